"""A small module with a KV cache that every test of the delegate here exports."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import flex_attention

import flexpte

CAPACITY = 32
VOCABULARY = 50


class CachedAttention(torch.nn.Module):
    """One layer, grouped heads, learned positions: ``tokens [1, T]``, ``input_pos [T]`` -> ``[1, T, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.query, self.key = torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 16)
        self.value, self.out = torch.nn.Linear(32, 16), torch.nn.Linear(32, 32)
        self.register_buffer("k_cache", torch.zeros(1, 2, CAPACITY, 8))
        self.register_buffer("v_cache", torch.zeros(1, 2, CAPACITY, 8))

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        query = self.query(x).view(1, length, 4, 8).transpose(1, 2)
        self.k_cache.index_copy_(2, input_pos, self.key(x).view(1, length, 2, 8).transpose(1, 2))
        self.v_cache.index_copy_(2, input_pos, self.value(x).view(1, length, 2, 8).transpose(1, 2))

        def causal(score, b, h, q_idx, kv_idx):
            return torch.where(kv_idx <= input_pos[q_idx], score, -float("inf"))

        out = flex_attention(query, self.k_cache, self.v_cache, score_mod=causal, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).reshape(1, length, 32))


def export(path: Path, **options: str) -> CachedAttention:
    """Write the module to ``path``; returns a fresh one to compare with."""
    length = torch.export.Dim("T", min=1, max=CAPACITY)
    module = CachedAttention().eval()
    example = (torch.zeros(1, 3, dtype=torch.int64), torch.arange(3))
    flexpte.export(copy.deepcopy(module), example, dynamic_shapes=({1: length}, {0: length}), **options).save(path)
    return module


def call(first: int, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions of one chunk of a fixed sequence."""
    sequence = torch.randint(0, VOCABULARY, (1, CAPACITY), generator=torch.Generator().manual_seed(seed))
    return sequence[:, first : first + count], torch.arange(first, first + count)
