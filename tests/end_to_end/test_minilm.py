"""A real sentence encoder, rewritten with flex_attention and a padding mask, against transformers."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.export import Dim

import flexpte
from flexpte.models.encoder import load_encoder
from flexpte.models.fetch import fetch_minilm
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

TEXTS = [
    "A man is eating food.",
    "The quick brown fox jumps over the lazy dog, again and again, until the dog gets up and leaves.",
    "Hi",
    "Sparse attention visits only the tiles that its mask can see.",
]


@pytest.fixture(scope="module")
def folder():
    return fetch_minilm(ROOT / "models-cache")


@pytest.fixture(scope="module")
def session(folder):
    batch, length = Dim("batch", min=1, max=8), Dim("length", min=1, max=512)
    shapes = {"tokens": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    example = (torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64))
    result = flexpte.export(load_encoder(folder), example, shapes)
    assert len(result.report.attentions) == 6
    assert not result.report.refusals
    return flexpte.load(result.buffer).session()


def encoded(folder, texts):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(texts)
    return torch.tensor([e.ids for e in encodings]), torch.tensor([e.attention_mask for e in encodings])


def reference(folder, tokens, attention_mask):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(input_ids=tokens, attention_mask=attention_mask).last_hidden_state
    weights = attention_mask.unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[2:3], [" ".join(TEXTS[1:2] * 12)]], ids=["padded", "short", "long"])
def test_embeddings_equal_transformers(texts, folder, session):
    tokens, attention_mask = encoded(folder, texts)
    (got,) = session.run("forward", tokens, attention_mask)
    want = reference(folder, tokens, attention_mask)
    cosine = (got.double() * want.double()).sum(-1)
    assert (1 - cosine).abs().max() <= 1e-5
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_padding_does_not_change_an_embedding(folder, session):
    tokens, attention_mask = encoded(folder, TEXTS)
    (together,) = session.run("forward", tokens, attention_mask)
    alone = [session.run("forward", *encoded(folder, [text]))[0] for text in TEXTS]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)
