"""Text in, text out: a language model in one .pte file, with its tokenizer and chat template inside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from flexpte.runtime.chat import render_chat
from flexpte.runtime.program import FlexpteError, Program, load
from flexpte.runtime.sampling import sample, validate_sampling
from flexpte.runtime.text import TextStream

PREFILL_CHUNK_TOKENS = 512
"""Prompts are fed in pieces of this many tokens: the arena stays small however long the prompt is."""


@dataclass(frozen=True)
class GenerationStats:
    """What one generation did and how long it took.

    ``finish_reason`` is "stop" (an end-of-sequence token), "max_tokens" or "context" (the model's
    context is full). ``prompt_tokens`` counts the whole prompt, ``reused_tokens`` those of it that were
    still in the cache from the call before.
    """

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens actually computed, per second."""
        return (self.prompt_tokens - self.reused_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens after the first one (which the prefill gives), per second."""
        return max(self.generated_tokens - 1, 0) / max(self.decode_seconds, 1e-9)


class LLM:
    """A language model exported by ``flexpte export``, ready to generate.

    One conversation at a time: the key/value cache is kept between calls, and a prompt that begins like
    the last one is only computed from where it differs.
    """

    def __init__(self, source: str | Path | bytes | Program, *, device: str = "auto") -> None:
        """Load ``source``, a path, the bytes of a .pte, or a loaded program.

        Raises FlexpteError if the file cannot be loaded or is not a language model.
        """
        self.program = source if isinstance(source, Program) else load(source, device=device)
        metadata = self.program.metadata
        if metadata.get("kind") == "language_model" and not metadata.get("tokenizer"):
            raise FlexpteError(
                "this .pte has no tokenizer: the checkpoint had none. Put tokenizer.json beside its weights and export "
                "it again, or feed tokens to flexpte.load(...).session().run(...)",
                "InvalidArgument",
            )
        if metadata.get("kind") != "language_model" or not metadata.get("tokenizer"):
            raise FlexpteError(
                "this .pte is not a language model with a tokenizer inside: expected one written by "
                f"`flexpte export <checkpoint>`, got methods {sorted(self.program.methods)}. "
                "Use flexpte.load(...).session().run(...) for other models",
                "InvalidArgument",
            )
        if metadata.get("logits", "last") != "last":
            raise FlexpteError(
                "this .pte was exported with --logits all, which is for scoring; export it with --logits last "
                "to generate text",
                "InvalidArgument",
            )
        self.max_context: int = int(metadata["max_context"])
        self.eos_token_ids: frozenset[int] = frozenset(metadata.get("eos_token_ids") or [])
        self.tokenizer = Tokenizer.from_str(metadata["tokenizer"])
        # Embeddings are often padded; rows behind the last token have no text and are never chosen.
        self._num_tokens = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.stats: GenerationStats | None = None
        self._metadata: Mapping[str, Any] = metadata
        self._session = self.program.session()
        self._cached: list[int] = []

    def reset(self) -> None:
        """Forget the conversation: the next prompt is computed from its first token."""
        self._session.reset()
        self._cached = []

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; the beginning-of-sequence token is added where the model wants one."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        bos = self._metadata.get("bos_token_id")
        if self._metadata.get("add_bos") and bos is not None and (not ids or ids[0] != bos):
            ids.insert(0, bos)
        return ids

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The continuation of ``prompt`` (text, or token ids), up to ``max_tokens`` tokens.

        Temperature 0 takes the likeliest token each time; above it, tokens are drawn after top-k, top-p
        and min-p filtering, the same ones for the same seed. Stops at an end-of-sequence token, which is
        not part of the result. ``self.stats`` tells how it went.
        Raises FlexpteError (code "OutOfRange") if the prompt does not fit the context, and ValueError
        for sampling parameters outside their ranges.
        """
        return "".join(
            self.stream(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
            )
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Like :meth:`generate`, yielding text as it comes; characters are never split."""
        validate_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; expected 0 or more")
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._check_prompt(tokens)
        return self._stream(tokens, max_tokens, temperature, top_k, top_p, min_p, seed)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> str:
        """The assistant's answer to ``messages``, dicts with "role" and "content".

        Raises FlexpteError (code "InvalidArgument") if the model has no chat template.
        """
        return "".join(
            self.chat_stream(
                messages,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
            )
        )

    def chat_stream(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """Like :meth:`chat`, yielding text as it comes; ``options`` as for :meth:`stream`."""
        options.setdefault("max_tokens", 256)
        return self.stream(self.encode(self.chat_prompt(messages)), **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """``messages`` as the text that the model's chat template makes of them."""
        template = self._metadata.get("chat_template")
        if not template:
            raise FlexpteError(
                "this model has no chat template: it is a base model; use generate(prompt)", "InvalidArgument"
            )
        return render_chat(
            template,
            [dict(m) for m in messages],
            bos_token=self._special("bos_token_id"),
            eos_token=self._special("eos_token_ids"),
        )

    def _special(self, key: str) -> str:
        value = self._metadata.get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        return "" if value is None else (self.tokenizer.id_to_token(value) or "")

    def _check_prompt(self, tokens: list[int]) -> None:
        if not tokens:
            raise FlexpteError("the prompt is empty: expected at least one token", "InvalidArgument")
        if len(tokens) > self.max_context:
            raise FlexpteError(
                f"the prompt has {len(tokens)} tokens but the model was exported with a context of "
                f"{self.max_context}: shorten the prompt, or export with a larger --max-context",
                "OutOfRange",
            )
        vocab_size = int(self._metadata["vocab_size"])
        bad = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise FlexpteError(f"token id {bad} is outside the vocabulary of {vocab_size}", "InvalidArgument")

    def _stream(
        self,
        tokens: list[int],
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
    ) -> Iterator[str]:
        generator = np.random.default_rng(seed)
        text = TextStream(self.tokenizer)
        reused = self._reusable(tokens)
        generated, decode_seconds = 0, 0.0
        finish_reason = "max_tokens"
        start = time.perf_counter()
        logits = self._feed(tokens, reused)
        prefill_seconds = time.perf_counter() - start
        try:
            while generated < max_tokens:
                token = sample(
                    logits,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    generator=generator,
                )
                if token in self.eos_token_ids:
                    finish_reason = "stop"
                    break
                generated += 1
                piece = text.push(token)
                if piece:
                    yield piece
                if generated == max_tokens:
                    break
                if len(self._cached) == self.max_context:
                    finish_reason = "context"
                    break
                start = time.perf_counter()
                logits = self._feed([*self._cached, token], len(self._cached))
                decode_seconds += time.perf_counter() - start
            rest = text.finish()
            if rest:
                yield rest
        finally:
            self.stats = GenerationStats(len(tokens), reused, generated, prefill_seconds, decode_seconds, finish_reason)

    def _reusable(self, tokens: list[int]) -> int:
        """How many leading tokens are in the cache already; the last one is always computed anew."""
        common = 0
        for cached, token in zip(self._cached, tokens[:-1], strict=False):
            if cached != token:
                break
            common += 1
        return common

    def _feed(self, tokens: list[int], start: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Run tokens[start:] at their positions; logits [V] after the last one."""
        del self._cached[start:]
        logits = np.empty(0, np.float32)
        for begin in range(start, len(tokens), PREFILL_CHUNK_TOKENS):
            end = min(begin + PREFILL_CHUNK_TOKENS, len(tokens))
            (out,) = self._session.run(
                "forward", np.asarray([tokens[begin:end]], np.int64), np.arange(begin, end, dtype=np.int64)
            )
            self._cached += tokens[begin:end]
            logits = np.asarray(out, np.float32)[0, -1, : self._num_tokens]
        return logits
