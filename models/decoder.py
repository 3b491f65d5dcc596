"""A decoder-only transformer written with ``flex_attention``: Llama, Mistral, Qwen and Gemma families.

Plain PyTorch: it runs eagerly, and ``torch.export`` makes one program of it for every number of
tokens. The KV caches are buffers that every call updates at ``input_pos``. Parameters carry the names
that Hugging Face checkpoints give them, less the leading ``model.``.

Letters: B batch (1), T tokens of this call, H heads, S cache slots (the context), D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flexpte.models.config import Activation, DecoderConfig, LayerConfig, Rotary

Logits = Literal["last", "all"]
Angles = tuple[Tensor, Tensor]


def inverse_frequencies(rotary: Rotary) -> Tensor:
    """Angle per position of each rotated pair, [rotary_dim / 2] float32.

    RoFormer (arXiv:2104.09864) equation 15; scalings as in transformers' ``modeling_rope_utils.py``:
    ``linear`` stretches all wavelengths, Llama 3 only those long against the original context.
    """
    exponents = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary.rotary_dim
    frequencies = 1.0 / (rotary.theta**exponents) / rotary.linear_factor
    if rotary.divisors is not None:
        frequencies = frequencies / torch.tensor(rotary.divisors, dtype=torch.float32, device="cpu")
    scaling = rotary.llama3
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)  # 0: stretched in full, 1: kept
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Apply rotary position embedding to x [B, H, T, D], given cosine and sine [T, rotary_dim / 2].

    Pairs are the two halves of the rotated part (GPT-NeoX order).
    """
    cosine, sine = angles
    half = cosine.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def causal_mask(input_pos: Tensor, capacity: int, window_tokens: int | None) -> BlockMask:
    """Which cache slots the tokens at ``input_pos`` [T] see: those up to their own, the last
    ``window_tokens`` of them if given. Slots written by nobody yet lie behind, so they are never seen."""

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= input_pos[q_idx]

    mask_mod = causal
    if window_tokens is not None:
        window: int = window_tokens

        def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            position = input_pos[q_idx]
            return (kv_idx <= position) & (kv_idx > position - window)

        mask_mod = sliding_window
    return create_block_mask(mask_mod, None, None, input_pos.shape[0], capacity, device=input_pos.device)


