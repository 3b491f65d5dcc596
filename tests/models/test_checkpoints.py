"""Hugging Face folders: what is read, and one clear error for everything that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from flexpte.models.checkpoints import CheckpointError, load_checkpoint
from tests.models.tiny import random_tokens, save, transformers_model

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(transformers_model("llama"), tmp_path / "tiny-llama")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is KeyError:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    return load_checkpoint(path).decoder(16, logits="all")(random_tokens(9), torch.arange(9))


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    model = transformers_model("llama")
    whole, sharded = save(model, tmp_path / "whole"), save(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(whole), logits(sharded))


def test_version_4_configurations_are_read_the_same(folder: Path) -> None:
    expected = load_checkpoint(folder).config
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(folder, rope_parameters=KeyError, rope_theta=theta, rope_scaling=rope)
    assert load_checkpoint(folder).config == expected


def test_version_4_gemma_is_read_the_same(tmp_path: Path) -> None:
    folder = save(transformers_model("gemma3_linear_rope"), tmp_path)
    expected = load_checkpoint(folder).config
    assert {layer.rotary.linear_factor for layer in expected.layers} == {1.0, 8.0}
    edit_config(
        folder,
        rope_parameters=KeyError,
        layer_types=KeyError,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )
    assert load_checkpoint(folder).config == expected


def test_progress_names_every_tensor_and_ends_complete(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    model = load_checkpoint(folder, progress=lambda *call: calls.append(call))
    assert [name for name, _, _ in calls[:-1]] == list(model.state)
    assert calls[-1][1:] == (len(model.state), len(model.state))


def test_weights_of_the_right_dtype_stay_in_the_file(folder: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    model = load_checkpoint(folder)
    address = model.state["layers.0.mlp.up_proj.weight"].data_ptr()
    for line in maps.read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            assert line.endswith("model.safetensors")
            return
    pytest.fail("the weight is nowhere")


def test_ignorable_and_tied_tensors_are_ignored(tmp_path: Path) -> None:
    folder = save(transformers_model("qwen3"), tmp_path)
    expected = logits(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        tensors["lm_head.weight"] = torch.ones(120, 64)

    edit_tensors(folder, add)
    assert torch.equal(logits(folder), expected)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop("model.layers.1.self_attn.k_proj.weight"),
            r"tensor layers\.1\.self_attn\.k_proj\.weight is missing",
        ),
        (drop("lm_head.weight"), r"tensor lm_head\.weight is missing"),
        (
            put("model.layers.0.extra.weight", torch.ones(1)),
            r"tensor model\.layers\.0\.extra\.weight is not part of",
        ),
        (
            put("model.norm.weight", torch.ones(63)),
            r"tensor model\.norm\.weight has shape \[63\], expected \[64\]",
        ),
        (
            put("model.layers.0.mlp.up_proj.weight", torch.ones(64, 96)),
            r"has shape \[64, 96\], expected \[96, 64\]",
        ),
        (
            put("model.norm.weight", torch.ones(64, dtype=torch.int8)),
            r"tensor model\.norm\.weight is stored as I8; expected F32",
        ),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "multimodal model: save its text part",
        ),
        ({"model_type": KeyError}, "'model_type' is missing"),
        ({"hidden_size": KeyError}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a number, got 'many'"),
        ({"num_hidden_layers": 0}, "at least one layer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"sliding_window": 4}, "llama has no windows"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_configurations_that_do_not_fit(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_with_window", {"use_sliding_window": False}, "use_sliding_window is false; make them agree"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers = 2"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types names 'chunked_attention'",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"sliding_window": None}, "'sliding_window' is missing"),
        ("gemma3", {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attention_softcap must be positive or null"),
    ],
)
def test_windows_and_caps_that_do_not_fit(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    folder = save(transformers_model(family), tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_cut_off_safetensors(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt or cut off .*download it again"):
        load_checkpoint(folder)


def test_files_that_are_missing_or_something_else(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "text.txt")
    with pytest.raises(CheckpointError, match=r"config\.json or one \.gguf file, but it has neither"):
        load_checkpoint(tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; download it"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        load_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(transformers_model("llama"), tmp_path, max_shard_size="40KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} is missing"):
        load_checkpoint(folder)


def test_weights_too_large_for_float16(folder: Path) -> None:
    edit_tensors(folder, put("model.norm.weight", torch.full((64,), 1e5)))
    load_checkpoint(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight does not fit float16 .*100000"):
        load_checkpoint(folder, torch.float16)


def test_other_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16, got torch\.float64"):
        load_checkpoint(folder, torch.float64)


def tiny_tokenizer(add_bos: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:100]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<turn>")])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 100)])
    return tokenizer


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_and_template_come_along(folder: Path, add_bos: bool) -> None:
    tiny_tokenizer(add_bos).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "from the settings"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [102, 101]}))
    edit_config(folder, eos_token_id=99)
    model = load_checkpoint(folder)
    metadata = model.metadata(64, logits="all")
    assert metadata["tokenizer"] == (folder / "tokenizer.json").read_text()
    assert metadata["chat_template"] == "from the settings"
    assert (metadata["bos_token_id"], metadata["add_bos"]) == (100, add_bos)
    assert metadata["eos_token_ids"] == [101, 102, 99]
    assert (metadata["max_context"], metadata["logits"], metadata["dtype"]) == (64, "all", "fp32")
    assert (metadata["name"], metadata["vocab_size"], metadata["windows"]) == (
        "tiny-llama",
        120,
        [None, None],
    )
    json.dumps(metadata)
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_checkpoint(folder).metadata()["chat_template"] == "from the file"


def test_no_tokenizer_is_possible_but_another_format_is_an_error(folder: Path) -> None:
    assert load_checkpoint(folder).tokenizer is None
    (folder / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"has tokenizer\.model but no tokenizer\.json; make one"):
        load_checkpoint(folder)


def test_tokenizers_that_do_not_fit(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"not a valid tokenizer\.json"):
        load_checkpoint(folder)
    tokenizer = tiny_tokenizer(False)
    tokenizer.add_tokens([f"<{number}>" for number in range(18)])
    tokenizer.save(str(path))
    with pytest.raises(CheckpointError, match=r"token ids up to 120, but the model's vocab_size is 120"):
        load_checkpoint(folder)
    tiny_tokenizer(False).save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(CheckpointError, match="names the eos_token '<none>'"):
        load_checkpoint(folder)
