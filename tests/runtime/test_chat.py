"""Chat templates, compared with what transformers renders."""

from __future__ import annotations

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from flexpte.runtime.chat import ChatTemplateError, render_chat

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße 🙂\n\nwhat is 1<2?"},
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": "why"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": ["<x>", 1.5, None, True]}}}]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks_and_whitespace": (
        "{{ bos_token }}\n"
        "{% if messages[0].role == 'system' %}\n    {% set system = messages[0].content %}\n"
        "    {{- system | trim }}\n{% endif %}\n"
        "  {% for m in messages %}\n   {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ loop.index0 }}:{{ m.content }}{{ eos_token }}\n"
        "{% if loop.index > 3 %}{% break %}{% endif %}\n{% endfor %}\nend\n"
    ),
    "tools": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% else %}no tools{% endif %}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}"
    ),
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_as_transformers_does(template: str, opening: bool, tools: list[dict] | None) -> None:
    rendered, _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=tools,
        chat_template=template,
        add_generation_prompt=opening,
        bos_token="<s>",
        eos_token="</s>",
    )
    ours = render_chat(
        template, MESSAGES, bos_token="<s>", eos_token="</s>", add_generation_prompt=opening, tools=tools
    )
    assert [ours] == rendered


def test_the_date_is_there() -> None:
    text = render_chat("{{ strftime_now('%Y') }}", [], bos_token="", eos_token="")
    assert int(text) - datetime.datetime.now().year in (0, -1)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("line\n{% if %}", "not valid Jinja, line 2"),
        ("{{ messages[9]['role'].upper() }}", "failed on these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(10000000) %}{% endfor %}", "failed on these messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_bad_templates_are_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, MESSAGES, bos_token="", eos_token="")


@pytest.mark.parametrize("bad", ["hello", {"content": "x"}, {"role": 3, "content": "x"}])
def test_messages_must_have_a_role(bad: object) -> None:
    with pytest.raises(ChatTemplateError, match="message 1 must be a mapping"):
        render_chat("", [MESSAGES[0], bad], bos_token="", eos_token="")  # type: ignore[list-item]
