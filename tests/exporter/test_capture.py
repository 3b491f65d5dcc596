"""Captured programs against the modules themselves, and what capture leaves behind."""

from __future__ import annotations

import functools
import io
import math

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import nn
from torch._higher_order_ops.flex_attention import FlexAttentionHOP
from torch.export import Dim
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

from flexpte.exporter.capture import capture

compiled_flex_attention = torch.compile(flex_attention)
compiled_create_block_mask = torch.compile(create_block_mask)

pytestmark = pytest.mark.filterwarnings("ignore")


TABLE = torch.arange(40.0)


def causal(b, h, q, kv):
    return q >= kv


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=4, kv_heads=4, q_len=40, kv_len=40, dim=16, seed=0, dtype=torch.float32):
    sizes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return tuple(rand(*s, seed=seed + i, dtype=dtype) for i, s in enumerate(sizes))


def attention_nodes(program):
    return [n for n in program.graph.nodes if n.target is torch.ops.flexpte.flex_attention.default]


def check(module, *calls, dynamic_shapes=None, strict=False, attentions=1, example=0):
    """Capture, and compare with the module in eager mode on every call."""
    program = capture(module, calls[example], dynamic_shapes, strict=strict)
    assert len(attention_nodes(program)) == attentions
    allowed = ("aten", "flexpte", "_operator", "math")
    for node in program.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output"), node.op
        if node.op == "call_function":
            assert str(getattr(node.target, "namespace", node.target.__module__)).startswith(allowed), node.target
    runnable = program.module()
    for inputs in calls:
        with torch.no_grad():
            want, got = module(*inputs), runnable(*inputs)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    return program


