"""Run every benchmark, one after another; each writes its JSON to build/bench/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    ["export_cost.py"],
    ["smollm2_speed.py", "--dtype", "fp32"],
    ["smollm2_speed.py", "--dtype", "bf16"],
    ["flex_headline.py"],
    ["metal_anchors.py"],
)


def main() -> int:
    """Exit status: how many failed."""
    here = Path(__file__).parent
    failed = 0
    for name, *arguments in BENCHMARKS:
        print(f"== {name} {' '.join(arguments)}", flush=True)
        failed += subprocess.run([sys.executable, str(here / name), *arguments]).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
