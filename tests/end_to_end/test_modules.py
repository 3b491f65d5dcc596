"""Ordinary modules around (and without) flex_attention: export, load, run, compare with eager."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import flexpte


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def flat(outputs):
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    return tuple(outputs.values() if isinstance(outputs, dict) else outputs)


def check(module, *calls, dynamic_shapes=None, tolerance=1e-4, **options):
    """The first call is the example; returns the session."""
    result = flexpte.export(module, calls[0], dynamic_shapes, **options)
    session = flexpte.load(result.buffer).session()
    for inputs in calls:
        with torch.no_grad():
            want = flat(module(*inputs))
        got = session.run("forward", *inputs)
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            torch.testing.assert_close(g, w, atol=tolerance, rtol=tolerance)
    return session


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_attention(query, key, value):
    block_mask = create_block_mask(causal, None, None, query.shape[2], key.shape[2], device="cpu")
    return flex_attention(query, key, value, block_mask=block_mask)


class Causal(nn.Module):
    def forward(self, query, key, value):
        return causal_attention(query, key, value)


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 70, 32) for _ in range(3))


class CrossAttentionBlock(nn.Module):
    """Pre-norm block with learned positions, biases, GELU and padding-masked cross-attention."""

    def __init__(self, dim=64, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.positions = nn.Parameter(torch.randn(128, dim))
        self.register_buffer("scale", torch.tensor(0.5))

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def forward(self, x, context, lengths):
        x = x + self.positions[: x.shape[1]]

        def not_padding(b, h, q_idx, kv_idx):
            return kv_idx < lengths[b]

        block_mask = create_block_mask(not_padding, x.shape[0], None, x.shape[1], context.shape[1], device="cpu")
        query, key, value = self.query(self.norm1(x)), self.key(context), self.value(context)
        attended = flex_attention(self.heads(query), self.heads(key), self.heads(value), block_mask=block_mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return {"pooled": x.mean(1), "tokens": x * self.scale}


@pytest.mark.parametrize("delegate", ["full", "attention"])
def test_cross_attention_block_of_any_lengths_and_batch(delegate):
    torch.manual_seed(0)
    batch, length, context = Dim("batch", min=1, max=8), Dim("length", min=1, max=100), Dim("context", min=1, max=90)

    def inputs(batch_size, q_len, kv_len):
        lengths = torch.randint(1, kv_len + 1, (batch_size,))
        return torch.randn(batch_size, q_len, 64), torch.randn(batch_size, kv_len, 64), lengths

    check(
        CrossAttentionBlock().eval(),
        inputs(2, 20, 33),
        inputs(1, 1, 1),
        inputs(8, 100, 90),
        inputs(5, 7, 64),
        dynamic_shapes={"x": {0: batch, 1: length}, "context": {0: batch, 1: context}, "lengths": {0: batch}},
        delegate=delegate,
    )


class VisionTransformer(nn.Module):
    """Patch embedding, class token, learned positions, one pre-norm block in which patches see their neighbours."""

    def __init__(self, dim=48, num_heads=3, patch=4, grid=8):
        super().__init__()
        self.num_heads, self.grid = num_heads, grid
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, grid * grid + 1, dim))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out, self.classes = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 10)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        grid = self.grid

        def near(b, h, q_idx, kv_idx):
            q, kv = q_idx - 1, kv_idx - 1
            is_near = ((q // grid - kv // grid).abs() <= 2) & ((q % grid - kv % grid).abs() <= 2)
            return (q_idx == 0) | (kv_idx == 0) | is_near

        block_mask = create_block_mask(near, None, None, x.shape[1], x.shape[1], device="cpu")
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = flex_attention(query, key, value, block_mask=block_mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.classes(self.norm3(x[:, 0]))


@pytest.mark.parametrize("size", [32, 34])
def test_vision_transformer_with_a_neighbourhood_mask(size):
    torch.manual_seed(0)
    check(VisionTransformer().eval(), (torch.randn(2, 3, size, size),))


def test_convolutions_whose_patches_do_not_overlap():
    torch.manual_seed(0)
    check(nn.Conv1d(6, 5, 1), (torch.randn(2, 6, 9),))
    check(nn.Conv1d(6, 5, 4, stride=4, bias=False), (torch.randn(2, 6, 11),))
    check(nn.Conv3d(2, 7, (1, 2, 3), stride=(1, 2, 3)), (torch.randn(1, 2, 3, 4, 6),))


class LocalAndGlobal(nn.Module):
    """Layers as ModernBERT has them: every third sees all tokens, the others 8 to either side; rotary, gated GELU."""

    def __init__(self, num_layers=4, dim=64, num_heads=4, window_tokens=8):
        super().__init__()
        self.num_heads, self.window_tokens = num_heads, window_tokens
        self.embedding = nn.Embedding(100, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(2 * num_layers))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(num_layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim, bias=False) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(2 * dim, dim, bias=False) for _ in range(num_layers))

    def rotate(self, x, base):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, tokens, lengths):
        x = self.embedding(tokens)
        count = x.shape[1]

        def everywhere(b, h, q_idx, kv_idx):
            return kv_idx < lengths[b]

        def nearby(b, h, q_idx, kv_idx):
            return (kv_idx < lengths[b]) & ((q_idx - kv_idx).abs() <= self.window_tokens)

        masks = [create_block_mask(m, x.shape[0], None, count, count, device="cpu") for m in (everywhere, nearby)]
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            is_local = i % 3 != 0
            query, key, value = qkv(self.norms[2 * i](x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            base = 1e4 if is_local else 1.6e5
            attended = flex_attention(
                self.rotate(query, base), self.rotate(key, base), value, block_mask=masks[is_local]
            )
            x = x + out(attended.transpose(1, 2).flatten(2))
            value, gate = up(self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + down(nn.functional.gelu(value) * gate)
        is_token = (torch.arange(count) < lengths[:, None]).to(x.dtype).unsqueeze(-1)
        return (x * is_token).sum(1) / is_token.sum(1)


def test_local_and_global_layers_alternate():
    torch.manual_seed(0)
    batch, length = Dim("batch", min=1, max=4), Dim("length", min=1, max=200)

    def inputs(batch_size, count):
        return torch.randint(0, 100, (batch_size, count)), torch.randint(1, count + 1, (batch_size,))

    check(
        LocalAndGlobal().eval(),
        inputs(2, 30),
        inputs(1, 1),
        inputs(4, 200),
        inputs(3, 65),
        dynamic_shapes={"tokens": {0: batch, 1: length}, "lengths": {0: batch}},
    )


@pytest.mark.parametrize("delegate", ["full", "none"])
def test_modules_without_attention(delegate):
    module = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Softmax(-1))
    check(module, (torch.randn(3, 8),), delegate=delegate)


@pytest.mark.parametrize("delegate", ["full", "none"])
def test_attention_written_out_or_by_sdpa(delegate, qkv):
    def both(query, key, value):
        written = torch.softmax(query @ key.transpose(-1, -2) * 0.2, -1) @ value
        return written, nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    check(Function(both), qkv, delegate=delegate)


def test_several_attentions_with_different_mods(qkv):
    def three(query, key, value):
        biased = flex_attention(query, key, value, score_mod=lambda s, b, h, q, kv: s + (q - kv) * 0.1)
        return flex_attention(query, key, value), causal_attention(query, key, value), biased

    check(Function(three), qkv)


def test_log_sum_exp_by_both_spellings(qkv):
    def both(query, key, value):
        out, lse = flex_attention(query, key, value, return_lse=True)
        _, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
        return out, lse, aux.lse

    check(Function(both), qkv)


@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_held_by_the_module(strict, qkv):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = create_block_mask(causal, None, None, 70, 70, device="cpu")

        def forward(self, query, key, value):
            return flex_attention(query, key, value, block_mask=self.mask)

    check(Held(), qkv, strict=strict)


def test_an_explicit_cast_to_half_rounds_though_fused():
    x = torch.randn(50)
    check(Function(lambda a: (a.half().float() * 3 + 1, a.bfloat16().float() - a)), (x,), tolerance=0)


def test_outputs_may_be_inputs_repeated_and_named_tuples():
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    check(Function(lambda a, b: (a, b + 1, a)), (x, y))
    check(Function(lambda a: a.max(-1)), (x,))
    check(Function(lambda a: a.topk(2)), (x,))


def test_statistics_and_norms():
    def statistics(a):
        return a.var(-1), a.std(0), a.norm(dim=-1), nn.functional.normalize(a, dim=-1), *torch.var_mean(a, 1)

    check(Function(statistics), (torch.randn(5, 3),))


def test_python_numbers_are_inputs():
    check(Function(lambda a, n: a * n), (torch.randn(3), 2))


def test_no_query_gives_an_empty_result(qkv):
    query, key, value = qkv
    length = Dim("length", min=0, max=70)
    check(
        Causal(),
        (query[:, :, :5], key, value),
        (query[:, :, :0], key, value),
        (query[:, :, :1], key, value),
        dynamic_shapes=({2: length}, None, None),
    )


def test_buffers_start_from_their_values_and_the_module_stays_as_it_was():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.tensor([3.0]))
            self.register_buffer("total", torch.ones(4))

        def forward(self, x):
            self.steps.add_(1)
            self.total.mul_(2).add_(x)
            return self.total * self.steps

    module, x = Counter(), torch.ones(4)
    session = flexpte.load(flexpte.export(module, (x,)).buffer).session()
    assert module.steps.item() == 3
    first = [session.run("forward", x)[0] for _ in range(3)]
    for got in first:
        torch.testing.assert_close(got, module(x))
    session.reset()
    torch.testing.assert_close(session.run("forward", x)[0], first[0])


def test_threads_with_their_own_sessions_and_with_one(qkv):
    query, key, value = qkv
    program = flexpte.load(flexpte.export(Causal(), qkv).buffer)
    shared, wrong = program.session(), []

    def work(number):
        own = program.session()
        want = causal_attention(query * number, key, value)
        for session in (own, shared) * 5:
            (got,) = session.run("forward", query * number, key, value)
            if not torch.allclose(got, want, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("export", "error", "words"),
    [
        (lambda x: flexpte.export(lambda a: a, (x,)), TypeError, "nn.Module"),
        (lambda x: flexpte.export(Function(lambda a: a + 1), [x]), TypeError, "tuple"),
        (lambda x: flexpte.export(Function(lambda a: a + 1), (x,), delegate="all"), ValueError, "'full'"),
        (lambda x: flexpte.export(Function(lambda a: None), (x,)), flexpte.Unsupported, "returns no tensor"),
        (lambda x: flexpte.export(Causal(), (x.double(),) * 3), flexpte.Unsupported, "float64"),
        (lambda x: flexpte.export(Causal(), (x,) * 3, delegate="none"), flexpte.Unsupported, "delegate"),
        (lambda x: flexpte.export(Causal(), (x,) * 3, ({2: Dim.AUTO},) * 3), flexpte.Unsupported, "upper bound"),
        (lambda x: flexpte.export(Causal(), (x,) * 3, kv_dtype="int8"), flexpte.Unsupported, "kv_dtype"),
    ],
)
def test_what_cannot_be_exported_is_one_clear_error(export, error, words):
    with pytest.raises(error, match=words):
        export(torch.randn(1, 2, 8, 16))


def test_operators_that_the_runtime_lacks_are_named_though_they_have_several_results():
    result = flexpte.export(Function(lambda a: (a.cumsum(0) + 1, a.sort().values * 2)), (torch.randn(5),))
    with pytest.raises(flexpte.FlexpteError, match="sort"):
        flexpte.load(result.buffer)
