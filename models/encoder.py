"""A BERT encoder written with ``flex_attention``, giving one embedding a text (MiniLM and its like).

Modules carry the names that Hugging Face checkpoints of ``BertModel`` give them.
Letters: B batch, L tokens, H heads, D head_dim, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flexpte.models.hf import json_object, stored_tensors
from flexpte.models.source import CheckpointError

# What this encoder computes; another value in the configuration is another model.
_FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_NOT_COMPUTED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of an :class:`Encoder`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    num_token_types: int
    layer_norm_eps: float

    @staticmethod
    def from_hugging_face(config: dict[str, Any]) -> EncoderConfig:
        """Read a ``config.json``. Raises CheckpointError, naming the field, for what is missing or not BERT."""
        for field, expected in _FIXED.items():
            came = config.get(field, expected)
            if came != expected:
                raise CheckpointError(f"config.json: {field} is {came!r}, this encoder computes {expected!r} only")
        try:
            return EncoderConfig(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                max_tokens=config["max_position_embeddings"],
                num_token_types=config["type_vocab_size"],
                layer_norm_eps=config["layer_norm_eps"],
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: the field {error.args[0]} is missing; download it again") from error


class Encoder(nn.Module):
    """Token ids to mean-pooled, normalised embeddings (Sentence-BERT, arXiv:1908.10084)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(config) for _ in range(config.num_layers))})

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """tokens [B, L] int64, attention_mask [B, L] int64 (0: padding) -> [B, C] of length 1."""
        batch, length = tokens.shape

        def not_padding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return attention_mask[b, kv_idx] != 0

        block_mask = create_block_mask(not_padding, batch, None, length, length, device=tokens.device)
        x = self.embeddings(tokens)
        for layer in self.encoder["layer"].children():
            x = layer(x, block_mask)
        weights = attention_mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=-1)


class _Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_tokens, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.num_token_types, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Words, positions 0, 1, …, and token type 0."""
        positions = self.position_embeddings.weight[: tokens.shape[1]]
        x: Tensor = self.LayerNorm(self.word_embeddings(tokens) + positions + self.token_type_embeddings.weight[0])
        return x


class _Residual(nn.Module):
    """LayerNorm(residual + dense(x))"""

    def __init__(self, size: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [B, L, size], residual [B, L, C] -> [B, L, C]"""
        out: Tensor = self.LayerNorm(residual + self.dense(x))
        return out


class _Layer(nn.Module):
    """Attention and MLP, each followed by its residual and a norm (BERT, arXiv:1810.04805)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        projections = nn.ModuleDict({name: nn.Linear(size, size) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": projections, "output": _Residual(size, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(size, config.intermediate_size)})
        self.output = _Residual(config.intermediate_size, config)

    def forward(self, x: Tensor, block_mask: BlockMask) -> Tensor:
        """[B, L, C] -> [B, L, C]"""
        query, key, value = (self._heads(project(x)) for project in self.attention["self"].children())
        attended = flex_attention(query, key, value, block_mask=block_mask)
        assert isinstance(attended, Tensor)
        x = self.attention["output"](attended.transpose(1, 2).flatten(2), x)
        out: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, H * D] -> [B, H, L, D]"""
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


def load_encoder(folder: str | Path) -> Encoder:
    """The encoder of a Hugging Face folder with ``config.json`` and safetensors, in float32.

    Raises CheckpointError: not BERT, a missing, unexpected or mis-shaped tensor, unreadable files.
    """
    folder = Path(folder)
    model = Encoder(EncoderConfig.from_hugging_face(json_object(folder / "config.json"))).eval()
    stored = {name.removeprefix("bert."): tensor for name, tensor in stored_tensors(folder).items()}
    state = {}
    for name, parameter in model.state_dict().items():
        if name not in stored:
            raise CheckpointError(f"{folder}: tensor {name} is missing from the checkpoint; download it again")
        if stored[name].shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(stored[name].shape)}, expected {list(parameter.shape)} by "
                "config.json; one of the two is of another model"
            )
        state[name] = stored[name].read().to(torch.float32)
    unexpected = sorted(set(stored) - set(state) - set(_NOT_COMPUTED))
    if unexpected:
        raise CheckpointError(f"{folder}: tensors {', '.join(unexpected[:5])} are not part of a BERT encoder")
    model.load_state_dict(state)
    return model
