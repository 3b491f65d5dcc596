"""What is delegated: asserted, not assumed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from flexpte.exporter import ir
from flexpte.exporter.errors import Unsupported
from flexpte.models.config import DecoderConfig, LayerConfig, Rotary
from flexpte.models.decoder import Decoder, example_inputs_and_dynamic_shapes
from tests.exporter.lowering_helpers import interpreter, partitioned

CAPACITY = 24
CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    activation="silu",
    attention_scale=8**-0.5,
    layers=(LayerConfig(Rotary(1e4, 8)), LayerConfig(Rotary(1e4, 8), 5)),
    tie_word_embeddings=True,
)
VARIANTS = {
    "llama": CONFIG,
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, qkv_bias=True),
    "gemma3": dataclasses.replace(
        CONFIG,
        activation="gelu_tanh",
        post_norms=True,
        qk_norm=True,
        embedding_scale=5.5,
        attention_softcap=20.0,
        logit_softcap=30.0,
        norm_weight_offset=1.0,
    ),
}


def decoder(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config, CAPACITY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoder_is_one_delegate_call_and_equals_eager(name: str) -> None:
    model = decoder(VARIANTS[name])
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    parts = partitioned(model, inputs, shapes)
    assert not parts.refusals
    assert len(parts.regions) == 1
    region = parts.regions[0].region
    kinds = [type(i.op) for i in region.instructions]
    assert kinds.count(ir.FlexAttention) == 2
    assert kinds.count(ir.IndexCopy) == 4
    assert len(region.states) == 4
    runner = interpreter(parts)
    names = [n.name for n in parts.regions[0].inputs]
    start = 0
    for count in (7, 1, 1, 9, 1):
        arguments = {
            "tokens": torch.randint(0, 61, (1, count)),
            "input_pos": torch.arange(start, start + count),
        }
        with torch.no_grad():
            expected = model(**arguments)
        (logits,) = runner.run(*(arguments[n] for n in names))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        start += count


def test_a_decoder_layer_is_few_instructions() -> None:
    """Rotary embedding goes straight into halves, activations and residuals are fused, nothing is copied."""
    model = decoder(CONFIG)
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    instructions = partitioned(model, inputs, shapes).regions[0].region.instructions
    for i in instructions:
        if isinstance(i.op, ir.Elementwise):
            assert len(i.op.expression.nodes) > 1, f"{i.name} only copies"
    # 2 norms, 7 linears, rotary 2 x 2 halves, 2 cache updates, attention, activation, 2 residuals
    assert len(instructions) <= 2 * 19 + 8


def test_attention_mode_takes_cache_updates_and_attention_only() -> None:
    model = decoder(CONFIG)
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    parts = partitioned(model, inputs, shapes, "attention")
    assert len(parts.regions) == 2
    for lowered in parts.regions:
        kinds = [type(i.op) for i in lowered.region.instructions]
        assert kinds.count(ir.IndexCopy) == 2
        assert kinds.count(ir.FlexAttention) == 1
        assert not any(k in kinds for k in (ir.Linear, ir.RmsNorm))
        assert len(lowered.region.states) == 2
    assert all("attention" in r.reason for r in parts.refusals)


def test_none_delegates_nothing() -> None:
    parts = partitioned(nn.Linear(3, 4), (torch.randn(2, 3),), mode="none")
    assert not parts.regions
    assert parts.refusals


class Refused(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q.double(), q.double(), q.double()).float()


def test_attention_that_cannot_be_delegated_is_an_error() -> None:
    with pytest.raises(Unsupported, match=r"flex_attention.*float64"):
        partitioned(Refused(), (torch.randn(1, 2, 4, 8),))


def test_attention_with_nothing_delegated_is_an_error() -> None:
    model = decoder(CONFIG)
    inputs, shapes = example_inputs_and_dynamic_shapes(model.config, CAPACITY)
    with pytest.raises(Unsupported, match="Nothing else can run it"):
        partitioned(model, inputs, shapes, "none")


class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        return (y.cumsum(-1) + y).tanh()


def test_an_unknown_operator_splits_the_graph_in_two_regions() -> None:
    parts = partitioned(Split(), (torch.randn(2, 3),))
    assert len(parts.regions) == 2
    assert [r.operator for r in parts.refusals] == ["aten.cumsum.default"]
    assert parts.levels[parts.regions[0].nodes[0]] < parts.levels[parts.regions[1].nodes[0]]


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, pos, x)
        return self.cache.cumsum(0)


def test_a_buffer_that_others_read_stays_with_the_runtime() -> None:
    parts = partitioned(TwoReaders(), (torch.randn(2, 3), torch.arange(2)))
    assert not parts.owned
    assert {r.operator for r in parts.refusals} >= {"aten.cumsum.default"}
