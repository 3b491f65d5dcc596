"""From a checkpoint to a language model in one .pte file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexpte.exporter.api import ExportResult, Progress

DTYPES = ("fp32", "fp16", "bf16")


def export_language_model(
    checkpoint: str | Path,
    *,
    max_context: int | None = None,
    dtype: str = "fp32",
    delegate: str = "full",
    logits: str = "last",
    example_tokens: int | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Export the checkpoint at ``checkpoint`` as method ``forward(tokens, input_pos) -> logits``.

    tokens [1, T] int64, input_pos [T] int64, T from 1 to ``max_context`` (None: the model's own limit);
    logits [1, 1, V] of the last position, or [1, T, V] for ``logits="all"``. ``dtype`` is that of weights,
    caches and activations. ``example_tokens``: length of the prompt that the report explains masks for
    (None: a few tokens; the program is the same). ``progress(stage, done, total)`` is told how far the work is.
    Raises CheckpointError for a checkpoint that cannot be read, ValueError for other arguments out of
    range, Unsupported for what cannot be lowered.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if logits not in ("last", "all"):
        raise ValueError(f'logits is {logits!r}; expected "last" or "all"')
    if delegate not in ("full", "attention"):
        raise ValueError(
            f'delegate is {delegate!r}; expected "full" or "attention": a language model needs its attention delegated'
        )
    # torch takes seconds to import: not before the arguments are known to be good.
    import torch

    from flexpte.exporter.api import export
    from flexpte.models.checkpoints import load_checkpoint
    from flexpte.models.decoder import example_inputs_and_dynamic_shapes

    def loading(_name: str, done: int, total: int) -> None:
        if progress is not None:
            progress("reading weights", done, total)

    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = load_checkpoint(checkpoint, torch_dtype, progress=loading)
    limit = model.config.max_position_embeddings
    context = limit if max_context is None else max_context
    if not 1 <= context <= limit:
        raise ValueError(f"max_context is {context}; {model.name} takes 1 to {limit} tokens")
    decoder = model.decoder(context, logits="all" if logits == "all" else "last")
    metadata = model.metadata(context, logits="all" if logits == "all" else "last")
    inputs, dynamic_shapes = example_inputs_and_dynamic_shapes(model.config, context)
    if example_tokens is not None:
        count = max(1, min(example_tokens, context))
        inputs = (torch.zeros(1, count, dtype=torch.int64), torch.arange(count, dtype=torch.int64))
    return export(decoder, inputs, dynamic_shapes, delegate=delegate, metadata=metadata, progress=progress)
