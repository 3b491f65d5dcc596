"""Lowered operators give what eager PyTorch gives, at several sizes of one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flexpte.exporter import ir
from flexpte.exporter.errors import Unsupported
from tests.exporter.lowering_helpers import check, interpreter, partitioned

B, T = 2, 5


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.row = nn.Parameter(torch.randn(8))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def floats(t: int = T) -> torch.Tensor:
    return torch.randn(B, t, 8, generator=torch.Generator().manual_seed(t))


def tokens(t: int = T) -> torch.Tensor:
    return torch.randint(-3, 4, (B, t, 8), generator=torch.Generator().manual_seed(t))


def run(function: Callable[..., Any], make: Callable[[int], torch.Tensor] = floats, tolerance: float = 1e-5) -> Any:
    torch.manual_seed(0)
    dim = torch.export.Dim("T", min=1, max=16)
    return check(
        Function(function),
        (make(T),),
        {"inputs": ({1: dim},)},
        ((make(1),), (make(16),), (make(7),)),
        tolerance,
    )


ELEMENTWISE = {
    "exp": lambda m, x: x.exp(),
    "sigmoid": lambda m, x: x.sigmoid(),
    "silu": lambda m, x: F.silu(x),
    "tanh": lambda m, x: x.tanh(),
    "erf": lambda m, x: x.erf(),
    "gelu": lambda m, x: F.gelu(x),
    "gelu_tanh": lambda m, x: F.gelu(x, approximate="tanh"),
    "relu": lambda m, x: x.relu(),
    "leaky_relu": lambda m, x: F.leaky_relu(x, 0.2),
    "elu": lambda m, x: F.elu(x, 0.7),
    "log": lambda m, x: x.log(),
    "sqrt": lambda m, x: x.sqrt(),
    "rsqrt": lambda m, x: (x * x + 1).rsqrt(),
    "pow": lambda m, x: x**2 + x**3 + x.abs() ** 0.5,
    "floor": lambda m, x: x.floor() + x.ceil() + x.trunc(),
    "round": lambda m, x: x.round(),
    "abs_neg_sign": lambda m, x: -x.abs() + x.sign(),
    "alpha": lambda m, x: torch.add(x, x.exp(), alpha=2) - torch.sub(x, m.row, alpha=3),
    "rsub": lambda m, x: 3 - x,
    "div": lambda m, x: x / 3 + 1 / x,
    "clamp": lambda m, x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1),
    "where": lambda m, x: torch.where(x > 0, x, x * m.row),
    "masked_fill": lambda m, x: x.masked_fill(x < 0, -1.5),
    "compare": lambda m, x: (x > 0) & (x <= m.row) | (x != x),
    "minimum": lambda m, x: torch.minimum(x, m.row),
    "scalar_size": lambda m, x: x * x.shape[1],
    "to_int": lambda m, x: (x * 3).to(torch.int32),
    "to_bool": lambda m, x: x.round().to(torch.bool),
    "to_int8": lambda m, x: (x * 3).to(torch.int8) * 3,
    "isnan": lambda m, x: x.sqrt().isnan(),
    "full": lambda m, x: torch.full_like(x, 2.5) + torch.ones(8),
    "remainder": lambda m, x: torch.remainder(x, 0.7) + torch.fmod(x, 0.7),
    "trig": lambda m, x: x.sin() + x.cos(),
    "floor_divide": lambda m, x: torch.div(x, 0.3, rounding_mode="floor"),
    "maximum": lambda m, x: x.maximum(m.row),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_equals_eager(name: str) -> None:
    parts = run(ELEMENTWISE[name])
    assert all(isinstance(i.op, ir.Elementwise) for i in parts.regions[0].region.instructions)


INTEGERS = {
    "floor_divide": lambda m, x: x // 2,
    "remainder": lambda m, x: x % 3,
    "trunc_divide": lambda m, x: torch.div(x, 2, rounding_mode="trunc"),
    "bits": lambda m, x: (x & 3) | (x ^ 5),
    "not": lambda m, x: ~x,
    "shift": lambda m, x: (x << 2) >> 1,
    "divide": lambda m, x: x / 2,
    "to_float": lambda m, x: x.float() * 0.5,
    "logical": lambda m, x: torch.logical_and(x, x > 1) | ~(x > 0),
    "sum": lambda m, x: x.sum(-1),
    "mixed": lambda m, x: x * 0.5 + x,
    "large": lambda m, x: x * (1 << 40) + 1,
    "bool_sum": lambda m, x: (x > 0).sum(1),
    "square": lambda m, x: x**2,
    "int32": lambda m, x: x.to(torch.int32) + x,
    "compare_float": lambda m, x: x > 0.5,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_equal_eager(name: str) -> None:
    run(INTEGERS[name], tokens)


VIEWS = {
    "heads": lambda m, x: x.unflatten(-1, (2, 4)).transpose(1, 2).exp(),
    "heads_back": lambda m, x: x.unflatten(-1, (2, 4)).transpose(1, 2).transpose(1, 2).flatten(-2) + 1,
    "copying_reshape": lambda m, x: x.transpose(1, 2).reshape(x.shape[0], -1) * 2,
    "halves": lambda m, x: x[..., :4] * x[..., 4:],
    "chunk": lambda m, x: x.chunk(2, -1)[0] + x.chunk(2, -1)[1],
    "last": lambda m, x: x[:, -1:] + 1,
    "select": lambda m, x: x[:, -1] + x[:, 0],
    "step": lambda m, x: x[..., ::2] + 1,
    "from_middle": lambda m, x: x[:, :, 2:6] * 2,
    "expand": lambda m, x: x[:, :, None].expand(-1, -1, 3, -1) + 1,
    "cat": lambda m, x: torch.cat([x, x * 2, x[..., :3]], -1),
    "cat_tokens": lambda m, x: torch.cat([x, x.exp()], 1),
    "stack": lambda m, x: torch.stack([x, x + 1], 2),
    "repeat": lambda m, x: x.repeat(1, 2, 3) + 1,
    "unbind": lambda m, x: x.unbind(-1)[3] + x.unbind(-1)[0],
    "squeeze": lambda m, x: x.sum(-1, keepdim=True).squeeze(-1),
    "split": lambda m, x: x.split([3, 5], -1)[1] * 2,
    "permute": lambda m, x: x.permute(2, 0, 1) + 1,
    "repeat_kv": lambda m, x: x.unflatten(-1, (2, 4))[:, :, :, None].expand(-1, -1, -1, 3, -1).flatten(2, 3) + 0,
    "rotate_half": lambda m, x: x * 2 + torch.cat([-x[..., 4:], x[..., :4]], -1) * m.row,
    "stack_real": lambda m, x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * 2,
    "cat_constant": lambda m, x: torch.cat([x, m.row.expand(x.shape[0], x.shape[1], 8)], -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_equal_eager(name: str) -> None:
    run(VIEWS[name])


OTHERS = {
    "linear": lambda m, x: F.linear(x, m.weight),
    "linear_bias": lambda m, x: F.linear(x, m.weight, m.row[:6]),
    "matmul_weight": lambda m, x: x @ m.weight.t(),
    "matmul": lambda m, x: x @ x.transpose(1, 2),
    "matmul_vector": lambda m, x: x @ m.row,
    "matmul_untransposed": lambda m, x: x[..., :6] @ m.weight,
    "rms_norm": lambda m, x: F.rms_norm(x, (8,), m.row, 1e-6),
    "rms_norm_bare": lambda m, x: F.rms_norm(x, (8,)),
    "layer_norm": lambda m, x: F.layer_norm(x, (8,), m.row, m.row * 2, 1e-3),
    "layer_norm_bare": lambda m, x: F.layer_norm(x, (8,)),
    "softmax": lambda m, x: x.softmax(-1),
    "softmax_tokens": lambda m, x: x.softmax(1),
    "log_softmax": lambda m, x: x.log_softmax(-1),
    "mean": lambda m, x: x.mean(1),
    "mean_all": lambda m, x: x.mean(),
    "sum_keep": lambda m, x: x.sum((0, 2), keepdim=True),
    "amax": lambda m, x: x.amax(-1) + x.amin(1).sum(),
    "max_dim": lambda m, x: x.max(1),
    "argmax": lambda m, x: x.argmax(-1),
    "any": lambda m, x: (x > 1).any(1) | (x > 0).all(1),
    "arange": lambda m, x: torch.arange(x.shape[1]) * 2,
    "index": lambda m, x: m.weight[(x[..., 0] > 0).long()],
    "index_dim": lambda m, x: x[:, torch.arange(x.shape[1]) // 2],
    "index_select": lambda m, x: m.weight.index_select(1, torch.tensor([1, -1 + 3, 0])) + x[0, 0, 0],
    "embedding": lambda m, x: F.embedding((x[..., 1] > 0).long(), m.weight),
    "norm_of_heads": lambda m, x: F.rms_norm(x.unflatten(-1, (2, 4)).transpose(1, 2), (4,), m.row[:4], 1e-6),
}


@pytest.mark.parametrize("name", OTHERS)
def test_instructions_equal_eager(name: str) -> None:
    run(OTHERS[name])


def test_rms_norm_written_out_is_one_instruction() -> None:
    def norm(m: Function, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return m.row * h.to(x.dtype)

    parts = run(norm)
    assert [type(i.op) for i in parts.regions[0].region.instructions] == [ir.RmsNorm]


def test_rms_norm_with_offset_weight_is_one_instruction() -> None:
    def norm(m: Function, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h * (1.0 + m.row)

    parts = run(norm)
    assert [type(i.op) for i in parts.regions[0].region.instructions] == [ir.RmsNorm]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Function(lambda m, x: F.silu(F.linear(F.rms_norm(x, (8,), m.row, 1e-5), m.weight)) + 1).to(dtype)
    dim = torch.export.Dim("T", min=1, max=16)
    check(module, (floats().to(dtype),), {"inputs": ({1: dim},)}, ((floats(1).to(dtype),),), tolerance=5e-2)


class Cache(nn.Module):
    """Writes what it is given, returns what ``read`` makes of old and new cache."""

    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("cache", torch.zeros(1, 2, 8, 4))
        self.register_buffer("started", torch.arange(4.0))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return self.write(self, x, pos)


def _index_copy(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.cache.index_copy_(2, pos, x)
    return m.cache * 2


def _index_put(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.cache[:, :, pos] = x
    return m.cache.sum(2)


def _old_is_read_after(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    old = m.cache.clone()
    m.cache.index_copy_(2, pos, x)
    return m.cache - 3 * old


def _twice(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.cache.index_copy_(2, pos, x)
    between = m.cache.sum()
    m.cache.index_copy_(2, pos, x * 2)
    return m.cache + between


def _overwritten(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.started.copy_(m.started.flip(0) if False else m.started * 2 + x.sum())
    m.cache.index_copy_(2, pos, x)
    return m.started + m.cache.sum()


def _shifted(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.cache.copy_(torch.cat([m.cache[:, :, 1:], x[:, :, :1]], 2))
    return m.cache + pos.sum()


def _slice(m: Any, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    m.cache[:, :, 2:5] = x.mean(2, keepdim=True)
    return m.cache + pos.sum()


@pytest.mark.parametrize("write", [_index_copy, _index_put, _old_is_read_after, _twice, _overwritten, _shifted, _slice])
def test_states_equal_eager_over_calls(write: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module = Cache(write).eval()
    dim = torch.export.Dim("T", min=1, max=8)
    inputs = (torch.randn(1, 2, 3, 4), torch.arange(3))
    parts = partitioned(module, inputs, {"x": {2: dim}, "pos": {0: dim}})
    names = [n.name for n in parts.placeholders.user]
    runner = interpreter(parts)
    for start, count in ((0, 3), (3, 1), (1, 5), (0, 8)):
        arguments = (torch.randn(1, 2, count, 4), torch.arange(start, start + count))
        with torch.no_grad():
            expected = module(*arguments)
        by_name = dict(zip(names, arguments, strict=True))
        (result,) = runner.run(*(by_name[n.name] for n in parts.regions[0].inputs))
        torch.testing.assert_close(result, expected)


def test_caches_start_as_the_module_has_them() -> None:
    parts = partitioned(Cache(_overwritten), (torch.randn(1, 2, 3, 4), torch.arange(3)))
    initial = {s.name: s.initial for s in parts.regions[0].region.states}
    assert initial["cache"] == -1
    assert initial["started"] >= 0


def test_equal_nodes_are_computed_once() -> None:
    parts = run(lambda m, x: F.linear(x.cos(), m.weight) + F.linear(x.cos(), m.weight * 2))
    region = parts.regions[0].region
    cosines = [i for i in region.instructions if isinstance(i.op, ir.Elementwise) and "Cos" in str(i.op.expression)]
    assert len(cosines) == 1


def test_tied_weights_are_one_constant() -> None:
    parts = run(lambda m, x: F.linear(x, m.weight) @ m.weight + F.linear(x, m.weight).sum())
    assert len(parts.regions[0].region.constants) == 1


def test_unbounded_dimension_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"no upper bound.*Dim"):
        partitioned(Function(lambda m, x: x + 1), (floats(),), {"inputs": ({1: torch.export.Dim.DYNAMIC},)})


def test_refusal_names_operator_line_and_fix() -> None:
    parts = partitioned(Function(lambda m, x: x.double() + 1), (floats(),))
    assert not parts.regions
    assert "float64" in parts.refusals[0].reason
    assert "test_lower.py" in (parts.refusals[0].source or "")
    assert parts.refusals[0].fix
