"""The flexpte delegate inside the stock ExecuTorch runtime.

Call :func:`register`, then load a .pte as usual: ``executorch.runtime.Runtime.get().load_program(path)``.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

BACKEND = "FlexpteBackend"

# The runtime's extension: since 1.5 `_C` on top of libexecutorch, before that everything in `_portable_lib`.
_EXTENSIONS = ("executorch.extension.pybindings._C", "executorch.extension.pybindings._portable_lib")
_LLM_RUNNER = "executorch.extension.llm.runner._llm_runner"


class RegistrationError(RuntimeError):
    """The backend could not be registered; the message says what to do."""


def register() -> None:
    """Make .pte files with flexpte delegates load in ``executorch.runtime``; once per process is enough.

    May be called before or after executorch, torch or operator libraries are imported.
    Raises RegistrationError: executorch is missing, the plug-in was not built or does not match the
    installed version, or ``executorch.extension.llm.runner`` was imported first (it brings a second copy
    of the runtime's registry, which would hide the backend).
    """
    extension = _import_extension()
    if BACKEND in _registered(extension):
        return
    _make_symbols_global(extension)
    library = _library()
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    except OSError as error:
        raise RegistrationError(
            f"cannot load {library}: {error}. It was built for executorch 1.4; the installed version is "
            f"{_version()}: install executorch==1.4.0, or build flexpte again with this one installed"
        ) from error
    if BACKEND not in _registered(extension):
        raise RegistrationError(
            f"{BACKEND} registered itself in another copy of the ExecuTorch runtime than executorch.runtime "
            "uses. Call flexpte.executorch.register() before importing executorch.extension.llm.runner"
        )


def _import_extension() -> ModuleType:
    if _LLM_RUNNER in sys.modules and not any(name in sys.modules for name in _EXTENSIONS):
        raise RegistrationError(
            "executorch.extension.llm.runner was imported before executorch.runtime, so two copies of the "
            "runtime's registry are loaded. Start Python again and call flexpte.executorch.register() first"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the interface is experimental
        try:
            # Imports torch first, whose libraries the extension needs.
            importlib.import_module("executorch.extension.pybindings.portable_lib")
        except ImportError as error:
            raise RegistrationError(
                f"the ExecuTorch runtime cannot be imported ({error}): pip install executorch==1.4.0"
            ) from error
    for name in _EXTENSIONS:
        if name in sys.modules:
            return sys.modules[name]
    raise RegistrationError(f"executorch {_version()} has a runtime that is laid out in an unknown way: use 1.4.0")


def _registered(extension: ModuleType) -> list[str]:
    return list(extension._get_registered_backend_names())


def _make_symbols_global(extension: ModuleType) -> None:
    """Open the loaded runtime again so that our library finds its symbols; no second copy is made."""
    assert extension.__file__ is not None
    folder = Path(extension.__file__).parent
    candidates = [Path(extension.__file__), *_shared_runtime(folder)]
    for path in candidates:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL | getattr(os, "RTLD_NOLOAD", 0))


def _shared_runtime(folder: Path) -> list[Path]:
    """libexecutorch of 1.5 and later, wherever the wheel has put it, if it is loaded by the extension."""
    root = folder.parent.parent
    return [p for pattern in ("libexecutorch.so", "libexecutorch.dylib") for p in sorted(root.rglob(pattern))]


def _library() -> Path:
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    name = f"libflexpte_backend{suffix}"
    import flexpte

    folders = [Path(p) / "lib" for p in flexpte.__path__]
    spec = importlib.util.find_spec("flexpte.runtime._native")
    if spec is not None and spec.origin:
        folders.append(Path(spec.origin).parent.parent / "lib")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise RegistrationError(
        f"{name} is not installed (looked in {', '.join(map(str, folders))}): it is built when the "
        "executorch package is there; install executorch==1.4.0 and install flexpte again"
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("executorch")
    except PackageNotFoundError:
        return "not installed"
