"""Masks and score modifications that people use, by name, against the float64 oracle and compiled PyTorch."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.conformance.oracle import assert_matches, attention
from tests.conformance.test_flex_attention import DTYPES, Attention, qkv, session_of
from tests.devices import DEVICES as ALL_DEVICES

# The double of Metal runs the kernels of msl-host: the other suite is enough for it.
DEVICES = tuple(d for d in ALL_DEVICES if d != "metal" or sys.platform == "darwin")
LENGTH = 150
HEADS = 4
DRAW = torch.Generator().manual_seed(5)


def table(*shape):
    return torch.randn(*shape, generator=DRAW)


def causal(b, h, q, kv):
    return q >= kv


# Two documents and a prefix, three packed sequences, images of 15 x 10, videos of 6 frames of 5 x 5.
DOCUMENT = torch.tensor([0] * 40 + [1] * 65 + [2] * 45)
OFFSET = torch.tensor([0] * 40 + [40] * 65 + [105] * 45)
PREFIX_OF_DOCUMENT = torch.tensor([10, 30, 45])
IMAGE_OF_TEXT = torch.cumsum((torch.rand(LENGTH, generator=DRAW) < 0.1).int(), 0)
IMAGE_OF_KEY = torch.arange(LENGTH) // 12
PADDED = torch.rand(LENGTH, LENGTH, generator=DRAW) < 0.4
SEQUENCE_IS_GLOBAL = torch.rand(LENGTH, generator=DRAW) < 0.05
MORTON_Y = torch.tensor([sum(((i >> (2 * n + 1)) & 1) << n for n in range(4)) for i in range(LENGTH)])
MORTON_X = torch.tensor([sum(((i >> (2 * n)) & 1) << n for n in range(4)) for i in range(LENGTH)])
CHOSEN_BLOCKS = torch.rand(HEADS, 10, 10, generator=DRAW) < 0.3
TREE_PARENT = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5, 6])
ANCESTOR = torch.eye(10, dtype=torch.bool)
for node in range(1, 10):
    ANCESTOR[node] |= ANCESTOR[TREE_PARENT[node]]
LENGTHS = torch.tensor([150, 77])
IS_VALID = torch.rand(2, LENGTH, generator=DRAW) < 0.8


def hashed(b, h, q, kv):
    return (q * 2654435761 + kv * 40503 * 65599 + h) % 5 < 2


def block_diffusion(b, h, q, kv):
    noisy, size = 75, 15
    q_is_clean, kv_is_clean = q >= noisy, kv >= noisy
    q_block, kv_block = (q % noisy) // size, (kv % noisy) // size
    same = (q_block == kv_block) & (q_is_clean == kv_is_clean)
    before = (q_block > kv_block) & kv_is_clean & ~q_is_clean
    clean = (q_block >= kv_block) & kv_is_clean & q_is_clean
    return same | before | clean


def tree(b, h, q, kv):
    drafted = LENGTH - 10
    in_tree = (q >= drafted) & (kv >= drafted)
    return torch.where(in_tree, ANCESTOR[(q - drafted).clamp(min=0), (kv - drafted).clamp(min=0)], (q >= kv))


def natten(y, x, height, width, size):
    def mask(b, h, q, kv):
        q_y, q_x, kv_y, kv_x = y(q), x(q), y(kv), x(kv)
        centre_y = q_y.clamp(size // 2, height - 1 - size // 2)
        centre_x = q_x.clamp(size // 2, width - 1 - size // 2)
        return ((centre_y - kv_y).abs() <= size // 2) & ((centre_x - kv_x).abs() <= size // 2)

    return mask


def sliding_tiles(b, h, q, kv):
    # Frames of 5 x 5 in tiles of one frame: neighbours in time, and the same quadrant.
    return ((q // 25 - kv // 25).abs() <= 1) & (((q % 25) // 10 - (kv % 25) // 10).abs() <= 1)


MASKS = {
    "inverse_causal": lambda b, h, q, kv: q <= kv,
    "windowed": lambda b, h, q, kv: (q >= kv) & (q - kv < 30),
    "dilated_sliding_window": lambda b, h, q, kv: ((q - kv).abs() <= 40) & ((q - kv) % 4 == 0),
    "global_sliding_window": lambda b, h, q, kv: ((q - kv).abs() < 20) | (q < 8) | (kv < 8),
    "global_tokens": lambda b, h, q, kv: ((q - kv).abs() < 20) | SEQUENCE_IS_GLOBAL[q] | SEQUENCE_IS_GLOBAL[kv],
    "document": lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv),
    "prefix_of_each_document": lambda b, h, q, kv: (
        (DOCUMENT[q] == DOCUMENT[kv]) & ((q >= kv) | (kv - OFFSET[kv] < PREFIX_OF_DOCUMENT[DOCUMENT[kv]]))
    ),
    "shared_prefix": lambda b, h, q, kv: (kv < 40) | ((DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv)),
    "batchified_window": lambda b, h, q, kv: (
        (DOCUMENT[q] == DOCUMENT[kv]) & ((q - OFFSET[q]) - (kv - OFFSET[kv]) < 9) & (q >= kv)
    ),
    "flamingo": lambda b, h, q, kv: IMAGE_OF_TEXT[q] == IMAGE_OF_KEY[kv],
    "block_diffusion": block_diffusion,
    "hashed": hashed,
    "speculative_tree": tree,
    "natten": natten(lambda i: i // 10, lambda i: i % 10, 15, 10, 5),
    "natten_tiled": natten(lambda i: i // 50 * 5 + i % 25 // 5, lambda i: i % 50 // 25 * 5 + i % 5, 15, 10, 5),
    "natten_morton": natten(lambda i: MORTON_Y[i], lambda i: MORTON_X[i], 12, 16, 5),
    "sliding_tiles_of_video": sliding_tiles,
    "spatial_or_temporal_heads": lambda b, h, q, kv: torch.where(
        h % 2 == 0, (q // 25 - kv // 25).abs() <= 1, (q % 25 - kv % 25).abs() <= 2
    ),
    "chosen_blocks": lambda b, h, q, kv: CHOSEN_BLOCKS[h, q // 15, kv // 15] | (q == kv),
    "offset_causal": lambda b, h, q, kv: q + 20 >= kv,
    "padded_causal": lambda b, h, q, kv: (q >= kv) & (q < LENGTHS[b]) & (kv < LENGTHS[b]),
    "valid_tokens": lambda b, h, q, kv: IS_VALID[b, q] & IS_VALID[b, kv],
    "tail_only": lambda b, h, q, kv: kv >= 128,
    "dense_table": lambda b, h, q, kv: PADDED[q, kv],
    "head_dependent": lambda b, h, q, kv: (q >= kv) & (kv % (h + 1) == 0),
}


BIAS_QKV, BIAS_B, BIAS_H = table(LENGTH, LENGTH), table(2), table(HEADS)
BIAS_ALL, RELATIVE = table(2, HEADS, LENGTH, LENGTH), table(2 * LENGTH)
INDEX = torch.randint(0, LENGTH, (LENGTH,), generator=DRAW)
GATE, WEIGHT, LATENT_Q, LATENT_K = table(HEADS), table(HEADS, LENGTH), table(LENGTH, 16), table(LENGTH, 16)
HOPS = torch.randint(0, 5, (2, LENGTH, LENGTH), generator=DRAW)
HOP_BIAS = table(HEADS, 5)
SLOPES = torch.tensor([2.0**-i for i in range(1, HEADS + 1)])
FREQUENCIES = 10000.0 ** (-torch.arange(8) / 8)


def sandwich(s, b, h, q, kv):
    return s + SLOPES[h] * (torch.cos((q - kv) * FREQUENCIES).sum() - 8)


SCORE_MODS = {
    "identity": lambda s, b, h, q, kv: s,
    "times_two": lambda s, b, h, q, kv: s * 2,
    "squared": lambda s, b, h, q, kv: s * s,
    "causal": lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf),
    "inverse_causal": lambda s, b, h, q, kv: torch.where(q <= kv, s, -math.inf),
    "relative_bias": lambda s, b, h, q, kv: s + (q - kv),
    "relative_causal": lambda s, b, h, q, kv: torch.where(q >= kv, s + (q - kv), -math.inf),
    "alibi": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "windowed": lambda s, b, h, q, kv: torch.where((q - kv).abs() < 40, s, -math.inf),
    "head_offset": lambda s, b, h, q, kv: s * BIAS_H[h],
    "trigonometric": lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b * 1.0),
    "silu": lambda s, b, h, q, kv: torch.nn.functional.silu(s),
    "skip_odd_keys": lambda s, b, h, q, kv: torch.where(kv % 2 == 0, s, -math.inf),
    "composition": lambda s, b, h, q, kv: torch.where(q >= kv, s * BIAS_H[h] + (q - kv) * 0.1, -math.inf),
    "bias_of_pair": lambda s, b, h, q, kv: s + BIAS_QKV[q, kv],
    "bias_of_batch": lambda s, b, h, q, kv: s + BIAS_B[b],
    "bias_of_all": lambda s, b, h, q, kv: s + BIAS_ALL[b, h, q, kv],
    "relative_table": lambda s, b, h, q, kv: s + RELATIVE[q - kv + LENGTH],
    "index_of_index": lambda s, b, h, q, kv: s + BIAS_QKV[INDEX[q], INDEX[INDEX[kv]]],
    "literal_indices": lambda s, b, h, q, kv: s + BIAS_ALL[0, h, 3, kv] + BIAS_ALL[1][h][q][-1],
    "documents_by_score": lambda s, b, h, q, kv: torch.where((DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv), s, -math.inf),
    "natten": lambda s, b, h, q, kv: torch.where(
        ((q // 10 - kv // 10).abs() <= 2) & ((q % 10 - kv % 10).abs() <= 2), s, -math.inf
    ),
    "dependent_bidirectional": lambda s, b, h, q, kv: torch.where(
        (DOCUMENT[q] == 1) | (DOCUMENT[kv] != 1) & (q >= kv), s, -math.inf
    ),
    "unrolled_sum": lambda s, b, h, q, kv: s + sum(WEIGHT[h, q] * BIAS_H[i] for i in range(3)),
    "floor_division": lambda s, b, h, q, kv: s + (q // 7 - kv // 7) * 0.5,
    "multiplicative": lambda s, b, h, q, kv: s * WEIGHT[h, kv],
    "clamped_window": lambda s, b, h, q, kv: s + RELATIVE[(q - kv).clamp(-20, 20) + LENGTH],
    "global_token": lambda s, b, h, q, kv: s + torch.where(kv == 0, BIAS_H[h], 0.0),
    "gate": lambda s, b, h, q, kv: s * torch.sigmoid(GATE[h]),
    "symmetric": lambda s, b, h, q, kv: s + BIAS_QKV[torch.minimum(q, kv), torch.maximum(q, kv)],
    "soft_capping": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "activation": lambda s, b, h, q, kv: torch.nn.functional.gelu(s),
    "graphormer": lambda s, b, h, q, kv: s + HOP_BIAS[h, HOPS[b, q, kv]],
    "latent_dot": lambda s, b, h, q, kv: s + torch.dot(LATENT_Q[q], LATENT_K[kv]) / 4,
    "sandwich": sandwich,
    "distance_decay": lambda s, b, h, q, kv: s - SLOPES[h] * torch.log1p((q - kv).abs().float()),
}


def dense_mask(mod):
    """A mod that takes 0-d indices, over whole index tensors: one element at a time, which any mod allows."""

    def over_tensors(*index):
        shape = torch.broadcast_shapes(*(i.shape for i in index))
        flat = [i.expand(shape).reshape(-1) for i in index]
        return torch.func.vmap(mod)(*flat).reshape(shape)

    return over_tensors


def check(device, dtype, score_mod=None, mask_mod=None, **shape):
    inputs = qkv(dtype, **shape)
    module = Attention(score_mod=score_mod, mask_mod=mask_mod, per_batch=True, per_head=True)
    (got,) = session_of(module, inputs, device).run("forward", *inputs)
    oracle = {n: dense_mask(m) if m else None for n, m in (("score_mod", score_mod), ("mask_mod", mask_mod))}
    assert_matches(got, attention(*inputs, **oracle)[0], dtype)
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKS)
def test_mask_by_name(name, device):
    check(device, torch.float32, mask_mod=MASKS[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_by_name(name, device):
    check(device, torch.float32, score_mod=SCORE_MODS[name])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ["alibi", "soft_capping", "bias_of_all", "latent_dot", "documents_by_score"])
def test_score_mod_with_a_mask_in_half_precision(name, dtype, device):
    check(device, dtype, SCORE_MODS[name], MASKS["document"], kv_heads=2)


class Listed(nn.Module):
    """A BlockMask that lists chosen blocks, with or without a mask of its own inside them."""

    def __init__(self, num_blocks, indices, block, mask_mod=None):
        super().__init__()
        self.register_buffer("num_blocks", num_blocks)
        self.register_buffer("indices", indices)
        self.block, self.mask_mod = block, mask_mod

    def forward(self, query, key, value):
        block_mask = BlockMask.from_kv_blocks(
            self.num_blocks,
            self.indices,
            BLOCK_SIZE=self.block,
            mask_mod=self.mask_mod,
            seq_lengths=(query.shape[2], key.shape[2]),
        )
        return flex_attention(query, key, value, block_mask=block_mask)


def listed(mask_mod=None, length=256, block=64):
    blocks = length // block
    counts = torch.tensor([[[1 + i % 3 for i in range(blocks)]]], dtype=torch.int32)
    indices = torch.tensor([[[[(i + 3 * j) % blocks for j in range(blocks)] for i in range(blocks)]]]).int()
    return Listed(counts, indices, block, mask_mod)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["alone", "and_a_mask"])
def test_block_lists_decide_too(mask_mod, device):
    module = listed(mask_mod)
    inputs = qkv(torch.float32, q_len=256, kv_len=256)
    listed_table = torch.zeros(4, 4, dtype=torch.bool)
    for i in range(4):
        listed_table[i, module.indices[0, 0, i, : module.num_blocks[0, 0, i]].long()] = True

    def visible(b, h, q, kv):
        seen = listed_table[q // 64, kv // 64]
        return seen if mask_mod is None else seen & mask_mod(b, h, q, kv)

    (got,) = session_of(module, inputs, device).run("forward", *inputs)
    assert_matches(got, attention(*inputs, mask_mod=visible)[0], torch.float32)


COMPILED = {
    "natten": {"mask_mod": MASKS["natten"]},
    "document_and_alibi": {"mask_mod": MASKS["document"], "score_mod": SCORE_MODS["alibi"]},
    "graphormer": {"score_mod": SCORE_MODS["graphormer"]},
    "lists": {"module": listed()},
    "lists_and_mask": {"module": listed(causal)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_pytorch_gives_the_same(name):
    options = dict(COMPILED[name])
    module = options.pop("module", None) or Attention(per_batch=True, per_head=True, **options)
    inputs = qkv(torch.float32, q_len=256, kv_len=256) if "lists" in name else qkv(torch.float32)
    want = torch.compile(module)(*inputs)
    (got,) = session_of(module, inputs, "host").run("forward", *inputs)
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [64, 128])
def test_paged_caches_by_their_converted_block_mask(page, device):
    length, lengths = 2 * 128, torch.tensor([256, 100, 65])
    paged = PagedAttention(3 * length // page + 2, page, 3, device="cpu")
    for sequence in (2, 0, 1):  # pages of the sequences interleave
        for count in range(page, length + 1, page):
            paged.reserve(torch.tensor(sequence), torch.tensor(count))
    query, key, value = qkv(torch.float32, batch=3, q_len=length, kv_len=length)
    caches = [torch.full((1, 4, paged.n_pages * page, 32), math.nan) for _ in range(2)]
    positions = torch.arange(length).expand(3, -1).contiguous()
    paged.assign(torch.arange(3), positions, key, value, *caches)

    def visible(b, h, q, kv):
        return (q >= kv) & (kv < lengths[b])

    logical = create_block_mask(visible, 3, None, length, length, device="cpu", BLOCK_SIZE=page)

    class Paged(nn.Module):
        def __init__(self):
            super().__init__()
            self.block_mask = paged.convert_logical_block_mask(logical)

        def forward(self, query, key_cache, value_cache):
            return flex_attention(query, key_cache, value_cache, block_mask=self.block_mask)

    (got,) = session_of(Paged(), (query, *caches), device).run("forward", query, *caches)
    assert_matches(got, attention(query, key, value, mask_mod=visible)[0], torch.float32)
