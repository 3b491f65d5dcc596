"""The devices that tests run on: each must give the same answers from the same file.

``metal`` is an Apple GPU on a Mac. Elsewhere test builds have a double of Metal that runs the kernels through the
shim, so that the host code is executed; a build without the headers of metal-cpp lacks it.
"""

from __future__ import annotations

from flexpte.runtime import _native

DEVICES = tuple(_native.available_devices())

GPU_DEVICES = tuple(d for d in DEVICES if d != "host")
"""Devices that run Metal kernels."""
