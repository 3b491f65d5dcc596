"""On a Mac: run everything that only an Apple GPU can tell, and print a report to paste into an issue.

``make verify-metal`` sets up first. Nothing is sent anywhere. Takes about ten minutes; needs 3 GB of disk.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEXPTE = [sys.executable, "-m", "flexpte.exporter.cli"]


def main() -> int:
    """0 where every test on the GPU passed."""
    if sys.platform != "darwin":
        print("verify-metal runs on a Mac: this is", platform.platform(), file=sys.stderr)
        return 2
    lines = ["### flexpte on Apple hardware", "", f"- machine: {_sysctl('machdep.cpu.brand_string')}, {_memory()}"]
    lines += [f"- macOS {platform.mac_ver()[0]}, Python {platform.python_version()}", f"- commit {_commit()}", ""]
    passed, text = _tests()
    lines += ["| what | result |", "|---|---|", f"| tests on device metal | {text} |"]
    with tempfile.TemporaryDirectory() as folder:
        lines += _speed(Path(folder))
    print("\n".join(["", *lines]))
    return 0 if passed else 1


def _tests() -> tuple[bool, str]:
    start = time.monotonic()
    tests = ["tests/conformance", "tests/end_to_end/test_devices.py", "tests/metal_delegate"]
    command = [sys.executable, "-m", "pytest", "-q", "-k", "metal and not msl", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    sys.stderr.write(done.stdout[-4000:] if done.returncode else "")
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    return done.returncode == 0, f"{summary} ({time.monotonic() - start:.0f} s)"


def _speed(folder: Path) -> list[str]:
    fetched = subprocess.run([sys.executable, "-m", "flexpte.models.fetch"], cwd=ROOT, capture_output=True, text=True)
    if fetched.returncode:
        return [f"| speed | not measured: {fetched.stderr.strip()[-200:]} |"]
    rows = []
    for dtype in ("fp16", "fp32"):
        model = folder / f"smollm2-{dtype}.pte"
        export = [*FLEXPTE, "export", fetched.stdout.strip(), "-o", str(model), "--dtype", dtype, "-q"]
        subprocess.run(export, cwd=ROOT, check=True)
        for device in ("metal", "host"):
            bench = [*FLEXPTE, "bench", str(model), "--device", device, "--json", "-q"]
            done = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                rows.append(f"| SmolLM2-135M {dtype} on {device} | {done.stderr.strip()[-200:]} |")
                continue
            speeds = ", ".join(f"{p['phase']} {p['tokens_per_second']:.0f} tokens/s" for p in json.loads(done.stdout))
            rows.append(f"| SmolLM2-135M {dtype} on {device} | {speeds} |")
    return rows


def _sysctl(name: str) -> str:
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()


def _memory() -> str:
    return f"{int(_sysctl('hw.memsize')) / 2**30:.0f} GB"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
