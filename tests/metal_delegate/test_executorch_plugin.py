"""The same file in the stock ExecuTorch runtime, one process per order of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .cached_attention import export

REGISTER = "import flexpte.executorch; flexpte.executorch.register()"
RUNTIME = "import executorch.runtime"
LLM_RUNNER = "import executorch.extension.llm.runner._llm_runner"
CUSTOM_OPS = "import executorch.extension.llm.custom_ops.custom_ops"
QUANTIZED = "import executorch.kernels.quantized"

# Compares every chunk with our own runtime.
COMPARE = """
import sys
import torch
import flexpte
from executorch.runtime import Runtime

assert Runtime.get().backend_registry.registered_backend_names.count("FlexpteBackend") == 1
method = Runtime.get().load_program(sys.argv[1]).load_method("forward")
session = flexpte.load(sys.argv[1]).session()
torch.manual_seed(0)
first = 0
for count in (5, 1, 1, 20, 3):
    call = (torch.randint(0, 50, (1, count)), torch.arange(first, first + count))
    (theirs,), (ours,) = method.execute(call), session.run("forward", *call)
    assert theirs.shape == ours.shape == (1, count, 32)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    first += count
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "m.pte"
    export(path)
    return path


def python(path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines), str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=path.parent,
    )


ORDERS = {
    "register first": [REGISTER],
    "runtime first": [RUNTIME, REGISTER],
    "torch first": ["import torch", REGISTER],
    "register twice": [REGISTER, RUNTIME, REGISTER],
    "our runtime first": ["import flexpte; flexpte.load(__import__('sys').argv[1])", REGISTER],
    "then custom ops": [REGISTER, CUSTOM_OPS],
    "custom ops before": [RUNTIME, CUSTOM_OPS, REGISTER],
    "then quantized kernels": [REGISTER, QUANTIZED],
    "quantized kernels before": [RUNTIME, QUANTIZED, REGISTER],
    "then the LLM runner": [REGISTER, LLM_RUNNER],
    "runtime, LLM runner, register": [RUNTIME, LLM_RUNNER, REGISTER],
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports_gives_our_answers(path, order):
    run = python(path, *ORDERS[order], COMPARE)
    assert run.returncode == 0, run.stderr[-3000:]


def test_llm_runner_before_everything_works_or_says_what_to_do(path):
    run = python(path, LLM_RUNNER, REGISTER, COMPARE)
    if run.returncode != 0:
        assert "RegistrationError" in run.stderr, run.stderr[-3000:]
        assert "call flexpte.executorch.register() first" in run.stderr


def test_errors_come_back_as_errors(path):
    run = python(
        path,
        REGISTER,
        "import sys, torch",
        "from executorch.runtime import Runtime",
        "method = Runtime.get().load_program(sys.argv[1]).load_method('forward')",
        "try:",
        "    method.execute((torch.zeros(1, 1, dtype=torch.int64), torch.tensor([32])))",
        "except RuntimeError as error:",
        "    print('refused', error)",
        "print(method.execute((torch.zeros(1, 1, dtype=torch.int64), torch.tensor([31])))[0].shape)",
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "refused" in run.stdout
    assert "torch.Size([1, 1, 32])" in run.stdout
    assert "position 32 is past the capacity 32 of cache k_cache: context full" in run.stderr


def test_two_loaded_methods_have_their_own_states(path):
    run = python(
        path,
        REGISTER,
        "import sys, torch",
        "from executorch.runtime import Runtime",
        "program = Runtime.get().load_program(sys.argv[1])",
        "a = program.load_method('forward')",
        "b = Runtime.get().load_program(sys.argv[1]).load_method('forward')",
        "token, at = torch.tensor([[7]]), torch.tensor([1])",
        "a.execute((torch.tensor([[3]]), torch.tensor([0])))",
        "b.execute((torch.tensor([[4]]), torch.tensor([0])))",
        "x, y = a.execute((token, at))[0].clone(), b.execute((token, at))[0].clone()",
        "assert not torch.equal(x, y)",
    )
    assert run.returncode == 0, run.stderr[-3000:]
