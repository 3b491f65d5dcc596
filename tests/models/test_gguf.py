"""GGUF files: tiny ones written here from transformers models, and SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from flexpte.models.checkpoints import CheckpointError, load_checkpoint
from flexpte.models.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN
from tests.models.tiny import random_tokens, transformers_model

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_TOP["lm_head.weight"] = "output.weight"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: the first row of each half, the second of each half, ..."""
    size = rows.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


class Writer:
    """A GGUF file in the making, all of whose entries and tensors a test may change."""

    def __init__(self, family: str, architecture: str, **changes: Any) -> None:
        self.model = transformers_model(family, **changes)
        config = self.model.config
        self.architecture = architecture
        self.entries: dict[str, Any] = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
            "attention.value_length": config.head_dim if hasattr(config, "head_dim") else 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10_000.0,
        }
        self.tokenizer: dict[str, Any] = {
            "model": "llama",
            "tokens": [
                "<unk>",
                "<s>",
                "</s>",
                "<0x41>",
                *(chr(ord("a") + i % 26) * (1 + i // 26) for i in range(116)),
            ],
            "token_type": [UNKNOWN, CONTROL, CONTROL, BYTE, *[NORMAL] * 116],
            "scores": [-float(i) for i in range(120)],
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        self.tensors: dict[str, np.ndarray] = {}
        for name, parameter in self.model.named_parameters():
            values = parameter.detach().numpy().copy()
            if architecture == "gemma3" and name.endswith("norm.weight"):
                values = values + 1
            if architecture == "llama" and "self_attn.q_proj" in name:
                values = interleave(values, config.num_attention_heads)
            if architecture == "llama" and "self_attn.k_proj" in name:
                values = interleave(values, config.num_key_value_heads)
            self.tensors[self._name(name)] = values

    def _name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        _, _, layer, rest = name.split(".", 3)
        module, leaf = rest.rsplit(".", 1)
        names = _GEMMA_NAMES if self.architecture == "gemma3" else _NAMES
        return f"blk.{layer}.{names[module]}.{leaf}"

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.entries.items():
            self._add(writer, f"{self.architecture}.{key}", value)
        for key, value in self.tokenizer.items():
            self._add(writer, f"tokenizer.ggml.{key}", value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
        kinds: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        kinds[type(value)](key, value)


FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("mistral_without_window", "llama", {}),
    "llama_tied": ("one_kv_head", "llama", {"tie_word_embeddings": True}),
    "mistral_as_llama": ("mistral", "llama", {"attention.sliding_window": 8}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "gemma3": ("gemma3", "gemma3", {"attention.sliding_window": 8, "rope.freq_base": 1e6}),
    "gemma3_linear_rope": (
        "gemma3_linear_rope",
        "gemma3",
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}


@pytest.mark.parametrize("name", FILES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, architecture, entries = FILES[name]
    changes = {"tie_word_embeddings": entries["tie_word_embeddings"]} if "tie_word_embeddings" in entries else {}
    if architecture == "gemma3":
        changes["query_pre_attn_scalar"] = 24  # the head's size: files carry no other
    writer = Writer(family, architecture, **changes)
    writer.entries |= {key: value for key, value in entries.items() if key != "tie_word_embeddings"}
    tokens = random_tokens(30)
    expected = writer.model(tokens).logits
    decoder = load_checkpoint(writer.write(tmp_path / "tiny.gguf")).decoder(32, logits="all")
    actual = torch.cat([decoder(tokens[:, :20], torch.arange(20)), decoder(tokens[:, 20:], torch.arange(20, 30))], 1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_llama3_frequency_divisors(tmp_path: Path) -> None:
    writer = Writer("llama", "llama")
    rotary = writer.model.model.rotary_emb
    plain, _ = rotary.compute_default_rope_parameters(writer.model.config)
    writer.tensors["rope_freqs.weight"] = (plain / rotary.inv_freq).numpy()
    tokens = random_tokens(40)
    expected = writer.model(tokens).logits
    actual = load_checkpoint(writer.write(tmp_path / "t.gguf")).decoder(40, logits="all")(tokens, torch.arange(40))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    writer.tensors["rope_freqs.weight"] = np.ones(5, np.float32)
    with pytest.raises(CheckpointError, match="5 frequency divisors for 8 rotated pairs"):
        load_checkpoint(writer.write(tmp_path / "bad.gguf"))


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    writer = Writer("qwen3", "qwen3")
    original = writer.tensors["blk.0.ffn_up.weight"].copy()
    gguf_writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3")
    for key, value in writer.entries.items():
        writer._add(gguf_writer, f"qwen3.{key}", value)
    for key, value in writer.tokenizer.items():
        writer._add(gguf_writer, f"tokenizer.ggml.{key}", value)
    for name, values in writer.tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if name.endswith("ffn_up.weight") else gguf.GGMLQuantizationType.F16
        if values.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        gguf_writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    gguf_writer.write_header_to_file()
    gguf_writer.write_kv_data_to_file()
    gguf_writer.write_tensors_to_file()
    gguf_writer.close()
    loaded = load_checkpoint(tmp_path / "q.gguf").state["layers.0.mlp.up_proj.weight"].numpy()
    # Q8_0 keeps blocks of 32 with steps of a 127th of their largest magnitude.
    steps = np.abs(original.reshape(-1, 32)).max(axis=1) / 127
    errors = np.abs(loaded - original).reshape(-1, 32).max(axis=1)
    assert (errors <= 0.51 * steps + 1e-3 * steps * 127).all()
    assert errors.max() > 0


def change_entry(key: str, value: Any) -> Callable[[Writer], None]:
    return lambda writer: writer.entries.__setitem__(key, value)


def change_tokenizer(key: str, value: Any) -> Callable[[Writer], None]:
    return lambda writer: writer.tokenizer.__setitem__(key, value)


def remove_entry(key: str) -> Callable[[Writer], None]:
    return lambda writer: writer.entries.__delitem__(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_entry("block_count"), r"the entry llama\.block_count is missing"),
        (change_entry("expert_count", 4), "mixtures of experts are not supported"),
        (change_entry("attention.head_count_kv", [1, 2]), r"head_count_kv must be one number, got \[1, 2\]"),
        (change_entry("attention.value_length", 8), "value_length differs"),
        (change_entry("rope.scaling.type", "yarn"), r"rope\.scaling\.type 'yarn' is not supported"),
        (change_entry("rope.dimension_count", 8), "rope.dimension_count 8 differs from the head's 16"),
        (change_entry("attention.head_count", 0), "head_count must be at least 1"),
        (change_entry("block_count", 2**31), r"block_count is 2147483648, but the file has 21 tensors"),
        (change_entry("block_count", 3), r"tensors layers\.2\..* missing"),
        (change_entry("block_count", 1), r"tensors blk\.1\..* and 4 more are not part of a llama model"),
        (
            change_entry("feed_forward_length", 97),
            r"ffn_gate\.weight has shape \[96, 64\], expected \[97, 64\]",
        ),
        (
            change_tokenizer("model", "rwkv"),
            r"tokenizer\.ggml\.model 'rwkv' is not supported; known: gpt2, llama",
        ),
        (change_tokenizer("bos_token_id", 120), r"bos_token_id is 120, but the vocabulary has 120"),
        (
            change_tokenizer("scores", [0.0]),
            r"tokenizer\.ggml\.scores is missing or not one number for every token",
        ),
        (change_tokenizer("token_type", [1]), r"token_type has 1 entries for 120 tokens"),
        (
            lambda writer: writer.tokenizer.update(model="gpt2", pre="unheard-of"),
            r"tokenizer\.ggml\.pre 'unheard-of'",
        ),
        (
            lambda writer: writer.tokenizer.update(model="gpt2", pre="qwen2"),
            r"tokenizer\.ggml\.merges is missing",
        ),
        (
            lambda writer: writer.tokenizer.update(model="gpt2", pre="qwen2", merges=["ab"]),
            "expected two tokens",
        ),
        (
            lambda writer: writer.tokenizer.update(model="gpt2", pre="qwen2", merges=["a Q"]),
            "do not fit together",
        ),
        (lambda writer: writer.tokenizer.pop("tokens"), r"tokenizer\.ggml\.tokens is missing"),
        (
            lambda writer: writer.tensors.update({"blk.0.extra": np.ones(1, np.float32)}),
            r"tensor blk\.0\.extra is not part",
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: Callable[[Writer], Any], message: str) -> None:
    writer = Writer("mistral_without_window", "llama")
    change(writer)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(writer.write(tmp_path / "tiny.gguf"))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = Writer("mistral_without_window", "llama")
    writer.architecture = "phi3"
    with pytest.raises(CheckpointError, match=r"general\.architecture 'phi3' is not supported; supported: llama"):
        load_checkpoint(writer.write(tmp_path / "tiny.gguf"))


def test_damaged_files_never_load_and_never_crash(tmp_path: Path) -> None:
    content = Writer("qwen3", "qwen3").write(tmp_path / "good.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    generator = np.random.default_rng(0)
    cuts = [0, 3, 4, 8, 23, 24, 100, *generator.integers(200, len(content) - 64, 12)]
    for cut in cuts:
        damaged.write_bytes(content[: int(cut)])
        with pytest.raises(CheckpointError, match=r"damaged\.gguf: (corrupt or cut off|not a GGUF file)"):
            load_checkpoint(damaged)
    for field in (8, 16):  # the counts of tensors and of entries
        damaged.write_bytes(content[:field] + b"\xff" * 8 + content[field + 8 :])
        with pytest.raises(CheckpointError, match="corrupt or cut off"):
            load_checkpoint(damaged)
    damaged.write_bytes(b"GGUF" + bytes(generator.integers(0, 256, 4096, dtype=np.uint8)))
    with pytest.raises(CheckpointError, match="corrupt or cut off"):
        load_checkpoint(damaged)
    damaged.write_text("<html>404</html>")
    with pytest.raises(CheckpointError, match=r"begins with b'<htm', expected b'GGUF'"):
        load_checkpoint(damaged)


def test_one_file_in_a_folder_is_found(tmp_path: Path) -> None:
    writer = Writer("qwen3", "qwen3")
    writer.write(tmp_path / "a.gguf")
    assert load_checkpoint(tmp_path).name == "a"
    writer.write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"it has 2 \.gguf files: name one"):
        load_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_gguf: Path) -> Iterator[Any]:
    """transformers' own reading of the file. It asks for accelerate, but uses it for devices only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
        yield AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent,
            gguf_file=smollm2_gguf.name,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_equals_transformers(smollm2_gguf: Path, smollm2_reference: Any) -> None:
    model = load_checkpoint(smollm2_gguf)
    assert (model.config.num_layers, model.config.tie_word_embeddings) == (30, True)
    decoder = model.decoder(128, logits="all")
    tokens = torch.randint(0, 49_152, (1, 68), generator=torch.Generator().manual_seed(0))
    text = Tokenizer.from_str(model.tokenizer.content).encode("The sea is blue because").ids  # type: ignore[union-attr]
    tokens[0, : len(text)] = torch.tensor(text)
    expected = smollm2_reference(tokens).logits
    prefill = decoder(tokens[:, :64], torch.arange(64))
    assert (prefill - expected[:, :64]).abs().max() <= 2e-3
    for position in range(64, 68):
        row = decoder(tokens[:, position : position + 1], torch.tensor([position]))
        assert (row[0, 0] - expected[0, position]).abs().max() <= 2e-3


@pytest.mark.slow
def test_smollm2_weights_are_the_dequantised_ones(smollm2_gguf: Path, smollm2_reference: Any) -> None:
    state = load_checkpoint(smollm2_gguf).state
    theirs = {name.removeprefix("model."): parameter for name, parameter in smollm2_reference.named_parameters()}
    assert set(state) == set(theirs)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-6)
