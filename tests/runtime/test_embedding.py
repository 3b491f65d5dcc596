"""The program of docs/embedding.md: shown as it is compiled, and it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexpte

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build" / "release" / "tests" / "cpp" / "embedding_example"


class Causal(nn.Module):
    def forward(self, q, k, v):
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 16, 16, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)


def test_the_guide_shows_the_program_that_is_compiled():
    source = (ROOT / "tests" / "cpp" / "embedding_example.cpp").read_text()
    assert f"```cpp\n{source}```" in (ROOT / "docs" / "embedding.md").read_text()


def test_it_runs(tmp_path):
    inputs = tuple(torch.rand(1, 2, 16, 8) for _ in range(3))
    flexpte.export(Causal(), inputs).save(tmp_path / "causal.pte")
    done = subprocess.run([PROGRAM, tmp_path / "causal.pte"], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 2, 16, 8] of float32, first element 0.5\n"


def test_its_errors_are_sentences(tmp_path):
    (tmp_path / "broken.pte").write_bytes(b"no program")
    for name, words in (("broken.pte", "not a .pte"), ("missing.pte", "missing.pte")):
        done = subprocess.run([PROGRAM, tmp_path / name], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert words in done.stderr
