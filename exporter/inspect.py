"""What a .pte file holds, for ``flexpte inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LONGEST_SHOWN = 70


def describe(path: str | Path) -> dict[str, Any]:
    """Methods, inputs, delegates, caches, sizes and metadata of the .pte file at ``path``, JSON-able.

    Raises FlexpteError if the file cannot be loaded.
    """
    from flexpte.runtime.program import load

    report = load(path).report
    metadata = report["metadata"]
    return {"path": str(path), **report, "caches": metadata.get("caches", [])}


def size_text(size_bytes: float) -> str:
    """ "512 B", "1.5 MiB" """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"


def render(description: Mapping[str, Any], console: Console) -> None:
    """Print a description for people."""
    console.print(f"[bold]{description['path']}[/bold]", highlight=False)
    _render_sizes(description["file"], console)
    input_names = description["metadata"].get("input_names", {})
    for name, method in description["methods"].items():
        console.print(f"\n[bold]method {name}[/bold], arena up to {size_text(method['arena_size_bytes'])}")
        names = dict(enumerate(input_names.get(name, [])))
        for number, value in enumerate(method["inputs"]):
            console.print(f"  input {number} {names.get(number, '')}: {_value_text(value)}", markup=False)
        for number, value in enumerate(method["outputs"]):
            console.print(f"  output {number}: {_value_text(value)}", markup=False)
        for number, delegate in enumerate(method["delegates"]):
            console.print(f"  delegate {number}: {_delegate_text(delegate)}", markup=False)
        for operator, count in sorted(method["operators"].items(), key=lambda item: -item[1]):
            console.print(f"  operator {operator} x{count}", markup=False)
    if description["caches"]:
        _render_caches(description["caches"], console)
    if description["metadata"]:
        _render_metadata(description["metadata"], console)


def _render_sizes(file: Mapping[str, Any], console: Console) -> None:
    for key, value in file.items():
        if isinstance(value, int):
            console.print(f"  {key.removesuffix('_bytes').replace('_', ' ')}: {size_text(value)}", markup=False)
        elif isinstance(value, Mapping | list):
            sizes = list(value.values()) if isinstance(value, Mapping) else value
            total = sum(s for s in sizes if isinstance(s, int))
            console.print(f"  {key.replace('_', ' ')}: {len(sizes)}, {size_text(total)}", markup=False)


def _value_text(value: Mapping[str, Any]) -> str:
    if value["kind"] != "tensor":
        return str(value["kind"])
    bound = " (sizes up to these)" if value.get("dynamic") else ""
    return f"{value['dtype']} {list(value['shape'])}{bound}"


def _delegate_text(delegate: Mapping[str, Any]) -> str:
    text = str(delegate.get("id", delegate.get("name", "?")))
    inside = delegate.get("description")
    if isinstance(inside, Mapping):
        instructions = inside.get("instructions")
        if isinstance(instructions, Mapping):
            text += ": " + ", ".join(f"{count} {kind}" for kind, count in instructions.items() if count)
    return text


def _render_caches(caches: list[Mapping[str, Any]], console: Console) -> None:
    """One row for all caches that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for cache in caches:
        window = cache.get("window_tokens")
        kind: tuple[str, ...] = (
            str(list(cache["shape"])),
            str(cache["dtype"]),
            str(cache.get("layout", "contiguous")),
            "all" if window is None else str(window),
        )
        alike.setdefault(kind, []).append(str(cache["name"]))
    table = Table(title="caches", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("count", "names", "shape", "dtype", "layout", "window"):
        table.add_column(column)
    for cells, names in alike.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        table.add_row(str(len(names)), shown, *cells)
    console.print()
    console.print(table)


def _render_metadata(metadata: Mapping[str, Any], console: Console) -> None:
    console.print("\n[bold]metadata[/bold]")
    for key, value in metadata.items():
        if key in ("caches", "input_names"):
            continue
        text = value if isinstance(value, str) else repr(value)
        if len(text) > LONGEST_SHOWN:
            size = f"{len(text):,} characters" if isinstance(value, str) else f"{len(value)} entries"
            text = f"{text[:LONGEST_SHOWN]!s}… ({size})".replace("\n", "\\n")
        console.print(f"  {key}: {text}", markup=False, soft_wrap=True)
