"""What a delegated region is between lowering and packing: values, storages and instructions.

The vocabulary is that of ``metal_delegate/payload.fbs``; names of instructions and their fields are
the names there. Sizes, strides and offsets count elements and may be symbolic (sympy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import sympy

from flexpte.exporter.expression import Expression

if TYPE_CHECKING:
    import torch

Size: TypeAlias = int | sympy.Expr

ITEM_SIZE_BYTES = {
    "Bool": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
FLOATING = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Storage:
    """Where bytes live; ``index`` is the number of the input, output, constant or state."""

    kind: str  # Input, Output, Constant, State, Arena
    index: int = 0
    size_bytes: int = 0  # upper bound
    offset_bytes: int = 0  # Arena, once planned


@dataclass(frozen=True)
class Value:
    """A strided view of a storage."""

    storage: int
    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True)
class Constant:
    """A weight, or anything else known at export; ``name`` is for reports."""

    name: str
    tensor: torch.Tensor = field(compare=False, repr=False)


@dataclass(frozen=True)
class State:
    """A buffer that outlives a call; ``initial`` is a constant's number, or -1 for zeros."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    initial: int = -1


@dataclass(frozen=True)
class Op:
    """An instruction's operation. Fields named in READS and WRITES hold value numbers (-1: none)."""

    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ("out",)

    def reads(self) -> Iterator[int]:
        """Values that the instruction reads."""
        yield from _values(self, self.READS)

    def writes(self) -> Iterator[int]:
        """Values that the instruction writes."""
        yield from _values(self, self.WRITES)

    def replaced(self, old: int, new: int) -> Op:
        """The same operation with one value exchanged wherever it occurs."""

        def exchange(x: int) -> int:
            return new if x == old else x

        changes: dict[str, int | tuple[int, ...]] = {}
        for name in (*self.READS, *self.WRITES):
            value = getattr(self, name)
            changes[name] = tuple(map(exchange, value)) if isinstance(value, tuple) else exchange(value)
        return dataclasses.replace(self, **changes)


def _values(op: Op, names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        value = getattr(op, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number >= 0:
                yield number


@dataclass(frozen=True)
class Linear(Op):
    READS: ClassVar = ("x", "weight", "bias")
    x: int
    weight: int
    out: int
    bias: int = -1


@dataclass(frozen=True)
class Gather(Op):
    READS: ClassVar = ("source", "index")
    source: int
    dim: int
    index: int
    out: int


@dataclass(frozen=True)
class RmsNorm(Op):
    READS: ClassVar = ("x", "weight")
    x: int
    out: int
    eps: float
    weight: int = -1


@dataclass(frozen=True)
class LayerNorm(Op):
    READS: ClassVar = ("x", "weight", "bias")
    x: int
    out: int
    eps: float
    weight: int = -1
    bias: int = -1


@dataclass(frozen=True)
class Elementwise(Op):
    READS: ClassVar = ("inputs", "captures")
    expression: Expression
    inputs: tuple[int, ...]
    out: int
    scalars: tuple[Size, ...] = ()
    captures: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reduce(Op):
    READS: ClassVar = ("x",)
    op: str
    x: int
    out: int
    num_dims: int


@dataclass(frozen=True)
class Softmax(Op):
    READS: ClassVar = ("x",)
    x: int
    out: int
    log: bool = False


@dataclass(frozen=True)
class MatMul(Op):
    READS: ClassVar = ("a", "b")
    a: int
    b: int
    out: int


@dataclass(frozen=True)
class IndexCopy(Op):
    READS: ClassVar = ("index", "source")
    WRITES: ClassVar = ("target",)
    target: int
    dim: int
    index: int
    source: int


@dataclass(frozen=True)
class Arange(Op):
    out: int
    start: Size
    step: Size


@dataclass(frozen=True)
class FlexAttention(Op):
    READS: ClassVar = (
        "query",
        "key",
        "value",
        "score_captures",
        "mask_captures",
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
    )
    WRITES: ClassVar = ("out", "lse")
    query: int
    key: int
    value: int
    out: int
    scale: float
    q_block_size: int
    kv_block_size: int
    lse: int = -1
    score: Expression | None = None
    mask: Expression | None = None
    score_captures: tuple[int, ...] = ()
    mask_captures: tuple[int, ...] = ()
    score_scalars: tuple[Size, ...] = ()
    mask_scalars: tuple[Size, ...] = ()
    kv_num_blocks: int = -1
    kv_indices: int = -1
    full_kv_num_blocks: int = -1
    full_kv_indices: int = -1
    prefill_rows: int = 0
    prefill_threads: int = 0
    chunk_rows: int = 0
    chunk_threads: int = 0
    decode_rows: int = 0


@dataclass(frozen=True)
class Instruction:
    """One step; ``name`` is that of the graph node it came from."""

    op: Op
    name: str


@dataclass(frozen=True)
class Region:
    """One delegate call. ``inputs`` holds a value number per tensor input, -1 per integer input.

    ``symbols`` says how each symbol of the sizes is found from the inputs, ``upper_bounds`` how large
    it gets.
    """

    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    constants: tuple[Constant, ...]
    states: tuple[State, ...]
    instructions: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    symbols: dict[sympy.Symbol, SymbolSource]
    upper_bounds: dict[sympy.Symbol, tuple[int, int]]
    arena_size_bytes: int = 0


@dataclass(frozen=True)
class SymbolSource:
    """symbol = (size of a dimension of an input - ``addend``) // ``factor``; dim -1: the input itself."""

    input: int
    dim: int
    factor: int = 1
    addend: int = 0
