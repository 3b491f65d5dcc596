"""Compile the C++ code for arm64 macOS, from any machine: ``make check-apple``.

The compiler is Zig's clang, which brings macOS's C and C++ headers; what it lacks of Apple's frameworks is in
tests/cpp/apple_stubs. Objects are kept in build/apple and compiled again when they are out of date. Every function
of ours that an object refers to has to be defined in one of them, as a link would have it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import fetch_metal_cpp

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "apple"
ZIG_VERSION = "0.17.1"
TARGET = "aarch64-macos.13.0"
# As CMakeLists.txt has them.
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-pass-failed"]
# As metal_delegate/metal/CMakeLists.txt has them.
METAL_FLAGS = ["-fblocks", "-fno-delete-null-pointer-checks", "-fno-sanitize=null"]
FOLDERS = ["runtime", "runtime/kernels", "runtime/ops", "metal_delegate", "metal_delegate/*"]
# The bindings and the plug-in need Python's and ExecuTorch's headers for macOS.
EXCLUDED = {"bindings", "executorch"}


def fail(message: str) -> SystemExit:
    """What to raise."""
    return SystemExit(f"check-apple: {message}")


def zig() -> list[str]:
    """The command of the compiler, installed first where it is missing."""
    folder = OUT / f"ziglang-{ZIG_VERSION}"
    program = folder / "ziglang" / "zig"
    if not program.exists():
        print(f"installing ziglang {ZIG_VERSION} into {folder.relative_to(ROOT)}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--target", str(folder), f"ziglang=={ZIG_VERSION}"]
        if subprocess.run(command).returncode != 0:
            raise fail(f"pip cannot install ziglang {ZIG_VERSION} (is there a network?)")
    return [str(program), "c++", "-target", TARGET]


def sources(build: Path) -> list[Path]:
    """Every file of the runtime and the delegate, and those that the build generates of them."""
    found: set[Path] = set()
    for pattern in FOLDERS:
        for folder in ROOT.glob(pattern):
            if folder.is_dir() and folder.name not in EXCLUDED:
                found.update(folder.glob("*.cpp"))
                found.update((build / folder.relative_to(ROOT)).glob("*.cpp"))
    return sorted(found)


def include_flags(build: Path) -> list[str]:
    """The repository, the headers that the build generated, and those of other packages, by name."""
    generated = sorted({header.parent for header in build.rglob("*_generated.h")})
    names = {header.name for folder in generated for header in folder.iterdir()}
    missing = {"payload_generated.h", "program_generated.h"} - names
    if missing:
        raise fail(f"{build} has no {', '.join(sorted(missing))}: run make setup first")
    # Highway and flatbuffers by themselves: other headers of this machine are not macOS's.
    packages = OUT / "include"
    packages.mkdir(parents=True, exist_ok=True)
    for package in ("hwy", "flatbuffers"):
        link = packages / package
        folders = [root / package for root in (Path("/usr/include"), Path("/opt/homebrew/include"))]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            raise fail(f"no headers of {package} on this machine: run make setup first")
        if not link.exists():
            link.symlink_to(folder)
    flags = [f"-I{ROOT}", "-isystem", str(packages)]
    for folder in generated:
        flags += ["-isystem", str(folder)]
    return flags


def object_of(source: Path) -> Path:
    """Where a source is compiled to."""
    inside = source.relative_to(ROOT) if source.is_relative_to(ROOT) else Path("generated", *source.parts[1:])
    return OUT / "objects" / inside.with_suffix(".o")


def command_of(source: Path, compiler: list[str], includes: list[str], metal_cpp: Path) -> list[str]:
    """How a source is compiled."""
    target = object_of(source)
    command = [*compiler, "-std=c++20", "-O2", "-DNDEBUG", "-fvisibility=hidden", *WARNINGS, *includes]
    if source.parent.name == "metal":
        frameworks = ROOT / "tests" / "cpp" / "apple_stubs" / "frameworks"
        command += [*METAL_FLAGS, "-isystem", str(metal_cpp), "-isystem", str(frameworks)]
    return [*command, "-MD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]


def is_current(source: Path, command: list[str]) -> bool:
    """Whether the object is that of this command and newer than all that it was made of."""
    target = object_of(source)
    stamp, dependencies = target.with_suffix(".command"), target.with_suffix(".d")
    if not (target.exists() and stamp.exists() and dependencies.exists()) or stamp.read_text() != shlex.join(command):
        return False
    files = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
    made = target.stat().st_mtime
    return all(os.path.exists(file) and os.stat(file).st_mtime <= made for file in files)


def compile_one(source: Path, command: list[str]) -> tuple[Path, float, str]:
    """Compile; the time and the compiler's words, none when it went well."""
    target = object_of(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode == 0:
        target.with_suffix(".command").write_text(shlex.join(command))
        output = ""
    return source, time.monotonic() - begin, output or ("" if result.returncode == 0 else "no message")


def undefined_symbols(objects: list[Path]) -> list[str]:
    """Symbols of ours that no object defines."""
    nm = next((path for name in ("llvm-nm-19", "llvm-nm", "nm") if (path := shutil.which(name))), None)
    if nm is None:
        print("no llvm-nm: undefined symbols are not looked for")
        return []
    listing = subprocess.run([nm, "--format=posix", *map(str, objects)], capture_output=True, text=True)
    if listing.returncode != 0:
        print(f"{nm} does not read Mach-O: undefined symbols are not looked for")
        return []
    defined: set[str] = set()
    wanted: set[str] = set()
    for line in listing.stdout.splitlines():
        fields = line.split()
        if len(fields) < 2 or len(fields[1]) != 1:
            continue
        (wanted if fields[1] == "U" else defined).add(fields[0])
    return sorted(symbol for symbol in wanted - defined if "7flexpte" in symbol)


@contextmanager
def locked(path: str | None) -> Iterator[None]:
    """Holds the lock file, where there is one, while other builds wait."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile what is out of date, two at a time, and stop at the first error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release", help="where generated headers are")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lock", help="a file to lock while compiling")
    options = parser.parse_args()

    compiler = zig()
    includes = include_flags(options.build)
    metal_cpp = fetch_metal_cpp.fetch()
    commands = {source: command_of(source, compiler, includes, metal_cpp) for source in sources(options.build)}
    stale = [source for source, command in commands.items() if not is_current(source, command)]
    print(f"{len(commands)} files for {TARGET}, {len(stale)} out of date", flush=True)
    # The largest first.
    stale.sort(key=lambda source: -source.stat().st_size)
    with locked(options.lock), ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(compile_one, source, commands[source]) for source in stale]
        for future in futures:
            source, seconds, error = future.result()
            if error:
                for other in futures:
                    other.cancel()
                raise fail(f"{source} does not compile for {TARGET}:\n{error}")
            print(f"  {seconds:5.1f} s  {source.name}", flush=True)
    if undefined := undefined_symbols([object_of(source) for source in commands]):
        raise fail("symbols that no file defines:\n  " + "\n  ".join(undefined))
    print("check-apple: all compiles")


if __name__ == "__main__":
    main()
