"""Pictures of the tiles of a mask, for a terminal and as PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexpte.exporter.explain import EMPTY, FULL, PARTIAL
from flexpte.exporter.files import write_whole

_CHARACTERS = {EMPTY: "·", FULL: "█", PARTIAL: "▒"}
_COLOURS = {EMPTY: (238, 238, 238), FULL: (33, 102, 172), PARTIAL: (244, 165, 130)}


def text_picture(tiles: NDArray[np.uint8], columns: int = 64) -> str:
    """One character a tile: · empty, █ full, ▒ partial; groups of tiles where there are more than ``columns``."""
    step = max(1, -(-max(tiles.shape) // columns))
    rows = []
    for i in range(0, tiles.shape[0], step):
        groups = (tiles[i : i + step, j : j + step] for j in range(0, tiles.shape[1], step))
        rows.append("".join(_CHARACTERS[_together(g)] for g in groups))
    return "\n".join(rows)


def _together(group: NDArray[np.uint8]) -> int:
    first = int(group.flat[0])
    return first if (group == first).all() else PARTIAL


def write_png(path: str | Path, tiles: NDArray[np.uint8], pixels: int = 8) -> None:
    """Write the tiles as squares of ``pixels`` (PNG specification, third edition: 8-bit palette images)."""
    image = np.kron(tiles, np.ones((pixels, pixels), np.uint8))
    height, width = image.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), image])  # filter type 0 before each row
    palette = b"".join(bytes(_COLOURS[v]) for v in (EMPTY, FULL, PARTIAL))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    write_whole(Path(path), [content])
