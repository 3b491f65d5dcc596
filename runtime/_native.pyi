"""The runtime's bindings, see bindings/native.cpp."""

from collections.abc import Mapping, Sequence
from typing import Any

def available_devices() -> list[str]: ...

class Program:
    @staticmethod
    def load_path(path: str, device: str, num_threads: int) -> Program: ...
    @staticmethod
    def load_bytes(data: bytes, device: str, num_threads: int) -> Program: ...
    def methods(self) -> list[dict[str, Any]]: ...
    def file(self) -> dict[str, Any]: ...
    def named_data(self, key: str) -> bytes | None: ...

class Session:
    def __init__(self, program: Program) -> None: ...
    def run(self, method: str, inputs: list[Any]) -> list[Any]: ...
    def reset(self) -> None: ...
    def counters(self) -> list[str]: ...

class Mask:
    def __init__(
        self,
        nodes: list[tuple[int, int, list[int], int, int, int, float]],
        captures: list[tuple[Any, int]],
        scalars: list[int],
        num_queries: int,
        num_keys: int,
    ) -> None: ...
    def tiles(self, batch: int, head: int, q_tile: int, kv_tile: int) -> Any: ...
    def row(self, batch: int, head: int, q: int) -> tuple[int, int] | None: ...

class MslLibrary:
    """Metal kernels compiled for this machine. Faults raise FlexpteError with the kernel's name and line.

    `checked` (default: unless FLEXPTE_MSL_CHECKS=0) checks and counts every access. `reversed` runs threadgroups
    last to first. `constants` are the values of [[function_constant(n)]], by n.
    """

    functions: list[str]

    def __init__(
        self,
        source: str,
        *,
        checked: bool | None = None,
        reversed: bool = False,
        constants: Mapping[int, bool | int | float] = ...,
    ) -> None: ...
    def dispatch(
        self,
        function: str,
        buffers: Sequence[Any],
        params: bytes,
        threadgroups: tuple[int, int, int],
        threads: tuple[int, int, int],
        *,
        writable: Sequence[int] | None = None,
        threadgroup_bytes: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Runs `function`; params are buffer(0), buffers[i] (numpy array or None) is buffer(1 + i).

        `writable` holds the positions in `buffers` that the kernel may write (default: every array that numpy may
        write); `threadgroup_bytes` the sizes of [[threadgroup(n)]] arguments; `names` names of the buffers, for
        the counters that are returned (otherwise "buffer1", ...).
        """