class Attention(nn.Module):
    """flex_attention whose mask, if there is one, is built in forward."""

    def __init__(self, score_mod=None, mask_mod=None, **options):
        super().__init__()
        self.score_mod, self.mask_mod, self.options = score_mod, mask_mod, options

    def forward(self, q, k, v):
        mask = None
        if self.mask_mod is not None:
            mask = create_block_mask(self.mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
        return flex_attention(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=mask,
            enable_gqa=q.shape[1] != k.shape[1],
            **self.options,
        )


DOCUMENTS = torch.arange(40) // 7
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def window(width):
    return lambda b, h, q, kv: q - kv < width


SIMPLE = {
    "nothing": (None, None),
    "causal": (None, causal),
    "window": (None, and_masks(causal, window(5))),
    "documents": (None, lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv]),
    "prefix": (None, or_masks(causal, lambda b, h, q, kv: kv < 9)),
    "partial": (None, functools.partial(lambda n, b, h, q, kv: kv < n + q, 4)),
    "alibi": (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), causal),
    "soft_cap": (lambda s, b, h, q, kv: 5 * torch.tanh(s / 5), causal),
    "score_only": (lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf), None),
    "fully_masked": (None, lambda b, h, q, kv: (q > 3) & (q >= kv)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_mods(name, strict):
    check(Attention(*SIMPLE[name]), qkv(), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_one_program_for_every_length_with_the_mask_built_inside(strict):
    length = Dim("length", min=1, max=300)
    check(
        Attention(None, causal),
        *(qkv(q_len=n, kv_len=n) for n in (130, 1, 2, 127, 128, 129, 300)),
        dynamic_shapes={n: {2: length} for n in ("q", "k", "v")},
        strict=strict,
    )


def test_dimensions_found_by_export():
    check(
        Attention(None, causal),
        *(qkv(q_len=n, kv_len=n) for n in (130, 2, 300)),
        dynamic_shapes={n: {2: Dim.AUTO} for n in ("q", "k", "v")},
    )


def test_several_dynamic_dimensions():
    batch, q_len, kv_len = (
        Dim("batch", min=1, max=8),
        Dim("q_len", min=1, max=64),
        Dim("kv_len", min=1, max=64),
    )
    shapes = {"q": {0: batch, 2: q_len}, "k": {0: batch, 2: kv_len}, "v": {0: batch, 2: kv_len}}
    calls = [qkv(batch=b, q_len=q, kv_len=k) for b, q, k in ((2, 9, 20), (1, 1, 7), (3, 20, 1))]
    check(Attention(None, causal), *calls, dynamic_shapes=shapes)


def test_sizes_read_by_a_mod_are_scalars():
    class FromTheEnd(nn.Module):
        def forward(self, q, k, v):
            offset = k.shape[2] - q.shape[2]
            mask = create_block_mask(
                lambda b, h, i, j: (i + offset >= j) & (j < k.shape[2] - 1),
                None,
                None,
                q.shape[2],
                k.shape[2],
            )
            return flex_attention(q, k, v, block_mask=mask)

    q_len, kv_len = Dim("q_len", min=1, max=64), Dim("kv_len", min=1, max=64)
    shapes = {"q": {2: q_len}, "k": {2: kv_len}, "v": {2: kv_len}}
    calls = [qkv(q_len=a, kv_len=b) for a, b in ((5, 20), (1, 40), (3, 3))]
    program = check(FromTheEnd(), *calls, dynamic_shapes=shapes)
    assert len(attention_nodes(program)[0].args[6]) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    module, inputs = Attention(SIMPLE["alibi"][0], causal), qkv(dtype=dtype)
    got = capture(module, inputs).module()(*inputs)
    assert got.dtype == dtype
    exact = module(*(x.double() for x in inputs))
    assert (got.double() - exact).abs().mean() <= 1.5 * (module(*inputs).double() - exact).abs().mean()


@pytest.mark.parametrize("strict", [False, True])
def test_lse_is_natural_and_leaves_no_arithmetic(strict):
    program = check(Attention(None, SIMPLE["fully_masked"][1], return_lse=True), qkv(), strict=strict)
    targets = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert not targets & {torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}


def test_lse_by_request_and_log2_of_the_scores():
    class Aux(nn.Module):
        def forward(self, q, k, v):
            out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
            return out, aux.lse

    check(Aux(), qkv())


@pytest.mark.parametrize("strict", [False, True])
def test_mask_held_by_the_module(strict):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = create_block_mask(causal, None, None, 200, 200, device="cpu")

        def forward(self, q, k, v):
            return flex_attention(q, k, v, block_mask=self.mask)

    check(Held(), qkv(q_len=200, kv_len=200), strict=strict)


@pytest.mark.parametrize("with_capture", [False, True])
def test_mask_as_an_argument(with_capture):
    class Argument(nn.Module):
        def forward(self, q, k, v, mask):
            return flex_attention(q, k, v, block_mask=mask)

    table = torch.arange(200) // 9
    mod = (lambda b, h, q, kv: table[q] == table[kv]) if with_capture else causal
    mask = create_block_mask(mod, None, None, 200, 200, device="cpu")
    inputs = (*qkv(q_len=200, kv_len=200), mask)
    check(Argument(), inputs)


def test_lists_from_tensors_decide_with_the_mask():
    class Blocks(nn.Module):
        def forward(self, q, k, v, num, indices):
            mask = BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(40, 40))
            return flex_attention(q, k, v, block_mask=mask)

    num = torch.tensor([[[1, 1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [0, 2, 1]]]], dtype=torch.int32)
    inputs = (*qkv(), num, indices)
    program = capture(Blocks(), inputs)
    seen = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)

    def listed(b, h, q, kv):
        return (q >= kv) & seen[q // 16, kv // 16]

    want = Attention(None, listed)(*inputs[:3])
    torch.testing.assert_close(program.module()(*inputs), want, rtol=2e-5, atol=2e-5)


def test_lists_that_the_model_computes_with_are_computed():
    class Pages(nn.Module):
        def forward(self, q, k, v):
            mask = create_block_mask(window(20), None, None, 40, 40, BLOCK_SIZE=16, device="cpu")
            other = BlockMask.from_kv_blocks(
                mask.kv_num_blocks + 0,
                mask.kv_indices + 0,
                BLOCK_SIZE=16,
                mask_mod=causal,
                seq_lengths=(40, 40),
            )
            return flex_attention(q, k, v, block_mask=other), mask.kv_num_blocks

    inputs = qkv()
    out, num_blocks = capture(Pages(), inputs).module()(*inputs)
    assert torch.equal(num_blocks, Pages()(*inputs)[1])
    assert torch.isfinite(out).all()


def test_sliced_mask_with_its_mask_mod_set_again():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16, device="cpu")

        def forward(self, q, k, v, pos):
            mask = self.base[:, :, pos // 16]
            mask.mask_mod = lambda b, h, i, j: i + pos[0] >= j
            mask.seq_lengths = (1, 64)
            return flex_attention(q, k, v, block_mask=mask)

    calls = [(*qkv(q_len=1, kv_len=64), torch.tensor([p])) for p in (37, 0, 63)]
    check(Sliced(), *calls)


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_and_buffers_as_captures(strict):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(rand(4, 40, seed=9))
            self.register_buffer("limit", torch.tensor(30))

        def forward(self, q, k, v):
            mask = create_block_mask(lambda b, h, i, j: j < self.limit, None, None, 40, 40, device="cpu")
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + self.bias[h, i - j], block_mask=mask)

    program = check(Biased(), qkv(), strict=strict)
    assert program.graph_signature.parameters == ("bias",)
    assert program.graph_signature.buffers == ("limit",)


