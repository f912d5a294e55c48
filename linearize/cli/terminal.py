"""What the commands share: the application, options, how a result and an error are printed."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

app = typer.Typer(
    name="linearize",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Converts a softmax Transformer into one with constant-size memory, and measures it.\n\n"
    "Begin with [bold]linearize run recipes/quickstart.yaml[/]: no network, two minutes.",
)

AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto: the best there is.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
GradientCheckpointing = Annotated[bool, typer.Option(help="Stage 2: less memory, more time.")]
Length = Annotated[int, typer.Option(help="Tokens per window of text.")]
MaxTokens = Annotated[int | None, typer.Option(help="Score only the first tokens.")]
Model = Annotated[str, typer.Argument(help="Folder, hub name, or 'tiny-english' (embedded).")]
Progress = Annotated[bool, typer.Option(help="Show progress bars.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run Python code that comes with MODEL.")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point; a user's mistake ends with a message and exit code 2.

    LINEARIZE_DEBUG=1 shows the traceback.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("linearize").setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            app(args=arguments)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            if os.environ.get("LINEARIZE_DEBUG"):
                raise
            _to_stderr(f"error: {error}\n(LINEARIZE_DEBUG=1 shows where this comes from)")
            raise SystemExit(2) from None


def prepare() -> None:
    """Settings of torch and transformers, made when a command runs: help and completion need
    neither, and both take seconds to import.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_flush_denormal(True)  # sharp feature maps underflow, and a CPU is slow at that
    transformers_logging.disable_progress_bar()  # of shards; ours and those of downloads stay


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning):
        _to_stderr(f"warning: {message}")


def _to_stderr(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)


def layers_of(text: str) -> str | list[int]:
    items = text.split(",")
    return [int(item) for item in items] if all(map(str.isdecimal, items)) else text


def heads_of(items: Iterable[str]) -> dict[int, list[int]]:
    """{17: [0, 2]} of "17:0,2"."""
    found: dict[int, list[int]] = {}
    for item in items:
        layer, _, heads = item.partition(":")
        numbers = heads.split(",")
        if not all(map(str.isdecimal, (layer, *numbers))):
            raise ValueError(f"--softmax-heads: {item!r} is not layer:head,head such as 17:0,2")
        found.setdefault(int(layer), []).extend(map(int, numbers))
    return found


def show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """Prints a result as JSON, or as what a function of `tables` makes of it."""
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        Console().print(table(result), markup=False)
