"""Loading and running ``.pte`` files: the Python face of the runtime.

``flexpte.load(path)`` gives a :class:`Program`, ``program.session()`` a :class:`Session`, and
``session.run("forward", *inputs)`` runs a method. Needs NumPy only; torch tensors are taken and given where the
caller uses them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexpte.runtime._native as _native
from flexpte.runtime.errors import FlexpteError

__all__ = ["FlexpteError", "MethodInfo", "Program", "Session", "ValueInfo", "load"]

METADATA_KEY = "flexpte.metadata"
DEVICES = ("auto", "host", "msl-host", "metal")


@dataclass(frozen=True)
class ValueInfo:
    """An input or output of a method.

    ``kind`` is ``"tensor"``, ``"int"``, ``"bool"``, ``"float"`` or ``"none"``. For tensors ``shape`` has the largest
    sizes; where ``dynamic`` is true, smaller ones are taken too.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    dynamic: bool = False


@dataclass(frozen=True)
class MethodInfo:
    """A method's name, inputs and outputs."""

    name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]


def load(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    device: str = "auto",
    *,
    num_threads: int | None = None,
) -> Program:
    """Load a ``.pte`` file, or its bytes, and verify all of it.

    A file is mapped read-only: weights cost memory only when touched. ``device`` is where delegated regions run:
    ``"host"``, ``"msl-host"`` (the file's Metal kernels, executed and checked on this machine: needs clang, slow), or
    ``"auto"`` for the best that this machine has. ``num_threads`` defaults to what the process
    may use (environment variable ``FLEXPTE_NUM_THREADS``).

    Raises:
        FlexpteError: no such file (``Io``), a malformed or truncated file (``InvalidProgram``), an operator or a
            device that this build lacks (``Unsupported``), a delegate that it lacks (``NotFound``).
    """
    if device not in DEVICES:
        raise FlexpteError(f"unknown device {device!r}; there are {', '.join(DEVICES)}", "InvalidArgument")
    name = "host" if device == "auto" else device
    if num_threads is not None and num_threads < 1:
        raise FlexpteError(f"num_threads is {num_threads}, expected at least 1", "InvalidArgument")
    threads = num_threads or 0
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Program(_native.Program.load_bytes(bytes(source), name, threads))
    return Program(_native.Program.load_path(os.fspath(Path(source)), name, threads))


