"""Loads a language model from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexpte.models.config import DecoderConfig
from flexpte.models.decoder import Decoder, Logits
from flexpte.models.gguf_reader import is_gguf, open_gguf
from flexpte.models.hf import open_hugging_face
from flexpte.models.source import CheckpointError, Source, StoredTensor
from flexpte.models.tokenizer import TokenizerInfo

Progress = Callable[[str, int, int], None]

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    ``state`` holds the decoder's parameters by name, all of dtype ``dtype``; a head tied to the
    embedding is not listed twice. ``tokenizer`` is None where the checkpoint has none.
    """

    name: str
    config: DecoderConfig
    dtype: torch.dtype
    state: Mapping[str, Tensor]
    tokenizer: TokenizerInfo | None

    def decoder(self, capacity: int | None = None, *, logits: Logits = "last") -> Decoder:
        """A decoder on these weights (shared, not copied), with fresh caches of ``capacity`` tokens.

        ``capacity`` None means the model's own limit. Raises ValueError if it is out of range.
        """
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        return Decoder.from_state(self.config, self.state, capacity, logits=logits)

    def metadata(self, capacity: int | None = None, *, logits: Logits = "last") -> dict[str, Any]:
        """What a runtime must know to generate text with the exported :meth:`decoder`."""
        tokenizer = self.tokenizer
        return {
            "kind": "language_model",
            "name": self.name,
            "max_context": self.config.max_position_embeddings if capacity is None else capacity,
            "vocab_size": self.config.vocab_size,
            "windows": list(self.config.windows),
            "logits": logits,
            "dtype": _DTYPE_NAMES[self.dtype],
            "tokenizer": None if tokenizer is None else tokenizer.content,
            "chat_template": None if tokenizer is None else tokenizer.chat_template,
            "bos_token_id": None if tokenizer is None else tokenizer.bos_token_id,
            "eos_token_ids": [] if tokenizer is None else list(tokenizer.eos_token_ids),
            "add_bos": tokenizer is not None and tokenizer.add_bos,
        }


def load_checkpoint(
    path: str | Path, dtype: torch.dtype = torch.float32, *, progress: Progress | None = None
) -> LoadedModel:
    """Load the checkpoint at ``path``: a folder with config.json and safetensors, or a .gguf file.

    Weights become ``dtype`` (float32, float16 or bfloat16) one tensor at a time; those that have it
    already stay mapped from the file. ``progress(name, done, total)`` is called for every tensor.
    Raises :class:`CheckpointError`, and ValueError for other dtypes.
    """
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"weights can be float32, float16 or bfloat16, got {dtype}")
    source = _open(Path(path))
    expected = _expected_shapes(source.config)
    _check_names(source, expected)
    _check_shapes(source, expected)
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for done, name in enumerate(expected):
            if progress is not None:
                progress(name, done, len(expected))
            state[name] = _read(source.tensors[name], name, source.config, dtype)
    if progress is not None:
        progress("", len(expected), len(expected))
    return LoadedModel(source.name, source.config, dtype, state, source.tokenizer)


def _open(path: Path) -> Source:
    if path.is_dir():
        if (path / "config.json").is_file():
            return open_hugging_face(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return open_gguf(ggufs[0])
        found = f"it has {len(ggufs)} .gguf files: name one of them" if ggufs else "it has neither"
        raise CheckpointError(f"{path}: expected a folder with config.json or one .gguf file, but {found}")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; give a downloaded Hugging Face folder or a .gguf file")
    if is_gguf(path):
        return open_gguf(path)
    raise CheckpointError(
        f"{path}: not a checkpoint; expected a Hugging Face folder (config.json, *.safetensors) or a .gguf file"
    )


def _expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Decoder(config, capacity=1)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _check_names(source: Source, expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        raise CheckpointError(
            f"{source.name}: {_listed('tensor', missing)} missing from the checkpoint; expected "
            f"{len(expected)} tensors for a {source.config.model_type} model of {source.config.num_layers} "
            "layers. Download it again, or correct its configuration"
        )
    tied = {"lm_head.weight"} if source.config.tie_word_embeddings else set()
    unexpected = [t.stored_name for name, t in source.tensors.items() if name not in expected and name not in tied]
    if unexpected:
        raise CheckpointError(
            f"{source.name}: {_listed('tensor', unexpected)} not part of a {source.config.model_type} model; "
            "the checkpoint and its configuration do not belong together, or the model is a variant of it "
            "that is not supported"
        )


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{noun} {shown} is" if len(names) == 1 else f"{noun}s {shown} are"


def _check_shapes(source: Source, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        stored = source.tensors[name]
        if stored.shape != shape:
            raise CheckpointError(
                f"{source.name}: tensor {stored.stored_name} has shape {list(stored.shape)}, expected "
                f"{list(shape)} by the configuration; one of the two is of another model"
            )


def _read(stored: StoredTensor, name: str, config: DecoderConfig, dtype: torch.dtype) -> Tensor:
    tensor = stored.read()
    if config.norm_weight_offset and name.endswith("norm.weight"):
        tensor = tensor.to(torch.float32) + config.norm_weight_offset
    converted = tensor.to(dtype).contiguous()
    # Large finite weights can overflow to infinity in half precision.
    if dtype == torch.float16 and tensor.dtype != dtype and not torch.isfinite(converted).all():
        raise CheckpointError(
            f"tensor {stored.stored_name} does not fit float16 (largest magnitude "
            f"{tensor.to(torch.float32).abs().max().item():g}); use bfloat16 or float32"
        )
    return converted


__all__ = ["CheckpointError", "LoadedModel", "load_checkpoint"]
