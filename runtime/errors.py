"""The one error of loading and running."""

from __future__ import annotations


class FlexpteError(RuntimeError):
    """What went wrong, in words; ``code`` says of which kind, e.g. ``"InvalidArgument"``.

    Codes: ``InvalidArgument``, ``InvalidProgram``, ``Unsupported``, ``NotFound``, ``OutOfRange``,
    ``OutOfMemory``, ``Io``, ``Unavailable`` (not now: a GPU that the system keeps from apps in the
    background), ``Internal``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
