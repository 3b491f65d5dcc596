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


def _create_block_mask(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of torch's module (see symbolic_block_masks), where this name is put.
    return _flexpte_symbolic_block_mask(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def symbolic_block_masks() -> Iterator[None]:
    """``create_block_mask`` makes symbolic masks, however a model imported it.

    Its code object is exchanged, since ``from ... import create_block_mask`` holds the function itself.
    """
    block_list_op()
    function = flex_module.create_block_mask
    code, defaults = function.__code__, function.__defaults__
    with mock.patch.object(flex_module, "_flexpte_symbolic_block_mask", _symbolic_block_mask, create=True):
        try:
            function.__code__, function.__defaults__ = _create_block_mask.__code__, None
            yield
        finally:
            function.__code__, function.__defaults__ = code, defaults


def _no_query_lists(num_blocks: Tensor, indices: Tensor) -> tuple[None, None]:
    return None, None


@contextmanager
def forward_only_block_masks() -> Iterator[None]:
    """``BlockMask.from_kv_blocks`` leaves out the lists that only a backward pass reads."""
    with mock.patch.object(flex_module, "_transpose_ordered", _no_query_lists):
        yield


@contextmanager
def block_masks_as_inputs() -> Iterator[None]:
    """BlockMask is a pytree node, so that it can be an argument of forward."""
    pytree = torch.utils._pytree
    if BlockMask in pytree.SUPPORTED_NODES:
        yield
        return
    pytree.register_pytree_node(
        BlockMask,
        BlockMask._flatten,
        lambda leaves, context: BlockMask._unflatten(tuple(leaves), context),
        flatten_with_keys_fn=BlockMask._flatten_with_keys,
        serialized_type_name="torch.nn.attention.flex_attention.BlockMask",
    )
    try:
        yield
    finally:
        pytree._deregister_pytree_node(BlockMask)
