"""What a decoder-only transformer is made of, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]


class ConfigError(ValueError):
    """A model configuration that this decoder cannot represent; the message names the field."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later, see :func:`flexpte.models.decoder.inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rotary:
    """One rotary position embedding; layers with equal ones share their angles.

    ``divisors``, one for each rotated pair, is how GGUF files store the scaling of Llama 3.
    """

    theta: float
    rotary_dim: int
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerConfig:
    """``window_tokens`` = W: a token sees the last W tokens, itself included; None: all of them."""

    rotary: Rotary
    window_tokens: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and switches of a :class:`flexpte.models.decoder.Decoder`.

    ``norm_weight_offset`` is what a checkpoint of this family leaves out of its norm weights (1 for
    Gemma in Hugging Face form); it is added when the weights are loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Activation
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers:
            raise ConfigError("a decoder needs at least one layer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        for layer in self.layers:
            if layer.window_tokens is not None and layer.window_tokens < 1:
                raise ConfigError(f"sliding_window must be at least 1, got {layer.window_tokens}")
            if layer.rotary.rotary_dim % 2 or not 0 < layer.rotary.rotary_dim <= self.head_dim:
                raise ConfigError(
                    f"the rotated part of a head must be even and within head_dim ({self.head_dim}), "
                    f"got {layer.rotary.rotary_dim}"
                )
            divisors = layer.rotary.divisors
            if divisors is not None and len(divisors) != layer.rotary.rotary_dim // 2:
                raise ConfigError(
                    f"{len(divisors)} frequency divisors for {layer.rotary.rotary_dim // 2} rotated pairs of a head"
                )
        for name in ("attention_softcap", "logit_softcap"):
            cap = getattr(self, name)
            if cap is not None and not cap > 0:
                raise ConfigError(f"{name} must be positive or null, got {cap}")

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """``window_tokens`` of each layer."""
        return tuple(layer.window_tokens for layer in self.layers)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the content of a ``config.json``, as transformers 4 or 5 write it.

        Raises :class:`ConfigError` where a required field is missing or a value would change the
        computation in a way that the decoder does not have.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            raise ConfigError(_unsupported_model_type(model_type, config))
        return _read_hugging_face(model_type, _Fields(config, _FAMILIES[model_type]))


# What transformers assumes where config.json leaves a field out (its configuration_<family>.py).
_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
}
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rope_theta": 10_000.0,
}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "rope_theta": 10_000.0,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10_000.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
}

SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Fields of relatives and forks that change the computation, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "use_bidirectional_attention": (None, False),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "logit_scale": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_out_bias": (None, False),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
}


