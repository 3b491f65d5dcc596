"""Tokenizers built from GGUF metadata, against those that transformers builds."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer

from flexpte.models.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TokenizerError,
    tokenizer_from_gguf,
)

TEXTS = [
    "",
    " ",
    "Hello, world! We'll see, DON'T shouldn't I'M",
    "  leading and   inner spaces \n\n\ttabs  \r\n\r\n x\n",
    "naïve café Ünïcödé, Ελληνικά, русский, עברית, हिन्दी, 中文字符, 日本語, 한국어",
    "🙂👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 emoji, e\u0301 combining, \u00a0nbsp\u2003em\u200bzw",
    "def f(x):\n    return x**y # comment\n\tif a != b: pass",
    "<|start|>user\nhi<|end|>\n<|start|>",
    "a" * 50 + " " * 30 + "b",
    "\n\n\n\n\ta\n \n  \n",
    "\ufffd\x00\x01 ½ Ⅷ",
]
NUMBERS = ["1", "12", "2024", "1234567 things", "v1.2.3", "١٢٣٤"]
_GENERATOR = random.Random(0)
_CHARACTERS = [*map(chr, range(33, 48)), *"abcdefgh \n \t", *"éü中日🙂ж", *"  \n", "'s", " the", "in", "er"]
TEXTS += ["".join(_GENERATOR.choices(_CHARACTERS, k=_GENERATOR.randrange(40))) for _ in range(300)]
CORPUS = [*TEXTS, *NUMBERS, "the inner singer enters the thing, there in the garden " * 30]


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A small vocabulary learned from the texts above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [*model["vocab"], "<|start|>", "<|end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    corpus = [text for text in CORPUS if text.isascii()]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = list(json.loads(tokenizer.to_str())["model"]["vocab"])
    pieces = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL, *[BYTE] * 256]
    pieces += [piece for piece in learned if piece not in pieces]
    if "\u2581" not in pieces:
        pieces.append("\u2581")
    types += [NORMAL] * (len(pieces) - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def oracle(metadata: dict[str, Any], architecture: str) -> Tokenizer:
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "add_space_prefix": "add_prefix_space"}
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokenizer, _ = convert_gguf_tokenizer(architecture, {names.get(key, key): value for key, value in given.items()})
    return tokenizer


def assert_same(ours: Tokenizer, theirs: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-2"])
def test_byte_level_tokenizers_equal_those_of_transformers(pre: str) -> None:
    metadata = byte_level_metadata(pre)
    info = tokenizer_from_gguf(metadata, "llama")
    # Qwen's rules compose accents, which transformers' conversion leaves out; llama.cpp does not either.
    texts = [text for text in [*TEXTS, *NUMBERS] if "\u0301" not in text or pre not in ("qwen2", "deepseek-r1-qwen")]
    assert_same(Tokenizer.from_str(info.content), oracle(metadata, "llama"), texts)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2", "smollm"])
def test_every_text_survives_the_round_trip(pre: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_from_gguf(byte_level_metadata(pre), "llama").content)
    for text in [*TEXTS, *NUMBERS]:
        if "\u0301" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_whole_and_end_turns() -> None:
    metadata = byte_level_metadata("smollm")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"][:0] = ["<|im_end|>"]
    metadata["tokenizer.ggml.token_type"][:0] = [CONTROL]
    info = tokenizer_from_gguf({**metadata, "tokenizer.ggml.eos_token_id": size - 1}, "llama")
    assert info.eos_token_ids == (size - 1, 0)
    tokenizer = Tokenizer.from_str(info.content)
    assert tokenizer.encode("<|im_end|><tool>").ids == [0, size]
    assert tokenizer.decode([0, size]) == "<tool>"


@pytest.mark.parametrize(("flag", "expected"), [(None, True), (True, True), (False, False)])
def test_llama3_begins_with_bos_unless_told_otherwise(flag: bool | None, expected: bool) -> None:
    metadata = byte_level_metadata("llama-bpe")
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    info = tokenizer_from_gguf(metadata, "llama")
    ids = Tokenizer.from_str(info.content).encode("hello").ids
    assert info.add_bos is expected
    assert (ids[0] == info.bos_token_id) is expected


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_tokenizers_equal_those_of_transformers(architecture: str) -> None:
    metadata = sentencepiece_metadata()
    if architecture == "gemma3":
        metadata["tokenizer.ggml.add_space_prefix"] = False
    info = tokenizer_from_gguf(metadata, architecture)
    ours, theirs = Tokenizer.from_str(info.content), oracle(metadata, architecture)
    assert info.add_bos
    # After a special token and in front of a space the two ways of writing the prefix differ.
    texts = [t for t in [*TEXTS, *NUMBERS] if architecture == "gemma3" or not (t.startswith((" ", "<")) or t == "")]
    assert_same(ours, theirs, texts)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_round_trip(architecture: str) -> None:
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": architecture == "llama"}
    tokenizer = Tokenizer.from_str(tokenizer_from_gguf(metadata, architecture).content)
    for text in [*TEXTS, *NUMBERS]:
        if "<|" not in text:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_merges_follow_the_scores() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] = ["<unk>", "a", "b", "c", "ab", "bc"]
    metadata["tokenizer.ggml.token_type"] = [UNKNOWN, *[NORMAL] * 5]
    for scores, expected in (([0, 0, 0, 0, -1, -2], ["ab", "c"]), ([0, 0, 0, 0, -2, -1], ["a", "bc"])):
        metadata["tokenizer.ggml.scores"] = [float(score) for score in scores]
        metadata["tokenizer.ggml.add_space_prefix"] = False
        tokenizer = Tokenizer.from_str(tokenizer_from_gguf(metadata, "llama").content)
        assert tokenizer.encode("abc", add_special_tokens=False).tokens == expected


def test_gpt2_files_without_a_pre_tokenizer_are_refused() -> None:
    metadata = byte_level_metadata("smollm")
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre None is not supported; known: gpt-2, smollm"):
        tokenizer_from_gguf(metadata, "llama")


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2_gguf: Path) -> None:
    from flexpte.models.gguf_reader import open_gguf

    info = open_gguf(smollm2_gguf).tokenizer
    assert info is not None
    ours = Tokenizer.from_str(info.content)
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    chat = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    # The model was trained on single digits, which transformers' conversion does not know.
    texts = [text for text in TEXTS if not any(unicodedata.category(c).startswith("N") for c in text)]
    assert len(texts) > 300
    assert_same(ours, theirs.backend_tokenizer, [*texts, chat])
    assert ours.encode("in 2024").tokens[-4:] == ["2", "0", "2", "4"]
    assert (info.bos_token_id, info.eos_token_ids, info.add_bos) == (1, (2, 0), False)
    messages = [{"role": "user", "content": "Grüße"}]
    from flexpte.runtime.chat import render_chat

    assert info.chat_template is not None
    prompt = render_chat(info.chat_template, messages, bos_token="<|im_start|>", eos_token="<|im_end|>")
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
