"""The custom op: its eager meaning against float64 dense attention, its fake against its eager."""

from __future__ import annotations

import math

import pytest
import torch
from torch._higher_order_ops.flex_attention import _permute_strides
from torch._subclasses.fake_tensor import FakeTensorMode

from flexpte.exporter.expression import Expression, Node, to_json
from flexpte.exporter.flex_op import flex_attention_op

OP = flex_attention_op()
CAUSAL = to_json(Expression((Node("QIdx", "I32"), Node("KvIdx", "I32"), Node("Ge", "Bool", (0, 1)))))
BIASED = to_json(
    Expression(
        (
            Node("Score", "F32"),
            Node("QIdx", "I32"),
            Node("KvIdx", "I32"),
            Node("Sub", "I32", (1, 2)),
            Node("Load", "F32", (3,)),
            Node("Add", "F32", (0, 4)),
        )
    )
)
WITHIN = to_json(Expression((Node("KvIdx", "I32"), Node("Scalar", "I32", index=0), Node("Lt", "Bool", (0, 1)))))


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(
    q,
    k,
    v,
    score="",
    mask="",
    *,
    captures=((), ()),
    scalars=((), ()),
    lists=(None,) * 4,
    block=(128, 128),
    scale=0.3,
):
    return OP(q, k, v, *map(list, captures), *map(list, scalars), *lists, list(block), score, mask, scale)


def dense(q, k, v, seen, bias=None, scale=0.3):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().expand(q.shape[0], -1, -1, -1).repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.transpose(-1, -2) * scale
    s = torch.where(seen, s if bias is None else s + bias, -math.inf)
    top = s.amax(-1, keepdim=True).clamp_min(-1e300)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return torch.where(total > 0, p / total.clamp_min(1e-300), 0.0) @ v, lse


def check(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (6, 1)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 17), (17, 17), (5, 30)])
def test_causal(heads, kv_heads, q_len, kv_len):
    q, k, v = (
        rand(2, heads, q_len, 8),
        rand(2, kv_heads, kv_len, 8, seed=1),
        rand(2, kv_heads, kv_len, 6, seed=2),
    )
    seen = torch.arange(q_len)[:, None] >= torch.arange(kv_len)
    check(run(q, k, v, mask=CAUSAL), dense(q, k, v, seen))


def test_keys_of_one_batch_serve_all():
    q, k, v = rand(3, 2, 5, 8), rand(1, 2, 7, 8, seed=1), rand(1, 2, 7, 8, seed=2)
    check(run(q, k, v), dense(q, k, v, torch.ones(5, 7, dtype=torch.bool)))


def test_captures_and_scalars():
    q, k, v, table = rand(1, 2, 5, 8), rand(1, 2, 7, 8, seed=1), rand(1, 2, 7, 8, seed=2), rand(13, seed=3)
    distance = torch.arange(5)[:, None] - torch.arange(7)
    want = dense(q, k, v, torch.arange(7) < 4, table.double()[distance])
    check(run(q, k, v, BIASED, WITHIN, captures=([table], []), scalars=([], [4])), want)


def test_rows_that_see_nothing():
    q, k, v = rand(1, 2, 5, 8), rand(1, 2, 7, 8, seed=1), rand(1, 2, 7, 8, seed=2)
    out, lse = run(q, k, v, mask=WITHIN, scalars=([], [0]))
    assert not out.any()
    assert torch.equal(lse, torch.full((1, 2, 5), -math.inf))


@pytest.mark.parametrize("kv_len", [31, 32, 33])
def test_lists_decide_too(kv_len):
    q, k, v = rand(2, 2, 40, 8), rand(2, 2, kv_len, 8, seed=1), rand(2, 2, kv_len, 8, seed=2)
    num = torch.tensor([1, 0, 2], dtype=torch.int32).view(1, 1, 3)
    indices = torch.tensor([[1, 9, 9], [0, 9, 9], [2, 0, 9]], dtype=torch.int32).view(1, 1, 3, 3)
    full_num = torch.tensor([0, 1, 0], dtype=torch.int32).view(1, 1, 3)
    full_indices = torch.tensor([[9, 9, 9], [1, 9, 9], [9, 9, 9]], dtype=torch.int32).view(1, 1, 3, 3)
    q_idx, kv_idx = torch.arange(40)[:, None], torch.arange(kv_len)
    partial = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)[q_idx // 16, kv_idx // 16]
    full = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)[q_idx // 16, kv_idx // 16]
    got = run(q, k, v, mask=CAUSAL, lists=(num, indices, full_num, full_indices), block=(16, 16))
    check(got, dense(q, k, v, (partial & (q_idx >= kv_idx)) | full))


def test_reading_outside_a_capture_where_it_counts_is_an_error():
    q, k, v, table = rand(1, 1, 5, 8), rand(1, 1, 7, 8), rand(1, 1, 7, 8), rand(5)
    with pytest.raises(IndexError, match=r"shape \(5,\)"):
        run(q, k, v, BIASED, captures=([table], []))
    out, _ = run(q, k, v, BIASED, CAUSAL, captures=([table], []))  # masked keys may
    assert torch.isfinite(out).all()


def test_nan_propagates():
    q, k, v = rand(1, 1, 3, 8), rand(1, 1, 4, 8, seed=1), rand(1, 1, 4, 8, seed=2)
    q[0, 0, 1, 0] = math.nan
    out, lse = run(q, k, v)
    assert out.isnan().any(-1).tolist() == [[[False, True, False]]]
    assert lse.isnan().tolist() == [[[False, True, False]]]


LAYOUTS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (1, 0, 2, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fake_is_like_eager_and_like_torch(layout, dtype):
    inverse = [layout.index(d) for d in range(4)]
    q = rand(*((2, 3, 5, 8)[d] for d in layout)).to(dtype).permute(inverse)
    k, v = rand(2, 3, 7, 8).to(dtype), rand(2, 3, 7, 4).to(dtype)
    out, lse = run(q, k, v)
    with FakeTensorMode() as mode:
        fake_out, fake_lse = run(*(mode.from_tensor(x) for x in (q, k, v)))
    assert out.dtype == fake_out.dtype == dtype
    assert lse.dtype == fake_lse.dtype == torch.float32
    assert out.shape == fake_out.shape == (2, 3, 5, 4)
    assert lse.shape == fake_lse.shape == (2, 3, 5)
    assert out.stride() == fake_out.stride() == _permute_strides(out.contiguous(), q.stride()).stride()


def test_defining_it_again_is_harmless():
    assert flex_attention_op() is flex_attention_op() is torch.ops.flexpte.flex_attention.default
