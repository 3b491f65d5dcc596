"""What a checkpoint reader hands over, whatever the file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from flexpte.models.config import DecoderConfig
from flexpte.models.tokenizer import TokenizerInfo


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message says what was expected, what came, and what to do."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still in its file. ``read`` gives it in its own floating dtype."""

    stored_name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: everything but the weights is in memory.

    ``tensors`` by the decoder's parameter names; names the decoder does not have are found out later.
    """

    name: str
    config: DecoderConfig
    tokenizer: TokenizerInfo | None
    tensors: Mapping[str, StoredTensor]
