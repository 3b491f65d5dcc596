"""Mods as programs, against the mods themselves called on 0-d tensors, one (b, h, q, kv) after the other."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpte.exporter.builder import KINDS
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.evaluate import evaluate
from flexpte.exporter.expression import from_json, to_json
from flexpte.exporter.mods import Mod, mask_program, score_program

B, H, Q, K = 2, 3, 5, 6
LIKE = torch.zeros(1)
SCORES = torch.randn(B, H, Q, K, generator=torch.Generator().manual_seed(1)) * 3


def each_element(mod, *, score: bool) -> torch.Tensor:
    rows = []
    for b, h, q, k in itertools.product(range(B), range(H), range(Q), range(K)):
        index = [torch.tensor(i) for i in (b, h, q, k)]
        rows.append(mod(SCORES[b, h, q, k].clone(), *index) if score else mod(*index))
    return torch.stack(rows).reshape(B, H, Q, K)


def as_program(program: Mod) -> torch.Tensor:
    leaves = {
        "Score": SCORES,
        "Batch": torch.arange(B).view(-1, 1, 1, 1),
        "Head": torch.arange(H).view(1, -1, 1, 1),
        "QIdx": torch.arange(Q).view(1, 1, -1, 1),
        "KvIdx": torch.arange(K),
    }
    if program.expression is None:
        return SCORES
    expression = from_json(to_json(program.expression))
    assert to_json(expression) == to_json(program.expression)
    return evaluate(expression, leaves, program.captures, program.scalars).expand(B, H, Q, K)


def check_score(mod, **tolerance) -> Mod:
    program = score_program(mod, LIKE)
    got = as_program(program)
    assert got.dtype == torch.float32
    want = each_element(mod, score=True).float()
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
    return program


def check_mask(mod) -> Mod:
    program = mask_program(mod, LIKE)
    got = as_program(program)
    assert got.dtype == torch.bool
    assert torch.equal(got, each_element(mod, score=False))
    return program


def ops(program: Mod) -> list[str]:
    return [n.op for n in program.expression.nodes]


TABLE = torch.randn(H, Q, K, generator=torch.Generator().manual_seed(2))
DOC = torch.tensor([0, 0, 1, 1, 2, 2])
BIG = torch.tensor([2**24, 2**24, 2**24 + 1, 2**24 + 1, 2**24, 7])
POS = torch.tensor([3, 4, 5, 6, 7])
COMPLEX = torch.ones(6, dtype=torch.complex64)
ZERO_D = torch.tensor(0.5)

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 3),
    "documents": lambda b, h, q, k: DOC[q] == DOC[k],
    "documents_above_2_pow_24": lambda b, h, q, k: BIG[q] == BIG[k],
    "not_xor": lambda b, h, q, k: ~(q < k) & ((k % 3 == 0) ^ (q % 2 == 0)),
    "floor_div_of_negative": lambda b, h, q, k: (q - k) // 2 == -1,
    "remainder_of_negative": lambda b, h, q, k: (q - k) % 3 == 2,
    "remainder_by_negative": lambda b, h, q, k: q % -3 == -1,
    "fmod_of_negative": lambda b, h, q, k: torch.fmod(q - k, 3) == -1,
    "trunc_div": lambda b, h, q, k: torch.div(q - k, 2, rounding_mode="trunc") == 0,
    "bits": lambda b, h, q, k: ((q & 3) | (k ^ 1)) >> 1 == (1 << h) - 1,
    "bit_not": lambda b, h, q, k: ~q == -k - 1,
    "logical": lambda b, h, q, k: torch.logical_xor(q, k) | torch.logical_and(h, b) | torch.logical_not(q),
    "or_of_bools_added": lambda b, h, q, k: (q > k) + (k > 3),
    "product_of_bools": lambda b, h, q, k: (q > 1) * (k > 1),
    "position_of_query": lambda b, h, q, k: (POS[q] >= k) & (k > POS[q] - 4),
    "bool_table": lambda b, h, q, k: (TABLE > 0)[h, q, k],
    "bool_of_number": lambda b, h, q, k: ((q * k) % 2).bool(),
    "clamped_index": lambda b, h, q, k: DOC[(q + k).clamp(max=5)] == 1,
    "minimum": lambda b, h, q, k: torch.minimum(q, k) >= torch.maximum(b, h),
    "compared_with_float": lambda b, h, q, k: k < q * 0.5 + 1.25,
    "bools_compared": lambda b, h, q, k: (q > 1) == (k > 1),
    "bools_ordered": lambda b, h, q, k: (q > 1) <= (k > 1),
    "isinf": lambda b, h, q, k: torch.isinf(1.0 / q) | torch.isnan((q - k) / (q - k)),
    "abs_distance": lambda b, h, q, k: (q - k).abs() <= 1,
    "where_bool": lambda b, h, q, k: torch.where(h == 0, q >= k, k < 2),
    "any_and_all": lambda b, h, q, k: torch.stack([q > k, k > 2]).all() | torch.stack([b > 0, h > 1]).any(),
    "rounding": lambda b, h, q, k: torch.floor(q / 2) == torch.ceil(k / 3) - torch.trunc(h / 2),
    "uint8_wraps": lambda b, h, q, k: (q - k).to(torch.uint8) > 250,
    "int8_wraps": lambda b, h, q, k: (q * 60).to(torch.int8) < 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    check_mask(MASKS[name])


def half(values, dtype):
    return values.to(dtype)


SCORE_MODS = {
    "hash": lambda s, b, h, q, k: s + (q * 2654435761 + k * 2**40 + h * 7919) % 101,
    "large_shift": lambda s, b, h, q, k: s + ((q + 1) << 33 >> (k + 29)) + ((k << 31) & 0x3FFFFFFFFF) % 7,
    "large_product": lambda s, b, h, q, k: s + (q * 100003 * (k + 5) * 99991) // 10**9,
    "soft_cap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "alibi": lambda s, b, h, q, k: s + torch.tensor([0.5, 0.25, 0.125])[h] * (k - q),
    "alpha": lambda s, b, h, q, k: torch.add(s, (k - q) * 0.01, alpha=3.0),
    "alpha_of_sub": lambda s, b, h, q, k: torch.sub(s, k, alpha=2),
    "rsub": lambda s, b, h, q, k: 1.0 - s + torch.rsub(s, k, alpha=2),
    "negative_index": lambda s, b, h, q, k: s + TABLE[0, 0][q - k],
    "chained_index": lambda s, b, h, q, k: s + TABLE[h][q][k],
    "chained_partial_index": lambda s, b, h, q, k: s + TABLE[h, q][k],
    "index_of_index": lambda s, b, h, q, k: s + TABLE[0, 0][DOC[k]],
    "literal_index": lambda s, b, h, q, k: s + TABLE[0][q, k] + TABLE[-1, q, 2],
    "literal_index_0d": lambda s, b, h, q, k: s * TABLE[1, 2, 3],
    "zero_d": lambda s, b, h, q, k: s * ZERO_D,
    "slice_then_index": lambda s, b, h, q, k: s + TABLE[:, :, 1:][h, q, k - 1],
    "strided_slice": lambda s, b, h, q, k: s + TABLE[..., ::2][h, q, k // 2],
    "slice_with_negative_index": lambda s, b, h, q, k: s + TABLE[h, q, 1:4][k % 3 - 3],
    "unsqueeze": lambda s, b, h, q, k: s + TABLE[None][0, h, q, k],
    "transpose": lambda s, b, h, q, k: s + TABLE.transpose(0, 2)[k, q, h],
    "permute": lambda s, b, h, q, k: s + TABLE.permute(2, 0, 1)[k][h][q],
    "computed_table": lambda s, b, h, q, k: s + (TABLE * 2 + 1)[h, q, k],
    "reduced_table": lambda s, b, h, q, k: s + TABLE.sum() + TABLE.amax(-1)[h, q],
    "row_sum": lambda s, b, h, q, k: s + TABLE[h, q].sum(),
    "row_max_mean": lambda s, b, h, q, k: s + TABLE[h, q].max() + TABLE[h, q].mean() + TABLE[h].amin(),
    "dot": lambda s, b, h, q, k: s + torch.dot(TABLE[h, q], TABLE[0, k % Q]),
    "sum_of_products": lambda s, b, h, q, k: s + (TABLE[h, q] * TABLE[1, k % Q]).sum(),
    "matvec": lambda s, b, h, q, k: s + (TABLE[h] @ TABLE[0, q])[2],
    "sum_of_three": lambda s, b, h, q, k: sum((s * TABLE[i, q, k] for i in range(3)), s * 0),
    "gather_many": lambda s, b, h, q, k: s + TABLE[h, q, torch.arange(3)].sum(),
    "in_mod_table": lambda s, b, h, q, k: s * torch.tensor([1.0, 2.0, 3.0])[h],
    "pow_2": lambda s, b, h, q, k: s.pow(2) + s**3,
    "pow_float": lambda s, b, h, q, k: s.abs() ** 1.5 + s.abs().pow(0.5) + (s.abs() + 1) ** -1,
    "pow_tensor": lambda s, b, h, q, k: (s.abs() + 0.1).pow(h) + 2.0**q,
    "pow_int": lambda s, b, h, q, k: s + (q - k) ** 2 + (q - k) ** 3 + (q - k) ** 4,
    "exponentials": lambda s, b, h, q, k: torch.exp(s) + torch.exp2(s) + torch.expm1(s),
    "logarithms": lambda s, b, h, q, k: sum(
        f(s.abs() + 0.5) for f in (torch.log, torch.log2, torch.log10, torch.log1p)
    ),
    "roots": lambda s, b, h, q, k: torch.sqrt(s.abs()) + torch.rsqrt(s.abs() + 1) + torch.reciprocal(s.abs() + 1),
    "trigonometry": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s) + torch.tan(s) + torch.atan2(s, k + 1),
    "inverse": lambda s, b, h, q, k: sum(f(s / 20) for f in (torch.asin, torch.acos, torch.atan, torch.atanh)),
    "hyperbolic": lambda s, b, h, q, k: sum(f(s) for f in (torch.sinh, torch.cosh, torch.tanh, torch.asinh)),
    "acosh": lambda s, b, h, q, k: torch.acosh(s.abs() + 1),
    "activations": lambda s, b, h, q, k: torch.sigmoid(s) + torch.nn.functional.silu(s) + torch.relu(s),
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s) + torch.nn.functional.gelu(s, approximate="tanh"),
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "decomposed": lambda s, b, h, q, k: torch.nn.functional.softplus(s) + torch.nn.functional.elu(s),
    "leaky": lambda s, b, h, q, k: torch.nn.functional.leaky_relu(s) + torch.nn.functional.hardswish(s),
    "relu6": lambda s, b, h, q, k: torch.nn.functional.relu6(s) + torch.nn.functional.hardtanh(s),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * 2, 0.3) + torch.addcmul(s, s, s, value=0.5),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1) + s.clamp(min=0.5) + s.clamp_max(0.1),
    "clamp_tensor": lambda s, b, h, q, k: torch.clamp(s, min=TABLE[h, q, k], max=TABLE[h, q, k] + 1),
    "cast_truncates": lambda s, b, h, q, k: s + 0.1 * (s * 3.0).to(torch.int32).clamp(-2, 2),
    "cast_to_bool": lambda s, b, h, q, k: s * (k % 2).bool(),
    "int_and_float": lambda s, b, h, q, k: s + (q * 2 + 1) / (k + 1),
    "floor_div_float": lambda s, b, h, q, k: s // 0.7 + s % 0.7,
    "remainder_scalar_tensor": lambda s, b, h, q, k: torch.remainder(7.0, s.abs() + 1),
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.7),
    "round": lambda s, b, h, q, k: torch.round(s) + torch.floor(s) + torch.ceil(s) + torch.trunc(s),
    "round_decimals": lambda s, b, h, q, k: torch.round(s, decimals=2) + torch.round(s * 100, decimals=-1),
    "signs": lambda s, b, h, q, k: torch.sign(s) * s.abs() + (-s) + torch.sign(q - k),
    "where_scalar": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "where_both_scalars": lambda s, b, h, q, k: s + torch.where(q >= k, 1, 2),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf),
    "nan": lambda s, b, h, q, k: torch.where(k == 1, s * float("nan"), s),
    "max_of_nan": lambda s, b, h, q, k: torch.maximum(torch.where(k == 1, float("nan"), s), s * 2),
    "fmax": lambda s, b, h, q, k: torch.fmax(torch.where(k == 1, float("nan"), s), s * 2),
    "in_place": lambda s, b, h, q, k: s.mul_(2).add_(k),
    "half_cast": lambda s, b, h, q, k: s.half().float() + s.bfloat16(),
    "half_capture": lambda s, b, h, q, k: s * TABLE.half()[h, q, k],
    "half_arithmetic": lambda s, b, h, q, k: s + TABLE.bfloat16()[h, q, k] * TABLE.bfloat16()[0, q, k],
    "half_with_index": lambda s, b, h, q, k: s + TABLE.half()[h, q, k] * (k * 100 + 1),
    "constants": lambda s, b, h, q, k: s + torch.full((), 2.0) + torch.ones(()) + s.new_zeros(()) + torch.zeros_like(s),
    "stack": lambda s, b, h, q, k: torch.stack([s, s * 2, s.abs()]).sum() + torch.cat([s[None], s[None]]).prod(),
    "integer_result": lambda s, b, h, q, k: q - k,
    "bool_result": lambda s, b, h, q, k: q >= k,
    "identity_of_one": lambda s, b, h, q, k: s * 1.0 + 0,
    "float64": lambda s, b, h, q, k: (s + TABLE.double()[h, q, k]).float(),
    "isfinite": lambda s, b, h, q, k: torch.where(torch.isfinite(1.0 / q) & ~torch.isneginf(s), s, 0.0),
    "squeeze": lambda s, b, h, q, k: s + TABLE[h, q, k].reshape(1).squeeze(),
    "expand": lambda s, b, h, q, k: (s + TABLE[h, q, k]).expand(4).sum(),
    "split": lambda s, b, h, q, k: s + TABLE[h, q].split(3)[1].sum() + TABLE[h, q].chunk(2)[0].sum(),
    "computed_then_indexed": lambda s, b, h, q, k: torch.stack([s, s * 2, s * 3])[h] + torch.stack([s, -s])[-1 - k % 2],
    "max_over_dim": lambda s, b, h, q, k: s + TABLE[h].max(dim=1).values[q % 2],
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score(name):
    loose = {"rtol": 2e-5, "atol": 2e-5} if name in ("exponentials", "hyperbolic", "pow_tensor") else {}
    check_score(SCORE_MODS[name], **loose)


@pytest.mark.parametrize("dtype", list(KINDS))
def test_captures_of_every_dtype(dtype):
    table = torch.arange(-3, 3).abs().to(dtype)
    program = check_score(lambda s, b, h, q, k: s + table[k])
    assert program.captures[0].dtype == dtype


def test_callables_of_every_form():
    class Window:
        def __init__(self, width):
            self.width = width

        def mask(self, b, h, q, k):
            return q - k < self.width

        def __call__(self, b, h, q, k):
            return self.mask(b, h, q, k)

    def nested(width):
        inner = functools.partial(lambda w, b, h, q, k: q - k < w, width)
        return lambda b, h, q, k: inner(b, h, q, k)

    programs = [check_mask(m) for m in (Window(2).mask, Window(2), nested(2), functools.partial(nested(2)))]
    assert len({to_json(p.expression) for p in programs}) == 1


def test_no_op_mods_are_nothing():
    assert score_program(lambda s, b, h, q, k: s, LIKE).expression is None
    assert mask_program(lambda b, h, q, k: q.new_ones((), dtype=torch.bool), LIKE).expression is None
    assert mask_program(lambda b, h, q, k: (q >= 0) | True, LIKE).expression is None


def test_equal_mods_with_other_captures_are_one_program():
    def bias(table, scale):
        return lambda s, b, h, q, k: s * scale + table[h, q - k] + table[h, q - k]

    a, b = (score_program(bias(torch.randn(2, 9), 0.5), LIKE) for _ in range(2))
    assert to_json(a.expression) == to_json(b.expression)
    assert not torch.equal(a.captures[0], b.captures[0])
    assert ops(a).count("Load") == 1
    assert ops(a).count("Sub") == 1


def test_combined_masks_leave_no_constants():
    from torch.nn.attention.flex_attention import and_masks, or_masks

    program = check_mask(and_masks(MASKS["causal"], or_masks(MASKS["documents"], MASKS["window"])))
    constants = [n for n in program.expression.nodes if n.op == "Constant" and n.type == "Bool"]
    assert not constants


def test_constants_are_folded():
    program = check_score(lambda s, b, h, q, k: s + (torch.tensor(3) * 4 - 2) // 5)
    assert ops(program) == ["Score", "Constant", "Add"]


def test_tables_computed_from_captures_only_are_captured():
    program = check_score(SCORE_MODS["computed_table"])
    assert ops(program).count("Mul") == 0
    assert torch.equal(program.captures[0], TABLE * 2 + 1)


def test_negative_zero_is_kept():
    program = score_program(lambda s, b, h, q, k: torch.where(k == 0, -0.0, 0.0) * s.abs(), LIKE)
    got = as_program(program)
    assert torch.equal(torch.signbit(got), torch.arange(K).eq(0).expand(got.shape))


FAILURES = {
    "item": (lambda s, b, h, q, k: s * k.item(), "Python number"),
    "branch": (lambda s, b, h, q, k: s if q > k else s * 2, "Python number"),
    "vector": (lambda s, b, h, q, k: s + TABLE[h, q], "returns a tensor of shape (6,)"),
    "number": (lambda s, b, h, q, k: 1.0, "returns 1.0"),
    "mutation": (lambda s, b, h, q, k: TABLE.add_(1)[h, q, k] + s, "in place"),
    "unknown_op": (lambda s, b, h, q, k: torch.special.bessel_j0(s), "bessel_j0"),
    "too_many": (lambda s, b, h, q, k: s + (torch.ones(3, 20, 20)[h] * k).sum(), "at most 256"),
    "complex": (lambda s, b, h, q, k: s + torch.ones(6, dtype=torch.complex64)[k].real, "view_as_real"),
    "nonzero": (lambda s, b, h, q, k: s + torch.nonzero(k).sum(), "size depends on values"),
    "bool_index": (lambda s, b, h, q, k: s + TABLE[0, 0][TABLE[0, 0] > q][0], "size depends on values"),
    "complex_capture": (lambda s, b, h, q, k: s + COMPLEX[k], "complex64"),
    "computed_and_indexed": (
        lambda s, b, h, q, k: s + torch.stack([s, s * 2])[torch.stack([k, q]) % 2].sum(),
        "indexes values that it computed",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_unsupported_says_what_where_and_what_to_do(name):
    mod, words = FAILURES[name]
    with pytest.raises(Unsupported) as caught:
        score_program(mod, LIKE)
    assert words in str(caught.value)
    assert __file__ in str(caught.value.source)
    assert caught.value.fix


def test_mask_must_be_bool():
    with pytest.raises(Unsupported, match=r"mask_mod returns torch\.int64"):
        mask_program(lambda b, h, q, k: q - k, LIKE)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
]
DTYPES += [torch.float32]
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "lt": torch.lt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "bitwise_and": torch.bitwise_and,
    "bitwise_xor": torch.bitwise_xor,
    "logical_or": torch.logical_or,
    "where": lambda a, b: torch.where(a > b, a, b),
    "rsub": torch.rsub,
    "atan2": torch.atan2,
}


def operand(dtype: torch.dtype, value: float) -> torch.Tensor:
    if dtype == torch.uint8:
        value = abs(value)
    return torch.tensor(value).to(dtype)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(sorted(BINARY)),
    left=st.sampled_from(DTYPES),
    right=st.sampled_from([*DTYPES, bool, int, float]),
    a=st.integers(-40, 40).map(lambda n: n / 4),
    b=st.integers(-40, 40).map(lambda n: n / 4),
)
def test_binary_ops_follow_aten(op, left, right, a, b):
    """Promotion, rounding and wrapping of every pair of operand types, Python numbers included."""
    x = operand(left, a)
    y = right(b) if isinstance(right, type) else operand(right, b)
    try:
        want = BINARY[op](x, y)
    except (RuntimeError, TypeError, ZeroDivisionError):
        return  # no such op in ATen
    program = score_program(lambda s, b, h, q, k: BINARY[op](x, y), LIKE)
    got = evaluate(program.expression, {}, program.captures, program.scalars)
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-6, equal_nan=True)
