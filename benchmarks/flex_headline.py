"""Sliding-window attention: flexpte beside causal SDPA and compiled flex_attention, interleaved in one run.

    python benchmarks/flex_headline.py [--repeats 5] [--dtypes bf16,fp32] [--without-compiled]

Shapes are those of PyTorch's own headline: window 256 at 1x8x32768x64 and window 64 at 1x8x8192x64.
flexpte is timed as a whole call through the runtime, planning included. create_block_mask of the
compiled peer is timed separately and together with it. Peak extra memory of a flexpte call is read in
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import interleaved, save, summary
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

SHAPES = ((32768, 256), (8192, 64))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

EXTRA_MEMORY = """
import json, sys
import torch, flexpte
def status(field):
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(field)) * 1024
length, dtype = int(sys.argv[2]), getattr(torch, sys.argv[3])
inputs = [torch.randn(1, 8, length, 64).to(dtype) for _ in range(3)]
session = flexpte.load(sys.argv[1]).session()
open('/proc/self/clear_refs', 'w').write('5')
before = status('VmRSS')
out = session.run('forward', *inputs)
output_bytes = out[0].nbytes
print(json.dumps({'extra_bytes': status('VmHWM') - before, 'output_bytes': output_bytes}))
"""


PLANNING = """
import sys
import torch, flexpte
length, dtype, calls = int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
inputs = [torch.randn(1, 8, length, 64).to(dtype) for _ in range(3)]
session = flexpte.load(sys.argv[1]).session()
for _ in range(calls):
    session.run('forward', *inputs)
"""


def sliding(window_tokens: int) -> Any:
    """The causal window mask."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window_tokens)


class Windowed(nn.Module):
    """flex_attention under a sliding window."""

    def __init__(self, window_tokens: int) -> None:
        super().__init__()
        self.mask_mod = sliding(window_tokens)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, H, L, D] each."""
        length = query.shape[2]
        block_mask = create_block_mask(self.mask_mod, None, None, length, length, device="cpu")
        return flex_attention(query, key, value, block_mask=block_mask)


def measure(length: int, window_tokens: int, dtype_name: str, repeats: int, with_compiled: bool) -> dict[str, Any]:
    """Seconds of every contender, ratios to flexpte pair by pair, memory and largest difference."""
    import flexpte

    dtype = DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(1, 8, length, 64, generator=generator).to(dtype) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.pte"
        flexpte.export(Windowed(window_tokens), inputs).save(path)
        session = flexpte.load(path).session()
        extra = {**extra_memory(path, length, dtype), **planning(path, length, dtype, repeats)}
        contenders = {
            "flexpte": lambda: session.run("forward", *inputs),
            "sdpa_causal": lambda: nn.functional.scaled_dot_product_attention(*inputs, is_causal=True),
        }
        result: dict[str, Any] = {"length": length, "window_tokens": window_tokens, "dtype": dtype_name, **extra}
        if with_compiled:
            compiled = torch.compile(flex_attention)
            start = time.perf_counter()
            mask = create_block_mask(sliding(window_tokens), None, None, length, length, device="cpu")
            result["create_block_mask_seconds"] = time.perf_counter() - start
            contenders["compiled_flex"] = lambda: compiled(*inputs, block_mask=mask)
            want = compiled(*inputs, block_mask=mask).float()
            (got,) = session.run("forward", *inputs)
            result["largest_difference_to_compiled"] = (torch.as_tensor(got).float() - want).abs().max().item()
        with torch.inference_mode():
            seconds = interleaved(contenders, repeats)
    result["seconds"] = {name: summary(s) for name, s in seconds.items()}
    result["ratio_to_flexpte"] = {
        name: statistics.median(a / b for a, b in zip(s, seconds["flexpte"], strict=True))
        for name, s in seconds.items()
        if name != "flexpte"
    }
    if with_compiled:
        together = statistics.median(seconds["compiled_flex"]) + result["create_block_mask_seconds"]
        result["ratio_to_flexpte"]["compiled_flex_with_mask"] = together / statistics.median(seconds["flexpte"])
    return result


def extra_memory(path: Path, length: int, dtype: torch.dtype) -> dict[str, int]:
    """How far one call raises the resident set above what it was, the output included; Linux only."""
    if sys.platform != "linux":
        return {}
    command = [sys.executable, "-c", EXTRA_MEMORY, str(path), str(length), str(dtype).removeprefix("torch.")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


def planning(path: Path, length: int, dtype: torch.dtype, calls: int) -> dict[str, float]:
    """Milliseconds and share of planning in a call, from the delegate's own profile."""
    arguments = [str(path), str(length), str(dtype).removeprefix("torch."), str(calls)]
    environment = {**os.environ, "FLEXPTE_PROFILE": "1"}
    command = [sys.executable, "-c", PLANNING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    words = next(line.split() for line in done.stderr.splitlines() if line.split()[:1] == ["planning"])
    return {"planning_ms": float(words[1]), "planning_percent": float(words[3])}


def main() -> None:
    """Measure and write build/bench/flex_headline.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--without-compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    rows = []
    for length, window_tokens in SHAPES:
        for dtype in arguments.dtypes.split(","):
            row = measure(length, window_tokens, dtype, arguments.repeats, not arguments.without_compiled)
            rows.append(row)
            times = "  ".join(f"{n} {s['median'] * 1e3:.1f} ms" for n, s in row["seconds"].items())
            ratios = "  ".join(f"{n} {r:.2f}x" for n, r in row["ratio_to_flexpte"].items())
            print(
                f"{length} window {window_tokens} {dtype}: {times} | over flexpte: {ratios} | "
                f"planning {row['planning_percent']}% of a call",
                flush=True,
            )
    save("flex_headline", {"rows": rows})


if __name__ == "__main__":
    main()
