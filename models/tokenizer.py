"""Tokenizers as the content of a ``tokenizer.json``, also for GGUF files, which have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens in ``tokenizer.ggml.token_type`` (llama.cpp, ``enum llama_token_type``)."""

_SPACE = "\u2581"  # SentencePiece writes spaces as this character


class TokenizerError(ValueError):
    """A tokenizer that cannot be read or built; the message names what is wrong."""


@dataclass(frozen=True)
class TokenizerInfo:
    """Everything between text and token ids.

    ``content`` is a ``tokenizer.json``. ``add_bos``: a raw prompt begins with ``bos_token_id``. The
    first of ``eos_token_ids`` is the tokenizer's own end of sequence; generation stops at any.
    """

    content: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


def describe_tokenizer(
    content: str,
    *,
    bos_token: str | None,
    eos_token: str | None,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    chat_template: str | None,
    vocab_size: int,
) -> TokenizerInfo:
    """Collect what the files of a Hugging Face folder say; token texts win over token ids.

    Raises :class:`TokenizerError`: not a tokenizer.json, or token ids beyond the model's vocabulary.
    """
    tokenizer = load_tokenizer(content)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise TokenizerError(
            f"has token ids up to {largest}, but the model's vocab_size is {vocab_size}; "
            "tokenizer and weights are of different models"
        )
    ids = [] if eos_token is None else [_required_id(tokenizer, eos_token, "eos_token")]
    bos = bos_token_id if bos_token is None else _required_id(tokenizer, bos_token, "bos_token")
    prefix = tokenizer.encode("", add_special_tokens=True).ids
    return TokenizerInfo(
        content=content,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys([*ids, *eos_token_ids])),
        add_bos=bos is not None and prefix[:1] == [bos],
        chat_template=chat_template,
    )


def load_tokenizer(content: str) -> Tokenizer:
    """A tokenizer from the content of its tokenizer.json. Raises :class:`TokenizerError`."""
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"not a valid tokenizer.json ({error}); download it again") from error


def _required_id(tokenizer: Tokenizer, token: str, field: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise TokenizerError(f"tokenizer_config.json names the {field} {token!r}, which the vocabulary does not have")
    return token_id


# How text is cut before merging, by tokenizer.ggml.pre. These are the rules the vocabularies were trained
# with, published in the models' tokenizer.json files; llama.cpp (src/llama-vocab.cpp) has the names.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _ByteLevelRules:
    """``split``: a pattern, or None for GPT-2's own; ``digits``: every digit stands alone before it;
    ``whole_words``: a word that is a token needs no merges."""

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3_RULES = _ByteLevelRules(_LLAMA3_SPLIT, whole_words=True, add_bos=True)
_QWEN2_RULES = _ByteLevelRules(_QWEN2_SPLIT, nfc=True)
_BYTE_LEVEL_RULES: dict[str, _ByteLevelRules] = {
    "gpt-2": _ByteLevelRules(),
    "smollm": _ByteLevelRules(digits=True),
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
    "tekken": _ByteLevelRules(_TEKKEN_SPLIT, whole_words=True, add_bos=True),
}

# Tokens that end a turn where a GGUF names only one end of sequence.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], architecture: str) -> TokenizerInfo:
    """Build the tokenizer that the ``tokenizer.*`` entries of a GGUF file describe.

    Models ``gpt2`` (byte-level BPE) and ``llama`` (SentencePiece BPE with byte fallback).
    Raises :class:`TokenizerError`: a missing entry, another model or pre-tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if architecture.startswith("gemma"):
        # Tokens of several spaces are stored as spaces; merges need them as text looks by then.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer, default_add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, default_add_bos = _sentencepiece(metadata, tokens, types, architecture), True
    else:
        raise TokenizerError(f"tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama")
    _add_special_tokens(tokenizer, tokens, types)
    bos = _token_id(metadata, "bos", tokens)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_add_bos)) and bos is not None
    if add_bos:
        text = tokens[bos] if bos is not None else ""
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text}:1 $B:1", special_tokens=[(text, bos)]
        )
    named = [_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    turns = [index for index, token in enumerate(tokens) if token in _END_OF_TURN and types[index] == CONTROL]
    template = metadata.get("tokenizer.chat_template")
    return TokenizerInfo(
        content=tokenizer.to_str(),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys([*(i for i in named if i is not None), *turns])),
        add_bos=add_bos,
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise TokenizerError(f"{key} is missing or not a list of strings; the file has no usable tokenizer")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise TokenizerError(f"{key} is {value!r}, but the vocabulary has {len(tokens)} tokens")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    rules = _BYTE_LEVEL_RULES.get(name) if isinstance(name, str) else None
    if rules is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre {name!r} is not supported; known: {', '.join(_BYTE_LEVEL_RULES)}. "
            "Use the model's Hugging Face folder, which has a tokenizer.json"
        )
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TokenizerError(f"tokenizer.ggml.merges has {merge!r}; expected two tokens and a space between")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=rules.whole_words))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if rules.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"tokenizer.ggml.tokens and merges do not fit together ({error})") from error


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], architecture: str
) -> Tokenizer:
    gemma = architecture.startswith("gemma")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError("tokenizer.ggml.scores is missing or not one number for every token")
    # Gemma's merge order is the order of its tokens; its scores say otherwise.
    ranks = [-index for index in range(len(tokens))] if gemma else scores
    mergeable = [
        (token, ranks[index])
        for index, token in enumerate(tokens)
        if types[index] == NORMAL or (gemma and types[index] == USER_DEFINED)
    ]
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        _bpe(vocabulary, _merges(mergeable, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", not gemma):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(mergeable: Iterable[tuple[str, float]], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges behind a SentencePiece vocabulary: every way to make a token of two others, the
    tokens of the highest score first."""
    found = []
    for token, score in mergeable:
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and unknown tokens are special; user-defined ones are matched whole but stay visible text."""
    special = [
        AddedToken(t, normalized=False, special=True)
        for t, k in zip(tokens, types, strict=True)
        if k in (CONTROL, UNKNOWN)
    ]
    tokenizer.add_special_tokens(special)
    visible = [
        AddedToken(t, normalized=False, special=False) for t, k in zip(tokens, types, strict=True) if k == USER_DEFINED
    ]
    tokenizer.add_tokens(visible)


__all__ = ["TokenizerError", "TokenizerInfo", "describe_tokenizer", "load_tokenizer", "tokenizer_from_gguf"]
