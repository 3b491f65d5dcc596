"""Tiny checkpoints that a language model can be exported from, tokenizer and chat template included."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.models.tiny import save, transformers_model

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


def save_tiny_checkpoint(folder: Path, family: str, **changes) -> Path:
    """A random model of ``family`` in ``folder``; one token per printable ASCII character."""
    save(transformers_model(family, **changes), folder)
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
