"""Fetch Apple's metal-cpp headers into build/metal-cpp and print the folder to include from.

They are taken from the macOS wheel of mlx-metal, which carries them (Apache License 2.0). Nothing is done when
they are there already.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.32.4"
SHA256 = "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947"
PREFIX = "mlx/include/metal_cpp/"
FOLDER = Path(__file__).resolve().parent.parent / "build" / "metal-cpp" / VERSION


def is_complete(folder: Path) -> bool:
    """Whether the headers are there: the last file written is the mark."""
    return (folder / "Metal" / "Metal.hpp").is_file() and (folder / ".complete").is_file()


def download(folder: Path) -> Path:
    """The wheel, fetched into ``folder`` by pip, which checks its hash."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"mlx-metal=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64", "--python-version", "3.11"]
    result = subprocess.run([*command, "--dest", str(folder), "-r", str(requirement)], capture_output=True, text=True)
    if result.returncode != 0:
        message = result.stderr.strip() or result.stdout.strip()
        raise SystemExit(
            f"fetch_metal_cpp: pip cannot fetch mlx-metal {VERSION}, which carries Apple's metal-cpp headers "
            f"(is there a network?); or set FLEXPTE_METAL_CPP_DIR to a folder that has Metal/Metal.hpp\n{message}"
        )
    return next(folder.glob("*.whl"))


def fetch() -> Path:
    """The folder of the headers, fetched first where they are missing."""
    if is_complete(FOLDER):
        return FOLDER
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(download(Path(temporary))) as wheel:
        for name in wheel.namelist():
            if not name.startswith(PREFIX) or name.endswith("/"):
                continue
            target = FOLDER / name.removeprefix(PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(name))
    (FOLDER / ".complete").touch()
    if not is_complete(FOLDER):
        raise SystemExit(f"fetch_metal_cpp: the wheel of mlx-metal {VERSION} has no {PREFIX}Metal/Metal.hpp")
    return FOLDER


if __name__ == "__main__":
    print(fetch())
