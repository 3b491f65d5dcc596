"""Malformed files: one clear error each, and never a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flexpte
from tests.runtime import stock

WORKER = Path(__file__).parent / "fuzz_worker.py"


def fuzz(path: Path, kind: str, count: int) -> tuple[int, int]:
    """Runs mutations 0..count in a process of its own: (refused, tried)."""
    result = subprocess.run(
        [sys.executable, str(WORKER), str(path), kind, "0", str(count)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=path.parent,
        check=False,
    )
    lines = result.stdout.split("\n")
    assert result.returncode == 0, f"mutation {lines[-2] if len(lines) > 1 else '?'}: {result.stderr[-2000:]}"
    _, refused, tried = lines[-2].split()
    return int(refused), int(tried)


@pytest.fixture(scope="module")
def decoder_path(decoder_bytes: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder") / "decoder.pte"
    path.write_bytes(decoder_bytes)
    return path


@pytest.fixture(scope="module")
def counter_path(counter_bytes: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counter") / "counter.pte"
    path.write_bytes(counter_bytes)
    return path


@pytest.mark.parametrize("kind", ["byte", "word"])
@pytest.mark.parametrize("model", ["mlp_path", "counter_path"])
def test_mutated_small_files(model: str, kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    size = path.stat().st_size
    refused, tried = fuzz(path, kind, size if kind == "byte" else size // 4)
    assert tried > 500
    assert refused > tried // 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "word"])
def test_mutated_decoder(decoder_path: Path, kind: str) -> None:
    size = decoder_path.stat().st_size
    refused, tried = fuzz(decoder_path, kind, size if kind == "byte" else size // 4)
    assert refused > tried // 20


def test_every_truncation_is_refused(counter_path: Path) -> None:
    size = counter_path.stat().st_size
    refused, tried = fuzz(counter_path, "cut", size - 64)
    assert refused == tried


def test_wrong_magic(mlp: tuple[stock.Mlp, bytes]) -> None:
    data = bytearray(mlp[1])
    data[4:8] = b"ET99"
    with pytest.raises(flexpte.FlexpteError, match="'ET99', expected 'ET12'") as error:
        flexpte.load(bytes(data))
    assert error.value.code == "InvalidProgram"


@pytest.mark.parametrize("data", [b"", b"ET12", b"\0" * 11, b"not a program at all, just text"])
def test_no_program(data: bytes) -> None:
    with pytest.raises(flexpte.FlexpteError, match=r"not a \.pte file") as error:
        flexpte.load(data)
    assert error.value.code == "InvalidProgram"


def test_missing_file_folder_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(flexpte.FlexpteError, match=r"missing\.pte.*No such file") as error:
        flexpte.load(tmp_path / "missing.pte")
    assert error.value.code == "Io"
    with pytest.raises(flexpte.FlexpteError, match="is not a file"):
        flexpte.load(tmp_path)
    (tmp_path / "empty.pte").touch()
    with pytest.raises(flexpte.FlexpteError, match="0 bytes are too few"):
        flexpte.load(tmp_path / "empty.pte")


def test_unknown_operators_are_all_named() -> None:
    class Unusual(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cdist(x, x), torch.nn.functional.conv1d(x[None], x[:, :, None])

    data = stock.export_stock(Unusual(), (torch.randn(4, 4),))
    with pytest.raises(flexpte.FlexpteError, match=r"(?=.*_cdist_forward)(?=.*convolution).*") as error:
        flexpte.load(data)
    assert error.value.code == "Unsupported"


def test_unknown_delegate_is_named_with_those_available(tmp_path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    module = stock.Mlp().eval().requires_grad_(False)
    edge = to_edge_transform_and_lower(
        torch.export.export(module, (torch.randn(3, 16),)), partitioner=[XnnpackPartitioner()]
    )
    data = bytes(edge.to_executorch().buffer)
    assert b"XnnpackBackend" in data
    with pytest.raises(flexpte.FlexpteError, match="'XnnpackBackend'; available here: FlexpteBackend") as error:
        flexpte.load(data)
    assert error.value.code == "NotFound"


def test_path_and_bytes_give_the_same(mlp: tuple[stock.Mlp, bytes], mlp_path: Path) -> None:
    x = torch.randn(3, 16)
    outputs = [
        flexpte.load(source).session().run("forward", x)[0]
        for source in (mlp_path, str(mlp_path), mlp[1], bytearray(mlp[1]), memoryview(mlp[1]))
    ]
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0], rtol=0, atol=0)
