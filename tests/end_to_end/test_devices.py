"""Language models on every device: the same tokens, logits as near as rounding allows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import flexpte
from flexpte.exporter import pack
from flexpte.exporter.api import export
from flexpte.exporter.language_model import export_language_model
from flexpte.exporter.msl_library import MetalLibrary
from flexpte.models.checkpoints import load_checkpoint
from flexpte.models.decoder import example_inputs_and_dynamic_shapes
from tests.devices import GPU_DEVICES
from tests.models.tiny import random_tokens, save, transformers_model

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


def greedy(path, device, prompt, steps):
    """(logits of each step, tokens): the prompt in one call, then one token after the other."""
    session = flexpte.load(path, device=device).session()
    rows, tokens, begin, step = [], [], 0, np.asarray(prompt)[None]
    for _ in range(steps):
        (out,) = session.run("forward", step, np.arange(begin, begin + step.shape[1]))
        rows.append(out[0, -1].astype(np.float32))
        tokens.append(int(rows[-1].argmax()))
        begin, step = begin + step.shape[1], np.array([[tokens[-1]]])
    return np.stack(rows), tokens


def assert_equal_to_host(path, device, prompt, steps, tolerance):
    want, tokens = greedy(path, "host", prompt, steps)
    got, others = greedy(path, device, prompt, steps)
    assert others == tokens
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("device", GPU_DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tiny_models_of_every_family(family, dtype, device, tmp_path):
    save(transformers_model(family), tmp_path / "checkpoint")
    path = tmp_path / "model.pte"
    export_language_model(tmp_path / "checkpoint", max_context=64, dtype=dtype).save(path)
    prompt = random_tokens(11)[0].tolist()
    want, _ = greedy(path, "host", prompt, 6)
    got, _ = greedy(path, device, prompt, 1)
    assert np.abs(got[0] - want[0]).max() <= TOLERANCE[dtype] * np.abs(want).max()
    if dtype == "fp32":
        assert_equal_to_host(path, device, prompt, 6, TOLERANCE[dtype])


@pytest.mark.parametrize("device", GPU_DEVICES)
def test_two_layers_of_the_real_model(device, smollm2_gguf, tmp_path):
    model = load_checkpoint(smollm2_gguf, torch.float32)
    decoder = model.decoder(64, logits="last")
    decoder.config = dataclasses.replace(decoder.config, layers=decoder.config.layers[:2])
    decoder.layers = nn.ModuleList(decoder.layers[:2])
    inputs, dynamic_shapes = example_inputs_and_dynamic_shapes(decoder.config, 64)
    path = tmp_path / "two.pte"
    export(decoder, inputs, dynamic_shapes).save(path)
    assert_equal_to_host(path, device, [504, 1194, 282, 4649, 314, 253, 1194], 6, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("device", GPU_DEVICES)
def test_the_whole_real_model(device, smollm2_pte, monkeypatch):
    monkeypatch.setenv("FLEXPTE_MSL_CHECKS", "0")
    assert_equal_to_host(smollm2_pte(), device, [504, 3575, 282, 4649, 314], 8, 1e-4)


@pytest.mark.parametrize("device", GPU_DEVICES)
def test_a_position_past_the_context_changes_nothing(device, tmp_path):
    save(transformers_model("llama"), tmp_path / "checkpoint")
    path = tmp_path / "model.pte"
    export_language_model(tmp_path / "checkpoint", max_context=16).save(path)
    session = flexpte.load(path, device=device).session()
    session.run("forward", np.zeros((1, 10), np.int64), np.arange(10))
    with pytest.raises(flexpte.FlexpteError, match="past the capacity"):
        session.run("forward", np.zeros((1, 3), np.int64), np.arange(14, 17))
    with pytest.raises(flexpte.FlexpteError, match="outside"):
        session.run("forward", np.full((1, 1), 10**6), np.arange(10, 11))
    (got,) = session.run("forward", np.ones((1, 1), np.int64), np.arange(10, 11))
    fresh = flexpte.load(path, device=device).session()
    fresh.run("forward", np.zeros((1, 10), np.int64), np.arange(10))
    (want,) = fresh.run("forward", np.ones((1, 1), np.int64), np.arange(10, 11))
    np.testing.assert_array_equal(got, want)


class Sine(nn.Module):
    def forward(self, x):
        return (x * 2).sin()


@pytest.mark.parametrize("device", GPU_DEVICES)
def test_files_without_metal_kernels_are_refused_by_name(device, monkeypatch):
    monkeypatch.setattr(
        pack, "metal_library", lambda region: MetalLibrary("", ((),) * len(region.instructions), region.instructions)
    )
    result = flexpte.export(Sine(), (torch.randn(5),))
    with pytest.raises(flexpte.FlexpteError, match=r"Elementwise.*no Metal kernel.*host"):
        flexpte.load(result.buffer, device=device)
    assert flexpte.load(result.buffer).session().run("forward", torch.ones(5))[0][0] == torch.tensor(2.0).sin()


@pytest.mark.parametrize("device", GPU_DEVICES)
def test_kernels_of_another_version_are_refused_by_name(device, monkeypatch):
    monkeypatch.setattr(pack, "kernels_version", lambda: 999)
    result = flexpte.export(Sine(), (torch.randn(5),))
    with pytest.raises(flexpte.FlexpteError, match=r"version 999.*export the model again"):
        flexpte.load(result.buffer, device=device)
