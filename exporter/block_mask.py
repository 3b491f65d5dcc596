"""BlockMask construction made symbolic while a model is captured.

The mask of an attention is its mask_mod; the block lists that ``create_block_mask`` computes from it say
nothing more. During capture they are tensors without contents, so that neither the dense mask nor the sort
reaches the graph, and no size is pinned to a number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexpte.exporter.evaluate import evaluate
from flexpte.exporter.mods import mask_program

_LIBRARY = torch.library.Library("flexpte", "FRAGMENT")  # an op lives as long as its library object


def block_list_op() -> torch._ops.OpOverload:
    """``torch.ops.flexpte.block_list.default``: a block list that was not computed."""
    if not hasattr(torch.ops.flexpte, "block_list"):
        _LIBRARY.define("block_list(SymInt[] size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl("block_list", _block_list, "CompositeExplicitAutograd")
        torch.library.register_fake("flexpte::block_list", _block_list, lib=_LIBRARY)
    return torch.ops.flexpte.block_list.default


def _block_list(size: list[int]) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _symbolic_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """create_block_mask without the lists' contents; same arguments and shapes."""
    q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    # A number of blocks that depends on a dynamic length would be compared with 1 (is the list contiguous?),
    # which would exclude lengths; nothing reads these lists.
    dynamo = torch.compiler.is_dynamo_compiling()  # where every size is an int
    rows = (Q_LEN + q_block - 1) // q_block if isinstance(Q_LEN, int) and not dynamo else 1
    columns = (KV_LEN + kv_block - 1) // kv_block if isinstance(KV_LEN, int) and not dynamo else 1
    batch = 1 if B is None else B
    heads = 1 if H is None else H
    num_blocks = torch.ops.flexpte.block_list([batch, heads, rows])
    indices = torch.ops.flexpte.block_list([batch, heads, rows, columns])
    return BlockMask(
        seq_lengths=(Q_LEN, KV_LEN),
        kv_num_blocks=num_blocks,
        kv_indices=indices,
        full_kv_num_blocks=num_blocks if separate_full_blocks else None,
        full_kv_indices=indices if separate_full_blocks else None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(q_block, kv_block),
        mask_mod=mask_mod,
    )


def _create_block_mask(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: Any = False,
    separate_full_blocks: Any = True,
    compute_dq_write_order: Any = False,
    dq_kv_order: Any = True,
) -> Any:
    # Runs with the globals and defaults of torch's function (see symbolic_block_masks), where this name is put.
    return _flexpte_symbolic_block_mask(  # type: ignore[name-defined]  # noqa: F821
        mask_mod,
        B,
        H,
        Q_LEN,
        KV_LEN,
        device,
        BLOCK_SIZE,
        _compile,
        separate_full_blocks,
        compute_dq_write_order,
        dq_kv_order,
    )


@contextmanager
def symbolic_block_masks() -> Iterator[None]:
    """``create_block_mask`` makes symbolic masks, however a model imported it.

    Its code object is exchanged, since ``from ... import create_block_mask`` holds the function itself; by one of
    the same signature, since Dynamo remembers a function's parameters once it has traced a call of it.
    """
    block_list_op()
    function = flex_module.create_block_mask
    code = function.__code__
    with mock.patch.object(flex_module, "_flexpte_symbolic_block_mask", _symbolic_block_mask, create=True):
        try:
            function.__code__ = _create_block_mask.__code__
            yield
        finally:
            function.__code__ = code


def _no_query_lists(num_blocks: Tensor, indices: Tensor) -> tuple[None, None]:
    return None, None


@contextmanager
def forward_only_block_masks() -> Iterator[None]:
    """``BlockMask.from_kv_blocks`` leaves out the lists that only a backward pass reads."""
    with mock.patch.object(flex_module, "_transpose_ordered", _no_query_lists):
        yield


@contextmanager
def computed_block_masks() -> Iterator[None]:
    """``create_block_mask`` computes its lists by ordinary ops, for a model that reads them.

    torch's own way, vmap over the mask_mod, leaves functorch's internals in a captured graph.
    """
    with mock.patch.object(flex_module, "create_mask", _dense_mask):
        yield


def _dense_mask(mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> Tensor:
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    names = ("Batch", "Head", "QIdx", "KvIdx")
    leaves = {
        name: torch.arange(size).reshape([-1 if d == i else 1 for d in range(4)])
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    program = mask_program(mask_mod, leaves["QIdx"])
    if program.expression is None:
        return torch.ones(sizes, dtype=torch.bool)
    return evaluate(program.expression, leaves, program.captures, program.scalars).expand(sizes)


def accept_block_masks(inputs: Any) -> None:
    """Make BlockMask a pytree node if ``inputs`` hold one: torch.export takes pytrees of tensors.

    It stays one, since the exported program is called with it. A mask_mod's closure tensors are leaves.
    """
    pytree = torch.utils._pytree
    if any(isinstance(x, BlockMask) for x in pytree.tree_leaves(inputs)):
        pytree.register_pytree_node(
            BlockMask,
            _flatten,
            lambda leaves, context: BlockMask._unflatten(tuple(leaves), context),
            flatten_with_keys_fn=_flatten_with_keys,
            serialized_type_name="torch.nn.attention.flex_attention.BlockMask",
        )


def _flatten(mask: BlockMask) -> Any:
    # torch leaves closures alone while anything is traced, and would find other leaves than before.
    with mock.patch.object(torch.compiler, "is_compiling", torch.compiler.is_dynamo_compiling):
        return mask._flatten()


def _flatten_with_keys(mask: BlockMask) -> Any:
    with mock.patch.object(torch.compiler, "is_compiling", torch.compiler.is_dynamo_compiling):
        return mask._flatten_with_keys()
