"""Device "metal": the code that runs on a Mac, here on a double of Metal, with whole programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import flexpte
from flexpte.exporter.language_model import export_language_model
from tests.models.tiny import random_tokens, save, transformers_model


class Scale(nn.Module):
    def forward(self, x, y):
        return x * 2 + y


def is_available() -> bool:
    result = flexpte.export(Scale(), (torch.randn(4), torch.randn(4)))
    try:
        flexpte.load(result.buffer, device="metal")
    except flexpte.FlexpteError as error:
        if error.code != "Unsupported":
            raise
        return False
    return True


@pytest.fixture(scope="module", autouse=True)
def _metal():
    if not is_available():
        pytest.skip("no device metal in this build: set FLEXPTE_METAL_CPP_DIR")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metal")
    save(transformers_model("llama"), folder / "checkpoint")
    path = folder / "model.pte"
    export_language_model(folder / "checkpoint", max_context=64, dtype="fp32").save(path)
    return path


def run(session, tokens, begin=0):
    return session.run("forward", tokens, np.arange(begin, begin + tokens.shape[1]))[0]


def test_sessions_are_reset_where_the_gpu_sees_it(model):
    tokens = random_tokens(20).numpy()
    session = flexpte.load(model, device="metal").session()
    want = run(session, tokens)
    for _ in range(3):
        session.reset()
        np.testing.assert_array_equal(run(session, tokens), want)


def test_sessions_share_weights_and_nothing_else(model):
    tokens = random_tokens(20).numpy()
    program = flexpte.load(model, device="metal")
    one, other = program.session(), program.session()
    want = run(one, tokens)
    run(other, tokens[:, ::-1].copy())
    step = tokens[:, :1]
    assert not np.array_equal(run(other, step, 20), run(one, step, 20))
    one.reset()
    np.testing.assert_array_equal(run(one, tokens), want)


def test_inputs_may_lie_anywhere():
    size = 1 << 16  # large enough for the system to map and unmap each array
    result = flexpte.export(Scale(), (torch.randn(size), torch.randn(size)))
    session = flexpte.load(result.buffer, device="metal").session()
    rng = np.random.default_rng(0)
    for _ in range(8):
        x, y = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
        (out,) = session.run("forward", x, y)
        np.testing.assert_array_equal(out, x * 2 + y)
    # Neighbours in one page, and one array twice.
    both = rng.standard_normal(2 * size).astype(np.float32)
    (out,) = session.run("forward", both[:size], both[size:])
    np.testing.assert_array_equal(out, both[:size] * 2 + both[size:])
    (out,) = session.run("forward", x, x)
    np.testing.assert_array_equal(out, x * 3)
