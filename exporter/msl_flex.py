"""The Metal kernels of one attention: which tiles for its head dimensions, and the kernels' text.

``metal_delegate/kernels/flex_*.metal`` hold the algorithms as templates; here their parameters are chosen and
each kernel is written as a function that owns the threadgroup memory and builds the mods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexpte.exporter import ir
from flexpte.exporter.msl_expression import MSL_TYPES

THREADGROUP_BYTES = 32 * 1024
"""Of threadgroup memory that a kernel can have."""

MAX_BUFFERS = 31
_FIRST_CAPTURE = 15

_STAGED_BYTES = 20 * 1024
"""Beyond this little is gained, and fewer threadgroups fit a core."""
_MAX_DECODE_ROWS = 8
_MAX_DECODE_ELEMENTS = 32
_DECODE_SIMDGROUPS = 4
CHUNK_ROWS = 16
"""Rows of the kernel for a few queries: a chunk of a prompt, a draft to verify, large groups of heads."""


@dataclass(frozen=True)
class MatrixTiles:
    """Of flex_prefill: rows = 8 * row_groups * row_blocks, threads = 32 * row_groups * dim_groups."""

    row_groups: int
    row_blocks: int
    dim_groups: int
    keys: int
    staged_bytes: int
    shared_bytes: int

    @property
    def rows(self) -> int:
        return 8 * self.row_groups * self.row_blocks

    @property
    def threads(self) -> int:
        return 32 * self.row_groups * self.dim_groups


@dataclass(frozen=True)
class DecodeTiles:
    """Of flex_decode; threads = 128."""

    rows: int
    lanes: int
    piece: int
    block: int
    shared_bytes: int


def _matrix_tiles(width: int, item_size_bytes: int, row_groups: int, row_blocks: int, dim_groups: int) -> MatrixTiles:
    """As many keys at a time as fit: the fewer barriers."""
    step = 8 * dim_groups
    pitch_bytes = -(-width // step) * step * item_size_bytes + 16
    simdgroups = row_groups * dim_groups
    keys = 64
    while True:
        staged = keys * pitch_bytes
        exchanged = 4 * simdgroups * 8 * row_blocks * keys if dim_groups > 1 else 0
        shared = 4 * (-(-simdgroups // 2) * 2) + exchanged
        if (staged <= _STAGED_BYTES and staged + shared <= THREADGROUP_BYTES) or keys == 8:
            break
        keys -= 8 if keys <= 32 else 32
    assert staged + shared <= THREADGROUP_BYTES, (width, item_size_bytes)
    return MatrixTiles(row_groups, row_blocks, dim_groups, keys, staged, shared)


def prefill_tiles(head_dim_qk: int, head_dim_v: int, item_size_bytes: int) -> MatrixTiles:
    """Rows of a threadgroup decide how often keys are read: as many as registers allow.

    A lane holds, for each block of 8 rows, a part of the queries (2 elements for every 8 of DK) and of the results
    (2 floats for every 8 of DV): about 64 registers of 32 bits in each case below, beside those for scores.
    """
    width = max(head_dim_qk, head_dim_v)
    row_groups, row_blocks, dim_groups = (8, 1, 1)
    if width <= 64:
        row_groups, row_blocks, dim_groups = (8, 2, 1)
    elif width > 256:
        row_groups, row_blocks, dim_groups = (4, 1, 4)
    elif width > 128:
        row_groups, row_blocks, dim_groups = (8, 1, 2)
    return _matrix_tiles(width, item_size_bytes, row_groups, row_blocks, dim_groups)


def chunk_tiles(head_dim_qk: int, head_dim_v: int, item_size_bytes: int) -> MatrixTiles:
    """All simdgroups share the 16 rows, each with its part of the head dimensions."""
    width = max(head_dim_qk, head_dim_v)
    dim_groups = 2 if width <= 64 else 4 if width <= 256 else 8
    return _matrix_tiles(width, item_size_bytes, 1, CHUNK_ROWS // 8, dim_groups)


def decode_tiles(head_dim_qk: int, head_dim_v: int, item_size_bytes: int, rows: int) -> DecodeTiles | None:
    """For at most ``rows`` (query, head) pairs; None where registers would not do: the chunk kernel takes those."""
    width = max(head_dim_qk, head_dim_v)
    if rows > _MAX_DECODE_ROWS:
        return None
    rows = next(n for n in (1, 2, 4, _MAX_DECODE_ROWS) if n >= rows)
    # 16 bytes of a row a lane, or 8 where many rows need the registers.
    for piece in dict.fromkeys((16 // item_size_bytes, 4)):
        lanes = rows
        while lanes < 32 and lanes * piece < width:
            lanes *= 2
        elements = -(-width // (lanes * piece)) * piece
        if lanes <= 32 and rows * elements <= _MAX_DECODE_ELEMENTS:
            break
    else:
        return None
    block = min(8, max(4, lanes // rows))
    shared = 4 * max(rows * head_dim_qk, _DECODE_SIMDGROUPS * rows * (head_dim_v + 2))
    if shared > _STAGED_BYTES:
        return None
    return DecodeTiles(rows, lanes, piece, block, shared)


def flex_fits(num_captures: int) -> bool:
    """Whether a kernel has buffers enough."""
    return _FIRST_CAPTURE + num_captures <= MAX_BUFFERS


def flex_wrappers(
    name: str,
    mods: str,
    types: tuple[str, str, str],
    head_dims: tuple[int, int],
    captures: Sequence[str],
    decode_rows: int,
) -> str:
    """The kernels NAME_prefill, NAME_merge, NAME_chunk and, where ``decode_rows`` is not 0, NAME_decode.

    ``mods``: the struct with the attention's score and mask (msl_library.py). ``types``: payload names of the
    elements of query, of key and value, and of out; ``captures``: of the captured tensors.
    """
    staged = types[0] if types[0] == types[1] else "F32"
    item_size_bytes = ir.ITEM_SIZE_BYTES[staged]
    texts = [
        _matrix_kernel(
            f"{name}_prefill", mods, types, staged, head_dims, captures, prefill_tiles(*head_dims, item_size_bytes)
        ),
        _merge_kernel(f"{name}_merge", types[2], head_dims[1]),
        _matrix_kernel(
            f"{name}_chunk", mods, types, staged, head_dims, captures, chunk_tiles(*head_dims, item_size_bytes)
        ),
    ]
    tiles = decode_tiles(*head_dims, ir.ITEM_SIZE_BYTES[types[1]], decode_rows) if decode_rows else None
    if tiles is not None:
        texts.append(_decode_kernel(f"{name}_decode", mods, types, head_dims, captures, tiles))
    return "\n".join(texts)


def _msl(*types: str) -> str:
    return ", ".join(MSL_TYPES[t] for t in types)


_ARGUMENTS = "params, query, key, value, out, lse, plan, partial_out, partial_lse, mods"
_POSITIONS = "group, thread_index, lane, simdgroup"


def _attributes(threads: int) -> str:
    """The compiler has to leave each of so many threads its registers."""
    return f"[[kernel, max_total_threads_per_threadgroup({threads})]]"


def _head(
    name: str, mods: str, types: tuple[str, str, str], captures: Sequence[str], threads: int
) -> tuple[str, list[str]]:
    """The parameters of a kernel, and the statements that build its plan and mods."""
    query, key, out = (MSL_TYPES[t] for t in types)
    buffers = [
        "constant FlexParams& params",
        f"device const {query}* query",
        f"device const {key}* key",
        f"device const {key}* value",
        f"device {out}* out",
        "device float* lse",
        "constant int* tile_begin",
        "constant int* first_run",
        "constant KeyRun* runs",
        "device const int2* row_bounds",
        "device float* partial_out",
        "device float* partial_lse",
        "constant CaptureView* views",
        "constant long* scalars",
        "device atomic_uint* status",
        *(f"device const {MSL_TYPES[t]}* capture_{i}" for i, t in enumerate(captures)),
    ]
    arguments = [f"{declaration} [[buffer({i})]]" for i, declaration in enumerate(buffers)]
    arguments += [
        "uint3 group [[threadgroup_position_in_grid]]",
        "uint thread_index [[thread_index_in_threadgroup]]",
        "uint lane [[thread_index_in_simdgroup]]",
        "uint simdgroup [[simdgroup_index_in_threadgroup]]",
    ]
    fields = [*(f"capture_{i}" for i in range(len(captures))), "views", "scalars", "status", "params.instruction"]
    return f"{_attributes(threads)} void {name}({', '.join(arguments)}) {{", [
        "  const FlexPlanView plan = {tile_begin, first_run, runs, row_bounds};",
        f"  const {mods} mods = {{{', '.join(fields)}}};",
    ]


def _matrix_kernel(
    name: str,
    mods: str,
    types: tuple[str, str, str],
    staged: str,
    head_dims: tuple[int, int],
    captures: Sequence[str],
    tiles: MatrixTiles,
) -> str:
    head, lines = _head(name, mods, types, captures, tiles.threads)
    # Vectors, for their alignment.
    staged_vectors = -(-tiles.staged_bytes // 16)
    shape = f"{tiles.row_groups}, {tiles.row_blocks}, {tiles.dim_groups}, {tiles.keys}"
    return "\n".join(
        [
            head,
            f"  threadgroup vec<float, 4> staged[{staged_vectors}];",
            f"  threadgroup vec<float, 2> shared[{-(-tiles.shared_bytes // 8)}];",
            *lines,
            f"  flex_prefill<{_msl(*types, staged)}, {head_dims[0]}, {head_dims[1]}, {shape}, {mods}>(",
            f"      {_ARGUMENTS}, (threadgroup {MSL_TYPES[staged]}*)staged, (threadgroup float*)shared,",
            f"      {_POSITIONS});",
            "}",
        ]
    )


def _decode_kernel(
    name: str,
    mods: str,
    types: tuple[str, str, str],
    head_dims: tuple[int, int],
    captures: Sequence[str],
    tiles: DecodeTiles,
) -> str:
    head, lines = _head(name, mods, types, captures, 32 * _DECODE_SIMDGROUPS)
    shape = f"{tiles.rows}, {tiles.lanes}, {tiles.piece}, {tiles.block}"
    return "\n".join(
        [
            head,
            f"  threadgroup float shared[{tiles.shared_bytes // 4}];",
            *lines,
            f"  flex_decode<{_msl(*types)}, {head_dims[0]}, {head_dims[1]}, {shape}, {mods}>(",
            f"      {_ARGUMENTS}, shared, {_POSITIONS});",
            "}",
        ]
    )


def _merge_kernel(name: str, out: str, head_dim_v: int) -> str:
    return "\n".join(
        [
            f"{_attributes(32)} void {name}(constant FlexParams& params [[buffer(0)]],",
            "    device const float* partial_out [[buffer(1)]], device const float* partial_lse [[buffer(2)]],",
            f"    device {MSL_TYPES[out]}* out [[buffer(3)]], device float* lse [[buffer(4)]],",
            "    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {",
            f"  flex_merge<{MSL_TYPES[out]}, {head_dim_v}>(params, partial_out, partial_lse, out, lse, group, lane);",
            "}",
        ]
    )
