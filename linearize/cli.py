"""The command line: each command reads its options, calls one library function and prints what it returns."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(
    name="linearize",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Converts a softmax Transformer into one with constant-size memory, and measures the result.\n\n"
    "Begin with [bold]linearize run recipes/quickstart.yaml[/]: it needs no network and two minutes.",
)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON on standard output, nothing else.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto: the best there is.")]
Model = Annotated[str, typer.Argument(help="Folder, hub name, or 'tiny-english' (embedded).")]
GgufFile = Annotated[str | None, typer.Option(help="A GGUF file inside MODEL.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run Python code that comes with the model.")]


@app.command()
def inspect(
    model: Model,
    layers: Annotated[str, typer.Option(help="all, every:2, or a list such as 0,3,5.")] = "all",
    window: Annotated[int, typer.Option(help="Keys read exactly.")] = 64,
    sinks: Annotated[int, typer.Option(help="First tokens that stay exact.")] = 4,
    feature_map: Annotated[str, typer.Option(help="Map of the linear part.")] = "hedgehog",
    feature_dim: Annotated[int | None, typer.Option(help="Width of the map.")] = None,
    mixing: Annotated[str, typer.Option(help="calibrated, lolcats or kernel.")] = "calibrated",
    k_map: Annotated[str, typer.Option(help="kv_head or q_head.")] = "kv_head",
    length: Annotated[
        list[int] | None, typer.Option(help="Context length to list; repeat it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and cache.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Shows what would be converted, without loading weights: geometry, new parameters, memory, FLOPs.

    [bold]Examples[/]

    linearize inspect tiny-english

    linearize inspect meta-llama/Llama-3.1-8B --window 128 --length 8192 --length 131072

    linearize inspect ./my-model --layers every:2 --feature-map taylor --json
    """
    from linearize import tables
    from linearize.inspection import LENGTHS, inspect

    report = inspect(
        model, layers=_layers(layers), window=window, sinks=sinks, feature_map=feature_map, feature_dim=feature_dim,
        mixing=mixing, k_map=k_map, lengths=tuple(length or LENGTHS), dtype=dtype, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _show(report, tables.inspection, as_json)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, applied on top.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Run directory, instead of the recipe's.")
    ] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with what the run directory holds.")] = True,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Stage 2: less memory, more time.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
    as_json: AsJson = False,
) -> None:
    """Runs a recipe: convert, transfer, finetune, evaluate. The same command again goes on after a stop.

    [bold]Examples[/]

    linearize run recipes/quickstart.yaml

    linearize run recipes/quickstart.yaml convert.window=16 finetune=null --output-dir runs/w16

    linearize run my.yaml data.sources='[books/*.txt, news.jsonl]' seed=1 --device cuda
    """
    from linearize.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])  # its faults show before anything heavy loads
    from linearize import tables
    from linearize.stages import run

    results = run(
        loaded, output_dir=output_dir, device=device, resume=resume, save_steps=save_steps,
        gradient_checkpointing=gradient_checkpointing, progress=progress,
    )  # fmt: skip
    _show(results, tables.results, as_json)


@app.command()
def evaluate(
    model: Model,
    text: Annotated[str | None, typer.Option(help="Text or JSON-lines file to score.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Unconverted model, for a finetuned MODEL.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first tokens.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 8,
    efficiency: Annotated[
        bool, typer.Option("--efficiency", help="Measure speed and memory instead.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
    as_json: AsJson = False,
) -> None:
    """Scores a model on a text: every row of the ablation table, or perplexity alone for a stock model.

    [bold]Examples[/]

    linearize evaluate runs/quickstart/model --text book.txt

    linearize evaluate runs/smollm2/model --base models/smollm2-135m-instruct --text wiki.txt --max-tokens 100000

    linearize evaluate runs/quickstart/model --efficiency
    """
    from linearize.stages import evaluate

    results = evaluate(
        model, text, base=base, length=length, max_tokens=max_tokens, batch_size=batch_size, efficiency=efficiency,
        dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    _show(results, tables.results, as_json)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Beginning of the text.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest continuation.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Continues a text with a model, converted or not.

    [bold]Examples[/]

    linearize generate runs/quickstart/model "Once upon a time"

    linearize generate runs/quickstart/model "The king said" --temperature 0.8 --max-new-tokens 200
    """
    from linearize.stages import generate

    result = generate(
        model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _show(result, lambda result: Text(result["text"]), as_json)


@app.command()
def schema(
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON schema instead of a table.")
    ] = False,
) -> None:
    """Lists every key of a recipe with its default; --json gives the JSON schema for editors.

    [bold]Examples[/]

    linearize schema

    linearize schema --json > recipe.schema.json
    """
    from linearize import tables
    from linearize.recipe import describe, json_schema

    _show(json_schema() if as_json else list(describe()), tables.keys, as_json)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: a user's mistake ends with one message and exit code 2; LINEARIZE_DEBUG=1 shows the traceback."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("linearize").setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            app(args=arguments)
        except KeyboardInterrupt:
            _fail("stopped; the same command again goes on from the last checkpoint", 130)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            if os.environ.get("LINEARIZE_DEBUG"):
                raise
            _fail(f"{error}\n(LINEARIZE_DEBUG=1 shows where this came from)", 2)


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print("[red]error:[/] ", end="")
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)
    raise SystemExit(code)


def _print_warning(message: Any, category: type[Warning], *rest: Any) -> None:
    if issubclass(category, UserWarning):
        Console(stderr=True, soft_wrap=True).print(
            f"warning: {message}", markup=False, highlight=False
        )


def _layers(text: str) -> str | list[int]:
    if not text.replace(",", "").replace(" ", "").isdecimal():
        return text
    return [int(item) for item in text.split(",") if item.strip()]


def _show(result: Any, table: Any, as_json: bool) -> None:
    """Prints a result as JSON, or as the table that a function of `tables` makes of it."""
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        Console().print(table(result), markup=False)
