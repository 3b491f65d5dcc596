"""What exporting and loading SmolLM2-135M-Instruct costs: seconds, peak memory, file size.

    python benchmarks/export_cost.py [--dtype fp32] [--repeats 3]

Each export is a process of its own; peak memory is the operating system's figure for it. Memory after
loading is the growth of the resident set by flexpte.load, beside what the file holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import OUT, checkpoint, save, summary

PARAMETERS = 134_515_008

AFTER_LOAD = """
import json, sys
import flexpte, flexpte.runtime._native
def rss():
    fields = dict(l.split(':') for l in open('/proc/self/smaps_rollup').read().splitlines()[1:])
    return {k: int(fields[k].split()[0]) * 1024 for k in ('Rss', 'Private_Dirty')}
before = rss()
program = flexpte.load(sys.argv[1])
session = program.session()
after = rss()
print(json.dumps({k: after[k] - before[k] for k in after}))
"""


def export_once(path: Path, dtype: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of one ``flexpte export``."""
    command = [str(Path(sys.executable).with_name("flexpte")), "export", str(checkpoint()), "-o", str(path)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--dtype", dtype, "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit("export failed")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Measure and write build/bench/export_cost_<dtype>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    checkpoint()
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"export_cost_{arguments.dtype}.pte"
    runs = [export_once(path, arguments.dtype) for _ in range(arguments.repeats)]
    weights_fp32_bytes = PARAMETERS * 4
    result = {
        "dtype": arguments.dtype,
        "seconds": summary([s for s, _ in runs]),
        "peak_bytes": summary([float(b) for _, b in runs]),
        "peak_over_fp32_weights": max(b for _, b in runs) / weights_fp32_bytes,
        "file_bytes": path.stat().st_size,
        "weights_fp32_bytes": weights_fp32_bytes,
    }
    if sys.platform == "linux":
        done = subprocess.run([sys.executable, "-c", AFTER_LOAD, str(path)], capture_output=True, text=True, check=True)
        result["load_growth_bytes"] = json.loads(done.stdout)
    print(json.dumps(result, indent=2))
    save(f"export_cost_{arguments.dtype}", result)
    path.unlink()


if __name__ == "__main__":
    main()
