"""Stock exports that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.export import Dim

from tests.runtime import stock


@pytest.fixture(scope="session")
def mlp() -> tuple[stock.Mlp, bytes]:
    torch.manual_seed(0)
    module = stock.Mlp()
    return module, stock.export_stock(module, (torch.randn(3, 16),), ({0: Dim("n", min=1, max=10)},))


@pytest.fixture(scope="session")
def counter_bytes() -> bytes:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["steps"])], emit_mutable_buffer_names=True)
    return stock.export_stock(stock.Counter(), (torch.zeros(3),), config=config)


@pytest.fixture(scope="session")
def decoder_bytes() -> bytes:
    torch.manual_seed(0)
    length = Dim("length", min=1, max=20)
    inputs = (torch.zeros(1, 5, dtype=torch.long), torch.arange(5))
    return stock.export_stock(stock.Decoder(), inputs, ({1: length}, {0: length}))


@pytest.fixture(scope="session")
def mlp_path(mlp: tuple[stock.Mlp, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mlp") / "mlp.pte"
    path.write_bytes(mlp[1])
    return path
