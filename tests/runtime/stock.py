"""Models exported by the stock ExecuTorch exporter, nothing delegated: what our runtime must run."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import export


def export_stock(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: Any = None,
    *,
    transform_and_lower: bool = False,
    config: ExecutorchBackendConfig | None = None,
) -> bytes:
    """The bytes of a ``.pte`` with portable operators only."""
    module.eval().requires_grad_(False)
    with torch.no_grad():
        program = export(module, inputs, dynamic_shapes=dynamic_shapes)
        edge = to_edge_transform_and_lower(program) if transform_and_lower else to_edge(program)
        return bytes(edge.to_executorch(config).buffer)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + torch.tanh(x[:, :8])


class Encoder(nn.Module):
    """A BERT-like embedding and block with mean pooling, as in MiniLM."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.words, self.positions, self.types = (
            nn.Embedding(100, dim),
            nn.Embedding(64, dim),
            nn.Embedding(2, dim),
        )
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm, self.norm_attention, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = ids.shape
        x = self.words(ids) + self.positions(torch.arange(length)[None]) + self.types(torch.zeros_like(ids))
        x = self.norm(x)
        query, key, value = (
            layer(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        bias = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        x = self.norm_attention(x + self.out(attended))
        x = self.norm_mlp(x + self.down(F.gelu(self.up(x))))
        weights = mask[..., None].float()
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=-1), x


class Decoder(nn.Module):
    """A Llama-like block with a static KV cache, written in one of three usual ways."""

    def __init__(self, cache: str = "index_put", dim: int = 32, num_heads: int = 4, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.cache, self.num_heads, self.num_kv_heads, self.head_dim = (
            cache,
            num_heads,
            num_kv_heads,
            dim // num_heads,
        )
        self.words = nn.Embedding(50, dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(dim, eps=1e-5) for _ in range(3))
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.capacity = 24
        shape = (1, num_kv_heads, self.capacity, self.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, self.head_dim, 2) / self.head_dim))
        self.register_buffer("mask", torch.tril(torch.ones(self.capacity, self.capacity, dtype=torch.bool)))

    def rotate(self, x: Tensor, input_pos: Tensor) -> Tensor:
        angles = input_pos[:, None].float() * self.frequencies[None]
        angles = torch.cat([angles, angles], -1)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def update(self, cache: Tensor, input_pos: Tensor, new: Tensor) -> None:
        if self.cache == "index_put":
            cache[:, :, input_pos] = new
        elif self.cache == "index_copy":
            cache.index_copy_(2, input_pos, new)
        else:
            start: Any = input_pos[0].item()
            torch._check(start >= 0)
            torch._check(start + new.shape[2] <= self.capacity)
            cache.narrow(2, start, new.shape[2]).copy_(new)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.words(tokens)
        normed = self.norm1(x)

        def heads(layer: nn.Linear, count: int) -> Tensor:
            return layer(normed).view(batch, length, count, self.head_dim).transpose(1, 2)

        query = self.rotate(heads(self.query, self.num_heads), input_pos)
        self.update(self.k_cache, input_pos, self.rotate(heads(self.key, self.num_kv_heads), input_pos))
        self.update(self.v_cache, input_pos, heads(self.value, self.num_kv_heads))
        repeats = self.num_heads // self.num_kv_heads
        key, value = (c.repeat_interleave(repeats, 1) for c in (self.k_cache, self.v_cache))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask[input_pos])
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm2(x)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return F.linear(self.norm3(x)[:, -1:], self.words.weight)


class Counter(nn.Module):
    """Two mutable buffers, one of which starts at values other than zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor([5.0, 7.0, -1.0]))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1.0)
        self.total.add_(x * self.steps)
        return self.steps + 0.0, self.total + 0.0
