"""Attention with mods in dense float64 tensors: the yardstick of every device.

Nothing here calls flex_attention; the mods are evaluated on broadcast index tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Mod = Callable[..., Tensor]
LOW_PRECISION_FACTOR = {torch.float32: 10.0, torch.float16: 1.5, torch.bfloat16: 1.5}


@dataclass(frozen=True)
class Answer:
    """``exact``: float64; ``low``: what dense attention gives in the inputs' own dtype, as float64."""

    exact: Tensor
    low: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
) -> tuple[Answer, Answer]:
    """(out [B, Hq, Lq, Dv], lse [B, Hq, Lq]); a row that sees no key gives 0 and -inf."""
    exact = _dense(query, key, value, score_mod, mask_mod, scale, torch.float64, torch.float64)
    low = _dense(query, key, value, score_mod, mask_mod, scale, query.dtype, torch.float32)
    return tuple(Answer(e, l) for e, l in zip(exact, low, strict=True))  # type: ignore[return-value]


def _dense(query, key, value, score_mod, mask_mod, scale, dtype, softmax_dtype):
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    key, value = (
        x.to(dtype).expand(batch, -1, -1, -1).repeat_interleave(num_heads // num_kv_heads, 1) for x in (key, value)
    )
    scores = torch.einsum("bhqd,bhkd->bhqk", query.to(dtype), key).to(softmax_dtype)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    index = [
        torch.arange(n).reshape([n if i == j else 1 for j in range(4)])
        for i, n in enumerate((batch, num_heads, q_len, kv_len))
    ]
    if score_mod is not None:
        scores = score_mod(scores, *index).to(softmax_dtype).expand_as(scores).clone()
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*index).expand_as(scores), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    out = torch.einsum("bhqk,bhkd->bhqd", weights.to(dtype), value)
    return out.double(), lse.double()


def assert_matches(got: Tensor, answer: Answer, dtype: torch.dtype, what: str = "out") -> None:
    """Mean absolute error within a small factor of dense attention's own in ``dtype``."""
    assert tuple(got.shape) == tuple(answer.exact.shape), what
    got = got.double()
    finite = answer.exact.isfinite()
    assert torch.equal(got[~finite], answer.exact[~finite]), f"{what}: -inf rows"
    if not finite.any():
        return
    assert got[finite].isfinite().all(), f"{what}: not finite"
    if answer.exact.dim() == 4:
        empty = (answer.exact == 0).all(-1)
        assert (got[empty] == 0).all(), f"{what}: rows that see no key must be 0"
    error = (got - answer.exact)[finite].abs().mean().item()
    own_error = (answer.low - answer.exact)[finite].abs().mean().item()
    floor = 2 * torch.finfo(dtype).eps * answer.exact[finite].abs().mean().item()
    bound = max(LOW_PRECISION_FACTOR[dtype] * own_error, floor)
    assert error <= bound, f"{what}: mean absolute error {error:.3g} > {bound:.3g}"
