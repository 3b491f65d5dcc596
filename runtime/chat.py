"""Chat templates: messages to prompt text, by the Jinja template that a checkpoint carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A chat template that is not valid, or that refuses these messages."""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks text for training; rendering ignores the marks."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt that ``template`` makes of ``messages``, each a mapping with "role" and "content".

    The template runs in a sandbox without access to files, attributes of Python objects or mutation, with
    what Hugging Face templates expect: ``raise_exception``, ``strftime_now``, ``tojson`` that keeps
    characters as they are, loop controls and ``generation`` blocks.
    ``add_generation_prompt`` ends with the opening of the assistant's turn.
    Raises :class:`ChatTemplateError`: not a valid template, an undefined operation, or refused messages.
    """
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f'message {number} must be a mapping with a "role" and "content", got {message!r}')
    try:
        return (
            _environment()
            .from_string(template)
            .render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                bos_token=bos_token,
                eos_token=eos_token,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except ChatTemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # templates are programs of others: they may fail in any way
        raise ChatTemplateError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes HTML characters, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
