"""Prefill and decode speed of SmolLM2-135M-Instruct: flexpte beside transformers on torch, one run.

    python benchmarks/smollm2_speed.py [--dtype fp32] [--depths 0,512,2000] [--repeats 5]

Both run in this process with two threads, in turn. Decode is the median step over --steps tokens at
each depth. torch uses its static cache; both include their Python step per token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
from common import checkpoint, interleaved, save, smollm2, summary

TORCH_DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Flexpte:
    """The exported file in our runtime."""

    def __init__(self, dtype: str) -> None:
        import flexpte

        self.session = flexpte.load(smollm2("--dtype", dtype)).session()

    def feed(self, tokens: np.ndarray[Any, Any], start: int) -> int:
        """Run tokens at their positions; the likeliest next token."""
        (logits,) = self.session.run("forward", tokens[None], np.arange(start, start + len(tokens)))
        return int(logits[0, -1].argmax())


class Transformers:
    """The same weights in transformers with a static cache."""

    def __init__(self, dtype: str, context: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, StaticCache

        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
        gguf = checkpoint()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, TORCH_DTYPE[dtype])
        ).eval()
        self.cache = StaticCache(config=self.model.config, max_cache_len=context)

    def feed(self, tokens: np.ndarray[Any, Any], start: int) -> int:
        """Run tokens at their positions; the likeliest next token."""
        torch = self.torch
        with torch.inference_mode():
            if start == 0:
                self.cache.reset()
            out = self.model(
                torch.from_numpy(tokens[None]),
                position_ids=torch.arange(start, start + len(tokens))[None],
                past_key_values=self.cache,
                logits_to_keep=1,
            )
        return int(out.logits[0, -1].argmax())


def decode_step_seconds(model: Any, depth: int, steps: int) -> float:
    """Median seconds of a step behind ``depth`` tokens."""
    seconds, token = [], 1
    for i in range(steps):
        start = time.perf_counter()
        token = model.feed(np.array([token]), depth + i)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Measure and write build/bench/smollm2_speed_<dtype>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=TORCH_DTYPE, default="fp32")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--depths", default="0,512,2000")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    depths = [int(d) for d in arguments.depths.split(",")]
    # transformers counts what it has seen: repeated steps at one depth take room of their own.
    context = max([arguments.prefill, *depths]) + arguments.steps * (arguments.repeats + 1) + 1
    models = {"flexpte": Flexpte(arguments.dtype), "transformers": Transformers(arguments.dtype, context)}
    prompt = np.random.default_rng(0).integers(0, 49152, context)

    result: dict[str, Any] = {"dtype": arguments.dtype}
    seconds = interleaved(
        {name: lambda m=m: m.feed(prompt[: arguments.prefill], 0) for name, m in models.items()},
        arguments.repeats,
    )
    result[f"prefill_{arguments.prefill}"] = report(
        f"prefill {arguments.prefill}",
        {n: [arguments.prefill / s for s in all_] for n, all_ in seconds.items()},
    )
    for depth in depths:
        for model in models.values():
            for begin in range(0, depth, 512):
                model.feed(prompt[begin : min(begin + 512, depth)], begin)
        rates: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(arguments.repeats):
            for name, model in models.items():
                rates[name].append(1 / decode_step_seconds(model, depth, arguments.steps))
        result[f"decode_at_{depth}"] = report(f"decode @{depth}", rates)
    save(f"smollm2_speed_{arguments.dtype}", result)


def report(what: str, tokens_per_second: dict[str, list[float]]) -> dict[str, Any]:
    """Print and return the medians and the ratio flexpte / transformers, pair by pair."""
    ratios = [a / b for a, b in zip(tokens_per_second["flexpte"], tokens_per_second["transformers"], strict=True)]
    rows = {name: summary(rates) for name, rates in tokens_per_second.items()}
    print(
        f"{what:14s} "
        + "  ".join(f"{name} {r['median']:.1f} tok/s [{r['min']:.1f}-{r['max']:.1f}]" for name, r in rows.items())
        + f"  ratio {statistics.median(ratios):.2f}x"
    )
    return {"tokens_per_second": rows, "ratio": summary(ratios)}


if __name__ == "__main__":
    main()
