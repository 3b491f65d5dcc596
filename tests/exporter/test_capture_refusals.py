"""What capture refuses: one sentence that says what, where and what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from flexpte.exporter.capture import capture
from flexpte.exporter.errors import Unsupported
from tests.exporter.test_capture import TABLE, Attention, qkv

pytestmark = pytest.mark.filterwarnings("ignore")


def test_dropout_in_training_mode_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    with pytest.raises(Unsupported, match=r"'1' would drop activations.*\.eval\(\)"):
        capture(module, (torch.zeros(1, 4),))
    capture(module.eval(), (torch.zeros(1, 4),))


def test_unsupported_mod_names_its_line():
    with pytest.raises(Unsupported, match=r"bessel_j0.*test_capture_refusals\.py:\d+"):
        capture(Attention(lambda s, b, h, i, j: torch.special.bessel_j0(s), None), qkv())


def test_max_scores_are_refused():
    class Max(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))[1].max_scores

    with pytest.raises(Unsupported, match="max_scores"):
        capture(Max(), qkv())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("mod", "what"),
    [
        (lambda s, b, h, i, j: s * s.item(), "Python number"),
        (lambda s, b, h, i, j: s * int(i), "Python number"),
        (lambda s, b, h, i, j: s * TABLE[i].item(), "Python number"),
        (lambda s, b, h, i, j: s + torch.rand(()), "random"),
        (lambda s, b, h, i, j: torch.nn.functional.dropout(s, 0.5), "random"),
        (lambda s, b, h, i, j: s + TABLE.add_(1)[i], "in place"),
        (lambda s, b, h, i, j: s + TABLE, r"shape \(40,\)"),
        (lambda s, b, h, i, j: None, "None"),
    ],
)
def test_what_no_mod_can_be_is_one_sentence_that_names_the_line(mod, what, strict):
    with pytest.raises(Unsupported, match=what) as caught:
        capture(Attention(mod, None), qkv(), strict=strict)
    message = str(caught.value)
    assert "\n" not in message
    # Dynamo gives no line of what it has made into a graph.
    assert re.search(r"test_capture_refusals\.py:\d+\. ", message) or strict


def test_dynamos_refusals_say_what_to_try():
    table = TABLE.expand(2, 40)
    module = Attention(None, lambda b, h, i, j: (table[:, j] > 0).any())
    capture(module, qkv())
    with pytest.raises(Exception, match="data-dependent") as caught:
        capture(module, qkv(), strict=True)
    assert any("strict=False" in note for note in caught.value.__notes__)
