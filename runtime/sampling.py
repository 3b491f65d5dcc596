"""Choosing the next token from logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def validate_sampling(*, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise ValueError, naming the parameter, if one is outside its range."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
            raise ValueError(f"{name} must be a number, got {value!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (the likeliest token) or more, got {temperature}")
    if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)) or top_k < 0:
        raise ValueError(f"top_k must be a whole number, 0 (all tokens) or more, got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (all tokens), got {top_p}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be 0 (all tokens) to 1, got {min_p}")


def sample(
    logits: NDArray[Any],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    generator: np.random.Generator,
) -> int:
    """Draw a token id from ``logits`` [V], which may hold -inf for tokens that must not come.

    Temperature 0 takes the largest logit (the first of equal ones). Otherwise, in this order, each on
    the distribution that the one before left: divide by ``temperature``; keep the ``top_k`` likeliest
    (0: all); keep the likeliest whose probabilities sum to ``top_p``, the one that reaches it included
    (arXiv:1904.09751); keep those at least ``min_p`` times as likely as the likeliest (arXiv:2407.01082).
    Of equally likely tokens the lower ids are kept. One number is drawn from ``generator``.
    Raises ValueError for parameters outside their ranges, and for logits with NaN, +inf or nothing
    but -inf.
    """
    validate_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = np.asarray(logits)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"logits must be one row of the vocabulary's size, got shape {scores.shape}")
    likeliest = int(np.argmax(scores))  # NaN counts as the largest
    if not np.isfinite(scores[likeliest]):
        raise ValueError(
            f"cannot choose a token: the largest logit is {scores[likeliest]} (of token {likeliest}); "
            "the model computed NaN or infinity"
        )
    if temperature == 0:
        return likeliest
    tokens, weights = _softmax_weights(scores, temperature, top_k)
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        tokens, weights = tokens[order], weights[order]
        before = np.cumsum(weights) - weights
        keep = before < top_p * weights.sum()
        keep[0] = True
        tokens, weights = tokens[keep], weights[keep]
    if min_p > 0:
        keep = weights >= min_p * weights.max()
        tokens, weights = tokens[keep], weights[keep]
    cumulative = np.cumsum(weights)
    drawn = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(tokens[min(int(drawn), tokens.size - 1)])


def _softmax_weights(
    scores: NDArray[Any], temperature: float, top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids, ascending, and exp((score - max) / temperature) of the ``top_k`` likeliest."""
    if 0 < top_k < scores.size:
        threshold = np.partition(scores, scores.size - top_k)[scores.size - top_k]
        above, equal = np.flatnonzero(scores > threshold), np.flatnonzero(scores == threshold)
        tokens = np.sort(np.concatenate([above, equal[: top_k - above.size]]))
    else:
        tokens = np.arange(scores.size)
    kept = scores[tokens].astype(np.float64)
    # A tiny temperature may overflow the quotient to -inf, whose weight is 0 as it should be.
    with np.errstate(over="ignore"):
        weights = np.exp((kept - kept.max()) / temperature)
    return tokens.astype(np.int64), weights