def test_state_that_a_closure_holds_is_the_modules_state():
    class Closure(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            count = self.count
            self.mod = lambda b, h, i, j: j < count

        def forward(self, q, k, v):
            self.count.add_(7)
            return flex_attention(q, k, v, block_mask=create_block_mask(self.mod, None, None, 40, 40, device="cpu"))

    inputs = qkv()
    runnable = capture(Closure(), inputs).module()
    for seen in (7, 14):
        want = Attention(None, lambda b, h, i, j, n=seen: j < n)(*inputs)
        torch.testing.assert_close(runnable(*inputs), want, rtol=2e-5, atol=2e-5)


class Cached(nn.Module):
    def __init__(self, capacity=32):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, capacity, 16))
        self.register_buffer("values", torch.zeros(1, 2, capacity, 16))

    def forward(self, q, k, v, input_pos):
        self.keys.index_copy_(2, input_pos, k)
        self.values.index_copy_(2, input_pos, v)
        mask = create_block_mask(
            lambda b, h, i, j: j <= input_pos[i], None, None, q.shape[2], self.keys.shape[2], device=q.device
        )
        return flex_attention(q, self.keys, self.values, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("strict", [False, True])
def test_cache_prefill_then_decode(strict):
    q, k, v = qkv(batch=1, kv_heads=2, q_len=20, kv_len=20)
    tokens = Dim("tokens", min=1, max=32)
    shapes = {"q": {2: tokens}, "k": {2: tokens}, "v": {2: tokens}, "input_pos": {0: tokens}}

    def step(start, stop):
        return (*(x[:, :, start:stop] for x in (q, k, v)), torch.arange(start, stop))

    module = Cached()
    program = capture(module, step(0, 6), shapes, strict=strict)
    assert not module.keys.any()
    want = Attention(None, causal)(q, k, v)
    runnable, at = program.module(), 0
    for n in (6, 1, 1, 9, 1, 2):
        got = runnable(*step(at, at + n))
        torch.testing.assert_close(got, want[:, :, at : at + n], rtol=2e-5, atol=2e-5)
        at += n


def test_layers_with_equal_mods_have_equal_programs():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.biases = nn.ParameterList([nn.Parameter(rand(4, seed=i)) for i in range(3)])

        def forward(self, q, k, v):
            mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
            for bias in self.biases:
                q = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * bias[h], block_mask=mask)  # noqa: B023
            return q

    program = check(Layers(), qkv(), attentions=3)
    assert len({n.args[12:14] for n in attention_nodes(program)}) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_compiled_functions_are_traced_through(strict):
    class Compiled(nn.Module):
        def forward(self, q, k, v):
            mask = compiled_create_block_mask(causal, None, None, 40, 40, device="cpu")
            return compiled_flex_attention(q, k, v, block_mask=mask)

    inputs = qkv()
    program = capture(Compiled(), inputs, strict=strict)
    torch.testing.assert_close(program.module()(*inputs), Attention(None, causal)(*inputs), rtol=2e-5, atol=2e-5)


