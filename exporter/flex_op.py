"""The custom op that stands for one attention with its mods, and what it computes.

Shapes: query [B, Hq, Lq, Dk], key [Bk, Hkv, Lk, Dk], value [Bk, Hkv, Lk, Dv], Bk in {1, B}, Hq a multiple
of Hkv; out [B, Hq, Lq, Dv] in query's dtype, lse [B, Hq, Lq] float32, natural logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexpte.exporter.evaluate import evaluate
from flexpte.exporter.expression import from_json

SCHEMA = (
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] score_captures, Tensor[] mask_captures,"
    " SymInt[] score_scalars, SymInt[] mask_scalars, Tensor? kv_num_blocks, Tensor? kv_indices,"
    " Tensor? full_kv_num_blocks, Tensor? full_kv_indices, SymInt[2] block_size, str score, str mask,"
    " float scale) -> (Tensor out, Tensor lse)"
)

_LIBRARY = torch.library.Library("flexpte", "FRAGMENT")  # an op lives as long as its library object


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_captures: list[Tensor],
    mask_captures: list[Tensor],
    score_scalars: list[int],
    mask_scalars: list[int],
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    block_size: list[int],
    score: str,
    mask: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with every score computed, in float32; a row that sees no key gives 0 and -inf.

    Raises IndexError where a mod reads outside a captured tensor at a key that is seen.
    """
    batch, num_heads, q_len, _ = query.shape
    kv_len, group = key.shape[2], num_heads // key.shape[1]
    k, v = (x.float().expand(batch, -1, -1, -1).repeat_interleave(group, dim=1) for x in (key, value))
    indices = {
        "Batch": torch.arange(batch).view(-1, 1, 1, 1),
        "Head": torch.arange(num_heads).view(1, -1, 1, 1),
        "QIdx": torch.arange(q_len).view(1, 1, -1, 1),
        "KvIdx": torch.arange(kv_len).view(1, 1, 1, -1),
    }
    seen = torch.ones((), dtype=torch.bool)
    full = torch.zeros((), dtype=torch.bool)
    if kv_num_blocks is not None and kv_indices is not None:
        seen = listed(kv_num_blocks, kv_indices, block_size, q_len, kv_len)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            full = listed(full_kv_num_blocks, full_kv_indices, block_size, q_len, kv_len)
    if mask:
        seen = seen & evaluate(from_json(mask), indices, mask_captures, mask_scalars, seen)
    seen = seen | full

    scores = (query.float() @ k.transpose(-1, -2)) * scale
    if score:
        leaves = {**indices, "Score": scores}
        scores = evaluate(from_json(score), leaves, score_captures, score_scalars, seen).expand(scores.shape)
    scores = torch.where(seen, scores, -torch.inf)
    if kv_len == 0:
        lse = torch.full((batch, num_heads, q_len), -torch.inf)
        out = query.new_zeros(batch, num_heads, q_len, value.shape[-1])
    else:
        lse = torch.logsumexp(scores, dim=-1)
        out = torch._safe_softmax(scores, dim=-1) @ v
    like = allocate(query, value)
    like.copy_(out)
    return like, lse


def listed(num_blocks: Tensor, indices: Tensor, block_size: list[int], q_len: int, kv_len: int) -> Tensor:
    """Which (query, key) pairs lie in a listed block: bool [B', H', Lq, Lk].

    num_blocks [B', H', QB] int32, indices [B', H', QB, KB] int32; a pair beyond the lists is not listed.
    """
    q_block, kv_block = (int(n) for n in block_size)
    num_rows, num_columns = indices.shape[-2:]
    used = torch.arange(num_columns) < num_blocks.unsqueeze(-1)
    columns = max(num_columns, -(-kv_len // kv_block))
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool)
    blocks.scatter_(-1, torch.where(used, indices, columns).long(), True)
    q_of, kv_of = torch.arange(q_len) // q_block, torch.arange(kv_len) // kv_block
    inside = (q_of < num_rows).view(-1, 1)
    return blocks[:, :, q_of.clamp_max(num_rows - 1)][:, :, :, kv_of] & inside


def allocate(query: Tensor, value: Tensor) -> Tensor:
    """An empty output, its strides in query's order, the last dimension innermost.

    As torch/_higher_order_ops/flex_attention.py: _permute_strides.
    """
    shape = (*query.shape[:-1], value.shape[-1])
    # Sizes may be symbolic: order by example sizes, so that no guard is made.
    hints = [_hint(s) for s in query.stride()]
    inner_first = [3, *sorted((0, 1, 2), key=lambda d: (hints[d], -d))]
    strides = [1] * 4
    step = 1
    for d in inner_first:
        strides[d] = step
        step = step * shape[d]
    return query.new_empty_strided(shape, strides)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, torch.SymInt):
        return size.node.hint if size.node.has_hint() else 1
    return size


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return allocate(query, value), query.new_empty(query.shape[:3], dtype=torch.float32)


def flex_attention_op() -> torch._ops.OpOverload:
    """``torch.ops.flexpte.flex_attention.default``, defined on first use."""
    if not hasattr(torch.ops.flexpte, "flex_attention"):
        _LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl("flex_attention", dense_attention, "CompositeExplicitAutograd")
        torch.library.register_fake("flexpte::flex_attention", _fake, lib=_LIBRARY)
    return torch.ops.flexpte.flex_attention.default
