"""Indices into captured tensors: bad ones are errors wherever a query sees the key, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexpte
from tests.conformance.oracle import assert_matches, attention
from tests.conformance.test_flex_attention import qkv
from tests.devices import DEVICES


class Table(nn.Module):
    """A score from a table of an argument's length, where the mask is causal or absent."""

    def __init__(self, is_causal, in_mask=False):
        super().__init__()
        self.is_causal, self.in_mask = is_causal, in_mask

    def forward(self, query, key, value, table):
        block_mask = None
        if self.is_causal:
            block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, query.shape[2], key.shape[2], "cpu")
        if self.in_mask:
            block_mask = create_block_mask(
                lambda b, h, q, kv: table[kv] > 0, None, None, query.shape[2], key.shape[2], "cpu"
            )
            return flex_attention(query, key, value, block_mask=block_mask)
        return flex_attention(query, key, value, lambda s, b, h, q, kv: s + table[kv], block_mask=block_mask)


def session_of(module, inputs, device):
    table = {0: torch.export.Dim("entries", min=1, max=1000)}
    return flexpte.load(flexpte.export(module, inputs, (None, None, None, table)).buffer, device=device).session()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 4, 30, 100])
@pytest.mark.parametrize("in_mask", [False, True])
def test_a_table_shorter_than_the_keys(device, q_len, in_mask):
    inputs = (*qkv(torch.float32, q_len=q_len, kv_len=150), torch.rand(150) + 0.1)
    session = session_of(Table(False, in_mask), inputs, device)
    (want,) = session.run("forward", *inputs)
    with pytest.raises(flexpte.FlexpteError, match="indexes a captured tensor outside its bounds"):
        session.run("forward", *inputs[:3], inputs[3][:149].contiguous())
    (got,) = session.run("forward", *inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len", [1, 7, 100])
def test_keys_that_no_query_sees_need_no_entry(device, q_len):
    query, key, value = qkv(torch.float32, q_len=q_len, kv_len=150)
    table = torch.randn(q_len)
    session = session_of(Table(True), (query, key, value, torch.randn(150)), device)
    (got,) = session.run("forward", query, key, value, table)
    padded = torch.cat([table, torch.zeros(150)])
    answer, _ = attention(query, key, value, lambda s, b, h, q, kv: s + padded[kv], lambda b, h, q, kv: q >= kv)
    assert_matches(got, answer, torch.float32)


class Fused(nn.Module):
    def forward(self, x, table, index):
        return x * 2 + table[index].exp()


@pytest.mark.parametrize("device", DEVICES)
def test_indices_of_fused_expressions(device):
    x, table, index = torch.randn(70), torch.randn(9), torch.arange(70) % 9
    session = flexpte.load(flexpte.export(Fused(), (x, table, index)).buffer, device=device).session()
    for bad in (9, -10, 2**40):
        wrong = index.clone()
        wrong[69] = bad
        with pytest.raises(flexpte.FlexpteError, match="outside"):
            session.run("forward", x, table, wrong)
    (got,) = session.run("forward", x, table, index - 9)
    np.testing.assert_allclose(got, Fused()(x, table, index), rtol=1e-6)
