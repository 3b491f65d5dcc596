"""Times a language model's prefill and decode, and reports what kernels counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexpte.runtime.errors import FlexpteError
from flexpte.runtime.program import Program, Session
from flexpte.runtime.roofline import MATRIX_FLOPS

Counters = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """Counted work of some kernels together; bytes of device memory, ``flops`` without matrix products."""

    read_bytes: int
    written_bytes: int
    threadgroup_bytes: int
    flops: int
    matrix_flops: int
    barriers: int
    dispatches: int
    idle: float

    @property
    def device_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Phase:
    """One measured phase: tokens per second, and what its kernels did (empty where the device does not count).

    ``minimum_bytes``: every weight once, and the part of the caches that may be seen, once.
    """

    name: str
    tokens: int
    tokens_per_second: float
    counters: Counters
    minimum_bytes: int


def work_of(counters: Counters, kernel: str | None = None) -> Work:
    """The work of one kernel, or of all."""
    chosen = [c for name, c in counters.items() if kernel is None or name == kernel]
    slots = sum(c["instruction_slots"] for c in chosen)
    buffers = [b for c in chosen for b in c["buffers"].values()]
    return Work(
        read_bytes=sum(b["read_bytes"] for b in buffers),
        written_bytes=sum(b["written_bytes"] for b in buffers),
        threadgroup_bytes=sum(c["threadgroup_read_bytes"] + c["threadgroup_written_bytes"] for c in chosen),
        flops=sum(c["flops"] for c in chosen),
        matrix_flops=sum(c["matrix_multiplies"] for c in chosen) * MATRIX_FLOPS,
        barriers=sum(c["barriers"] for c in chosen),
        dispatches=sum(c["dispatches"] for c in chosen),
        idle=1 - sum(c["instructions"] for c in chosen) / slots if slots else 0.0,
    )


def bench(
    program: Program,
    prompt_tokens: int,
    decode_tokens: int,
    repeats: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Phase, Phase]:
    """Prefill of ``prompt_tokens`` and ``decode_tokens`` single steps behind it: medians over ``repeats``.

    Raises FlexpteError for a program without method ``forward(tokens [1, T], input_pos [T])``, and for lengths
    that its caches do not hold.
    """
    method = program.methods.get("forward")
    if method is None or [(i.dtype, len(i.shape)) for i in method.inputs] != [("int64", 2), ("int64", 1)]:
        raise FlexpteError(
            "bench needs a language model: method forward(tokens [1, T] int64, input_pos [T] int64)", "InvalidArgument"
        )
    tokens = np.random.default_rng(0).integers(0, _vocabulary(program), (1, prompt_tokens + decode_tokens))
    prefill_seconds, decode_seconds = [], []
    before: Counters = {}
    after: Counters = {}
    for repeat in range(repeats):
        session = program.session()
        start = time.perf_counter()
        _step(session, tokens, 0, prompt_tokens)
        prefill_seconds.append(time.perf_counter() - start)
        before = session.counters()
        for i in range(decode_tokens):
            start = time.perf_counter()
            _step(session, tokens, prompt_tokens + i, prompt_tokens + i + 1)
            decode_seconds.append(time.perf_counter() - start)
            if progress is not None:
                progress("measuring", repeat * decode_tokens + i + 1, repeats * decode_tokens)
        after = session.counters()
    minimum = _weight_bytes(program)
    last = prompt_tokens + decode_tokens
    seen = sum(_cache_bytes(program, length) for length in range(prompt_tokens + 1, last + 1))
    return (
        Phase(
            "prefill",
            prompt_tokens,
            prompt_tokens / statistics.median(prefill_seconds),
            before,
            minimum + _cache_bytes(program, prompt_tokens),
        ),
        Phase(
            "decode",
            decode_tokens,
            1 / statistics.median(decode_seconds),
            _difference(after, before),
            minimum * decode_tokens + seen,
        ),
    )


def _step(session: Session, tokens: np.ndarray[Any, Any], begin: int, end: int) -> None:
    session.run("forward", tokens[:, begin:end], np.arange(begin, end))


def _vocabulary(program: Program) -> int:
    return int(program.metadata.get("vocab_size", 256))


def _weight_bytes(program: Program) -> int:
    return sum(int(d["constants_bytes"]) for d in _regions(program))


def _regions(program: Program) -> list[dict[str, Any]]:
    delegates = program.report["methods"]["forward"]["delegates"]
    return [d["description"] for d in delegates if "constants_bytes" in d["description"]]


def _cache_bytes(program: Program, num_tokens: int) -> int:
    """Of the keys and values that a query behind ``num_tokens`` may see."""
    windows = {c["name"]: c["window_tokens"] for c in program.metadata.get("caches", [])}
    total = 0
    for state in (s for region in _regions(program) for s in region["states"]):
        capacity = state["shape"][2] if len(state["shape"]) == 4 else 1
        window = windows.get(state["name"]) or capacity
        total += state["size_bytes"] * min(num_tokens, window, capacity) // capacity
    return total


def _difference(after: Counters, before: Counters) -> Counters:
    return {name: _subtract(counted, before.get(name, {})) for name, counted in after.items()}


def _subtract(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {k: _subtract(v, b.get(k, {})) if isinstance(v, dict) else v - b.get(k, 0) for k, v in a.items()}
