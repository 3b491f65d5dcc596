"""The Metal (MSL 3.1) text of all kernels of a region: files of ``metal_delegate/kernels`` and what is generated.

Kernel files hold templates; kernels come into being by the instantiations and wrappers that are generated here,
one for each combination of element types, head dimensions and expressions that the region has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import flexpte.metal_delegate
from flexpte.exporter import ir
from flexpte.exporter.expression import Expression
from flexpte.exporter.msl_expression import MSL_TYPES, converted, statements

MAX_OPERANDS = 28
"""Tensors of one elementwise kernel (FLEXPTE_MAX_OPERANDS in params.h)."""

STAGED_BYTES = 16 * 1024
"""Of keys or values in the threadgroup memory of a prefill kernel: two threadgroups fit an Apple core."""

_MAX_DECODE_ROWS = 8
_PRELUDE = ("params.h", "strided.metal", "expression.metal")


@dataclass(frozen=True)
class MetalLibrary:
    """``source`` and, an instruction each, the names of its kernels; no names where Metal cannot do it (F64).

    ``instructions``: those of the region, attentions with the rows of their kernels filled in.
    """

    source: str
    kernels: tuple[tuple[str, ...], ...]
    instructions: tuple[ir.Instruction, ...]


@dataclass
class _Builder:
    region: ir.Region
    files: dict[str, None] = field(default_factory=dict)
    texts: dict[str, None] = field(default_factory=dict)
    names: dict[object, int] = field(default_factory=dict)

    def type(self, value: int) -> str:
        return self.region.values[value].dtype

    def use(self, *names: str) -> None:
        self.files.update(dict.fromkeys(names))

    def number(self, prefix: str, key: object) -> tuple[str, bool]:
        """A name for what ``key`` describes, and whether it is new."""
        is_new = (prefix, key) not in self.names
        number = self.names.setdefault((prefix, key), len(self.names))
        return f"{prefix}_{number}", is_new

    def instantiate(self, name: str, function: str) -> str:
        """One kernel from a template."""
        self.texts[f'template [[host_name("{name}")]] [[kernel]] decltype({function}) {function};'] = None
        return name


def metal_library(region: ir.Region) -> MetalLibrary:
    """The kernels of a region."""
    builder = _Builder(region)
    kernels: list[tuple[str, ...]] = []
    instructions = []
    for instruction in region.instructions:
        op = instruction.op
        values = [*op.reads(), *op.writes()]
        if any(region.values[v].dtype not in MSL_TYPES for v in values):
            kernels.append(())
        else:
            if isinstance(op, ir.FlexAttention):
                op = _with_rows(builder, op)
                instruction = dataclasses.replace(instruction, op=op)
            kernels.append(_KERNELS[type(op)](builder, op))
        instructions.append(instruction)
    parts = ["#include <metal_stdlib>", "#include <metal_simdgroup_matrix>", "using namespace metal;"]
    parts += [_file(name) for name in (*_PRELUDE, *builder.files)]
    parts += builder.texts
    return MetalLibrary("\n".join(parts) + "\n", tuple(kernels), tuple(instructions))


@cache
def _file(name: str) -> str:
    folder = Path(flexpte.metal_delegate.__file__).parent / "kernels"
    return (folder / name).read_text(encoding="utf-8")


def _suffix(*types: str) -> str:
    return "_".join(t.lower() for t in types)


def _msl(*types: str) -> str:
    return ", ".join(MSL_TYPES[t] for t in types)


def _staged(*types: str) -> str:
    """What tiles of operands are staged as: their type where they agree, else float."""
    return types[0] if len(set(types)) == 1 else "F32"


def _linear(b: _Builder, op: ir.Linear) -> tuple[str, ...]:
    b.use("linear.metal")
    x, weight, out = b.type(op.x), b.type(op.weight), b.type(op.out)
    bias = b.type(op.bias) if op.bias >= 0 else weight
    types = (x, weight, bias, out)
    suffix = _suffix(*types)
    names = [b.instantiate(f"linear_gemv{rows}_{suffix}", f"linear_gemv<{_msl(*types)}, {rows}>") for rows in (1, 4)]
    staged = _staged(x, weight)
    return (*names, b.instantiate(f"linear_gemm_{suffix}", f"linear_gemm<{_msl(*types, staged)}>"))


def _matmul(b: _Builder, op: ir.MatMul) -> tuple[str, ...]:
    b.use("linear.metal")
    types = (b.type(op.a), b.type(op.b), b.type(op.out))
    staged = _staged(*types[:2])
    return (b.instantiate(f"matmul_{_suffix(*types)}", f"matmul<{_msl(*types, staged)}>"),)


def _rms_norm(b: _Builder, op: ir.RmsNorm) -> tuple[str, ...]:
    b.use("rows.metal")
    x = b.type(op.x)
    types = (x, b.type(op.weight) if op.weight >= 0 else x, b.type(op.out))
    return (b.instantiate(f"rms_norm_{_suffix(*types)}", f"rms_norm<{_msl(*types)}>"),)


def _layer_norm(b: _Builder, op: ir.LayerNorm) -> tuple[str, ...]:
    b.use("rows.metal")
    x = b.type(op.x)
    weight, bias = (b.type(v) if v >= 0 else x for v in (op.weight, op.bias))
    types = (x, weight, bias, b.type(op.out))
    return (b.instantiate(f"layer_norm_{_suffix(*types)}", f"layer_norm<{_msl(*types)}>"),)


def _softmax(b: _Builder, op: ir.Softmax) -> tuple[str, ...]:
    b.use("rows.metal")
    types = (b.type(op.x), b.type(op.out))
    return (b.instantiate(f"softmax_{_suffix(*types)}", f"softmax<{_msl(*types)}>"),)


def _reduce(b: _Builder, op: ir.Reduce) -> tuple[str, ...]:
    b.use("reduce.metal")
    kinds = ("Sum", "Mean", "Max", "Min", "Prod", "Any", "All", "ArgMax", "ArgMin")
    x, out = b.type(op.x), b.type(op.out)
    held = "F32" if x in ir.FLOATING else "I64"
    name = f"reduce_{op.op.lower()}_{_suffix(x, out)}"
    return (b.instantiate(name, f"reduce<{_msl(x, held, out)}, {kinds.index(op.op)}>"),)


def _bits(dtype: str) -> str:
    """The integer type that copies an element."""
    return {1: "U8", 2: "I16", 4: "I32", 8: "I64"}[ir.ITEM_SIZE_BYTES[dtype]]


def _gather(b: _Builder, op: ir.Gather) -> tuple[str, ...]:
    b.use("indexing.metal")
    types = (_bits(b.type(op.source)), b.type(op.index))
    return (b.instantiate(f"gather_{_suffix(*types)}", f"gather<{_msl(*types)}>"),)


def _index_copy(b: _Builder, op: ir.IndexCopy) -> tuple[str, ...]:
    b.use("indexing.metal")
    types = (_bits(b.type(op.target)), b.type(op.index))
    return (b.instantiate(f"index_copy_{_suffix(*types)}", f"index_copy<{_msl(*types)}>"),)


def _arange(b: _Builder, op: ir.Arange) -> tuple[str, ...]:
    b.use("indexing.metal")
    out = b.type(op.out)
    return (b.instantiate(f"arange_{_suffix(out)}", f"arange<{_msl(out)}>"),)


def _elementwise(b: _Builder, op: ir.Elementwise) -> tuple[str, ...]:
    if 1 + len(op.inputs) + len(op.captures) > MAX_OPERANDS:
        return ()
    b.use("elementwise.metal")
    inputs, captures = [b.type(v) for v in op.inputs], [b.type(v) for v in op.captures]
    out = b.type(op.out)
    name, is_new = b.number("elementwise", (op.expression, tuple(inputs), tuple(captures), out))
    if is_new:
        b.texts[_elementwise_text(name, op.expression, out, inputs, captures)] = None
    return (name,)


def _elementwise_text(
    name: str, expression: Expression, out: str, inputs: Sequence[str], captures: Sequence[str]
) -> str:
    tensors = [(f"device {MSL_TYPES[out]}* out", 1)]
    tensors += [(f"device const {MSL_TYPES[t]}* operand_{i}", i + 2) for i, t in enumerate(inputs)]
    first_capture = 2 + len(inputs)
    tensors += [(f"device const {MSL_TYPES[t]}* capture_{i}", first_capture + i) for i, t in enumerate(captures)]
    behind = first_capture + len(captures)
    tensors += [("constant CaptureView* views", behind), ("constant long* scalars", behind + 1)]
    arguments = ["constant ElementwiseParams& params [[buffer(0)]]"]
    arguments += [f"{declaration} [[buffer({number})]]" for declaration, number in tensors]
    arguments += ["uint index [[thread_position_in_grid]]"]
    lines = [f"[[kernel]] void {name}({', '.join(arguments)}) {{", "  if (index >= params.count) return;"]
    for i, dtype in enumerate(inputs):
        offset = f"elementwise_offset(params, {i + 1}, index)"
        lines.append(f"  const {MSL_TYPES[dtype]} input_{i} = operand_{i}[{offset}];")
    body, result = statements(expression, captures, input_types=inputs)
    lines += body
    lines.append(f"  out[elementwise_offset(params, 0, index)] = {converted(result, expression.type, out)};")
    return "\n".join([*lines, "}"])


def _with_rows(b: _Builder, op: ir.FlexAttention) -> ir.FlexAttention:
    width = max(_head_dims(b, op))
    simdgroups, blocks = _prefill_shape(width)
    num_heads, num_kv_heads = (b.region.values[v].sizes[1] for v in (op.query, op.key))
    decode_rows = 0
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_kv_heads:
        group = num_heads // num_kv_heads
        decode_rows = next((r for r in (1, 2, 4, _MAX_DECODE_ROWS) if r >= group), 0)
    return dataclasses.replace(
        op, prefill_rows=8 * blocks * simdgroups, prefill_threads=32 * simdgroups, decode_rows=decode_rows
    )


def _prefill_shape(width: int) -> tuple[int, int]:
    """Simdgroups of a prefill threadgroup, and 8-row blocks of each: what registers allow for a head dimension.

    A row block holds its queries, results and scores in registers: at 64 two blocks are about 100 of them.
    """
    if width <= 64:
        return 8, 2
    return (8, 1) if width <= 128 else (4, 1) if width <= 256 else (2, 1)


def _head_dims(b: _Builder, op: ir.FlexAttention) -> tuple[int, int]:
    head_dims = b.region.values[op.key].sizes[3], b.region.values[op.value].sizes[3]
    return int(head_dims[0]), int(head_dims[1])


def _flex_attention(b: _Builder, op: ir.FlexAttention) -> tuple[str, ...]:
    b.use("flex_common.metal", "flex_prefill.metal", "flex_decode.metal")
    types = (b.type(op.query), b.type(op.key), b.type(op.out))
    captures = [b.type(v) for v in (*op.score_captures, *op.mask_captures)]
    mods = (op.score, op.mask, len(op.score_captures), len(op.score_scalars), tuple(captures))
    dims = _head_dims(b, op)
    name, is_new = b.number("flex", (types, dims, mods, op.prefill_rows, op.decode_rows))
    if is_new:
        struct, is_new_struct = b.number("FlexMods", mods)
        if is_new_struct:
            b.texts[_mods_text(struct, op, captures)] = None
        b.texts[_prefill_text(name, struct, types, dims, captures)] = None
        b.texts[_merge_text(name, types[2], dims[1])] = None
        if op.decode_rows:
            b.texts[_decode_text(name, struct, types, dims, op.decode_rows, captures)] = None
    decode = (f"{name}_decode",) if op.decode_rows else ()
    return (f"{name}_prefill", f"{name}_merge", *decode)


def _mods_text(struct: str, op: ir.FlexAttention, captures: Sequence[str]) -> str:
    num_score = len(op.score_captures)
    lines = [f"struct {struct} {{"]
    lines += [f"  device const {MSL_TYPES[t]}* capture_{i};" for i, t in enumerate(captures)]
    lines += ["  constant CaptureView* views;", "  constant long* scalars;"]
    lines += [f"  enum {{ has_score = {int(op.score is not None)}, has_mask = {int(op.mask is not None)} }};"]
    lines += ["  float score(float score, int b, int h, int q_idx, int kv_idx) const {"]
    if op.score is None:
        lines += ["    return score;", "  }"]
    else:
        body, result = statements(op.score, captures[:num_score], indent="    ")
        lines += [*body, f"    return {converted(result, op.score.type, 'F32')};", "  }"]
    lines += ["  bool mask(int b, int h, int q_idx, int kv_idx) const {"]
    if op.mask is None:
        lines += ["    return true;", "  }"]
    else:
        body, result = statements(
            op.mask,
            captures[num_score:],
            first_capture=num_score,
            first_scalar=len(op.score_scalars),
            indent="    ",
        )
        lines += [*body, f"    return {converted(result, op.mask.type, 'Bool')};", "  }"]
    return "\n".join([*lines, "};"])


def _flex_head(name: str, struct: str, types: tuple[str, str, str], captures: Sequence[str]) -> tuple[str, list[str]]:
    """The parameters of a prefill or decode kernel, and the statements that build its plan and mods."""
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
        "device const int* row_begin",
        "device const int* row_end",
        "device float* partial_out",
        "device float* partial_lse",
        "constant CaptureView* views",
        "constant long* scalars",
        *(f"device const {MSL_TYPES[t]}* capture_{i}" for i, t in enumerate(captures)),
    ]
    arguments = [f"{declaration} [[buffer({i})]]" for i, declaration in enumerate(buffers)]
    arguments += [
        "uint3 group [[threadgroup_position_in_grid]]",
        "uint thread_index [[thread_index_in_threadgroup]]",
        "uint lane [[thread_index_in_simdgroup]]",
        "uint simdgroup [[simdgroup_index_in_threadgroup]]",
    ]
    fields = [*(f"capture_{i}" for i in range(len(captures))), "views", "scalars"]
    return f"[[kernel]] void {name}({', '.join(arguments)}) {{", [
        "  const FlexPlanView plan = {tile_begin, first_run, runs, row_begin, row_end};",
        f"  const {struct} mods = {{{', '.join(fields)}}};",
    ]


_FLEX_ARGUMENTS = "params, query, key, value, out, lse, plan, partial_out, partial_lse, mods"


def _prefill_text(
    name: str, struct: str, types: tuple[str, str, str], dims: tuple[int, int], captures: Sequence[str]
) -> str:
    staged = _staged(*types[:2])
    width = -(-max(dims) // 8) * 8
    keys = 64
    simdgroups, blocks = _prefill_shape(max(dims))
    while keys > 8 and keys * width * ir.ITEM_SIZE_BYTES[staged] > STAGED_BYTES:
        keys //= 2
    head, lines = _flex_head(f"{name}_prefill", struct, types, captures)
    return "\n".join(
        [
            head,
            f"  threadgroup {MSL_TYPES[staged]} staged[{keys * width}];",
            *lines,
            f"  flex_prefill<{_msl(*types, staged)}, {dims[0]}, {dims[1]}, {simdgroups}, {blocks}, {keys}, {struct}>(",
            f"      {_FLEX_ARGUMENTS}, staged, group, thread_index, lane, simdgroup);",
            "}",
        ]
    )


def _decode_text(
    name: str, struct: str, types: tuple[str, str, str], dims: tuple[int, int], rows: int, captures: Sequence[str]
) -> str:
    pieces = -(-max(dims) * ir.ITEM_SIZE_BYTES[types[1]] // 16)
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(pieces, 32))
    head, lines = _flex_head(f"{name}_decode", struct, types, captures)
    return "\n".join(
        [
            head,
            f"  threadgroup float shared[{rows * max(dims[0], dims[1] + 2 * 4)}];",
            *lines,
            f"  flex_decode<{_msl(*types)}, {dims[0]}, {dims[1]}, {rows}, {lanes}, {-(-pieces // lanes)}, {struct}>(",
            f"      {_FLEX_ARGUMENTS}, shared, group, thread_index, lane, simdgroup);",
            "}",
        ]
    )


def _merge_text(name: str, out: str, value_dim: int) -> str:
    return "\n".join(
        [
            f"[[kernel]] void {name}_merge(constant FlexParams& params [[buffer(0)]],",
            "    device const float* partial_out [[buffer(1)]], device const float* partial_lse [[buffer(2)]],",
            f"    device {MSL_TYPES[out]}* out [[buffer(3)]], device float* lse [[buffer(4)]],",
            "    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {",
            f"  flex_merge<{MSL_TYPES[out]}, {value_dim}>(params, partial_out, partial_lse, out, lse, group, lane);",
            "}",
        ]
    )


_KERNELS: dict[type[ir.Op], Callable[[_Builder, Any], tuple[str, ...]]] = {
    ir.Linear: _linear,
    ir.MatMul: _matmul,
    ir.RmsNorm: _rms_norm,
    ir.LayerNorm: _layer_norm,
    ir.Softmax: _softmax,
    ir.Reduce: _reduce,
    ir.Gather: _gather,
    ir.IndexCopy: _index_copy,
    ir.Arange: _arange,
    ir.Elementwise: _elementwise,
    ir.FlexAttention: _flex_attention,
}
