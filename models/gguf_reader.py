"""Opens a GGUF file: dequantised weights, configuration and tokenizer from its metadata.

The format is specified in ggml's docs/gguf.md; the names of entries and tensors are llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from flexpte.models.config import ConfigError, DecoderConfig, LayerConfig, Rotary
from flexpte.models.source import CheckpointError, Source, StoredTensor
from flexpte.models.tokenizer import TokenizerError, tokenizer_from_gguf

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_TOP_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK_NAMES = {
    **_BLOCK_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FREQUENCY_DIVISORS = "rope_freqs.weight"


def is_gguf(path: Path) -> bool:
    """Whether the file calls itself GGUF, by name or by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open_gguf(path: Path) -> Source:
    """Read the metadata of ``path``; weights are dequantised when they are read.

    Raises :class:`CheckpointError`.
    """
    reader = _open(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise _corrupt(path, error) from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(metadata, stored)
        tokenizer = tokenizer_from_gguf(metadata, metadata["general.architecture"])
    except (ConfigError, TokenizerError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if (count := len(metadata["tokenizer.ggml.tokens"])) > config.vocab_size:
        raise CheckpointError(f"{path}: {count} tokens in the tokenizer, {config.vocab_size} in the embedding")
    tensors = {}
    for name, tensor in stored.items():
        if name == _FREQUENCY_DIVISORS:  # part of the configuration
            continue
        shape = tuple(int(size) for size in reversed(tensor.shape))
        parameter = _parameter_name(name, config.post_norms)
        tensors[parameter] = StoredTensor(name, shape, partial(_read, path, tensor, shape, _unpermute(name, config)))
    return Source(path.stem, config, tokenizer, tensors)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    try:
        # Copy on write: tensors that need no conversion stay mapped, and nothing can reach the file.
        return gguf.GGUFReader(path, "c")
    except Exception as error:  # malformed bytes surface as whatever numpy or Python raise on them
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> CheckpointError:
    detail = f"{type(error).__name__}: {error}"
    return CheckpointError(f"{path}: corrupt or cut off ({detail}); download it again")


def _parameter_name(name: str, gemma: bool) -> str:
    """The decoder's name of a tensor, or the stored name where the decoder has none like it."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    module, _, leaf = rest.rpartition(".")
    known = (_GEMMA_BLOCK_NAMES if gemma else _BLOCK_NAMES).get(module)
    return f"layers.{layer}.{known}.{leaf}" if prefix == "blk" and known else name


def _unpermute(name: str, config: DecoderConfig) -> Callable[[Tensor], Tensor] | None:
    """llama.cpp rotates neighbouring rows together in the llama architecture and stores queries and keys
    in that order (convert_hf_to_gguf.py, ``permute``); this decoder rotates the halves of a head."""
    if config.model_type != "llama":
        return None
    module = name.split(".")[2:3]
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(module[0] if module else "")
    if heads is None:
        return None

    def unpermute(rows: Tensor) -> Tensor:
        pairs = rows.reshape(heads, config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    return unpermute


def _read(
    path: Path, tensor: gguf.ReaderTensor, shape: tuple[int, ...], finish: Callable[[Tensor], Tensor] | None
) -> Tensor:
    kind = tensor.tensor_type
    try:
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            values = tensor.data
        else:
            values = np.ascontiguousarray(dequantize(tensor.data, kind))
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} is stored as {kind.name}, which cannot be dequantised; "
            "use a file in another quantisation"
        ) from error
    except ValueError as error:
        raise _corrupt(path, error) from error
    weights = torch.from_numpy(values).reshape(shape)
    return weights if finish is None else finish(weights)


class _Metadata:
    """Entries of one architecture, with errors that name them."""

    def __init__(self, entries: Mapping[str, Any], architecture: str) -> None:
        self.entries, self.architecture = entries, architecture

    def get(self, name: str) -> Any:
        return self.entries.get(f"{self.architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"the entry {self.architecture}.{name} is missing")
            return float(default)
        if isinstance(value, list) and len(set(value)) == 1:  # one for every layer
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"the entry {self.architecture}.{name} must be one number, got {value!r}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))


def _config(entries: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    architecture = entries.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"general.architecture {architecture!r} is not supported; supported: {known}")
    if (parts := entries.get("split.count", 1)) > 1:
        raise ConfigError(f"is one of {parts} parts; join them with llama-gguf-split --merge")
    data = _Metadata(entries, architecture)
    if data.get("expert_count"):
        raise ConfigError(
            f"{architecture}.expert_count = {data.get('expert_count')}: mixtures of experts are not supported"
        )
    gemma = architecture == "gemma3"
    hidden_size, num_heads = data.integer("embedding_length"), data.integer("attention.head_count")
    if num_heads < 1:
        raise ConfigError(f"the entry {architecture}.attention.head_count must be at least 1, got {num_heads}")
    head_dim = data.integer("attention.key_length", hidden_size // num_heads)
    if data.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{architecture}.attention.value_length differs from key_length, which is not supported")
    layers = _layers(data, tensors, head_dim)
    softcaps = {key: data.get(f"{key}_logit_softcapping") or None for key in ("attn", "final")}
    return DecoderConfig(
        model_type="gemma3_text" if gemma else architecture,
        vocab_size=data.integer("vocab_size", _rows(tensors, "token_embd.weight", 1)),
        hidden_size=hidden_size,
        intermediate_size=data.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=data.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=data.integer("context_length"),
        rms_norm_eps=data.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gemma else "silu",
        layers=layers,
        attention_scale=_attention_scale(architecture, len(layers), hidden_size, num_heads, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=hidden_size**0.5 if gemma else None,
        attention_softcap=softcaps["attn"],
        logit_softcap=softcaps["final"],
        norm_weight_offset=0.0,  # already added by the converter
    )


def _rows(tensors: Mapping[str, Any], name: str, dim: int) -> int:
    return int(tensors[name].shape[dim]) if name in tensors and len(tensors[name].shape) > dim else 0


def _attention_scale(architecture: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    # Files do not carry the scale; Gemma 3 27B, known by its 62 layers, is the one that differs.
    if architecture == "gemma3" and num_layers == 62:
        return 1 / math.sqrt(hidden_size / num_heads)
    return 1 / math.sqrt(head_dim)


def _layers(data: _Metadata, tensors: Mapping[str, Any], head_dim: int) -> tuple[LayerConfig, ...]:
    rotary = _rotary(data, tensors, head_dim)
    window = data.integer("attention.sliding_window", 0) or None
    count = data.integer("block_count")
    if count > len(tensors):
        raise ConfigError(f"{data.architecture}.block_count is {count}, but the file has {len(tensors)} tensors")
    if data.architecture == "gemma3":
        # Every sixth layer is global; local ones rotate with base 10000 and are never stretched.
        local = Rotary(data.number("rope.freq_base_swa", 10_000.0), head_dim)
        if window is None:
            raise ConfigError("the entry gemma3.attention.sliding_window is missing")
        pattern = max(data.integer("attention.sliding_window_pattern", 6), 1)
        return tuple(
            LayerConfig(local, window) if (layer + 1) % pattern else LayerConfig(rotary) for layer in range(count)
        )
    return (LayerConfig(rotary, window),) * count


def _rotary(data: _Metadata, tensors: Mapping[str, Any], head_dim: int) -> Rotary:
    scaling = data.get("rope.scaling.type") or "none"
    if scaling not in ("none", "linear"):
        raise ConfigError(f"{data.architecture}.rope.scaling.type {scaling!r} is not supported; known: none, linear")
    rotary_dim = data.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ConfigError(
            f"{data.architecture}.rope.dimension_count {rotary_dim} differs from the head's {head_dim}, "
            "which is not supported"
        )
    divisors = tensors.get(_FREQUENCY_DIVISORS)
    return Rotary(
        theta=data.number("rope.freq_base", 10_000.0),
        rotary_dim=rotary_dim,
        linear_factor=data.number("rope.scaling.factor") if scaling == "linear" else 1.0,
        divisors=None if divisors is None else tuple(float(value) for value in divisors.data),
    )