class _Fields:
    """The fields of a ``config.json`` over the defaults of its family."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = given, defaults

    def get(self, name: str) -> Any:
        return self.given[name] if name in self.given else self.defaults.get(name)

    def number(self, name: str, kinds: tuple[type, ...] = (int, float)) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"config.json: the field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"config.json: {name} must be a number, got {value!r}")
        return value

    def integer(self, name: str) -> int:
        return int(self.number(name, (int,)))

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def optional_float(self, name: str) -> float | None:
        return None if self.get(name) is None else float(self.number(name))


def _unsupported_model_type(model_type: Any, config: Mapping[str, Any]) -> str:
    known = ", ".join(SUPPORTED_MODEL_TYPES)
    if model_type is None:
        return f"config.json: the field 'model_type' is missing; supported: {known}"
    message = f"config.json: model_type {model_type!r} is not supported; supported: {known}"
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") in _FAMILIES:
        message += ". It is a multimodal model: save its text part alone (its text_config and language model)"
    return message


def _read_hugging_face(model_type: str, fields: _Fields) -> DecoderConfig:
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) not in neutral:
            raise ConfigError(f"config.json: {name} = {fields.get(name)!r} is not supported for {model_type}")
    gemma = model_type in ("gemma2", "gemma3_text")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise ConfigError(f"config.json: num_attention_heads must be at least 1, got {num_heads}")
    num_kv_heads = num_heads if fields.get("num_key_value_heads") is None else fields.integer("num_key_value_heads")
    head_dim = hidden_size // num_heads if fields.get("head_dim") is None else fields.integer("head_dim")
    attention_bias = model_type not in ("mistral", "qwen2") and fields.boolean("attention_bias")
    scale_by = fields.number("query_pre_attn_scalar") if gemma else head_dim
    activation = fields.get("hidden_activation" if gemma else "hidden_act")
    if activation not in _ACTIVATIONS:
        name = "hidden_activation" if gemma else "hidden_act"
        raise ConfigError(f"config.json: {name} {activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=float(fields.number("rms_norm_eps")),
        activation=_ACTIVATIONS[activation],
        layers=_layers(model_type, fields, head_dim),
        attention_scale=float(scale_by) ** -0.5,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and fields.boolean("mlp_bias"),
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        embedding_scale=hidden_size**0.5 if gemma else None,
        attention_softcap=fields.optional_float("attn_logit_softcapping") if gemma else None,
        logit_softcap=fields.optional_float("final_logit_softcapping") if gemma else None,
        norm_weight_offset=1.0 if gemma else 0.0,
    )


def _layers(model_type: str, fields: _Fields, head_dim: int) -> tuple[LayerConfig, ...]:
    types = _layer_types(model_type, fields)
    rotaries = {kind: _rotary(model_type, fields, kind, head_dim) for kind in set(types)}
    window = fields.integer("sliding_window") if "sliding_attention" in types else None
    return tuple(LayerConfig(rotaries[kind], window if kind == "sliding_attention" else None) for kind in types)


def _layer_types(model_type: str, fields: _Fields) -> list[str]:
    """``full_attention`` or ``sliding_attention`` for every layer."""
    count = fields.integer("num_hidden_layers")
    if model_type == "mistral":
        kind = "full_attention" if fields.get("sliding_window") is None else "sliding_attention"
        return [kind] * count
    if model_type == "llama":
        if fields.get("sliding_window") is not None or fields.get("layer_types") is not None:
            raise ConfigError(
                "config.json: llama has no windows; sliding_window and layer_types must be absent or null"
            )
        return ["full_attention"] * count
    given = fields.get("layer_types")
    if given is None:
        return [_default_layer_type(model_type, fields, layer) for layer in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise ConfigError(f"config.json: layer_types must list num_hidden_layers = {count} types, got {given!r}")
    for kind in given:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"config.json: layer_types names {kind!r}; supported: full_attention, sliding_attention")
    if model_type.startswith("qwen") and "sliding_attention" in given and not fields.boolean("use_sliding_window"):
        raise ConfigError(
            "config.json: layer_types has sliding_attention while use_sliding_window is false; make them agree"
        )
    return given


def _default_layer_type(model_type: str, fields: _Fields, layer: int) -> str:
    if model_type == "gemma2":
        sliding = layer % 2 == 0
    elif model_type == "gemma3_text":
        sliding = (layer + 1) % fields.integer("sliding_window_pattern") != 0
    else:
        windowed = fields.boolean("use_sliding_window") and fields.get("sliding_window") is not None
        sliding = windowed and layer >= fields.integer("max_window_layers")
    return "sliding_attention" if sliding else "full_attention"


def _rotary(model_type: str, fields: _Fields, kind: str, head_dim: int) -> Rotary:
    """Rotary embedding of the layers of one kind.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``, by
    kind of layer where kinds differ.
    """
    local = model_type == "gemma3_text" and kind == "sliding_attention"
    theta = fields.number("rope_local_base_freq" if local else "rope_theta")
    parameters = None if local else fields.get("rope_scaling")
    if parameters is None:
        parameters = fields.get("rope_parameters") or {}
        if isinstance(parameters, Mapping) and any(isinstance(p, Mapping) for p in parameters.values()):
            parameters = parameters.get(kind) or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"config.json: rope_scaling/rope_parameters must be an object, got {parameters!r}")
    rope = _Fields(parameters, {"rope_theta": theta, "partial_rotary_factor": fields.get("partial_rotary_factor")})
    partial = 1.0 if rope.get("partial_rotary_factor") is None else float(rope.number("partial_rotary_factor"))
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    base = Rotary(theta=float(rope.number("rope_theta")), rotary_dim=int(head_dim * partial))
    if rope_type == "default":
        # transformers rotates the whole head here, whatever partial_rotary_factor says.
        if partial != 1.0:
            raise ConfigError("config.json: partial_rotary_factor with the default rope_type is not supported")
        return base
    if rope_type == "linear":
        return Rotary(base.theta, base.rotary_dim, linear_factor=float(rope.number("factor")))
    if rope_type == "llama3":
        original = rope.get("original_max_position_embeddings") or fields.integer("max_position_embeddings")
        scaling = Llama3Scaling(
            factor=float(rope.number("factor")),
            low_freq_factor=float(rope.number("low_freq_factor")),
            high_freq_factor=float(rope.number("high_freq_factor")),
            original_context=int(original),
        )
        return Rotary(base.theta, base.rotary_dim, llama3=scaling)
    raise ConfigError(f"config.json: rope_type {rope_type!r} is not supported; known: default, linear, llama3")
