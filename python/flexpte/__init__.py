"""flexpte: FlexAttention models, from PyTorch to Apple devices, in one ExecuTorch file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexpte.exporter.api import export as export
    from flexpte.runtime.llm import LLM as LLM
    from flexpte.runtime.program import Program as Program
    from flexpte.runtime.program import Session as Session
    from flexpte.runtime.program import load as load

__version__ = "0.1.0"

# Looked up on first use: running a model must not import torch, exporting need not load the runtime.
_WHERE = {
    "export": "flexpte.exporter.api",
    "load": "flexpte.runtime.program",
    "Program": "flexpte.runtime.program",
    "Session": "flexpte.runtime.program",
    "FlexpteError": "flexpte.runtime.program",
    "Unsupported": "flexpte.exporter.errors",
    "LLM": "flexpte.runtime.llm",
}

__all__ = ["LLM", "FlexpteError", "Program", "Session", "Unsupported", "__version__", "export", "load"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'flexpte' has no attribute {name!r}")
