"""Runs the Metal attention kernels of one attention through the shim, on numpy arrays, with a plan made from a
dense mask; and the same attention in float64."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import flexpte.metal_delegate
from flexpte.exporter.msl_flex import chunk_tiles, decode_tiles, flex_wrappers, prefill_tiles
from flexpte.runtime import _native

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FULL, BOUNDS, MASK = range(3)
DECODE_THREADS = 128


@dataclass(frozen=True)
class Mods:
    """MSL bodies of the mods: they read ``score, b, h, q_idx, kv_idx``, ``scalars`` and ``capture_0`` …"""

    score: str = ""
    mask: str = ""
    capture_types: tuple[str, ...] = ()

    def text(self) -> str:
        msl = {"F32": "float", "I32": "int", "I64": "long"}
        lines = ["struct Mods {"]
        lines += [f"  device const {msl[t]}* capture_{i};" for i, t in enumerate(self.capture_types)]
        lines += ["  constant CaptureView* views;", "  constant long* scalars;"]
        lines += ["  device atomic_uint* status;", "  uint instruction;"]
        lines += [f"  enum {{ has_score = {int(bool(self.score))}, has_mask = {int(bool(self.mask))} }};"]
        lines += ["  float score(float score, int b, int h, int q_idx, int kv_idx) const {"]
        lines += [f"    {self.score or 'return score;'}", "  }"]
        lines += ["  bool mask(int b, int h, int q_idx, int kv_idx) const {"]
        lines += [f"    {self.mask or 'return true;'}", "  }", "};"]
        return "\n".join(lines)


NO_MODS = Mods()
INSTRUCTION = 7
"""What kernels report a bad index of a capture as."""


@dataclass
class Plan:
    tile_begin: list[int] = field(default_factory=list)
    first_run: list[int] = field(default_factory=list)
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    row_begin: Array | None = None
    row_end: Array | None = None


def make_plan(mask: Array, q_tile: int, allow_bounds: bool = True) -> Plan:
    """What each tile visits. ``mask``: [B', H', Lq, Lk]."""
    batches, heads, q_len, kv_len = mask.shape
    plan = Plan(tile_begin=[*range(0, q_len, q_tile), q_len])
    begins = np.zeros((batches, heads, q_len), np.int32)
    ends = np.zeros((batches, heads, q_len), np.int32)
    has_bounds = False
    for b in range(batches):
        for h in range(heads):
            for tile_begin in range(0, q_len, q_tile):
                plan.first_run.append(len(plan.runs))
                tile = mask[b, h, tile_begin : tile_begin + q_tile]
                runs, bounds = _tile_runs(tile, kv_len, allow_bounds)
                plan.runs += runs
                if bounds is not None:
                    has_bounds = has_bounds or any(kind == BOUNDS for _, _, kind in runs)
                    begins[b, h, tile_begin : tile_begin + q_tile] = bounds[0]
                    ends[b, h, tile_begin : tile_begin + q_tile] = bounds[1]
    plan.first_run.append(len(plan.runs))
    if has_bounds:
        plan.row_begin, plan.row_end = begins, ends
    return plan


def _tile_runs(
    tile: Array, kv_len: int, allow_bounds: bool
) -> tuple[list[tuple[int, int, int]], tuple[Array, Array] | None]:
    counts = tile.sum(axis=1)
    begins = np.where(counts > 0, tile.argmax(axis=1), 0)
    ends = np.where(counts > 0, kv_len - tile[:, ::-1].argmax(axis=1), 0)
    if allow_bounds and bool(np.all(ends - begins == counts)):
        if not counts.any():
            return [], (begins, ends)
        first, last = int(begins[counts > 0].min()), int(ends.max())
        kind = FULL if bool(tile[:, first:last].all()) else BOUNDS
        return [(first, last, kind)], (begins, ends)
    runs: list[tuple[int, int, int]] = []
    for begin in range(0, kv_len, 64):
        block = tile[:, begin : begin + 64]
        if not block.any():
            continue
        end, kind = min(begin + 64, kv_len), FULL if block.all() else MASK
        if runs and runs[-1][1] == begin and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], end, kind)
        else:
            runs.append((begin, end, kind))
    return runs, None


def _kernel_file(name: str) -> str:
    return (Path(flexpte.metal_delegate.__file__).parent / "kernels" / name).read_text(encoding="utf-8")


@cache
def library(dtype: str, head_dims: tuple[int, int], rows: int, mods: Mods) -> _native.MslLibrary:
    parts = ["#include <metal_stdlib>", "#include <metal_simdgroup_matrix>", "using namespace metal;"]
    parts += [_kernel_file(n) for n in ("params.h", "flex_common.metal", "flex_prefill.metal", "flex_decode.metal")]
    parts += [mods.text(), flex_wrappers("attention", "Mods", (dtype,) * 3, head_dims, mods.capture_types, rows)]
    return _native.MslLibrary("\n".join(parts))


@dataclass
class Outcome:
    out: Array
    lse: Array
    counters: dict[str, Any]
    merge_counters: dict[str, Any] | None
    status: int


def strides_of(view: Array) -> list[int]:
    return [s // view.itemsize if n > 1 else 0 for s, n in zip(view.strides, view.shape, strict=True)]


def run(
    kernel: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    mods: Mods = NO_MODS,
    *,
    dtype: str = "F32",
    scale: float = 1.0,
    captures: Sequence[Array] = (),
    scalars: Sequence[int] = (),
    splits: int = 1,
    heads_at_once: int | None = None,
    allow_bounds: bool = True,
    out: Array | None = None,
    vectorizable: bool | None = None,
) -> Outcome:
    """``query`` [B, Hq, Lq, DK], ``key`` [Bk, Hkv, Lk, DK], ``value``: arrays of ``dtype``, in any layout; ``mask``
    [B', H', Lq, Lk]."""
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, head_dim_v = value.shape[1], value.shape[3]
    group = num_heads // num_kv_heads
    heads = heads_at_once or (group if mask.shape[1] == 1 else 1)
    item_size = query.itemsize
    rows = heads * q_len
    if kernel == "decode":
        tiles = decode_tiles(head_dim, head_dim_v, item_size, rows)
        assert tiles is not None
        assert rows <= tiles.rows
        q_tile, threads = q_len, DECODE_THREADS
    else:
        choose = prefill_tiles if kernel == "prefill" else chunk_tiles
        matrix = choose(head_dim, head_dim_v, item_size)
        q_tile, threads = matrix.rows // heads, matrix.threads
    plan = make_plan(mask, q_tile, allow_bounds)
    num_tiles = len(plan.tile_begin) - 1
    if out is None:
        out = np.full((batch, num_heads, q_len, head_dim_v), 77.0, DTYPES[dtype])
    lse = np.full((batch, num_heads, q_len), 77.0, np.float32)
    if vectorizable is None:
        vectorizable = all(
            strides_of(x)[3] == 1
            and x.ctypes.data % 16 == 0
            and all(s * item_size % 16 == 0 for s in strides_of(x)[:3])
            and x.shape[3] * item_size % 16 == 0
            for x in (key, value)
        )
    numbers = [num_heads, num_kv_heads, q_len, num_tiles, heads, mask.shape[0], mask.shape[1], splits, 1]
    numbers += [int(vectorizable), int(key.shape[0] != 1 or batch == 1), int(plan.row_begin is not None)]
    params = struct.pack("12ifI", *numbers, scale, INSTRUCTION)
    for view in (query, key, value, out, lse):
        params += struct.pack(f"{view.ndim}q", *strides_of(view))
    partial_out = np.zeros((batch, num_heads, q_len, splits, head_dim_v), np.float32)
    partial_lse = np.zeros((batch, num_heads, q_len, splits), np.float32)
    status = np.zeros(1, np.uint32)
    views = np.zeros((max(1, len(captures)), 2, 8), np.int64)
    buffers: list[Array | None] = [
        _bytes(query),
        _bytes(key),
        _bytes(value),
        _bytes(out),
        lse,
        np.array(plan.tile_begin, np.int32),
        np.array(plan.first_run, np.int32),
        np.array(plan.runs, np.int32).reshape(-1, 3),
        None if plan.row_begin is None else np.stack([plan.row_begin, plan.row_end], -1),
        partial_out if splits > 1 else None,
        partial_lse if splits > 1 else None,
        views,
        np.array(scalars or [0], np.int64),
        status,
        *captures,
    ]
    names = ["query", "key", "value", "out", "lse", *["plan"] * 4, "partial", "partial", "views", "scalars", "status"]
    lib = library(dtype, (head_dim, head_dim_v), rows if kernel == "decode" else 1, mods)
    counters = lib.dispatch(
        f"attention_{kernel}",
        buffers,
        params,
        (num_tiles * splits, num_heads // heads, batch),
        (threads, 1, 1),
        writable=[3, 4, 9, 10, 13],
        names=[*names, *["capture"] * len(captures)],
    )
    merge_counters = None
    if splits > 1:
        merge_counters = lib.dispatch(
            "attention_merge",
            [partial_out, partial_lse, _bytes(out), lse],
            params,
            (q_len, num_heads, batch),
            (32, 1, 1),
        )
    return Outcome(out, lse, counters, merge_counters, int(status[0]))


def _bytes(view: Array) -> Array:
    """The extent of a strided view, as a contiguous array over the same memory."""
    if view.size == 0:
        return np.zeros(0, np.uint8)
    extent = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + view.itemsize
    memory = (ctypes.c_uint8 * extent).from_address(view.ctypes.data)
    return np.frombuffer(memory, np.uint8)


def reference(
    query: Array, key: Array, value: Array, mask: Array, score: Any = None, scale: float = 1.0
) -> tuple[Array, Array]:
    """out and lse in float64. ``score(s, b, h, q, k)`` on arrays; masked values do not enter, whatever they are."""
    batch, num_heads, q_len, _ = query.shape
    group = num_heads // key.shape[1]
    kv_len = key.shape[2]
    b, h, q, k = np.ogrid[:batch, :num_heads, :q_len, :kv_len]
    wide = [
        np.repeat(np.broadcast_to(x, (batch, *x.shape[1:])).astype(np.float64), group, axis=1) for x in (key, value)
    ]
    with np.errstate(all="ignore"):
        s = np.einsum("bhqd,bhkd->bhqk", query.astype(np.float64), wide[0]) * scale
        if score is not None:
            s = np.broadcast_to(score(s, b, h, q, k), s.shape)
        s = np.where(mask, s, -np.inf)
        most = s.max(axis=-1, keepdims=True, initial=-np.inf)
        most = np.where(np.isneginf(most), 0.0, most)
        p = np.where(mask, np.exp(s - most), 0.0)
        total = p.sum(axis=-1, keepdims=True)
        masked = np.broadcast_to(mask, p.shape)
        out = np.zeros((batch, num_heads, q_len, value.shape[3]))
        for i in range(kv_len):
            seen = masked[..., i : i + 1]
            out = np.where(seen, out + p[..., i : i + 1] * wide[1][:, :, i : i + 1], out)
        out = np.where(total == 0.0, 0.0, out / total)
        lse = np.where(total == 0.0, -np.inf, most + np.log(total))[..., 0]
    return out, lse
