"""Streaming text equals decoding everything at once, and never splits a character."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flexpte.runtime.text import TextStream

TEXTS = [
    "Hello, world! It's 2024.",
    "  leading and   inner spaces \n\n\ttabs ",
    "naïve café, Ünïcödé, Ελληνικά, русский, עברית, हिन्दी, 中文字符, 日本語, 한국어",
    "🙂👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 emoji, e\u0301 combining",
    "a\ufffdb \ufffd\ufffd",
    "",
]


def byte_level() -> Tokenizer:
    """Every byte a token, and some merges that do not respect characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    merges = []
    for left, right in [("h", "e"), ("l", "l"), ("Ġ", "i"), ("Ð", "¿"), ("ð", "Ł"), ("Ñ", "Ģ"), ("Ã", "©")]:
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    """SentencePiece as Llama 2 (a space in front) or Gemma (none) have it: letters, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*"abcdefghijklmnopqrstuvwxyzH,!.é", "\u2581w", "\u2581\u2581"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("\u2581", "w"), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "llama2": sentencepiece(True), "gemma": sentencepiece(False)}


def pieces(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_without_broken_characters(tokenizer: Tokenizer, text: str) -> None:
    given = pieces(tokenizer, tokenizer.encode(text).ids)
    assert "".join(given) == text
    for piece in given[:-1]:
        assert "\ufffd" not in piece or "\ufffd" in text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_any_tokens_stream_to_what_decode_gives(tokenizer: Tokenizer, skip: bool) -> None:
    """Mostly invalid UTF-8: what a model may produce, though nobody writes it."""
    generator = random.Random(0)
    names = tokenizer.get_vocab()
    special = [names[name] for name in ("<s>", "</s>", "<|end|>", "<think>", "\u2581", "Ġ") if name in names]
    for _ in range(400):
        ids = [
            generator.choice(special) if generator.random() < 0.3 else generator.randrange(tokenizer.get_vocab_size())
            for _ in range(generator.randrange(12))
        ]
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == expected, ids


def test_a_word_is_given_out_at_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert pieces(tokenizer, tokenizer.encode("hello").ids) == ["he", "ll", "o", ""]


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("日x").ids
    assert len(ids) == 4
    assert pieces(tokenizer, ids) == ["", "", "日", "x", ""]


def test_byte_fallback_waits_for_the_end_of_the_bytes() -> None:
    tokenizer = TOKENIZERS["gemma"]
    assert pieces(tokenizer, tokenizer.encode("日a").ids) == ["", "", "", "日a", ""]


def test_bytes_that_make_no_character_come_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("日").ids[:2]
    assert pieces(tokenizer, ids) == ["", "", "\ufffd"]


def test_special_tokens_are_skipped_unless_wanted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<think>a<|end|>").ids
    assert "".join(pieces(tokenizer, ids)) == "<think>a"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "<think>a<|end|>"


def test_finish_starts_anew() -> None:
    tokenizer = TOKENIZERS["llama2"]
    stream = TextStream(tokenizer)
    for _ in range(2):
        ids = tokenizer.encode("we").ids
        assert "".join([*(stream.push(i) for i in ids), stream.finish()]) == "we"


def test_an_unknown_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="token 99999 is not in the vocabulary"):
        TextStream(TOKENIZERS["gemma"]).push(99999)
