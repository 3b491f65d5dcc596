"""Print the requirements of pyproject.toml, one a line: ``requirements.py [build] [extra...]``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(wanted: list[str]) -> None:
    """Write the dependencies, then those of each extra named; "build" means the build system's."""
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    lines = list(pyproject["project"]["dependencies"])
    extras = pyproject["project"]["optional-dependencies"]
    for name in wanted:
        lines += [*pyproject["build-system"]["requires"], "cmake", "ninja"] if name == "build" else extras[name]
    print("\n".join(dict.fromkeys(lines)))


if __name__ == "__main__":
    main(sys.argv[1:])
