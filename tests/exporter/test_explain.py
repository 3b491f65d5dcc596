"""What reports prove of masks, against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexpte.exporter.capture import capture
from flexpte.exporter.explain import EMPTY, FULL, PARTIAL, TILE, explain_masks
from flexpte.exporter.picture import text_picture, write_png


class Masked(nn.Module):
    def __init__(self, mask_mod, batch=None, heads=None):
        super().__init__()
        self.mask_mod, self.batch, self.heads = mask_mod, batch, heads

    def forward(self, query, key):
        block_mask = create_block_mask(
            self.mask_mod, self.batch, self.heads, query.shape[2], key.shape[2], device="cpu"
        )
        return flex_attention(query, key, key, block_mask=block_mask)


def explained(mask_mod, num_queries, num_keys, **options):
    inputs = (torch.randn(1, 1, num_queries, 8), torch.randn(1, 1, num_keys, 8))
    (mask,) = explain_masks(capture(Masked(mask_mod, **options), inputs)).values()
    return mask


def dense_tiles(mask_mod, num_queries, num_keys):
    zero = torch.tensor(0)
    visible = mask_mod(zero, zero, torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :])
    visible = visible.expand(num_queries, num_keys).numpy()
    rows, cols = -(-num_queries // TILE), -(-num_keys // TILE)
    tiles = np.empty((rows, cols), np.uint8)
    for i in range(rows):
        for j in range(cols):
            tile = visible[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            tiles[i, j] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return tiles


DOCUMENTS = torch.tensor([0] * 70 + [3] * 58 + [4] * 172)
LENGTHS = torch.tensor([131])
WINDOWS = torch.tensor([16, 100])
EXACT = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window_1": lambda b, h, q, kv: (q >= kv) & (q - kv < 1),
    "window_64": lambda b, h, q, kv: (q >= kv) & (q - kv < 64),
    "window_100": lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
    "prefix": lambda b, h, q, kv: (kv < 90) | (q >= kv),
    "documents": lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv),
    "padding": lambda b, h, q, kv: kv < LENGTHS[b],
    "neighbourhood": lambda b, h, q, kv: (q // 20 - kv // 20).abs() <= 1,
    "two_dimensions": lambda b, h, q, kv: ((q // 20 - kv // 20).abs() <= 2) & ((q % 20 - kv % 20).abs() <= 2),
    "two_dimensions_clamped": lambda b, h, q, kv: (
        (((q // 20).clamp(3, 11) - kv // 20).abs() <= 3) & (((q % 20).clamp(3, 16) - kv % 20).abs() <= 3)
    ),
    "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 2 == 0) & (q - kv < 130),
    "dilated_by_tiles": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 192 == 0),
    "sinks": lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (q - kv < 50)),
    "two_sided": lambda b, h, q, kv: (q - kv).abs() <= 32,
    "window_of_head": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOWS[h]),
    "nothing": lambda b, h, q, kv: q < kv - 1000,
    "everything": lambda b, h, q, kv: q + kv >= 0,
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_queries", [1, 63, 64, 65, 300])
def test_named_masks_are_exact_at_tile_granularity(name, num_queries):
    mask = explained(EXACT[name], num_queries, 300)
    np.testing.assert_array_equal(mask.tiles, dense_tiles(EXACT[name], num_queries, 300))
    assert mask.count(EMPTY) + mask.count(FULL) + mask.count(PARTIAL) == mask.tiles.size


@pytest.mark.parametrize("window_tokens", [1, 2, 64, 299])
def test_a_window_is_proved_with_its_own_key_included(window_tokens):
    mask = explained(lambda b, h, q, kv: (q >= kv) & (q - kv < window_tokens), 300, 300)
    assert mask.window_tokens == window_tokens


@pytest.mark.parametrize("name", ["causal", "prefix", "everything", "padding"])
def test_no_window_where_old_keys_stay_visible(name):
    assert explained(EXACT[name], 300, 300).window_tokens is None


@pytest.mark.parametrize("window_tokens", [None, 8])
def test_window_of_a_cached_layer_holds_for_all_positions(window_tokens):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 1, 128, 8))

        def forward(self, query, key, input_pos):
            self.cache.index_copy_(2, input_pos, key)

            def visible(b, h, q_idx, kv_idx):
                seen = kv_idx <= input_pos[q_idx]
                return seen if window_tokens is None else seen & (kv_idx > input_pos[q_idx] - window_tokens)

            block_mask = create_block_mask(visible, None, None, query.shape[2], 128, device="cpu")
            return flex_attention(query, self.cache, self.cache, block_mask=block_mask)

    x = torch.randn(1, 1, 3, 8)
    (mask,) = explain_masks(capture(Cached(), (x, x, torch.arange(3)))).values()
    assert mask.window_tokens == window_tokens
    assert (mask.num_queries, mask.num_keys) == (3, 128)


numbers = st.integers(min_value=-80, max_value=80)
positions = st.sampled_from(
    ["q", "kv", "q - kv", "q + kv", "kv - q", "2 * q - kv", "q // 16", "kv % 24", "TABLE[q]", "TABLE[kv]"]
)
comparisons = st.builds(
    lambda left, op, right, n: f"({left} {op} {right} + {n})",
    positions,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    positions,
    numbers,
)
masks = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds("({} & {})".format, inner, inner),
        st.builds("({} | {})".format, inner, inner),
        st.builds("(~{})".format, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(masks, st.sampled_from([1, 50, 64, 130]), st.sampled_from([1, 64, 65, 129]), st.integers(0, 3))
def test_no_visible_key_is_skipped_and_no_masked_one_called_full(text, num_queries, num_keys, seed):
    table = torch.randint(-60, 200, (130,), generator=torch.Generator().manual_seed(seed))
    mask_mod = eval(f"lambda b, h, q, kv: {text}", {"TABLE": table})
    tiles = explained(mask_mod, num_queries, num_keys).tiles
    dense = dense_tiles(mask_mod, num_queries, num_keys)
    proved = tiles != PARTIAL
    np.testing.assert_array_equal(tiles[proved], dense[proved])


def test_pictures(tmp_path):
    tiles = np.array([[PARTIAL, EMPTY], [FULL, PARTIAL]], np.uint8)
    assert text_picture(tiles) == "▒·\n█▒"
    assert text_picture(tiles, columns=1) == "▒"
    write_png(tmp_path / "mask.png", tiles, pixels=3)
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("name", ["window_of_head", "causal"])
def test_every_head_has_its_own_tiles(name, head):
    module = Masked(EXACT[name], heads=2)
    inputs = (torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8))
    (mask,) = explain_masks(capture(module, inputs), head=head).values()
    want = dense_tiles(lambda b, h, q, kv: EXACT[name](b, torch.tensor(head), q, kv), 300, 300)
    np.testing.assert_array_equal(mask.tiles, want)
