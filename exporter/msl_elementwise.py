"""The Metal kernel of one elementwise expression (``metal_delegate/kernels/elementwise.metal`` says how it works)."""

from __future__ import annotations

from collections.abc import Sequence

from flexpte.exporter.expression import Expression
from flexpte.exporter.msl_expression import MSL_TYPES, converted, statements

MAX_OPERANDS = 26
"""Inputs and captures of one kernel (FLEXPTE_MAX_OPERANDS in params.h)."""

_MAX_PARAMS_BYTES = 4096
_HEADER_BYTES, _STRIDES_BYTES, _VIEW_BYTES, _SCALAR_BYTES = 88, 72, 128, 8


def fits(num_inputs: int, num_captures: int, num_scalars: int) -> bool:
    """Whether one kernel can have so many operands: they need buffers, and room in the kernel's params."""
    size_bytes = _HEADER_BYTES + _STRIDES_BYTES * (1 + num_inputs)
    size_bytes += _VIEW_BYTES * num_captures + _SCALAR_BYTES * num_scalars
    return num_inputs + num_captures <= MAX_OPERANDS and size_bytes <= _MAX_PARAMS_BYTES


def elementwise_text(
    name: str, expression: Expression, out: str, inputs: Sequence[str], captures: Sequence[str], num_scalars: int
) -> str:
    """The kernel ``name``, and the function that it calls for each element. Types are payload names.

    Buffers: params, out, the inputs, the captures and, where there are any, the status. The params are an
    ``ElementwiseHeader``, then ``ElementwiseStrides`` of out and of each input, a ``CaptureView`` of each capture, the
    scalars.
    """
    return _value(name, expression, out, inputs, captures, num_scalars) + _kernel(
        name, out, inputs, captures, num_scalars
    )


def _value(
    name: str, expression: Expression, out: str, inputs: Sequence[str], captures: Sequence[str], num_scalars: int
) -> str:
    parameters = [f"{MSL_TYPES[t]} input_{i}" for i, t in enumerate(inputs)]
    parameters += [f"device const {_stored(t)}* capture_{i}" for i, t in enumerate(captures)]
    if captures:
        parameters += ["constant const CaptureView* views", "device atomic_uint* status", "uint instruction"]
    parameters += ["constant const long* scalars"] * bool(num_scalars)
    body, result = statements(expression, captures, input_types=inputs)
    lines = [f"inline {MSL_TYPES[out]} {name}_value({', '.join(parameters)}) {{", *body]
    return "\n".join([*lines, f"  return {converted(result, expression.type, out)};", "}", ""])


def _kernel(name: str, out: str, inputs: Sequence[str], captures: Sequence[str], num_scalars: int) -> str:
    members = ["  ElementwiseHeader header;", f"  ElementwiseStrides strides[{1 + len(inputs)}];"]
    members += [f"  CaptureView views[{len(captures)}];"] * bool(captures)
    members += [f"  long scalars[{num_scalars}];"] * bool(num_scalars)
    arguments = [f"in_{i}[j]{' != 0' if t == 'Bool' else ''}" for i, t in enumerate(inputs)]
    arguments += [f"capture_{i}" for i in range(len(captures))]
    arguments += ["params.views", "status", "params.header.instruction"] if captures else []
    arguments += ["params.scalars"] * bool(num_scalars)
    tensors = [f"constant {name}_params& params", f"device {_stored(out)}* out"]
    tensors += [f"device const {_stored(t)}* input_{i}" for i, t in enumerate(inputs)]
    tensors += [f"device const {_stored(t)}* capture_{i}" for i, t in enumerate(captures)]
    tensors += ["device atomic_uint* status"] * bool(captures)
    parameters = "".join(f"    {declaration} [[buffer({i})]],\n" for i, declaration in enumerate(tensors))
    starts = "".join(f"    long at_{i} = 0;\n" for i in range(len(inputs)))
    steps = "".join(f"      at_{i} += long(index) * params.strides[{1 + i}].rows[d];\n" for i in range(len(inputs)))
    loads = "".join(
        f"      const vec<{_stored(t)}, 4> in_{i} =\n"
        f"          elementwise_load(input_{i} + at_{i} + i * params.strides[{1 + i}].inner,"
        f" params.strides[{1 + i}].inner, count,\n"
        f"                           (params.header.vectors & {1 << (1 + i)}u) != 0);\n"
        for i, t in enumerate(inputs)
    )
    return f"""struct {name}_params {{
{chr(10).join(members)}
}};
[[kernel]] void {name}(
{parameters}    uint2 position [[thread_position_in_grid]],
    uint2 grid [[threads_per_grid]]) {{
  for (uint row = position.y; row < params.header.rows; row += grid.y) {{
    long to = 0;
{starts}    uint rest = row;
    for (int d = params.header.rank - 1; d >= 0; --d) {{
      uint index = rest;
      if (d > 0) {{
        const uint size = uint(params.header.sizes[d]);
        rest /= size;
        index -= rest * size;
      }}
      to += long(index) * params.strides[0].rows[d];
{steps}    }}
    for (long i = long(position.x) * 4; i < params.header.inner; i += long(grid.x) * 4) {{
      const int count = int(min(4L, params.header.inner - i));
{loads}      vec<{_stored(out)}, 4> result;
      for (int j = 0; j < 4; ++j) result[j] = {_stored(out)}({name}_value({", ".join(arguments)}));
      elementwise_store(out + to + i * params.strides[0].inner, result, params.strides[0].inner, count,
                        (params.header.vectors & 1u) != 0);
    }}
    if (row > 0xffffffffu - grid.y) return;
  }}
}}"""


def _stored(dtype: str) -> str:
    """An element in memory; of a bool any byte but 0 is true."""
    return "uchar" if dtype == "Bool" else MSL_TYPES[dtype]
