"""What Session.run takes and gives, and how it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flexpte
from tests.runtime import stock

X = np.arange(48, dtype=np.float32).reshape(3, 16) / 48


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def doubled(example: Tensor) -> flexpte.Session:
    return flexpte.load(stock.export_stock(Identity(), (example,))).session()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "takes 1 inputs, got 0"),
        ((X, X), "takes 1 inputs, got 2"),
        ((X[0],), r"float32 \[16\], expected at most float32 \[10, 16\]"),
        ((X[:, :8],), r"\[3, 8\]"),
        ((np.zeros((11, 16), np.float32),), r"\[11, 16\], expected at most"),
        ((X.astype(np.float64),), "float64"),
        ((X.astype(np.int64),), "int64"),
        ((1.0,), "is float, expected at most float32"),
        ((None,), "is none, expected"),
        ((np.zeros((3, 16), np.complex64),), "complex64, which is not supported"),
        ((np.array(["text"]),), "not supported"),
    ],
)
def test_wrong_inputs(mlp: tuple[stock.Mlp, bytes], inputs: tuple[Any, ...], message: str) -> None:
    session = flexpte.load(mlp[1]).session()
    with pytest.raises(flexpte.FlexpteError, match=message) as error:
        session.run("forward", *inputs)
    assert error.value.code == "InvalidArgument"
    session.run("forward", X)


def test_unknown_method_names_those_there_are(mlp: tuple[stock.Mlp, bytes]) -> None:
    with pytest.raises(flexpte.FlexpteError, match="no method 'decode'; the program has 'forward'") as error:
        flexpte.load(mlp[1]).session().run("decode", X)
    assert error.value.code == "NotFound"


@pytest.mark.parametrize(
    "view",
    [
        np.asfortranarray(X),
        np.ascontiguousarray(X[::-1])[::-1],
        np.repeat(X, 2, axis=1)[:, ::2],
        np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 16),
        X.astype(">f4"),
    ],
    ids=["fortran", "negative strides", "every second column", "misaligned", "big-endian"],
)
def test_numpy_arrays_of_any_layout(mlp: tuple[stock.Mlp, bytes], view: np.ndarray) -> None:
    session = flexpte.load(mlp[1]).session()
    np.testing.assert_array_equal(view.astype(np.float32), X)
    np.testing.assert_array_equal(session.run("forward", view)[0], session.run("forward", X)[0])


def test_torch_tensors_of_any_layout() -> None:
    x = torch.randn(2, 3, 4, 5)
    session = doubled(x)
    for view in (
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(0, 3).contiguous().transpose(0, 3),
        x.clone().requires_grad_(),
    ):
        (out,) = session.run("forward", view)
        torch.testing.assert_close(out, 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(1, 7).reshape(2, 3).to(dtype)
    (out,) = doubled(x).run("forward", x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, x + x)


def test_bfloat16_comes_back_as_float32_without_torch_inputs() -> None:
    x = torch.tensor([[1.5, -2.25]], dtype=torch.bfloat16)
    import ml_dtypes

    (out,) = doubled(x).run("forward", x.float().numpy().astype(ml_dtypes.bfloat16))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [[3.0, -4.5]])


def test_empty_and_scalar_tensors() -> None:
    for x in (torch.zeros(0, 3), torch.tensor(2.5)):
        (out,) = doubled(x).run("forward", x)
        torch.testing.assert_close(out, x + x)


def test_methods_and_report(mlp: tuple[stock.Mlp, bytes]) -> None:
    program = flexpte.load(mlp[1])
    forward = program.methods["forward"]
    assert [(v.kind, v.dtype, v.shape, v.dynamic) for v in forward.inputs] == [("tensor", "float32", (10, 16), True)]
    assert forward.outputs[0].shape == (10, 8)
    report = program.report
    assert report["file"]["file_size_bytes"] == len(mlp[1])
    assert report["methods"]["forward"]["operators"]["aten::addmm.out"] == 2
    assert report["methods"]["forward"]["delegates"] == []
    assert program.metadata == {}


def test_an_unknown_device_is_named(mlp: tuple[stock.Mlp, bytes]) -> None:
    with pytest.raises(flexpte.FlexpteError, match=r"'gpu'; there are auto, host, msl-host, metal") as error:
        flexpte.load(mlp[1], device="gpu")
    assert error.value.code == "InvalidArgument"


def test_files_without_delegated_regions_load_for_any_device(mlp: tuple[stock.Mlp, bytes]) -> None:
    for device in ("auto", "host", "msl-host", "metal"):
        assert flexpte.load(mlp[1], device=device).methods
