"""Who may import whom; what importing must not load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# room -> rooms of flexpte that its Python files may import
PYTHON_ARROWS = {
    "models": {"models"},
    "runtime": {"runtime"},
    "metal_delegate": {"metal_delegate"},
    "exporter": {"exporter", "metal_delegate", "models", "runtime"},
}
# The compiler proper knows the schema and its own files; what drives it may know more, and what explains
# masks asks the delegate's own evaluator.
EXPORTER_DRIVERS = {"bench_tables.py", "cli.py", "explain.py", "inspect.py", "language_model.py"}

CPP_ARROWS = {
    "runtime/kernels": {"runtime"},
    "runtime": {"runtime"},
    "metal_delegate": {"runtime", "metal_delegate"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module != "flexpte" else [f"flexpte.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("flexpte.")}
    return rooms


@pytest.mark.parametrize("room", PYTHON_ARROWS)
def test_python_rooms_import_only_along_the_arrows(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        allowed = PYTHON_ARROWS[room]
        if room == "exporter" and path.name not in EXPORTER_DRIVERS:
            allowed = {"exporter", "metal_delegate"}
        forbidden = imported_rooms(path) - allowed
        assert not forbidden, f"{path.relative_to(ROOT)} imports flexpte.{', flexpte.'.join(sorted(forbidden))}"


@pytest.mark.parametrize("room", CPP_ARROWS)
def test_cpp_rooms_include_only_along_the_arrows(room):
    pattern = re.compile(r'#include "(\w+)/')
    for path in sorted((ROOT / room).glob("*.[hc]*")):
        included = set(pattern.findall(path.read_text())) & {
            "runtime",
            "metal_delegate",
            "exporter",
            "models",
        }
        forbidden = included - CPP_ARROWS[room]
        assert not forbidden, f"{path.relative_to(ROOT)} includes {forbidden}"


@pytest.mark.parametrize(
    "module", ["flexpte", "flexpte.runtime.program", "flexpte.runtime.llm", "flexpte.exporter.cli"]
)
def test_importing_does_not_load_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'executorch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_public_names_resolve():
    import flexpte

    for name in flexpte.__all__:
        assert getattr(flexpte, name) is not None
