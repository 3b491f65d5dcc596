"""Masks that differ by head where rows are few: heads of a KV group visit keys together, and see their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tests.conformance.oracle import assert_matches, attention
from tests.conformance.test_flex_attention import DTYPES, Attention, qkv, session_of
from tests.devices import DEVICES

HEADS, KV_LEN = 12, 700
WINDOWS = torch.tensor([1, 5, 64, 130, 7, 300, 129, 128, 127, 700, 65, 2])
CHOSEN = torch.rand(2, HEADS, KV_LEN, generator=torch.Generator().manual_seed(3)) < 0.1
CHOSEN[:, 4] = False
CHOSEN[:, 6:9, 64:400] = True


def windows(b, h, q, kv):
    return (kv <= q + KV_LEN - 20) & (q + KV_LEN - 20 - kv < WINDOWS[h])


def chosen(b, h, q, kv):
    return CHOSEN[b, h, kv]


def every_third_of_some_heads(b, h, q, kv):
    return (h % 3 != 1) & (kv % 3 == h % 3) | (h == 7)


MASKS = {f.__name__: f for f in (windows, chosen, every_third_of_some_heads)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 3, 12])
@pytest.mark.parametrize("q_len", [1, 5, 16, 17])
def test_few_queries(device, name, kv_heads, q_len):
    dtype = DTYPES[(q_len + kv_heads) % 3]
    inputs = qkv(dtype, heads=HEADS, kv_heads=kv_heads, q_len=q_len, kv_len=KV_LEN)
    module = Attention(mask_mod=MASKS[name], lse=True, per_head=True, per_batch=name == "chosen")
    outputs = session_of(module, inputs, device).run("forward", *inputs)
    answers = attention(*inputs, mask_mod=MASKS[name])
    for what, got, answer in zip(("out", "lse"), outputs, answers, strict=True):
        assert_matches(got, answer, dtype, what)


class ListedBlocks(nn.Module):
    """Blocks of keys for each head, without a mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("listed", torch.stack([torch.randperm(11)[:5].sort().values for _ in range(HEADS)]))

    def forward(self, query, key, value):
        counts = torch.full((1, HEADS, 1), 5, dtype=torch.int32)
        indices = self.listed.to(torch.int32).reshape(1, HEADS, 1, 5)
        lengths = (query.shape[2], key.shape[2])
        mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, seq_lengths=lengths, compute_q_blocks=False)
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, return_lse=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 4])
def test_lists_that_differ_by_head(device, q_len):
    torch.manual_seed(1)
    module = ListedBlocks()
    inputs = qkv(torch.float32, heads=HEADS, kv_heads=3, q_len=q_len, kv_len=KV_LEN)
    block = torch.arange(KV_LEN) // 64
    visible = (module.listed[:, None, :] == block[None, :, None]).any(-1)
    answers = attention(*inputs, mask_mod=lambda b, h, q, kv: visible[h, kv])
    outputs = session_of(module, inputs, device).run("forward", *inputs)
    for what, got, answer in zip(("out", "lse"), outputs, answers, strict=True):
        assert_matches(got, answer, torch.float32, what)


@pytest.mark.parametrize("kv_heads", [1, 3, 12])
def test_keys_of_a_group_are_read_once(kv_heads):
    inputs = qkv(torch.float16, batch=1, heads=HEADS, kv_heads=kv_heads, q_len=1, kv_len=KV_LEN, head_dim=64)
    session = session_of(Attention(mask_mod=windows, per_head=True), inputs, "msl-host")
    session.run("forward", *inputs)
    (counted,) = (c for name, c in session.counters().items() if not name.endswith("_merge"))
    seen = [
        {kv for h in range(k, k + HEADS // kv_heads) for kv in range(KV_LEN) if bool(windows(0, h, 0, kv))}
        for k in range(0, HEADS, HEADS // kv_heads)
    ]
    minimum = sum(map(len, seen)) * 64 * 2
    for name in ("key", "value"):
        assert minimum <= counted["buffers"][name]["read_bytes"] <= 1.05 * minimum
