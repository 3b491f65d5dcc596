"""The command line: what it writes, how it fails."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flexpte.exporter.cli import app
from tests.exporter.checkpoints import save_tiny_checkpoint

runner = CliRunner()


def run(*arguments, **options):
    return runner.invoke(app, [str(a) for a in arguments], **options)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A tiny random Llama as transformers saves it, with a tokenizer of single bytes."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def llama_pte(llama_folder):
    path = llama_folder / "model.pte"
    done = run("export", llama_folder, "-o", path, "--max-context", 64)
    assert done.exit_code == 0, done.output
    return path


def test_help_names_every_command():
    text = run("--help").output
    for command in ("export", "explain", "generate", "chat", "inspect"):
        assert command in text
        assert run(command, "--help").exit_code == 0


def test_export_reports_what_was_delegated(llama_folder, tmp_path):
    done = run("export", llama_folder, "-o", tmp_path / "m.pte", "--max-context", 32)
    assert done.exit_code == 0
    assert "wrote" in done.output
    assert "attention" in done.output


def test_dry_run_reports_and_writes_nothing(llama_folder, tmp_path):
    done = run("export", llama_folder, "-o", tmp_path / "m.pte", "--max-context", 32, "--dry-run")
    assert done.exit_code == 0
    assert "not written" in done.output
    assert not list(tmp_path.iterdir())


def test_explain_shows_mods_windows_and_pictures(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "gemma", "gemma3")
    done = run("explain", folder, "--tokens", 256, "--png", tmp_path / "pictures", "--quiet")
    assert done.exit_code == 0, done.output
    assert "kv_idx > (c0[q_idx] - 8)" in done.output
    assert "window of 8 tokens proved" in done.output
    assert "no window proved" in done.output
    assert "▒···" in done.output
    assert "█▒··" in done.output
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert len(pictures) == 2
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_generate_prints_the_continuation(llama_pte):
    done = run("generate", llama_pte, "--prompt", "ab", "--max-tokens", 5, "--stats")
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.output


def test_chat_conversation_ends_at_end_of_input(llama_pte):
    done = run("chat", llama_pte, "--max-tokens", 3, input="hello\n/reset\nagain\n/exit\n")
    assert done.exit_code == 0, done.output


def test_a_message_is_a_text_not_a_command(llama_pte):
    for message in ("hello", "/reset", "/exit"):
        done = run("chat", llama_pte, "--max-tokens", 3, "--message", message, "--stats")
        assert done.exit_code == 0, done.output
        assert "generated 3 tokens" in done.output


def test_a_file_without_a_tokenizer_says_so(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "model", "llama")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert run("export", folder, "-o", tmp_path / "m.pte", "--max-context", 16).exit_code == 0
    done = run("generate", tmp_path / "m.pte", "--prompt", "a")
    assert done.exit_code == 1
    assert "no tokenizer" in done.output


def test_inspect_shows_caches_and_metadata(llama_pte):
    text = run("inspect", llama_pte).output
    for word in ("forward", "FlexpteBackend", "tokens", "cache", "max_context"):
        assert word in text
    description = json.loads(run("inspect", llama_pte, "--json").output)
    assert description["metadata"]["max_context"] == 64
    assert len(description["caches"]) == 4


def test_bench_times_and_counts(llama_pte):
    done = run("bench", llama_pte, "-q")  # whose context is 64
    assert done.exit_code == 0, done.output
    assert "prefill: 32 tokens" in done.output
    options = ("--prompt-tokens", 5, "--decode-tokens", 2, "-q")
    done = run("bench", llama_pte, *options)
    assert done.exit_code == 0
    assert "prefill: 5 tokens" in done.output
    assert "decode: 2 tokens" in done.output
    done = run("bench", llama_pte, "--device", "msl-host", "--counters", *options)
    assert done.exit_code == 0
    assert "estimate" in done.output
    done = run("bench", llama_pte, "--device", "msl-host", "--counters", "--json", *options)
    prefill, decode = json.loads(done.stdout)
    for phase in (prefill, decode):
        # All weights and the visible cache are read, and little else.
        assert 0.9 < phase["total"]["read_bytes"] / phase["minimum_bytes"] < 3
        assert phase["estimated_seconds"]["M1"] > phase["estimated_seconds"]["M2 Max"] > 0
    assert decode["total"]["matrix_flops"] < prefill["total"]["matrix_flops"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "/nowhere/model", "-o", "x.pte"), ("/nowhere/model",)),
        (("export", "{folder}", "-o", "/nowhere/x.pte"), ("/nowhere", "does not exist")),
        (("export", "{folder}", "-o", "{folder}"), ("is a folder",)),
        (("export", "{folder}", "-o", "{tmp}/x.pte", "--max-context", "0"), ("max_context", "0")),
        (("export", "{folder}", "-o", "{folder}/config.json/x.pte"), ("x.pte",)),
        (("export", "{folder}", "-o", "{tmp}/" + "x" * 300), ("xxx", "too long")),
        (("chat", "{pte}", "--message", " "), ("--message", "empty")),
        (("inspect", "/nowhere/x.pte"), ("/nowhere/x.pte",)),
        (("inspect", "{folder}/config.json"), ("config.json",)),
        (("generate", "{pte}", "--prompt", ""), ("empty",)),
        (("generate", "{pte}", "--prompt", "a" * 100), ("100", "64")),
        (("generate", "{pte}", "--prompt", "a", "--top-p", "2"), ("top_p", "2")),
        (("generate", "{pte}", "--prompt", "a", "--temperature", "-1"), ("temperature", "-1")),
        (("generate", "{pte}", "--prompt", "a", "--device", "tpu"), ("tpu", "host")),
        (("bench", "{pte}", "--counters"), ("--counters", "msl-host")),
        (("bench", "{pte}", "--prompt-tokens", "100"), ("100", "64")),
        (("bench", "{folder}/config.json"), ("config.json",)),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(arguments, words, llama_folder, llama_pte, tmp_path):
    names = {"folder": llama_folder, "tmp": tmp_path, "pte": llama_pte}
    done = run(*(a.format(**names) if a.startswith("{") else a for a in arguments))
    assert done.exit_code == 1
    for word in words:
        assert word in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) <= 3
    assert not list(tmp_path.iterdir())