def soft_cap(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Score mod of Gemma 2 (arXiv:2408.00118, section 2): cap * tanh(score / cap)."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over this layer's KV cache."""

    def __init__(self, config: DecoderConfig, capacity: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = config.attention_scale
        self.score_mod = None if config.attention_softcap is None else soft_cap(config.attention_softcap)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        cache_shape = (1, config.num_kv_heads, capacity, config.head_dim)  # [B, Hkv, S, D]
        self.k_cache: Tensor
        self.v_cache: Tensor
        self.register_buffer("k_cache", torch.zeros(cache_shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(cache_shape), persistent=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, H * D] -> [B, H, T, D]"""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def forward(self, x: Tensor, input_pos: Tensor, angles: Angles, mask: BlockMask) -> Tensor:
        query = self.split_heads(self.q_proj(x))
        key = self.split_heads(self.k_proj(x))
        value = self.split_heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, angles), rotate(key, angles)
        self.k_cache.index_copy_(2, input_pos, key)
        self.v_cache.index_copy_(2, input_pos, value)
        out = flex_attention(
            query,
            self.k_cache,
            self.v_cache,
            score_mod=self.score_mod,
            block_mask=mask,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return result


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        result: Tensor = self.down_proj(gate * self.up_proj(x))
        return result


class Block(nn.Module):
    """One layer. Gemma normalises the results of attention and feed-forward as well (``post_norms``).

    Hugging Face's name ``post_attention_layernorm`` means the norm before the feed-forward in all
    other families, but the one after attention in Gemma's; the names here follow the checkpoints.
    """

    def __init__(self, config: DecoderConfig, capacity: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, capacity)
        self.mlp = FeedForward(config)
        self.post_norms = config.post_norms
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if config.post_norms:
            self.pre_feedforward_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, input_pos: Tensor, angles: Angles, mask: BlockMask) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), input_pos, angles, mask)
        if self.post_norms:
            x = x + self.post_attention_layernorm(attended)
            fed: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + attended
            fed = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class Decoder(nn.Module):
    """Tokens in, logits out, with its own KV caches [1, num_kv_heads, capacity, head_dim].

    ``capacity`` is the longest context in tokens. A new conversation is a new call at position 0:
    slots beyond the newest position are never seen, whatever they hold.
    """

    def __init__(self, config: DecoderConfig, capacity: int, logits: Logits = "last") -> None:
        super().__init__()
        if not 1 <= capacity <= config.max_position_embeddings:
            raise ValueError(
                f"the context must be 1 to {config.max_position_embeddings} tokens "
                f"(max_position_embeddings of this model), got {capacity}"
            )
        if logits not in ("last", "all"):
            raise ValueError(f"logits must be 'last' or 'all', got {logits!r}")
        self.config, self.capacity, self.logits = config, capacity, logits
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, capacity) for _ in config.layers)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotaries = tuple(dict.fromkeys(layer.rotary for layer in config.layers))
        for number, rotary in enumerate(self.rotaries):
            self.register_buffer(f"inv_freq_{number}", inverse_frequencies(rotary), persistent=False)

    @classmethod
    def from_state(
        cls, config: DecoderConfig, state: Mapping[str, Tensor], capacity: int, *, logits: Logits = "last"
    ) -> Decoder:
        """A decoder on the given parameters (by name, shared, not copied) and with empty caches.

        All of ``state`` has one dtype, which is that of the caches and of the computation. A head
        tied to the embedding is not listed. Raises KeyError if a parameter is missing.
        """
        with torch.device("meta"):
            model = cls(config, capacity, logits)
        for name in [name for name, _ in model.named_parameters()]:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(state[name], requires_grad=False))
        if config.tie_word_embeddings:
            model.lm_head.weight = model.embed_tokens.weight
        for attention in model.attentions():
            attention.k_cache = torch.zeros(attention.k_cache.shape, dtype=model.embed_tokens.weight.dtype)
            attention.v_cache = torch.zeros(attention.v_cache.shape, dtype=model.embed_tokens.weight.dtype)
        return model.eval()

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Logits of the last token, [1, 1, vocab_size], or of all, [1, T, vocab_size].

        ``tokens`` [1, T] int64, T in 1..capacity; ``input_pos`` [T] int64: their positions, which are
        the cache slots too. Attends to every position up to a token's own, so all must be filled.
        """
        x = self.embed_tokens(tokens)
        if self.config.embedding_scale is not None:
            x = x * rounded_to(self.config.embedding_scale, x.dtype)
        angles = self.angles(input_pos, x.dtype)
        masks = self.masks(input_pos)
        for layer, block in zip(self.config.layers, self.layers, strict=True):
            x = block(x, input_pos, angles[layer.rotary], masks[layer.window_tokens])
        if self.logits == "last":
            x = x[:, -1:]
        x = self.lm_head(self.norm(x))
        cap = self.config.logit_softcap
        return x if cap is None else cap * torch.tanh(x / cap)

    def angles(self, input_pos: Tensor, dtype: torch.dtype) -> dict[Rotary, Angles]:
        """Cosine and sine [T, rotary_dim / 2] of every distinct rotary embedding.

        Computed in float32 and rounded to the model's dtype, as transformers does.
        """
        result = {}
        for number, rotary in enumerate(self.rotaries):
            phase = input_pos.to(torch.float32).unsqueeze(-1) * self.get_buffer(f"inv_freq_{number}")
            result[rotary] = (phase.cos().to(dtype), phase.sin().to(dtype))
        return result

    def masks(self, input_pos: Tensor) -> dict[int | None, BlockMask]:
        """One mask for every distinct window."""
        windows = dict.fromkeys(self.config.windows)
        return {window: causal_mask(input_pos, self.capacity, window) for window in windows}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Casting the model to half precision must not round the frequencies: positions multiply them.
        for number, rotary in enumerate(self.rotaries):
            name = f"inv_freq_{number}"
            setattr(self, name, inverse_frequencies(rotary).to(self.get_buffer(name).device))
        return self

    @torch.no_grad()
    def reset(self) -> None:
        """Empty the caches."""
        for attention in self.attentions():
            attention.k_cache.zero_()
            attention.v_cache.zero_()

    def attentions(self) -> list[Attention]:
        """The attention of every layer, which holds the layer's caches."""
        return [module for module in self.modules() if isinstance(module, Attention)]


def rounded_to(value: float, dtype: torch.dtype) -> float:
    """The nearest value of ``dtype``: a factor that transformers keeps in the model's dtype."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu").to(dtype))


def example_inputs_and_dynamic_shapes(
    config: DecoderConfig, capacity: int
) -> tuple[tuple[Tensor, Tensor], dict[str, dict[int, Any]]]:
    """What ``export`` wants to know of a :class:`Decoder`: T is any number of 1..capacity.

    With a capacity of 1 nothing varies and T is 1.
    """
    count = min(4, capacity)
    tokens = torch.zeros(1, count, dtype=torch.int64)
    input_pos = torch.arange(count, dtype=torch.int64)
    if capacity == 1:
        return (tokens, input_pos), {"tokens": {}, "input_pos": {}}
    num_tokens = torch.export.Dim("T", min=1, max=capacity)
    return (tokens, input_pos), {"tokens": {1: num_tokens}, "input_pos": {0: num_tokens}}


__all__ = [
    "Decoder",
    "LayerConfig",
    "causal_mask",
    "example_inputs_and_dynamic_shapes",
    "inverse_frequencies",
]
