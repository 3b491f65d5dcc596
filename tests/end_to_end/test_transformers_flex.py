"""Models of transformers with attn_implementation="flex_attention", their own mask code included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import flexpte
from tests.models.tiny import random_tokens, transformers_model


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_one_program_for_all_lengths_equals_eager_attention(family):
    model = transformers_model(family)
    model.set_attn_implementation("flex_attention")
    shapes = {"input_ids": {1: Dim("length", min=1, max=64)}}
    result = flexpte.export(Logits(model).eval(), (random_tokens(20),), shapes)
    assert len(result.report.attentions) == model.config.num_hidden_layers
    session = flexpte.load(result.buffer).session()
    reference = Logits(transformers_model(family))
    for length in (20, 64, 1, 2, 33):
        tokens = random_tokens(length, seed=length)
        (got,) = session.run("forward", tokens)
        with torch.no_grad():
            torch.testing.assert_close(got, reference(tokens), atol=1e-4, rtol=1e-4)
