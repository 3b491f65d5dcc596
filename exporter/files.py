"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _refuse_what_is_no_file(path: Path) -> None:
    # A rename would put a file in the place of a device or pipe.
    if path.exists() and not path.is_file():
        is_folder = path.is_dir()
        kind, what = (errno.EISDIR, "is a folder") if is_folder else (errno.EEXIST, "exists and is no regular file")
        raise OSError(kind, what, str(path))


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces under a temporary name beside ``path``, then rename it.

    Raises OSError that names ``path`` where it cannot be written; nothing is left behind.
    """
    temporary = _temporary(path)
    try:
        _refuse_what_is_no_file(path)
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
        os.replace(temporary, path)
    except OSError as error:
        raise _about(path, error) from error
    finally:
        # Where the folder cannot be written to, it may not let itself be asked either.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError that names ``path`` where ``write_whole`` would fail at once: before work worth minutes."""
    temporary = _temporary(path)
    try:
        _refuse_what_is_no_file(path)
        with open(temporary, "wb"):
            pass
        temporary.unlink()
    except OSError as error:
        raise _about(path, error) from error


def _about(path: Path, error: OSError) -> OSError:
    return error if error.errno is None else OSError(error.errno, error.strerror, str(path))
