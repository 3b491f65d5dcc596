"""The ``flexpte`` command: export | explain | generate | chat | bench | inspect."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flexpte.exporter.files import check_writable

if TYPE_CHECKING:
    from flexpte.runtime.llm import LLM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Export FlexAttention models to ExecuTorch .pte files, and run them.\n\n"
    "A first session:\n\n"
    "    flexpte export path/to/checkpoint -o model.pte\n\n"
    "    flexpte inspect model.pte\n\n"
    '    flexpte chat model.pte --message "Hello!"',
)
errors = Console(stderr=True, highlight=False)


class Dtype(StrEnum):
    """Element type of weights, cache and activations."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Delegation(StrEnum):
    """How much of the graph the delegate takes."""

    full = "full"
    attention = "attention"


class Logits(StrEnum):
    """Which positions a call returns logits for."""

    last = "last"
    all = "all"


ModelFile = Annotated[Path, typer.Argument(help="A .pte file written by `flexpte export`.", show_default=False)]
MaxTokens = Annotated[int, typer.Option(help="Generate at most this many tokens.", min=0)]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Draw among the K likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens that sum to this probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this fraction of the likeliest.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same tokens.")]
DeviceName = Annotated[str, typer.Option(help="Where the delegate runs: host, msl-host, metal, or auto to choose.")]
Stats = Annotated[bool, typer.Option("--stats/--no-stats", help="Print speed to standard error at the end.")]


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder (config.json, *.safetensors, tokenizer.json) or a .gguf file.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .pte file to write.", show_default=False)],
    max_context: Annotated[
        int | None,
        typer.Option(help="Longest conversation in tokens, prompt and answer; default: the model's own limit."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights, cache and activations.")] = Dtype.fp32,
    delegate: Annotated[
        Delegation,
        typer.Option(help="full: the whole model in one call; attention: cache and attention only."),
    ] = Delegation.full,
    logits: Annotated[
        Logits, typer.Option(help="last: for generating; all: of every position, for scoring.")
    ] = Logits.last,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write the file.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress display, no report.")] = False,
) -> None:
    """Export a checkpoint to one .pte file that holds weights, tokenizer and chat template.

    The file is written under a temporary name and renamed when it is complete.
    """
    with _one_line_errors():
        _check_output(output)
        if not dry_run:
            check_writable(output)
        from flexpte.exporter.inspect import size_text
        from flexpte.exporter.language_model import export_language_model

        with _progress(quiet) as progress:
            result = export_language_model(
                checkpoint,
                max_context=max_context,
                dtype=dtype.value,
                delegate=delegate.value,
                logits=logits.value,
                progress=progress,
            )
            if not dry_run:
                result.save(output)
        if dry_run or not quiet:
            errors.print(str(result.report), markup=False)
            done = "dry run, not written:" if dry_run else "wrote"
            size_bytes = result.report.program_size_bytes
            errors.print(f"{done} {output} ({size_text(size_bytes)})", markup=False)


@app.command()
def explain(
    checkpoint: Annotated[
        Path, typer.Argument(help="A Hugging Face folder or a .gguf file, as for export.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(help="Length of the prompt whose masks are shown.", min=1)] = 1024,
    delegate: Annotated[Delegation, typer.Option(help="As for export.")] = Delegation.full,
    png: Annotated[
        Path | None, typer.Option(help="Also write a picture of each kind of mask into this folder.")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress display.")] = False,
) -> None:
    """Show what an export would delegate, and what is proved of each attention's mask. Writes no .pte file.

    The picture has one character a tile of 64 queries and 64 keys: · is never visited, █ needs no mask,
    ▒ is masked element by element or cut by bounds.
    """
    with _one_line_errors():
        from flexpte.exporter.language_model import export_language_model
        from flexpte.exporter.picture import text_picture, write_png

        with _progress(quiet) as progress:
            report = export_language_model(
                checkpoint,
                max_context=None,
                delegate=delegate.value,
                example_tokens=tokens,
                progress=progress,
            ).report
        print(report)
        shown: set[int] = set()
        for attention in report.attentions:
            if attention.mask is None or id(attention.mask) in shown:
                continue
            shown.add(id(attention.mask))
            # Keys behind the prompt are cache slots that nobody has written.
            rows = attention.mask.tiles.shape[0]
            tiles = attention.mask.tiles[:, :rows]
            print(f"\n{attention.name}: {attention.mask_mod}\n{text_picture(tiles)}")
            if png is not None:
                png.mkdir(parents=True, exist_ok=True)
                write_png(png / f"{attention.name}.png", tiles)
                print(f"wrote {png / attention.name}.png")


@app.command()
def generate(
    model: ModelFile,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue; - reads standard input.")],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    device: DeviceName = "auto",
    stats: Stats = False,
) -> None:
    """Continue a text."""
    with _one_line_errors():
        text = sys.stdin.read() if prompt == "-" else prompt
        llm = _load(model, device)
        pieces = llm.stream(
            text,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
        )
        _print_stream(pieces)
        _print_stats(llm, stats)


@app.command()
def chat(
    model: ModelFile,
    message: Annotated[
        str | None,
        typer.Option("-m", "--message", help="Ask once and exit; otherwise a conversation starts."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    device: DeviceName = "auto",
    stats: Stats = False,
) -> None:
    """Talk with a model, using the chat template inside the file.

    In a conversation, /reset starts over and /exit (or end of input) leaves.
    """
    with _one_line_errors():
        if message is not None and not message.strip():
            raise ValueError("--message is empty: give a text, or leave it out for a conversation")
        llm = _load(model, device)
        start = [{"role": "system", "content": system}] if system else []
        messages = list(start)
        while True:
            user = message if message is not None else _ask()
            if user is None:
                return
            if message is None:
                if user == "/exit":
                    return
                if user == "/reset":
                    messages = list(start)
                    llm.reset()
                    continue
                if not user.strip():
                    continue
            messages.append({"role": "user", "content": user})
            pieces = llm.chat_stream(
                messages,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
            )
            messages.append({"role": "assistant", "content": _print_stream(pieces)})
            _print_stats(llm, stats)
            if message is not None:
                return


@app.command()
def bench(
    model: ModelFile,
    device: DeviceName = "auto",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Length of the prefill; default 512, or 16 on msl-host; less where the context is shorter.", min=1
        ),
    ] = None,
    decode_tokens: Annotated[
        int | None, typer.Option(help="Single steps behind it; default 32, or 2 on msl-host.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Medians are over so many sessions.", min=1)] = 3,
    counters: Annotated[
        bool, typer.Option("--counters", help="What each kernel read, wrote and computed (device msl-host).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress display.")] = False,
) -> None:
    """Time prefill and decode of a language model; with --counters also count the work of its Metal kernels.

    The counts are exact and come from executing the kernels on this machine. What Apple GPUs would need for them is
    an estimate from public bandwidth and arithmetic rates.
    """
    with _one_line_errors():
        from flexpte.exporter.bench_tables import as_dict, render
        from flexpte.runtime.bench import bench as measure
        from flexpte.runtime.program import load

        program = load(model, device=device)
        is_slow = device == "msl-host"
        if counters and not is_slow:
            raise ValueError("--counters needs --device msl-host: other devices do not count")
        decode = decode_tokens or (2 if is_slow else 32)
        context = int(program.metadata.get("max_context", 512 + decode))
        with _progress(quiet or as_json) as progress:
            phases = measure(
                program,
                prompt_tokens or min(16 if is_slow else 512, max(1, context - decode)),
                decode,
                1 if counters else repeats,
                progress,
            )
        if as_json:
            print(json.dumps([as_dict(p, counters) for p in phases], indent=2))
        else:
            # A table that goes to a file or pipe is not cut to 80 columns.
            render(phases, counters, Console(highlight=False, width=None if sys.stdout.isatty() else 140))


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Any .pte file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show what a .pte file holds: methods, inputs, delegates, caches, sizes, metadata."""
    with _one_line_errors():
        from flexpte.exporter.inspect import describe, render

        description = describe(model)
        if as_json:
            print(json.dumps(description, indent=2))
        else:
            render(description, Console(highlight=False))


def main() -> None:
    """Entry point of the console script."""
    app()


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: expected a file name such as {output / 'model.pte'}")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist")


def _load(model: Path, device: str) -> LLM:
    from flexpte.runtime.llm import LLM

    return LLM(model, device=device)


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _print_stream(pieces: Iterator[str]) -> str:
    answer = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        answer += piece
    print()
    return answer


def _print_stats(llm: LLM, wanted: bool) -> None:
    s = llm.stats
    if wanted and s is not None:
        errors.print(
            f"prompt {s.prompt_tokens} tokens ({s.reused_tokens} reused), "
            f"{s.prefill_tokens_per_second:.1f} tokens/s; generated {s.generated_tokens} tokens, "
            f"{s.decode_tokens_per_second:.1f} tokens/s; finished: {s.finish_reason}",
            markup=False,
            soft_wrap=True,
        )


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A callable (stage, done, total) that drives one bar a stage on standard error."""
    if quiet:
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, total=1, completed=1)
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield update
        for task in tasks.values():
            bars.update(task, total=1, completed=1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Anything the user can mend ends as one line on standard error and exit status 1."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except _expected_errors() as error:
        errors.print(f"flexpte: {_text_of(error)}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {str(error.strerror).lower()}"
    return str(error)


def _expected_errors() -> tuple[type[Exception], ...]:
    """The exception classes whose message is written for the user."""
    from flexpte.exporter.errors import Unsupported
    from flexpte.runtime.program import FlexpteError

    kinds: list[type[Exception]] = [Unsupported, FlexpteError, ValueError, OSError, MemoryError]
    if "flexpte.models.checkpoints" in sys.modules:
        kinds.append(sys.modules["flexpte.models.checkpoints"].CheckpointError)
    return tuple(kinds)
