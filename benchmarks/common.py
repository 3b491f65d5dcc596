"""What the benchmarks share: interleaved timing, the model, JSON out."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "bench"


def interleaved(contenders: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender, run in turn A B A B ... after one warm-up each, so that drift hits all."""
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write build/bench/<name>.json."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({"machine": platform.processor() or platform.machine(), **result}, indent=2))
    print(f"wrote {path}")


def smollm2(*options: str) -> Path:
    """The exported model (``flexpte export`` with ``options``), made when missing."""
    path = OUT / ("-".join(["smollm2", *(o.lstrip("-") for o in options)]) + ".pte")
    if not path.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        command = [
            str(Path(sys.executable).with_name("flexpte")),
            "export",
            str(checkpoint()),
            "-o",
            str(path),
        ]
        subprocess.run([*command, *options], check=True)
    return path


def checkpoint() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    from flexpte.models.fetch import fetch_smollm2

    return fetch_smollm2(ROOT / "models-cache")
