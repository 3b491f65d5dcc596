"""FlexAttention modules from export to answer, on every device and dtype."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

import flexpte
from tests.conformance.oracle import Answer, assert_matches, attention
from tests.devices import DEVICES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request):
    return request.param


def qkv(
    dtype,
    batch=2,
    heads=4,
    kv_heads=4,
    q_len=150,
    kv_len=150,
    head_dim=32,
    value_dim=None,
    kv_batch=None,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        draw(batch, heads, q_len, head_dim),
        draw(kv_batch or batch, kv_heads, kv_len, head_dim),
        draw(kv_batch or batch, kv_heads, kv_len, value_dim or head_dim),
    )


class Attention(nn.Module):
    def __init__(
        self, score_mod=None, mask_mod=None, scale=None, lse=False, per_batch=False, per_head=False, block=128
    ):
        super().__init__()
        self.score_mod, self.mask_mod, self.scale, self.lse = score_mod, mask_mod, scale, lse
        self.per_batch, self.per_head, self.block = per_batch, per_head, block

    def forward(self, query, key, value):
        block_mask = None
        if self.mask_mod is not None:
            block_mask = create_block_mask(
                self.mask_mod,
                query.shape[0] if self.per_batch else None,
                query.shape[1] if self.per_head else None,
                query.shape[2],
                key.shape[2],
                device="cpu",
                BLOCK_SIZE=self.block,
            )
        return flex_attention(
            query,
            key,
            value,
            score_mod=self.score_mod,
            block_mask=block_mask,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_lse=self.lse,
        )


def session_of(module, inputs, device, dynamic_shapes=None):
    return flexpte.load(flexpte.export(module, inputs, dynamic_shapes).buffer, device=device).session()


def check(dtype, device, *, shape=None, **options):
    inputs = qkv(dtype, **(shape or {}))
    oracle_options = {k: options.get(k) for k in ("score_mod", "mask_mod", "scale")}
    outputs = session_of(Attention(**options), inputs, device).run("forward", *inputs)
    answers = attention(*inputs, **oracle_options)
    assert len(outputs) == (2 if options.get("lse") else 1)
    for name, got, answer in zip(("out", "lse"), outputs, answers, strict=False):
        assert_matches(got, answer, dtype, name)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(window_tokens):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window_tokens)


DOCUMENTS = torch.tensor([7] * 31 + [2**24] * 60 + [2**24 + 1] * 59)
WINDOWS = torch.tensor([1, 9, 40, 150])
LENGTHS = torch.tensor([150, 77])

MASKS = {
    "none": None,
    "causal": causal,
    "window_1": sliding(1),
    "window_33": sliding(33),
    "prefix": or_masks(causal, lambda b, h, q, kv: kv < 50),
    "anti_causal": lambda b, h, q, kv: q <= kv,
    "documents": and_masks(causal, lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv]),
    "windows_per_head": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOWS[h]),
    "padding_per_batch": lambda b, h, q, kv: kv < LENGTHS[b],
    "rows_that_see_nothing": lambda b, h, q, kv: (q >= 40) & (q % 7 != 3) & (q >= kv),
    "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    "neighbourhood_2d": lambda b, h, q, kv: ((q // 15 - kv // 15).abs() <= 1) & ((q % 15 - kv % 15).abs() <= 2),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, device):
    check(dtype, device, mask_mod=MASKS[mask], per_batch=True, per_head=True)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(299, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(2, 4, 150, 150, generator=torch.Generator().manual_seed(2))

SCORES = {
    "soft_cap": lambda s, b, h, q, kv: 15.0 * torch.tanh(s / 15.0),
    "alibi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "relative_bias": lambda s, b, h, q, kv: s + TABLE[q - kv],
    "bias": lambda s, b, h, q, kv: s + BIAS[b, h, q, kv],
    "minus_infinity": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "far_below_zero": lambda s, b, h, q, kv: s - 5e4,
    "integer_cast": lambda s, b, h, q, kv: s + (s * 2).to(torch.int32).clamp(-1, 3) * 0.5,
    "alpha": lambda s, b, h, q, kv: torch.add(s, q - kv, alpha=-0.01),
}


@pytest.mark.parametrize("score", SCORES)
def test_score_mods(score, dtype, device):
    check(dtype, device, score_mod=SCORES[score])


@pytest.mark.parametrize("score", ["soft_cap", "relative_bias"])
def test_score_mod_with_mask_and_lse(score, dtype, device):
    check(dtype, device, score_mod=SCORES[score], mask_mod=sliding(21), lse=True)


def test_lse_of_rows_that_see_nothing(dtype, device):
    check(dtype, device, mask_mod=lambda b, h, q, kv: (q > 5) & (q >= kv), lse=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (9, 3), (12, 2), (16, 1)])
@pytest.mark.parametrize("q_len", [1, 3, 65])
def test_grouped_queries(heads, kv_heads, q_len, dtype, device):
    check(dtype, device, shape={"batch": 1, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": 130})


@pytest.mark.parametrize("head_dim", [8, 17, 64, 94, 128, 256])
def test_head_dims(head_dim, dtype, device):
    shape = {"heads": 2, "kv_heads": 2, "head_dim": head_dim, "q_len": 70, "kv_len": 70}
    check(dtype, device, mask_mod=causal, shape=shape)


@pytest.mark.parametrize("value_dim", [16, 24, 80])
def test_value_dim_differs(value_dim, dtype, device):
    check(dtype, device, shape={"value_dim": value_dim})


def test_keys_of_one_batch_serve_all(dtype, device):
    check(dtype, device, mask_mod=causal, per_batch=True, shape={"batch": 3, "kv_batch": 1})


def test_more_keys_than_queries_count_from_the_top_left(dtype, device):
    check(dtype, device, mask_mod=causal, shape={"q_len": 20, "kv_len": 500})


def test_custom_scale(dtype, device):
    check(dtype, device, mask_mod=causal, scale=0.41)


LENGTHS_AROUND_TILES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]


@pytest.mark.parametrize("mask", ["none", "causal", "window_33"])
def test_one_program_for_all_lengths(mask, dtype, device):
    length = Dim("length", min=1, max=200)
    example = qkv(dtype, q_len=130, kv_len=130)
    session = session_of(
        Attention(mask_mod=MASKS[mask]), example, device, {n: {2: length} for n in ("query", "key", "value")}
    )
    for n in LENGTHS_AROUND_TILES:
        inputs = qkv(dtype, q_len=n, kv_len=n, seed=n)
        (out,) = session.run("forward", *inputs)
        assert_matches(out, attention(*inputs, mask_mod=MASKS[mask])[0], dtype, f"length {n}")


class CachedAttention(nn.Module):
    def __init__(self, capacity, window_tokens, dtype, kv_heads=2, head_dim=32):
        super().__init__()
        self.window_tokens = window_tokens
        for name in ("key_cache", "value_cache"):
            self.register_buffer(name, torch.zeros(1, kv_heads, capacity, head_dim, dtype=dtype))

    def forward(self, query, key, value, input_pos):
        self.key_cache.index_copy_(2, input_pos, key)
        self.value_cache.index_copy_(2, input_pos, value)

        def visible(b, h, q_idx, kv_idx):
            position = input_pos[q_idx]
            seen = kv_idx <= position
            return seen if self.window_tokens is None else seen & (kv_idx > position - self.window_tokens)

        block_mask = create_block_mask(
            visible, None, None, query.shape[2], self.key_cache.shape[2], device=query.device
        )
        return flex_attention(query, self.key_cache, self.value_cache, block_mask=block_mask, enable_gqa=True)


@pytest.mark.parametrize("window_tokens", [None, 1, 8])
@pytest.mark.parametrize(
    "chunks", [(1,) * 20, (6, *[1] * 30), (17, 40, 1, 1, 30, 1), (96,)], ids=lambda c: f"{len(c)}_calls"
)
def test_cache(window_tokens, chunks, dtype, device):
    capacity, total = 96, sum(chunks)
    query, key, value = qkv(dtype, batch=1, heads=6, kv_heads=2, q_len=total, kv_len=total)
    mask = causal if window_tokens is None else sliding(window_tokens)
    answer, _ = attention(query, key, value, mask_mod=mask)
    tokens = Dim("tokens", min=1, max=capacity)
    module = CachedAttention(capacity, window_tokens, dtype)
    example = (query[:, :, :3], key[:, :, :3], value[:, :, :3], torch.arange(3))
    shapes = {"query": {2: tokens}, "key": {2: tokens}, "value": {2: tokens}, "input_pos": {0: tokens}}
    session = session_of(module, example, device, shapes)
    begin = 0
    for n in chunks:
        piece = slice(begin, begin + n)
        inputs = (*(x[:, :, piece] for x in (query, key, value)), torch.arange(begin, begin + n))
        (out,) = session.run("forward", *inputs)
        expected = Answer(answer.exact[:, :, piece], answer.low[:, :, piece])
        assert_matches(out, expected, dtype, f"positions {begin}..{begin + n - 1}")
        begin += n
    assert not module.key_cache.any(), "the caller's module must not change"


def test_a_position_past_the_capacity_is_an_error_and_changes_nothing(device):
    query, key, value = qkv(torch.float32, batch=1, heads=2, kv_heads=2, q_len=4, kv_len=4)
    module = CachedAttention(8, None, torch.float32)
    tokens = Dim("tokens", min=1, max=8)
    shapes = {"query": {2: tokens}, "key": {2: tokens}, "value": {2: tokens}, "input_pos": {0: tokens}}
    session = session_of(module, (query, key, value, torch.arange(4)), device, shapes)
    (before,) = session.run("forward", query, key, value, torch.arange(4))
    for bad in ([5, 6, 7, 8], [-1, 0, 1, 2], [0, 1, 2, 2**40]):
        with pytest.raises(flexpte.FlexpteError) as caught:
            session.run("forward", query, key * torch.nan, value, torch.tensor(bad))
        assert caught.value.code == "OutOfRange"
        assert "key_cache" in str(caught.value)
        assert min(bad) < 0 or "capacity 8" in str(caught.value)
    (after,) = session.run("forward", query, key, value, torch.arange(4))
    assert torch.equal(before, after)


def test_packed_projection_views(dtype, device):
    class Packed(nn.Module):
        def forward(self, x):
            batch, length, _ = x.shape
            query, key, value = x.view(batch, length, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            out = flex_attention(query, key, value)
            return out.transpose(1, 2).reshape(batch, length, 32)

    x = qkv(dtype, heads=1, q_len=70, head_dim=96)[0][:, 0].contiguous()
    (out,) = session_of(Packed(), (x,), device).run("forward", x)
    parts = x.view(2, 70, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    answer, _ = attention(*parts)
    exact, low = (a.transpose(1, 2).reshape(2, 70, 32) for a in (answer.exact, answer.low))
    assert_matches(out, Answer(exact, low), dtype)


def test_block_lists_decide_without_a_mask(dtype, device):
    class Blocks(nn.Module):
        def forward(self, query, key, value, kv_num_blocks, kv_indices):
            block_mask = BlockMask.from_kv_blocks(
                kv_num_blocks, kv_indices, BLOCK_SIZE=64, seq_lengths=(128, 192), compute_q_blocks=False
            )
            return flex_attention(query, key, value, block_mask=block_mask)

    query, key, value = qkv(dtype, q_len=128, kv_len=192)
    kv_num_blocks = torch.tensor([[[1, 2]]], dtype=torch.int32)
    kv_indices = torch.tensor([[[[2, 0, 1], [0, 1, 2]]]], dtype=torch.int32)
    inputs = (query, key, value, kv_num_blocks, kv_indices)
    (out,) = session_of(Blocks(), inputs, device).run("forward", *inputs)

    def listed(b, h, q_idx, kv_idx):
        return torch.where(q_idx < 64, kv_idx >= 128, kv_idx < 128)

    assert_matches(out, attention(query, key, value, mask_mod=listed)[0], dtype)


def test_mods_may_be_partials_and_bound_methods(device):
    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.window_tokens = 12

        def visible(self, b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window_tokens)

        def forward(self, query, key, value):
            def capped(cap, score, b, h, q_idx, kv_idx):
                return cap * torch.tanh(score / cap)

            block_mask = create_block_mask(self.visible, None, None, query.shape[2], key.shape[2], device="cpu")
            return flex_attention(query, key, value, score_mod=functools.partial(capped, 10.0), block_mask=block_mask)

    inputs = qkv(torch.float32)
    (out,) = session_of(Windowed(), inputs, device).run("forward", *inputs)
    answer, _ = attention(*inputs, score_mod=lambda s, b, h, q, kv: 10.0 * torch.tanh(s / 10.0), mask_mod=sliding(12))
    assert_matches(out, answer, torch.float32)


class MaskArgument(nn.Module):
    def forward(self, query, key, value, mask):
        return flex_attention(query, key, value, block_mask=mask)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("with_capture", [False, True])
def test_a_mask_as_an_argument_of_forward(with_capture, strict, device):
    inputs = qkv(torch.float32)

    def mask_of(documents):
        mod = (lambda b, h, q, kv: documents[q] == documents[kv]) if with_capture else causal
        return mod, create_block_mask(mod, None, None, 150, 150, device="cpu")

    _, example = mask_of(torch.arange(150) // 9)
    if strict and with_capture:  # Dynamo does not make closures
        with pytest.raises(Exception, match="cell") as caught:
            flexpte.export(MaskArgument(), (*inputs, example), strict=True)
        assert any("strict=False" in note for note in caught.value.__notes__)
        return
    result = flexpte.export(MaskArgument(), (*inputs, example), strict=strict)
    session = flexpte.load(result.buffer, device=device).session()
    mod, mask = mask_of(torch.arange(150) // 40)
    (got,) = session.run("forward", *inputs, mask)
    assert_matches(got, attention(*inputs, mask_mod=mod)[0], torch.float32)
