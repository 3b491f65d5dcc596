"""Token ids to text while they are generated."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text one by one, never giving out part of a character.

    The pieces joined are exactly ``tokenizer.decode`` of all tokens, for byte-level vocabularies (GPT-2,
    Llama 3, Qwen) and for SentencePiece ones with byte fallback (Llama 2, Gemma).
    Special tokens give no text, unless ``skip_special_tokens`` is False.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {token for token, entry in added.items() if entry.special and skip_special_tokens}
        # What comes next may depend on the token before (a leading space is dropped at the start of a
        # text only), so the tokens of the last piece are decoded again in front of the new ones.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` is known; often one word, sometimes nothing.

        Raises ValueError if the vocabulary has no such token.
        """
        if token in self._skipped:
            return ""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            raise ValueError(f"token {token} is not in the vocabulary of {self._tokenizer.get_vocab_size()} tokens")
        self._pending.append(token)
        # A run of byte tokens is decoded as a whole: as characters if all of it is valid UTF-8.
        if _BYTE_TOKEN.fullmatch(name):
            return ""
        piece = self._decode_pending()
        return "" if piece.endswith(_REPLACEMENT) else self._give(piece)

    def finish(self) -> str:
        """What was held back; bytes that make no character are U+FFFD. The stream starts anew."""
        piece = self._decode_pending()
        self._context, self._pending = [], []
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""

    def _decode_pending(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _give(self, piece: str) -> str:
        self._context, self._pending = self._pending, []
        return piece
