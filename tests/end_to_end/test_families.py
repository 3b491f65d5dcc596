"""Tiny random checkpoints of every family: folder → .pte → logits, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flexpte
from flexpte.exporter.language_model import export_language_model
from tests.models.tiny import random_tokens, save, transformers_model

FAMILIES = ["llama", "mistral", "qwen3", "gemma3"]
CONTEXT = 128
TOKENS = 40


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(transformers' model, its folder); windows of 8 wrap several times in 40 tokens."""
    model = transformers_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param), max_shard_size="100KB")


def run_all(path, tokens, chunks):
    session, rows, begin = flexpte.load(path).session(), [], 0
    for n in chunks:
        (out,) = session.run("forward", tokens[:, begin : begin + n].numpy(), np.arange(begin, begin + n))
        rows.append(out[0])
        begin += n
    return np.concatenate(rows)


def reference(model, tokens, dtype=torch.float32):
    with torch.no_grad():
        return model.to(dtype)(tokens).logits[0].float().numpy()


@pytest.mark.parametrize("delegate", ["full", "attention"])
def test_logits_equal_transformers_in_prefill_and_decode(family, delegate, tmp_path):
    model, folder = family
    path = tmp_path / "model.pte"
    export_language_model(folder, max_context=CONTEXT, logits="all", delegate=delegate).save(path)
    tokens = random_tokens(TOKENS)
    want = reference(model, tokens)
    for chunks in ([TOKENS], [6, *[1] * (TOKENS - 6)], [17, 15, 1, 7]):
        assert np.abs(run_all(path, tokens, chunks) - want).max() <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_as_exact_as_transformers(family, dtype, tmp_path):
    model, folder = family
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    path = tmp_path / "model.pte"
    export_language_model(folder, max_context=CONTEXT, logits="all", dtype=dtype).save(path)
    tokens = random_tokens(TOKENS)
    exact = reference(model, tokens)
    own_error = np.abs(reference(model, tokens, torch_dtype) - exact).mean()
    model.to(torch.float32)
    error = np.abs(run_all(path, tokens, [6, *[1] * (TOKENS - 6)]).astype(np.float32) - exact).mean()
    assert error <= 1.2 * own_error


def test_the_file_tells_its_windows(family, tmp_path):
    model, folder = family
    path = tmp_path / "model.pte"
    export_language_model(folder, max_context=CONTEXT).save(path)
    metadata = flexpte.load(path).metadata
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    window = getattr(model.config, "sliding_window", None)
    if model.config.model_type == "mistral":
        types = ["sliding_attention"] * model.config.num_hidden_layers
    assert metadata["windows"] == [window if t == "sliding_attention" else None for t in types]
