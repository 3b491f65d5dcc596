"""The one error of an export."""

from __future__ import annotations


class Unsupported(Exception):
    """Something in the model that flexpte cannot lower.

    ``what`` names the op, mod, shape or dtype; ``source`` is the line of the model that it came from;
    ``fix`` says what to do about it.
    """

    def __init__(self, what: str, *, source: str | None = None, fix: str | None = None) -> None:
        self.what, self.source, self.fix = what, source, fix
        parts = [what]
        if source:
            parts.append(f"at {source}")
        message = " ".join(parts)
        super().__init__(f"{message}. {fix}" if fix else message)
        self._text = str(self.args[0])

    def __str__(self) -> str:
        return self._text  # torch's graph interpreter appends to the arguments of what passes through it
