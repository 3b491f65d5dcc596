"""Models exported by stock ExecuTorch give torch's answers."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import flexpte
from tests.runtime import stock

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 10])
def test_mlp(mlp: tuple[stock.Mlp, bytes], rows: int) -> None:
    module, data = mlp
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    (out,) = flexpte.load(data).session().run("forward", x)
    torch.testing.assert_close(out, module(x), **TOLERANCE)


@pytest.mark.parametrize("transform_and_lower", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_encoder(dynamic: bool, transform_and_lower: bool) -> None:
    torch.manual_seed(1)
    module = stock.Encoder()
    ids = torch.randint(0, 100, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    length = {1: Dim("length", min=2, max=64)}
    data = stock.export_stock(
        module, (ids, mask), (length, length) if dynamic else None, transform_and_lower=transform_and_lower
    )
    session = flexpte.load(data).session()
    for count in (7, 3, 2, 6) if dynamic else (7,):
        want = module(ids[:, :count], mask[:, :count])
        got = session.run("forward", ids[:, :count], mask[:, :count])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("cache", ["index_put", "index_copy", "slice"])
def test_decoder_with_cache(cache: str) -> None:
    torch.manual_seed(2)
    module = stock.Decoder(cache)
    length = Dim("length", min=1, max=20)
    inputs = (torch.zeros(1, 5, dtype=torch.long), torch.arange(5))
    session = flexpte.load(stock.export_stock(module, inputs, ({1: length}, {0: length}))).session()
    position = 0
    for count in (5, 1, 1, 3, 12, 1):
        tokens = torch.randint(0, 50, (1, count))
        input_pos = torch.arange(position, position + count)
        (got,) = session.run("forward", tokens, input_pos)
        with torch.no_grad():
            torch.testing.assert_close(got, module(tokens, input_pos), **TOLERANCE)
        position += count


def test_position_past_the_cache_is_an_error_and_leaves_the_session_usable(decoder_bytes: bytes) -> None:
    session = flexpte.load(decoder_bytes).session()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    (before,) = session.run("forward", tokens, torch.tensor([0]))
    with pytest.raises(flexpte.FlexpteError, match=r"index 24 .*size 24") as error:
        session.run("forward", tokens, torch.tensor([24]))
    assert error.value.code == "OutOfRange"
    (after,) = session.run("forward", tokens, torch.tensor([0]))
    torch.testing.assert_close(after, before)