def test_values_read_as_numbers():
    class Item(nn.Module):
        def forward(self, q, k, v, pos):
            n = pos.item()
            torch._check(n >= 0)
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(j <= n, s, -math.inf))

    inputs = (*qkv(), torch.tensor(11))
    program = capture(Item(), inputs)
    want = Attention(None, lambda b, h, i, j: j <= 11)(*inputs[:3])
    torch.testing.assert_close(program.module()(*inputs), want, rtol=2e-5, atol=2e-5)


def test_views_as_examples_do_not_pin_strides():
    q, k, v = (torch.cat([x, x], dim=2)[:, :, :7] for x in qkv())
    length = Dim("length", min=1, max=64)
    program = capture(Attention(), (q, k, v), {n: {2: length} for n in ("q", "k", "v")})
    inputs = qkv(q_len=40, kv_len=40)
    torch.testing.assert_close(program.module()(*inputs), Attention()(*inputs), rtol=2e-5, atol=2e-5)


def test_mask_leftovers_are_gone():
    table = torch.arange(40) // 3

    class Unused(nn.Module):
        def forward(self, q, k, v):
            mask = create_block_mask(causal, None, None, 40, 40, device="cpu")
            create_block_mask(lambda b, h, i, j: table[i] == j, None, None, 40, 40, device="cpu")
            return flex_attention(q, k, v, block_mask=mask)

    program = check(Unused(), qkv())
    assert [n.op for n in program.graph.nodes].count("call_function") == 2  # the attention, its first result
    assert not program.constants


@pytest.mark.parametrize("name", ["documents", "alibi", "nothing"])
def test_saved_and_loaded(name):
    inputs = qkv()
    program = capture(Attention(*SIMPLE[name]), inputs)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert torch.equal(loaded(*inputs), program.module()(*inputs))


def test_decompositions_run_on_the_result():
    program = capture(Attention(lambda s, b, h, i, j: s + SLOPES[0] * SLOPES[h], causal), qkv())
    lowered = program.run_decompositions()
    assert len(attention_nodes(lowered)) == 1
    inputs = qkv()
    assert torch.equal(lowered.module()(*inputs), program.module()(*inputs))


def test_gradients_of_the_caller_do_not_matter():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(rand(2, 4, 3, 16))
            self.project = nn.Linear(16, 16)

        def forward(self, k, v):
            return flex_attention(self.queries, self.project(k), v)

    module, (_, k, v) = Learned(), qkv()
    with torch.enable_grad():
        program = capture(module, (k, v))
        assert torch.is_grad_enabled()
    with torch.no_grad():
        out = program.module()(k, v)
        want = Attention()(module.queries.detach(), module.project(k), v)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    assert module.queries.requires_grad


def patched_state():
    return (
        create_block_mask.__code__,
        create_block_mask.__defaults__,
        FlexAttentionHOP.__call__,
        flex_module._validate_device,
        flex_module._transpose_ordered,
        hasattr(flex_module, "_flexpte_symbolic_block_mask"),
    )


@pytest.mark.parametrize("strict", [False, True])
def test_torch_is_left_as_it_was_even_after_errors(strict):
    class Broken(nn.Module):
        def forward(self, q, k, v):
            create_block_mask(causal, None, None, 40, 40, device="cpu")
            raise ValueError("broken")

    before = patched_state()
    capture(Attention(None, causal), qkv(), strict=strict)
    assert patched_state() == before
    with pytest.raises(Exception, match="broken"):
        capture(Broken(), qkv(), strict=strict)
    assert patched_state() == before
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    assert mask.kv_num_blocks.tolist() == [[[1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1]]]


def test_capture_and_compilation_do_not_meet_in_one_process():
    """Dynamo remembers the parameters of a function that it has traced: no order of the two may matter."""

    def inlined():
        return create_block_mask(causal, None, None, 256, 256, device="cpu")

    def compiled():
        torch._dynamo.reset()  # the compiled code goes, the parameters stay
        lists = torch.compile(inlined, backend="eager", fullgraph=True)()
        assert lists.kv_num_blocks.tolist() == [[[1, 1]]]
        assert lists.full_kv_num_blocks.tolist() == [[[0, 1]]]

    for _ in range(2):
        capture(Attention(None, causal), qkv(), strict=True)
        compiled()
        capture(Attention(None, causal), qkv(), strict=False)
        compiled()
