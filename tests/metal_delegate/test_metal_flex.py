"""The Metal attention kernels against attention in float64, executed through the shim."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flexpte.exporter.msl_flex import chunk_tiles, decode_tiles, prefill_tiles
from tests.metal_delegate import metal_flex
from tests.metal_delegate.metal_flex import DTYPES, NO_MODS, Mods, reference, run

Array = npt.NDArray[Any]
EPSILON = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
KERNELS = ("prefill", "chunk", "decode")


def random(seed: int, dtype: str, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def grid(q_len: int, kv_len: int) -> tuple[Array, Array]:
    """Positions of queries, the last of which is the last key, and of keys."""
    return np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None, :]


def causal(q_len: int, kv_len: int) -> Array:
    q, k = grid(q_len, kv_len)
    return (k <= q)[None, None]


def window(q_len: int, kv_len: int, size: int) -> Array:
    q, k = grid(q_len, kv_len)
    return ((k <= q) & (k > q - size))[None, None]


def full(q_len: int, kv_len: int) -> Array:
    return np.ones((1, 1, q_len, kv_len), bool)


def check(
    kernel: str,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    mask: Array,
    mods: Mods = NO_MODS,
    *,
    dtype: str = "F32",
    batch: int = 1,
    score: Any = None,
    **options: Any,
) -> metal_flex.Outcome:
    query = random(1, dtype, batch, heads[0], lengths[0], dims[0])
    key = random(2, dtype, batch, heads[1], lengths[1], dims[0])
    value = random(3, dtype, batch, heads[1], lengths[1], dims[1])
    return check_tensors(kernel, query, key, value, mask, mods, dtype=dtype, score=score, **options)


def check_tensors(
    kernel: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    mods: Mods = NO_MODS,
    *,
    dtype: str = "F32",
    score: Any = None,
    tolerance: float = 2e-6,
    **options: Any,
) -> metal_flex.Outcome:
    scale = float(query.shape[3]) ** -0.5
    got = run(kernel, query, key, value, mask, mods, dtype=dtype, scale=scale, **options)
    out, lse = reference(query, key, value, mask, score, scale)
    bound = EPSILON[dtype] + tolerance
    np.testing.assert_allclose(got.out.astype(np.float64), out, rtol=bound, atol=bound)
    np.testing.assert_allclose(got.lse, lse, rtol=tolerance, atol=2 * tolerance)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("kernel", KERNELS)
def test_head_dimensions(kernel: str, head_dim: int, dtype: str) -> None:
    q_len = 1 if kernel == "decode" else 19
    check(kernel, (2, 1), (q_len, 77), (head_dim, head_dim), causal(q_len, 77), dtype=dtype, splits=1)


@pytest.mark.parametrize("dims", [(64, 32), (16, 72), (128, 256), (24, 8), (512, 64)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_of_another_head_dimension(kernel: str, dims: tuple[int, int]) -> None:
    check(kernel, (2, 1), (1, 90), dims, causal(1, 90), dtype="F16")


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_of_query_heads(kernel: str, group: int) -> None:
    q_len = 1 if kernel == "decode" else 5
    got = check(kernel, (2 * group, 2), (q_len, 100), (64, 64), window(q_len, 100, 40), dtype="F16", batch=2)
    visited = 2 * 2 * (40 + q_len - 1) * 64 * 2
    if kernel == "decode" or q_len * group <= 16:
        assert got.counters["buffers"]["key"]["read_bytes"] == visited


@pytest.mark.parametrize("q_len", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_prefill_of_any_length(q_len: int) -> None:
    check("prefill", (2, 2), (q_len, q_len), (64, 64), causal(q_len, q_len))


@pytest.mark.parametrize("kv_len", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 129, 1000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_keys(kernel: str, kv_len: int) -> None:
    check(kernel, (3, 1), (1, kv_len), (32, 32), full(1, kv_len))


@pytest.mark.parametrize("q_len", range(1, 17))
def test_up_to_16_queries(q_len: int) -> None:
    check("chunk", (1, 1), (q_len, 200), (64, 64), causal(q_len, 200), dtype="F16", splits=2)
    if decode_tiles(64, 64, 2, q_len) is not None:
        check("decode", (1, 1), (q_len, 200), (64, 64), causal(q_len, 200), dtype="F16", splits=2)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_are_split(kernel: str, splits: int) -> None:
    q_len = 1 if kernel == "decode" else 6
    check(kernel, (4, 2), (q_len, 1000), (64, 64), causal(q_len, 1000), dtype="F16", splits=splits)
    check(kernel, (4, 2), (q_len, 100), (64, 64), window(q_len, 100, 30), dtype="F16", splits=splits)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_visible_key(kernel: str) -> None:
    mask = causal(4, 70)
    mask[..., 1:3, :] = False
    for splits in (1, 2):
        got = check(kernel, (2, 2), (4, 70), (64, 64), mask, splits=splits)
        assert not got.out[:, :, 1:3].any()
        assert np.isneginf(got.lse[:, :, 1:3]).all()
    got = check(kernel, (2, 2), (4, 70), (64, 64), np.zeros((1, 1, 4, 70), bool))
    assert not got.out.any()
    assert np.isneginf(got.lse).all()


DOCUMENTS = Mods(mask="return capture_0[q_idx] == capture_0[kv_idx];", capture_types=("I64",))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["prefill", "chunk"])
def test_documents(kernel: str, dtype: str) -> None:
    ids = np.repeat(np.arange(9), [3, 50, 1, 30, 64, 9, 20, 80, 23]).astype(np.int64)
    shuffled = np.random.default_rng(0).permutation(ids)
    for documents in (ids, shuffled):
        mask = (documents[:, None] == documents[None, :])[None, None]
        n = len(documents)
        options = {"dtype": dtype, "captures": [documents], "allow_bounds": documents is not ids}
        check(kernel, (4, 2), (n, n), (64, 64), mask, DOCUMENTS, **options)


EVERY_THIRD = Mods(mask="return (q_idx + kv_idx) % 3 != int(scalars[0]);")


@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_that_are_no_intervals(kernel: str) -> None:
    q, k = np.arange(4)[:, None], np.arange(150)[None, :]
    mask = ((q + k) % 3 != 1)[None, None]
    for splits in (1, 2):
        check(kernel, (2, 1), (4, 150), (64, 64), mask, EVERY_THIRD, scalars=[1], splits=splits, heads_at_once=2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_of_each_batch_and_head(kernel: str) -> None:
    mods = Mods(mask="return kv_idx <= q_idx + 20 * b + 7 * h && kv_idx % 2 == h % 2;")
    b, h, q, k = np.ogrid[:2, :4, :3, :99]
    mask = (k <= q + 20 * b + 7 * h) & (k % 2 == h % 2)
    check(kernel, (4, 2), (3, 99), (32, 32), mask, mods, batch=2)
    bounded = np.broadcast_to(k <= q + 20 * b + 7 * h, mask.shape)
    check(kernel, (4, 2), (3, 99), (32, 32), bounded, batch=2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_are_modified(kernel: str, splits: int) -> None:
    mods = Mods(
        score="return 20.0f * precise::tanh(score / 20.0f) + capture_0[h] * float(kv_idx - q_idx) + 0.5f * float(b);",
        capture_types=("F32",),
    )
    slopes = np.array([0.1, -0.05, 0.02, 0.3], np.float32)

    def score(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return 20.0 * np.tanh(s / 20.0) + slopes.astype(np.float64)[h] * (k - q) + 0.5 * b

    options = {"score": score, "captures": [slopes], "splits": splits, "batch": 2, "tolerance": 1e-5}
    check(kernel, (4, 2), (4, 140), (64, 64), causal(4, 140), mods, **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_of_minus_infinity_and_nan(kernel: str) -> None:
    """As softmax has it: a row of -inf alone is 0, a visible NaN makes its row NaN and no other."""
    mods = Mods(score="return q_idx == 0 || kv_idx < 5 ? -INFINITY : q_idx == 2 && kv_idx == 60 ? NAN : score;")

    def score(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return np.where((q == 0) | (k < 5), -np.inf, np.where((q == 2) & (k == 60), np.nan, s))

    for splits in (1, 2):
        got = check(kernel, (2, 1), (4, 130), (32, 32), full(4, 130), mods, score=score, splits=splits)
        assert not got.out[:, :, 0].any()
        assert np.isnan(got.out[:, :, 2]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_masked_does_not_matter(kernel: str, dtype: str, poison: float) -> None:
    query, key, value = (random(i, dtype, 1, 4 if i == 0 else 2, n, 64) for i, n in enumerate((4, 140, 140)))
    key[:, :, 100:], value[:, :, 100:] = poison, poison  # beyond what any row sees
    mask = np.zeros((1, 1, 4, 140), bool)
    mask[..., :100] = causal(4, 100)
    check_tensors(kernel, query, key, value, mask, dtype=dtype)
    # Between keys that rows see.
    key[:, :, 33], value[:, :, 33] = poison, poison
    mods = Mods(mask="return kv_idx != 33 && kv_idx < 100 - q_idx && kv_idx % 5 != q_idx;")
    q, k = np.arange(4)[:, None], np.arange(140)[None, :]
    holes = ((k != 33) & (k < 100 - q) & (k % 5 != q))[None, None]
    check_tensors(kernel, query, key, value, holes, mods, dtype=dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_visible_values_that_are_not_finite(kernel: str) -> None:
    query, key, value = (random(i, "F32", 1, 1, n, 32) for i, n in enumerate((4, 140, 140)))
    value[..., 20, 3], value[..., 21, 4], value[..., 22, 5] = np.nan, np.inf, -np.inf
    value[..., 30, 6], value[..., 31, 6] = np.inf, -np.inf
    value[..., 40, 7], value[..., 41, 7] = np.inf, np.inf
    mods = Mods(mask="return kv_idx % 4 != q_idx;")
    q, k = np.arange(4)[:, None], np.arange(140)[None, :]
    check_tensors(kernel, query, key, value, (k % 4 != q)[None, None], mods)
    check_tensors(kernel, query, key, value, full(4, 140))


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides(kernel: str) -> None:
    q_len = 4
    base = random(4, "F16", 2, 300, 3, 4, 32)  # [B, L, (q, k, v), H, D]
    query, key, value = (base[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    query = query[:, :, :q_len]
    mask = causal(q_len, 300)
    out = np.zeros((2, q_len, 4, 32), np.float16).transpose(0, 2, 1, 3)
    for splits in (1, 2):
        check_tensors(kernel, query, key, value, mask, dtype="F16", out=out, splits=splits)
    # The last dimension is not the innermost one.
    turned = [x.swapaxes(2, 3).copy().swapaxes(2, 3) for x in (query, key, value)]
    out = np.zeros((2, 4, 32, q_len), np.float16).swapaxes(2, 3)
    for splits in (1, 2):
        check_tensors(kernel, *turned, mask, dtype="F16", out=out, splits=splits)
    # Rows that are not aligned to 16 bytes.
    wide = random(5, "F16", 2, 4, 300, 33)[..., 1:]
    check_tensors(kernel, query, wide, wide, mask, dtype="F16")


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_batch_of_keys_for_all(kernel: str) -> None:
    query = random(1, "F16", 3, 2, 4, 64)
    key, value = random(2, "F16", 1, 2, 100, 64), random(3, "F16", 1, 2, 100, 64)
    check_tensors(kernel, query, key, value, causal(4, 100), dtype="F16")


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores_do_not_overflow(kernel: str) -> None:
    query, key, value = (random(i, "F32", 1, 1, n, 64) for i, n in enumerate((4, 300, 300)))
    check_tensors(kernel, query * 100, key * 100, value, causal(4, 300))


def test_decode_reads_each_visible_key_once() -> None:
    head_dim, q = 128, 32 * 128 * 2
    for kv_len, mask in ((1024, causal(1, 1024)), (1024, window(1, 1024, 512)), (4096, window(1, 4096, 512))):
        got = check("decode", (32, 8), (1, kv_len), (head_dim, head_dim), mask, dtype="F16")
        minimum = int(mask.sum()) * 8 * head_dim * 2 * 2 + q
        assert got.counters["device_read_bytes"] <= 1.01 * minimum
        assert got.counters["idle"] < 0.05
        split = check("decode", (32, 8), (1, kv_len), (head_dim, head_dim), mask, dtype="F16", splits=2)
        assert split.counters["device_read_bytes"] <= 1.02 * minimum


def test_prefill_reads_little() -> None:
    """The minimum is query, key and value once; 32-row tiles read 4.3 and 5 times that here."""
    for length, mask, most in ((256, causal(256, 256), 1.5), (512, window(512, 512, 64), 1.4)):
        got = check("prefill", (2, 2), (length, length), (64, 64), mask, dtype="F16")
        assert got.counters["device_read_bytes"] <= most * 3 * 2 * length * 64 * 2
        assert got.counters["flops"] <= 10 * 2 * int(mask.sum())
        assert got.counters["matrix_flops"] <= 1.3 * 2 * int(mask.sum()) * 4 * 64


def test_tiles_fit_a_threadgroup() -> None:
    for item_size in (2, 4):
        for head_dim in range(1, 513):
            for tiles in (prefill_tiles(head_dim, head_dim, item_size), chunk_tiles(head_dim, head_dim, item_size)):
                assert tiles.staged_bytes + tiles.shared_bytes <= 32768
                assert tiles.threads <= 1024
                assert tiles.keys % 8 == 0
            for rows in (1, 2, 3, 4, 8, 16):
                decode = decode_tiles(head_dim, head_dim, item_size, rows)
                if decode is not None:
                    assert rows <= decode.rows <= decode.lanes <= 32
                    assert decode.shared_bytes <= 32768
