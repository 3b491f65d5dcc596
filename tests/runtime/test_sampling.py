"""Sampling against a plain oracle, and its statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexpte.runtime.sampling import sample, validate_sampling

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Probability of every token that may come, one rule after the other, in plain Python."""
    largest = max(float(x) for x in logits)
    weight = {i: math.exp((float(x) - largest) / temperature) for i, x in enumerate(logits) if x != -math.inf}
    ranked = sorted(weight, key=lambda i: (-weight[i], i))
    if top_k:
        ranked = ranked[:top_k]
    total = sum(weight[i] for i in ranked)
    nucleus, reached = [], 0.0
    for i in ranked:
        nucleus.append(i)
        reached += weight[i] / total
        if top_p < 1 and reached >= top_p:
            break
    kept = [i for i in nucleus if weight[i] >= min_p * weight[nucleus[0]]]
    total = sum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 12},
        {"top_k": 100},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.85, "min_p": 0.1},
    ],
    ids=str,
)
def test_frequencies_match_the_distribution(options: dict[str, float]) -> None:
    logits = np.random.default_rng(7).normal(size=12).astype(np.float32) * 1.5
    logits[4] = -np.inf
    options = {**OFF, **options}
    expected = distribution(logits, **options)
    generator, draws = np.random.default_rng(1), 6000
    counts = np.zeros(12)
    for _ in range(draws):
        counts[sample(logits, generator=generator, **options)] += 1
    assert set(np.flatnonzero(counts)) <= set(expected)
    for token, probability in expected.items():
        # Five standard deviations of the binomial distribution.
        assert abs(counts[token] / draws - probability) <= 5 * math.sqrt(probability * (1 - probability) / draws) + 1e-9


def test_temperature_zero_is_greedy_and_takes_the_first_of_equals() -> None:
    logits = np.array([0.0, 2.0, -1.0, 2.0], np.float32)
    assert sample(logits, generator=np.random.default_rng(0), **{**OFF, "temperature": 0.0}) == 1


def test_equal_logits_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = np.array([1.0, 3.0, 1.0, 1.0, 1.0], np.float32)
    generator = np.random.default_rng(0)
    drawn = {sample(logits, generator=generator, **{**OFF, "top_k": 3}) for _ in range(500)}
    assert drawn == {0, 1, 2}


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)

    def tokens(seed: int) -> list[int]:
        generator = np.random.default_rng(seed)
        return [sample(logits, generator=generator, **OFF) for _ in range(20)]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_extreme_values_do_not_overflow() -> None:
    logits = np.array([3e38, -3e38, 2.9e38], np.float32)
    for temperature in (1e-30, 1e30):
        assert sample(logits, generator=np.random.default_rng(0), **{**OFF, "temperature": temperature}) in (
            0,
            1,
            2,
        )
    assert sample(logits, generator=np.random.default_rng(0), **{**OFF, "temperature": 1e-30}) == 0


def test_one_token_vocabulary() -> None:
    assert sample(np.zeros(1, np.float32), generator=np.random.default_rng(0), **OFF) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(ValueError, match=r"the largest logit is (nan|inf) \(of token 1\)"):
        sample(logits, generator=np.random.default_rng(0), **{**OFF, "temperature": temperature})


def test_nothing_allowed_is_an_error() -> None:
    with pytest.raises(ValueError, match="-inf"):
        sample(np.full(4, -np.inf, np.float32), generator=np.random.default_rng(0), **OFF)


@pytest.mark.parametrize("shape", [(0,), (1, 4)])
def test_logits_are_one_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one row"):
        sample(np.zeros(shape, np.float32), generator=np.random.default_rng(0), **OFF)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", None),
    ],
)
def test_parameters_outside_their_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        validate_sampling(**{**OFF, name: value})  # type: ignore[arg-type]
