"""From a module to a graph in which each attention is one ``flexpte::flex_attention``.

Capture is ``torch.export`` with one thing changed: where the model calls the flex_attention higher-order op,
its mods are turned into expressions there and then, and the custom op is called instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as flex_module
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import FlexAttentionHOP
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flexpte.exporter.block_mask import (
    accept_block_masks,
    computed_block_masks,
    forward_only_block_masks,
    symbolic_block_masks,
)
from flexpte.exporter.canonicalise import LN2, canonicalise, reads_block_lists
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import to_json
from flexpte.exporter.flex_op import flex_attention_op
from flexpte.exporter.mod_graph import model_line
from flexpte.exporter.mods import Mod, mask_program, score_program


def capture(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    *,
    strict: bool = False,
) -> ExportedProgram:
    """Export ``module`` with ordinary ATen ops and ``flexpte::flex_attention`` only.

    The module is left as it was, its buffers' values included. Raises Unsupported for what no program can
    express, and whatever torch.export raises for a model that it cannot trace.
    """
    flex_attention_op()
    accept_block_masks(example_inputs)
    with inference(module), forward_only_block_masks():
        # Strides of views would become part of the program, and exclude sizes that they do not fit.
        example_inputs = pytree.tree_map_only(Tensor, _packed, example_inputs)

        def trace() -> ExportedProgram:
            return _trace(module, example_inputs, dynamic_shapes, strict)

        with symbolic_block_masks():
            program = canonicalise(trace())
        if reads_block_lists(program):  # the model computes with the lists: they are needed after all
            with nullcontext() if strict else computed_block_masks():
                program = canonicalise(trace())
    return program


def _packed(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor._base is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _trace(module: nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any, strict: bool) -> ExportedProgram:
    with custom_attention(module, strict):
        try:
            return torch.export.export(module, example_inputs, dynamic_shapes=dynamic_shapes, strict=strict)
        except Exception as error:
            if strict and not isinstance(error, Unsupported):
                error.add_note(
                    "flexpte: strict=False, the default, captures much that torch.export's strict mode refuses"
                )
            raise


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """No gradients. Raises Unsupported for a module that would be random."""
    for name, child in module.named_modules():
        if child.training and isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            raise Unsupported(
                f"module {name or type(child).__name__!r} would drop activations at random (training mode)",
                fix="Call .eval() on the model before exporting it",
            )
    with torch.no_grad():
        yield


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """No check; a plain function, since Dynamo traces it."""


@contextmanager
def custom_attention(module: nn.Module, strict: bool) -> Iterator[None]:
    """While tracing, calls of the higher-order op become calls of the custom op."""
    original = FlexAttentionHOP.__call__
    state = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:  # Dynamo looks for the shapes of the results
            return original(self, *args, **kwargs)
        return attention(lambda t: _registered(module, state, t), *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FlexAttentionHOP, "__call__", call))
        # Inference only: queries that are parameters are fine.
        stack.enter_context(mock.patch.object(flex_module, "_validate_device", _any_device))
        if not strict:
            # Compiled functions, flex_attention's own included, are traced through.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            options = flex_module._apply_kernel_options
            stack.enter_context(
                mock.patch.object(
                    flex_module, "_apply_kernel_options", lambda *a, **k: _no_max_scores(options, *a, **k)
                )
            )
        yield


def _no_max_scores(options: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = kwargs.get("return_aux", args[5] if len(args) > 5 else None)
    if request is not None and request.max_scores:
        raise Unsupported(
            "flex_attention is asked for max_scores",
            source=model_line(sys._getframe(1)),
            fix="Use return_aux=AuxRequest(lse=True)",
        )
    return options(*args, **kwargs)


def _registered(module: nn.Module, state: dict[int, str], tensor: Tensor) -> Tensor:
    """What tracing put in the place of a parameter or buffer that a closure holds directly."""
    name = state.get(id(tensor))
    if name is None:
        return tensor
    owner, _, attribute = name.rpartition(".")
    current: Tensor = getattr(module.get_submodule(owner), attribute)
    return current


@dataclass(frozen=True)
class _WithBuffers:
    """A mod whose last arguments are known."""

    func: Callable[..., Tensor]
    buffers: tuple[Any, ...]

    def __call__(self, *arguments: Tensor) -> Tensor:
        return self.func(*arguments, *self.buffers)


def attention(
    resolve: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """The custom op for a call of the higher-order op; results as that returns them (lse to base 2)."""
    mask_mod = block_mask[-1]
    sizes = (*query.shape[:3], key.shape[2])
    score = score_program(_WithBuffers(score_mod, score_mod_other_buffers), query, sizes)
    mask = mask_program(_WithBuffers(mask_mod, mask_mod_other_buffers), query, sizes)
    block_size = [block_mask[-3], block_mask[-2]]
    whole = all(size == flex_module._LARGE_SPARSE_BLOCK_SIZE for size in block_size)
    lists = [None] * 4 if whole else block_mask[2:6]
    out, lse = torch.ops.flexpte.flex_attention(
        query,
        key,
        value,
        [resolve(t) for t in score.captures],
        [resolve(t) for t in mask.captures],
        list(score.scalars),
        list(mask.scalars),
        *lists,
        block_size,
        _serialise(score),
        _serialise(mask),
        float(scale),
    )
    log2 = lse / LN2
    return out, log2, log2


def _serialise(mod: Mod) -> str:
    return to_json(mod.expression) if mod.expression else ""
