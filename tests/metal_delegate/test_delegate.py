"""The delegate behind the public API: lengths, states, errors, the profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexpte

from .cached_attention import CAPACITY, CachedAttention, call, export


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CachedAttention]:
    path = tmp_path_factory.mktemp("delegate") / "m.pte"
    return path, export(path)


@pytest.fixture
def reference(exported: tuple[Path, CachedAttention]) -> torch.Tensor:
    with torch.no_grad():
        return CachedAttention().eval()(*call(0, CAPACITY))


@pytest.mark.parametrize("chunks", [[CAPACITY], [1] * CAPACITY, [CAPACITY - 1, 1], [7, 1, 16, 8]])
def test_any_chunks_give_the_rows_of_one_call(exported, reference, chunks):
    session, first = flexpte.load(exported[0]).session(), 0
    for count in chunks:
        (rows,) = session.run("forward", *call(first, count))
        assert rows.shape == (1, count, 32)
        torch.testing.assert_close(rows, reference[:, first : first + count], atol=1e-5, rtol=1e-5)
        first += count


def test_everything_is_one_delegate_call(exported):
    report = flexpte.load(exported[0]).report["methods"]["forward"]
    assert report["delegate_calls"] == 1
    assert report["operators"] == {}
    description = report["delegates"][0]["description"]
    assert description["instructions"]["FlexAttention"] == 1
    assert {state["name"] for state in description["states"]} == {"k_cache", "v_cache"}


def test_a_step_past_the_capacity_changes_nothing(exported, reference):
    session = flexpte.load(exported[0]).session()
    session.run("forward", *call(0, CAPACITY - 1))
    tokens, _ = call(0, 2, seed=9)
    with pytest.raises(
        flexpte.FlexpteError, match=f"position {CAPACITY} is past the capacity {CAPACITY} of cache k_cache"
    ) as error:
        session.run("forward", tokens, torch.tensor([0, CAPACITY]))
    assert error.value.code == "OutOfRange"
    (row,) = session.run("forward", *call(CAPACITY - 1, 1))
    torch.testing.assert_close(row, reference[:, -1:], atol=1e-5, rtol=1e-5)


def test_a_token_outside_the_vocabulary_is_an_error(exported):
    session = flexpte.load(exported[0]).session()
    with pytest.raises(flexpte.FlexpteError) as error:
        session.run("forward", torch.tensor([[50]]), torch.tensor([0]))
    assert error.value.code == "OutOfRange"


def test_inputs_that_disagree_are_named(exported):
    session = flexpte.load(exported[0]).session()
    with pytest.raises(
        flexpte.FlexpteError,
        match=r"input 1 has the shape \[2\]: dimension 0 is 2, and the other inputs give 3",
    ):
        session.run("forward", call(0, 3)[0], torch.arange(2))


def test_sessions_do_not_share_states(exported, reference):
    program = flexpte.load(exported[0])
    first, second = program.session(), program.session()
    first.run("forward", *call(0, 5))
    second.run("forward", *call(0, 5, seed=3))
    (rows,) = first.run("forward", *call(5, 4))
    torch.testing.assert_close(rows, reference[:, 5:9], atol=1e-5, rtol=1e-5)


def test_the_profile_prints_every_kind(exported):
    script = (
        "import sys, numpy as np, flexpte\n"
        "session = flexpte.load(sys.argv[1]).session()\n"
        "session.run('forward', np.zeros((1, 2), np.int64), np.arange(2))\n"
        "del session\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(exported[0])],
        env={**os.environ, "FLEXPTE_PROFILE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "flexpte profile: 1 calls" in run.stderr
    for kind in ("Linear", "Gather", "IndexCopy", "FlexAttention"):
        assert kind in run.stderr
