"""Tiny random models of every supported family, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 120
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA_SIZES = {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20}

# name -> (configuration class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2, "rope_parameters": _LLAMA3_SCALING}),
    "llama_biased_linear_rope": (
        "LlamaConfig",
        {
            "num_hidden_layers": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
        },
    ),
    "mistral": ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": 8}),
    "mistral_without_window": ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 2}),
    "qwen2_with_window": (
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GEMMA_SIZES,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA_SIZES, "num_hidden_layers": 7}),
    "gemma3_linear_rope": (
        "Gemma3TextConfig",
        {
            **_GEMMA_SIZES,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "one_kv_head": (
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    ),
}


def transformers_model(family: str, **changes: Any) -> Any:
    """A model with random weights, large enough that logits differ by far more than rounding."""
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SIZES, **arguments, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            if tensor_name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif tensor_name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """``save_pretrained``, giving the folder back."""
    model.save_pretrained(folder, **options)
    return folder


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    """[1, count] int64 within the tiny vocabulary."""
    return torch.randint(0, VOCAB_SIZE, (1, count), generator=torch.Generator().manual_seed(seed))
