"""Results of ``flexpte bench`` as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from flexpte.runtime.bench import Phase, Work, work_of
from flexpte.runtime.roofline import CHIPS


def as_dict(phase: Phase, with_counters: bool) -> dict[str, Any]:
    """A phase as JSON: speed, and with counters also totals, kernels, minimum and estimates in seconds by chip."""
    result: dict[str, Any] = {
        "phase": phase.name,
        "tokens": phase.tokens,
        "tokens_per_second": phase.tokens_per_second,
    }
    if with_counters:
        total = work_of(phase.counters)
        result |= {
            "minimum_bytes": phase.minimum_bytes,
            "device_bytes_over_minimum": total.device_bytes / phase.minimum_bytes if phase.minimum_bytes else None,
            "total": asdict(total),
            "kernels": phase.counters,
            "estimated_seconds": {c.name: _estimate(c, total) for c in CHIPS},
        }
    return result


def render(phases: Sequence[Phase], with_counters: bool, console: Console) -> None:
    """Print the phases."""
    for phase in phases:
        console.print(f"{phase.name}: {phase.tokens} tokens, {phase.tokens_per_second:.2f} tokens/s", markup=False)
        if with_counters:
            _render_counters(phase, console)


def _render_counters(phase: Phase, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in (
        "kernel",
        "calls",
        "device read",
        "written",
        "threadgroup",
        "Mflops",
        "matrix Mflops",
        "barriers",
        "idle",
    ):
        table.add_column(heading, justify="left" if heading == "kernel" else "right", no_wrap=True)
    rows = [(name, work_of(phase.counters, name)) for name in phase.counters if phase.counters[name]["dispatches"]]
    rows.sort(key=lambda row: -row[1].device_bytes)
    for name, work in [*rows, ("all", work_of(phase.counters))]:
        table.add_row(
            name,
            str(work.dispatches),
            _size(work.read_bytes),
            _size(work.written_bytes),
            _size(work.threadgroup_bytes),
            f"{work.flops / 1e6:.2f}",
            f"{work.matrix_flops / 1e6:.1f}",
            str(work.barriers),
            f"{100 * work.idle:.1f}%",
        )
    console.print(table)
    total = work_of(phase.counters)
    if phase.minimum_bytes:
        console.print(
            f"least that must be read: {_size(phase.minimum_bytes)} (weights and visible cache, once a step); "
            f"device bytes are {total.device_bytes / phase.minimum_bytes:.2f} times that",
            markup=False,
        )
    estimates = ", ".join(f"{c.name} {phase.tokens / _estimate(c, total):.0f} tokens/s" for c in CHIPS)
    console.print(f"estimate, an upper bound from public bandwidth and flops: {estimates}\n", markup=False)


def _estimate(chip: Any, work: Work) -> float:
    return float(chip.seconds(work.device_bytes, work.flops + work.matrix_flops))


def _size(size_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024 or unit == "MiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024  # type: ignore[assignment]
    return ""
