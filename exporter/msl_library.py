"""The Metal (MSL 3.1) text of all kernels of a region: files of ``metal_delegate/kernels`` and what is generated.

Kernel files hold templates; kernels come into being by the instantiations and wrappers that are generated here,
one for each combination of element types, head dimensions and expressions that the region has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import flexpte.metal_delegate
from flexpte.exporter import ir
from flexpte.exporter.msl_elementwise import elementwise_text, fits
from flexpte.exporter.msl_expression import MSL_TYPES, converted, statements
from flexpte.exporter.msl_flex import chunk_tiles, decode_tiles, flex_fits, flex_wrappers, prefill_tiles

_PRELUDE = ("params.h", "strided.metal", "elements.metal", "expression.metal")


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


def kernels_version() -> int:
    """FLEXPTE_KERNELS_VERSION of params.h: what devices must agree with."""
    found = re.search(r"#define FLEXPTE_KERNELS_VERSION (\d+)", _file("params.h"))
    assert found is not None
    return int(found.group(1))


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
    staged = _staged(x, weight)
    return (
        b.instantiate(f"linear_gemv_{suffix}", f"linear_gemv<{_msl(*types)}>"),
        b.instantiate(f"linear_gemm_{suffix}", f"linear_gemm<{_msl(*types, staged)}>"),
    )


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
    num_scalars = len(op.scalars)
    if not fits(len(op.inputs), len(op.captures), num_scalars):
        return ()
    b.use("elementwise.metal")
    inputs, captures = [b.type(v) for v in op.inputs], [b.type(v) for v in op.captures]
    out = b.type(op.out)
    name, is_new = b.number("elementwise", (op.expression, tuple(inputs), tuple(captures), out, num_scalars))
    if is_new:
        b.texts[elementwise_text(name, op.expression, out, inputs, captures, num_scalars)] = None
    return (name,)


def _with_rows(b: _Builder, op: ir.FlexAttention) -> ir.FlexAttention:
    dims = _head_dims(b, op)
    types = (b.type(op.query), b.type(op.key))
    item_size = ir.ITEM_SIZE_BYTES[_staged(*types)]
    prefill, chunk = prefill_tiles(*dims, item_size), chunk_tiles(*dims, item_size)
    num_heads, num_kv_heads = (b.region.values[v].sizes[1] for v in (op.query, op.key))
    decode = None
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_kv_heads:
        decode = decode_tiles(*dims, ir.ITEM_SIZE_BYTES[types[1]], num_heads // num_kv_heads)
    return dataclasses.replace(
        op,
        prefill_rows=prefill.rows,
        prefill_threads=prefill.threads,
        chunk_rows=chunk.rows,
        chunk_threads=chunk.threads,
        decode_rows=decode.rows if decode else 0,
    )


def _head_dims(b: _Builder, op: ir.FlexAttention) -> tuple[int, int]:
    head_dims = b.region.values[op.key].sizes[3], b.region.values[op.value].sizes[3]
    return int(head_dims[0]), int(head_dims[1])


def _flex_attention(b: _Builder, op: ir.FlexAttention) -> tuple[str, ...]:
    if not flex_fits(len(op.score_captures) + len(op.mask_captures)):
        return ()
    b.use("flex_common.metal", "flex_prefill.metal", "flex_decode.metal")
    types = (b.type(op.query), b.type(op.key), b.type(op.out))
    captures = [b.type(v) for v in (*op.score_captures, *op.mask_captures)]
    mods = (op.score, op.mask, len(op.score_captures), len(op.score_scalars), tuple(captures))
    dims = _head_dims(b, op)
    name, is_new = b.number("flex", (types, dims, mods, op.decode_rows))
    if is_new:
        struct, is_new_struct = b.number("FlexMods", mods)
        if is_new_struct:
            b.texts[_mods_text(struct, op, captures)] = None
        b.texts[flex_wrappers(name, struct, types, dims, captures, op.decode_rows)] = None
    decode = (f"{name}_decode",) if op.decode_rows else ()
    return (f"{name}_prefill", f"{name}_merge", f"{name}_chunk", *decode)


def _mods_text(struct: str, op: ir.FlexAttention, captures: Sequence[str]) -> str:
    num_score = len(op.score_captures)
    lines = [f"struct {struct} {{"]
    lines += [f"  device const {MSL_TYPES[t]}* capture_{i};" for i, t in enumerate(captures)]
    lines += ["  constant CaptureView* views;", "  constant long* scalars;"]
    lines += ["  device atomic_uint* status;", "  uint instruction;"]
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
