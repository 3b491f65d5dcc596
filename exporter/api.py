"""``flexpte.export``: from a PyTorch module to a ``.pte``."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

import flexpte
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.report import ExportReport, attentions_of, caches_of

if TYPE_CHECKING:
    from os import PathLike

Progress = Callable[[str, int, int], None]
STAGES = ("capture", "explain", "decompose", "lower", "pack", "emit")
MODES = ("full", "attention", "none")


@dataclass(frozen=True)
class ExportResult:
    """A program ready to be saved, and the report of how it came about."""

    pieces: list[bytes]
    report: ExportReport

    @property
    def buffer(self) -> bytes:
        """The whole file in memory (a copy of all weights)."""
        from flexpte.exporter.emit import contents

        return b"".join(contents(self.pieces))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file: under a temporary name first, so that ``path`` is whole or untouched.

        Raises OSError where it cannot be written.
        """
        from flexpte.exporter.emit import write

        write(self.pieces, Path(path))


def export(
    module: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    *,
    strict: bool = False,
    delegate: str = "full",
    kv_dtype: str | None = None,
    quantize: str | None = None,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Export a module that calls ``flex_attention`` to an ExecuTorch program.

    ``example_inputs``: positional arguments of ``forward``; ``dynamic_shapes``, ``strict``: as in
    ``torch.export.export``, every dynamic dimension bounded by ``Dim(max=...)``. ``delegate``: "full"
    delegates all it can, "attention" attention with its cache updates, "none" nothing. ``metadata``:
    JSON-able, travels in the file. ``progress`` is called with a stage's name, the stages done and
    their number.

    Raises Unsupported, naming op, source line and remedy, where the module cannot be exported;
    TypeError or ValueError for arguments that make no sense.
    """
    _validate(module, example_inputs, delegate, metadata)
    for name, value in (("kv_dtype", kv_dtype), ("quantize", quantize)):
        if value is not None:
            raise Unsupported(f"{name}={value!r}", fix=f"Leave out {name}: weights and caches keep the module's dtype")
    clock = _Clock(progress)
    with _quiet(), torch.no_grad():
        clock.start("capture")
        from flexpte.exporter.capture import capture

        program = capture(module, example_inputs, dynamic_shapes, strict=strict)
        return export_program(program, delegate=delegate, metadata=metadata, clock=clock)


def export_program(
    program: ExportedProgram, *, delegate: str, metadata: dict[str, Any] | None, clock: _Clock | None = None
) -> ExportResult:
    """The stages after capture. ``program`` is consumed."""
    from flexpte.exporter import emit
    from flexpte.exporter.explain import explain_masks
    from flexpte.exporter.partition import partition

    clock = clock or _Clock(None)
    _flatten_inputs_and_outputs(program)
    clock.start("explain")
    masks = explain_masks(program)
    clock.start("decompose")
    program = decomposed(program)

    clock.start("lower")
    parts = partition(program, delegate)

    clock.start("pack")
    exporter = f"flexpte {flexpte.__version__}"
    weights: dict[tuple[Any, ...], emit.WeightBytes] = {}
    modules = [emit.lowered_module(lowered, exporter, weights) for lowered in parts.regions]

    clock.start("emit")
    caches = [c for lowered in parts.regions for c in caches_of(lowered.region, masks)]
    described = {
        **(metadata or {}),
        "flexpte_version": flexpte.__version__,
        "delegate": delegate,
        "input_names": {"forward": [str(name) for name in program.graph_signature.user_inputs]},
        "caches": [
            {
                "name": c.name,
                "shape": c.shape,
                "dtype": c.dtype,
                "layout": c.layout,
                "window_tokens": c.window_tokens,
            }
            for c in caches
        ],
    }
    pieces = emit.emit(emit.edge_program(emit.residual(program, parts, modules)), described)
    clock.stop()
    report = ExportReport(
        mode=delegate,
        attentions=tuple(a for lowered in parts.regions for a in attentions_of(lowered, masks)),
        caches=tuple(caches),
        refusals=parts.refusals,
        num_regions=len(parts.regions),
        num_nodes_delegated=sum(len(lowered.nodes) for lowered in parts.regions),
        num_instructions=sum(len(lowered.region.instructions) for lowered in parts.regions),
        arena_size_bytes=max((lowered.region.arena_size_bytes for lowered in parts.regions), default=0),
        weights_size_bytes=sum({w.key: len(w) for w in weights.values()}.values()),
        program_size_bytes=sum(map(len, pieces)),
        seconds=clock.seconds,
    )
    return ExportResult(pieces, report)


def _flatten_inputs_and_outputs(program: ExportedProgram) -> None:
    """Both are flat tuples from here on, whatever forward takes or wraps them in: a .pte knows no other, named
    tuples such as torch.return_types.max cannot be serialised, and a BlockMask's function not even copied."""
    count = len(program.graph_signature.user_outputs)
    if count == 0 or all(output is None for output in program.graph_signature.user_outputs):
        raise Unsupported(
            "forward returns no tensor", fix="Return at least one, for example the last value that was computed"
        )
    signature = program.module_call_graph[0].signature
    assert signature is not None
    pytree = torch.utils._pytree
    signature.out_spec = pytree.tree_structure(tuple(range(count)))
    flat = pytree.tree_structure((tuple(range(signature.in_spec.num_leaves)), {}))
    if signature.in_spec != flat:
        signature.in_spec, signature.forward_arg_names = flat, None
        if program.example_inputs is not None:
            program._example_inputs = (tuple(pytree.tree_leaves(program.example_inputs)), {})


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """A functional program of core ATen and the operators that an instruction does whole."""
    from flexpte.exporter.decompositions import decomposition_table
    from flexpte.exporter.lower_ops import KEPT_OPERATORS

    functional: ExportedProgram = program.run_decompositions(decomposition_table(KEPT_OPERATORS))
    return functional


def _validate(module: Any, example_inputs: Any, delegate: Any, metadata: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            f"example_inputs must be a tuple of forward's positional arguments, got {type(example_inputs).__name__}"
        )
    if delegate not in MODES:
        raise ValueError(f"delegate must be one of {', '.join(map(repr, MODES))}, got {delegate!r}")
    if metadata is not None:
        if not isinstance(metadata, dict):
            raise TypeError(f"metadata must be a dict, got {type(metadata).__name__}")
        try:
            json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata must consist of JSON values: {error}") from error


class _Clock:
    """Times the stages and tells ``progress`` of them."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self._stage: str | None = None
        self._begin = 0.0

    def start(self, stage: str) -> None:
        """End the running stage, begin another."""
        self.stop(done=False)
        self._stage, self._begin = stage, time.perf_counter()
        if self.progress is not None:
            self.progress(stage, STAGES.index(stage), len(STAGES))

    def stop(self, done: bool = True) -> None:
        """End the running stage."""
        if self._stage is not None:
            self.seconds[self._stage] = time.perf_counter() - self._begin
            if done and self.progress is not None:
                self.progress(self._stage, len(STAGES), len(STAGES))
        self._stage = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the toolchain's warnings: what the user must know is raised, or in the report."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


__all__ = ["ExportResult", "export", "export_program"]
