"""Opens a Hugging Face folder: config.json, safetensors (one file or shards), tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexpte.models.config import ConfigError, DecoderConfig
from flexpte.models.source import CheckpointError, Source, StoredTensor
from flexpte.models.tokenizer import TokenizerError, TokenizerInfo, describe_tokenizer

_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def open_hugging_face(folder: Path) -> Source:
    """Read the small files of ``folder`` and the headers of its safetensors.

    Raises :class:`CheckpointError`.
    """
    raw_config = json_object(folder / "config.json")
    try:
        config = DecoderConfig.from_hugging_face(raw_config)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    name = raw_config.get("_name_or_path") or ""
    name = Path(name).name if isinstance(name, str) and name else folder.resolve().name
    return Source(name, config, _tokenizer(folder, raw_config, config.vocab_size), stored_tensors(folder))


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _optional_json(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors by name (less a leading ``model.``). Raises CheckpointError."""
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        for stored in _tensors_of_file(path):
            if stored.stored_name.endswith("rotary_emb.inv_freq"):  # derived from the configuration
                continue
            name = stored.stored_name.removeprefix("model.")
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {stored.stored_name} is stored in more than one file")
            tensors[name] = stored
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: has no weight_map; download it again")
        files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        advice = "download it"
        if any(folder.glob("*.bin")):
            advice = "only safetensors are read: save the model again with save_pretrained of transformers"
        raise CheckpointError(f"{folder}: {', '.join(missing)} is missing; {advice}")
    return files


def _tensors_of_file(path: Path) -> Iterable[StoredTensor]:
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights; run git lfs pull")
    try:
        tensors: Any = safe_open(str(path), framework="pt", device="cpu")
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            part = tensors.get_slice(name)
            yield StoredTensor(name, tuple(part.get_shape()), partial(_read, path, tensors, name, part.get_dtype()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: corrupt or cut off ({error}); download it again") from error


def _read(path: Path, file: Any, name: str, dtype: str) -> Tensor:
    if dtype not in _FLOATING:
        raise CheckpointError(
            f"{path}: tensor {name} is stored as {dtype}; expected {', '.join(_FLOATING)}. "
            "Quantised checkpoints must be dequantised first"
        )
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}); download it again") from error
    return tensor


def _tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> TokenizerInfo | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
        if others:
            raise CheckpointError(
                f"{folder}: has {others[0]} but no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None
    settings = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    eos_ids = [*_token_ids(generation, "eos_token_id", folder), *_token_ids(config, "eos_token_id", folder)]
    bos_ids = [*_token_ids(config, "bos_token_id", folder), *_token_ids(generation, "bos_token_id", folder)]
    try:
        return describe_tokenizer(
            path.read_text(encoding="utf-8"),
            bos_token=_token_text(settings, "bos_token"),
            eos_token=_token_text(settings, "eos_token"),
            bos_token_id=bos_ids[0] if bos_ids else None,
            eos_token_ids=eos_ids,
            chat_template=_chat_template(folder, settings),
            vocab_size=vocab_size,
        )
    except (TokenizerError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _token_ids(settings: Mapping[str, Any], field: str, folder: Path) -> list[int]:
    value = settings.get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise CheckpointError(f"{folder}: {field} must be a token id or a list of them, got {value!r}")
    return ids


def _token_text(settings: Mapping[str, Any], field: str) -> str | None:
    value = settings.get(field)
    if isinstance(value, Mapping):  # an AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
