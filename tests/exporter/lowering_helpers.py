"""Lower a module and run the payloads with numpy."""

from __future__ import annotations

from typing import Any

import torch

from flexpte.exporter.api import decomposed
from flexpte.exporter.capture import capture
from flexpte.exporter.emit import WeightBytes, lowered_module
from flexpte.exporter.partition import Partition, partition
from tests.exporter.payload_interpreter import Interpreter


def partitioned(
    module: torch.nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any = None, mode: str = "full"
) -> Partition:
    """The regions of a module."""
    with torch.no_grad():
        program = decomposed(capture(module.eval(), inputs, dynamic_shapes))
        return partition(program, mode)


def interpreter(parts: Partition) -> Interpreter:
    """The one region of a module, to be run with its forward's tensors."""
    assert len(parts.regions) == 1, [str(r) for r in parts.refusals]
    assert not parts.refusals, [str(r) for r in parts.refusals]
    lowered = parts.regions[0]
    module = lowered_module(lowered, "test", {})
    store = module.named_data_store_output
    data = {}
    for key, entry in store.pte_data.items():
        piece = store.buffers[entry.buffer_index]
        assert isinstance(piece, WeightBytes)
        data[key] = bytes(piece.data)
    return Interpreter(module.processed_bytes, data)


def check(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    others: tuple[tuple[Any, ...], ...] = (),
    tolerance: float = 1e-5,
) -> Partition:
    """Whole module in one region, and results as eager for these and other inputs."""
    parts = partitioned(module, inputs, dynamic_shapes)
    names = [node.name for node in parts.placeholders.user]
    runner = interpreter(parts)
    for arguments in (inputs, *others):
        with torch.no_grad():
            expected = module(*arguments)
        expected = expected if isinstance(expected, tuple) else (expected,)
        by_name = dict(zip(names, arguments, strict=True))
        results = runner.run(*(by_name[n.name] for n in parts.regions[0].inputs))
        assert len(results) == len(expected)
        for result, want in zip(results, expected, strict=True):
            assert result.dtype == want.dtype
            assert result.shape == want.shape
            torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    return parts
