"""What counted work would take at least on Apple GPUs: an estimate from public figures, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Peak memory bandwidth (GB/s) and float32 rate (TFLOPS) of a GPU, and where they come from."""

    name: str
    bandwidth_gb_per_s: float
    teraflops: float
    source: str

    def seconds(self, device_bytes: int, flops: int) -> float:
        """The larger of the times that memory and arithmetic need (Williams, Waterman, Patterson 2009)."""
        return max(device_bytes / (self.bandwidth_gb_per_s * 1e9), flops / (self.teraflops * 1e12))


CHIPS = (
    Chip("A17 Pro", 51.2, 2.1, "64-bit LPDDR5-6400; 6 cores x 128 multiply-adds x 1.4 GHz"),
    Chip("M1", 68.3, 2.6, "Apple, November 2020: 2.6 teraflops; 128-bit LPDDR4X-4266"),
    Chip("M2 Max", 400.0, 13.6, "Apple, January 2023: 400 GB/s; 38 cores x 128 multiply-adds x 1.4 GHz"),
    Chip("M4", 120.0, 4.0, "Apple, May 2024: 120 GB/s; 10 cores x 128 multiply-adds x 1.58 GHz"),
    Chip(
        "M5",
        153.0,
        4.1,
        "Apple, October 2025: 153 GB/s; 10 cores x 128 multiply-adds x 1.6 GHz, without its matrix units",
    ),
)
"""GPUs of Apple, smallest first. Clocks are those that public databases give."""

MATRIX_FLOPS = 8 * 8 * 8 * 2
"""Of one multiplication of 8x8 matrices."""
