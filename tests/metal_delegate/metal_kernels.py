"""Runs single Metal kernels through the shim: library text, params structs, buffers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import flexpte.metal_delegate
from flexpte.exporter import ir
from flexpte.exporter.msl_library import metal_library
from flexpte.runtime import _native

NUMPY: dict[str, Any] = {
    "Bool": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
}
"""Numpy's type of each element type."""

EPSILON = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Half a unit in the last place of 1."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one instruction: their names, in order, and their library, compiled."""

    names: tuple[str, ...]
    library: Any


@cache
def kernels_of(kind: type[ir.Op], /, **fields: Any) -> Kernels:
    """The fields of the operation; operands are given by their element types, or tuples of these."""
    values: list[ir.Value] = []

    def field(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(field(one) for one in given)
        if given not in NUMPY:
            return given
        values.append(ir.Value(0, given, (), ()))
        return len(values) - 1

    instruction = ir.Instruction(kind(**{name: field(given) for name, given in fields.items()}), "kernel")
    region = ir.Region(tuple(values), (ir.Storage("Arena"),), (), (), (instruction,), (), (), {}, {})
    made = metal_library(region)
    return Kernels(made.kernels[0], _native.MslLibrary(made.source))


@cache
def _params() -> str:
    folder = Path(flexpte.metal_delegate.__file__).parent / "kernels"
    return (folder / "params.h").read_text(encoding="utf-8")


_TYPES = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


@cache
def constants() -> dict[str, int]:
    """The integer macros of params.h."""
    return {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)", _params())}


@cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """The structs of params.h."""
    known: dict[str, Any] = dict(_TYPES)
    text = re.sub(r"//[^\n]*", "", _params())
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields = []
        for kind, member, size in re.findall(r"(\w+) (\w+)(?:\[(\w+)\])?;", body):
            count = int(constants().get(size, size)) if size else 0
            fields.append((member, known[kind] * count if count else known[kind]))
        known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return {name: known[name] for name in known if name not in _TYPES}


def pack(name: str, **values: Any) -> bytes:
    """The bytes of one params struct; what is not given is 0."""
    return bytes(_filled(structs()[name], values))


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    result = kind()
    for member, value in values.items():
        current = getattr(result, member)
        if isinstance(value, dict):
            setattr(result, member, _filled(type(current), value))
        elif isinstance(value, Sequence):
            for i, one in enumerate(value):
                current[i] = one
        else:
            setattr(result, member, value)
    return result


def strides(array: np.ndarray) -> list[int]:
    """In elements."""
    return [s // array.itemsize for s in array.strides]


def memory(array: np.ndarray | None) -> np.ndarray | None:
    """What a kernel gets for an array: exactly the bytes from its first to its last element."""
    if array is None or array.size == 0:
        return None
    count = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides(array), strict=True))
    raw = np.lib.stride_tricks.as_strided(array, (count,), (array.itemsize,))
    return raw.view(np.uint8 if array.itemsize == 1 else f"u{array.itemsize}")


def dispatch(
    kernels: Kernels,
    name: str,
    params: bytes,
    buffers: Sequence[np.ndarray | None],
    threadgroups: Sequence[int],
    threads: Sequence[int],
    written: Sequence[int],
) -> dict[str, Any]:
    """Runs a kernel, returns its counters; it may write the buffers whose positions are in ``written`` only."""
    grid, group = ([*sizes, 1, 1][:3] for sizes in (threadgroups, threads))
    counters: dict[str, Any] = kernels.library.dispatch(
        name, [memory(b) for b in buffers], params, grid, group, writable=list(written)
    )
    return counters


def empty(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes."""
    count = int(np.prod(shape)) * np.dtype(NUMPY[dtype]).itemsize
    raw = np.zeros(count + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + count].view(NUMPY[dtype]).reshape(shape)


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Normal floats, small integers, coin flips."""
    result = empty(shape, dtype)
    if dtype == "Bool":
        result[...] = rng.integers(0, 2, shape)
    elif dtype in EPSILON:
        result[...] = rng.standard_normal(shape)
    else:
        info = np.iinfo(NUMPY[dtype])
        result[...] = rng.integers(max(info.min, -100), min(info.max, 100) + 1, shape)
    return result


def padded(rng: np.random.Generator, shape: Sequence[int], dtype: str, extra: int = 3) -> np.ndarray:
    """The same, as a view with gaps between its rows; the gaps hold NaN (integers: 77)."""
    whole = empty((*shape[:-1], shape[-1] + extra), dtype)
    whole[...] = np.nan if dtype in EPSILON else 77
    view = whole[..., : shape[-1]]
    view[...] = random(rng, shape, dtype)
    return view


def wide(array: np.ndarray) -> np.ndarray:
    """As float64."""
    return array.astype(np.float64)


FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("U8", "I8", "I16", "I32", "I64")


def check(out: np.ndarray, expected: np.ndarray, dtype: str, scale: Any = 0.0, terms: int = 1) -> None:
    """Rounded once to ``dtype``; a float sum of ``terms`` numbers whose magnitudes add up to ``scale`` before that."""
    got = wide(out)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    tolerance = EPSILON[dtype] * np.abs(expected) * 1.01 + EPSILON["F32"] * scale * (4 + np.sqrt(terms)) + 1e-37
    if dtype == "F16":
        tolerance = tolerance + 2.0**-25  # subnormals
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(got[infinite], expected[infinite])
    inside = np.isfinite(expected)
    error = np.abs(got[inside] - expected[inside])
    assert np.all(error <= np.broadcast_to(tolerance, expected.shape)[inside]), float(np.max(error))