class Program:
    """A loaded ``.pte``: immutable, shared by any number of sessions."""

    def __init__(self, native: _native.Program) -> None:
        self._native = native
        self._methods = native.methods()

    @property
    def methods(self) -> dict[str, MethodInfo]:
        """The methods by name."""
        return {
            method["name"]: MethodInfo(method["name"], _value_infos(method["inputs"]), _value_infos(method["outputs"]))
            for method in self._methods
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """What the exporter wrote about the model; empty for files of other exporters.

        Raises:
            FlexpteError: the metadata is no JSON object (``InvalidProgram``).
        """
        raw = self._native.named_data(METADATA_KEY)
        if raw is None:
            return {}
        try:
            metadata = json.loads(raw)
        except ValueError as error:
            raise FlexpteError(f"the metadata is no JSON: {error}", "InvalidProgram") from error
        if not isinstance(metadata, dict):
            raise FlexpteError("the metadata is no JSON object", "InvalidProgram")
        return metadata

    def named_data(self, key: str) -> bytes | None:
        """A copy of the named data ``key`` of the file, or None."""
        data: bytes | None = self._native.named_data(key)
        return data

    @property
    def report(self) -> dict[str, Any]:
        """What is inside, for inspection.

        Keys ``file`` (sizes in bytes of the file, its flatbuffer, segments and named data), ``methods`` (by name:
        inputs, outputs, ``delegates`` with their descriptions and states, ``operators`` that are not delegated
        with how often each is called, planned buffers, activations in bytes) and ``metadata``.
        """
        return {
            "file": self._native.file(),
            "methods": {method["name"]: _method_report(method) for method in self._methods},
            "metadata": self.metadata,
        }

    def session(self) -> Session:
        """A new session, with all buffers at their initial values."""
        return Session(self)


class Session:
    """All memory of a program that changes: activations, caches and other mutable buffers.

    Sessions are independent of each other. Threads that share one take turns.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._native = _native.Session(program._native)

    def run(self, method: str, *inputs: Any) -> tuple[Any, ...]:
        """Run a method and return its outputs, which own their memory.

        Inputs are torch tensors, NumPy arrays, anything else with ``__dlpack__`` or the buffer protocol (any
        strides), and Python numbers for numbers; a BlockMask stands for the tensors that it holds. If one is a torch
        tensor, outputs are torch tensors; otherwise NumPy arrays, where bfloat16, which NumPy lacks, is widened to
        float32.

        Raises:
            FlexpteError: an input has another dtype, shape, rank or count than the method's
                (``InvalidArgument``); no such method (``NotFound``); a position past a cache's end (``OutOfRange``).
        """
        torch = sys.modules.get("torch")
        inputs = _without_block_masks(inputs)
        wants_torch = torch is not None and any(isinstance(x, torch.Tensor) for x in inputs)
        outputs = self._native.run(method, [_native_input(i, x, torch) for i, x in enumerate(inputs)])
        return tuple(_output(x, torch if wants_torch else None) for x in outputs)

    def counters(self) -> dict[str, dict[str, Any]]:
        """What each kernel did since the session began, by kernel name; empty on devices that do not count.

        Device ``"msl-host"`` counts ``dispatches``, ``threads``, ``flops`` (matrix products apart, as
        ``matrix_multiplies`` of 8x8x8), ``barriers``, bytes of threadgroup memory, ``buffers`` (device bytes read and
        written, by argument) and ``instructions`` out of ``instruction_slots``, the number there would be if all
        threads were as busy as the busiest of their threadgroup.
        """
        total: dict[str, dict[str, Any]] = {}
        for text in self._native.counters():
            for kernel, counted in json.loads(text).items():
                total[kernel] = _added(total[kernel], counted) if kernel in total else counted
        return total

    def reset(self) -> None:
        """Give all mutable buffers and caches their initial values again."""
        self._native.reset()


def _added(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Counters of two regions together, nested ones likewise."""
    return {
        key: _added(a.get(key, {}), b.get(key, {}))
        if isinstance(a.get(key, b.get(key)), dict)
        else a.get(key, 0) + b.get(key, 0)
        for key in {**a, **b}
    }


def _value_infos(values: list[Mapping[str, Any]]) -> tuple[ValueInfo, ...]:
    return tuple(
        ValueInfo(v["kind"], v.get("dtype"), tuple(v.get("shape", ())), v.get("dynamic", False)) for v in values
    )


def _method_report(method: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "inputs": method["inputs"],
        "outputs": method["outputs"],
        "delegates": [
            {**delegate, "description": _json_or_text(delegate["description"])} for delegate in method["delegates"]
        ],
        "delegate_calls": sum(is_delegate for _, is_delegate in method["instructions"]),
        "operators": dict(Counter(name for name, is_delegate in method["instructions"] if not is_delegate)),
        "buffers": [{"name": name, "size_bytes": size} for name, size in method["states"]],
        "arena_size_bytes": method["arena_size_bytes"],
    }


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _without_block_masks(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each BlockMask as the tensors that it is an input for: its block lists, then what its mask_mod captures."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None or not any(isinstance(x, module.BlockMask) for x in inputs):
        return inputs
    return tuple(leaf for x in inputs for leaf in (x._flatten()[0] if isinstance(x, module.BlockMask) else (x,)))


def _native_input(number: int, value: Any, torch: Any) -> Any:
    """The input as the bindings take it: a number, or (array, whether its int16 elements are bfloat16 bits)."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.layout is not torch.strided:
            raise FlexpteError(f"input {number} is a sparse tensor; pass a dense one", "InvalidArgument")
        if tensor.device.type != "cpu":
            raise FlexpteError(f"input {number} is on {tensor.device}; pass a tensor on the CPU", "InvalidArgument")
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16), True
        return tensor.numpy() if tensor.numel() == 0 or not tensor.is_contiguous() else tensor, False
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise FlexpteError(f"input {number} is no array or number: {error}", "InvalidArgument") from error
    else:
        array = np.from_dlpack(value)
    if array.dtype.name == "bfloat16":
        return np.ascontiguousarray(array).view(np.int16).reshape(array.shape), True
    if array.dtype.kind not in "biuf":
        raise FlexpteError(f"input {number} has dtype {array.dtype}, which is not supported", "InvalidArgument")
    aligned = (
        array
        if array.dtype.isnative and array.flags.aligned
        else np.require(array, array.dtype.newbyteorder("="), ["A"])
    )
    if any(stride % array.dtype.itemsize for stride in aligned.strides):
        aligned = np.ascontiguousarray(aligned)
    return aligned.reshape(array.shape), False


def _output(value: Any, torch: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    array, dtype = value
    if torch is not None:
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array
