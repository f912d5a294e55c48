"""The command line: a command reads its options, calls one library function, prints the result."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

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


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="Folder, hub name, 'tiny-english' (embedded), or a recipe.yaml.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, on top of a recipe.")
    ] = None,
    layers: Annotated[str, typer.Option(help="all, every:2, or a list such as 0,3,5.")] = "all",
    softmax_heads: Annotated[
        list[str] | None, typer.Option(help="Heads that stay, such as 17:0,2; repeat it.")
    ] = None,
    window: Annotated[int, typer.Option(help="Keys read exactly.")] = 64,
    sinks: Annotated[int, typer.Option(help="First tokens that stay exact.")] = 4,
    feature_map: Annotated[str, typer.Option(help="Map of the linear part.")] = "hedgehog",
    feature_dim: Annotated[int | None, typer.Option(help="Width of the map.")] = None,
    mixing: Annotated[str, typer.Option(help="calibrated, lolcats, kernel.")] = "calibrated",
    k_map: Annotated[str, typer.Option(help="kv_head or q_head.")] = "kv_head",
    length: Annotated[list[int] | None, typer.Option(help="Context to list; repeat it.")] = None,
    dtype: DType = "auto",
    gradient_checkpointing: GradientCheckpointing = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Shows what would be converted: geometry, new parameters, memory, FLOPs. Loads no weights.

    Of a recipe, also the memory and FLOPs of its training; the recipe then says what the options
    say otherwise, save --gradient-checkpointing.

    [bold]Examples[/]

    linearize inspect tiny-english

    linearize inspect meta-llama/Llama-3.1-8B --window 128 --length 8192 --length 131072

    linearize inspect ./my-model --layers every:2 --feature-map taylor --json

    linearize inspect recipes/quickstart.yaml convert.window=32
    """
    if Path(model).suffix in (".yaml", ".yml"):
        from linearize.recipe import load_recipe

        recipe = load_recipe(model, overrides or [])
        _prepare()
        from linearize.stages import preview

        report = preview(recipe, gradient_checkpointing=gradient_checkpointing)
    elif overrides:
        raise ValueError(f"{overrides[0]}: key=value belongs to a recipe; use options for a model")
    else:
        _prepare()
        from linearize.inspection import LENGTHS, inspect

        report = inspect(
            model, layers=_layers(layers), softmax_heads=_heads(softmax_heads or ()), window=window,
            sinks=sinks, feature_map=feature_map, feature_dim=feature_dim, mixing=mixing,
            k_map=k_map, lengths=tuple(length or LENGTHS), dtype=dtype,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    from linearize import tables

    _show(report, tables.inspection, as_json)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, on top of it.")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Instead of the recipe's output.")] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Go on with what the run directory holds.")] = True,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    gradient_checkpointing: GradientCheckpointing = False,
    teacher_cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the teacher's logits of stage 2 (finetune.top_k)."),
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="wandb, trackio, tensorboard, ...; all that are installed; repeat it."),
    ] = None,
    progress: Progress = True,
    as_json: AsJson = False,
) -> None:
    """Runs a recipe: convert, transfer, finetune, evaluate. After a stop, the same command goes on.

    [bold]Examples[/]

    linearize run recipes/quickstart.yaml

    linearize run recipes/quickstart.yaml convert.window=16 --output-dir runs/w16

    linearize run my.yaml data.sources='[books/*.txt, news.jsonl]' seed=1 --device cuda

    linearize run my.yaml --report-to trackio
    """
    from linearize.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])  # its faults show before anything heavy loads
    _prepare()
    from linearize import tables
    from linearize.stages import run

    results = run(
        loaded, output_dir=output_dir, device=device, resume=resume, save_steps=save_steps,
        gradient_checkpointing=gradient_checkpointing, teacher_cache=teacher_cache,
        progress=progress, report_to=report_to or (),
    )  # fmt: skip
    _show(results, tables.results, as_json)


@app.command()
def evaluate(
    model: Model,
    text: Annotated[str | None, typer.Option(help="Text or JSON-lines file to score.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Unconverted model; the teacher of a finetuned MODEL.")
    ] = None,
    length: Length = 1024,
    max_tokens: MaxTokens = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 8,
    recall: Annotated[
        bool, typer.Option("--recall", help="Ask for facts that lie far back.")
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="Harness tasks, task files or JSON-lines files, between commas."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Items of each task; contexts of each kind of --recall.")
    ] = None,
    efficiency: Annotated[
        bool, typer.Option("--efficiency", help="Measure time and memory.")
    ] = False,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens at which --recall and --efficiency measure; repeat it."),
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    progress: Progress = True,
    as_json: AsJson = False,
) -> None:
    """Measures a model: on a text, by recall, on tasks, in time and memory; whatever is asked for.

    A text gives the ablation table, or perplexity where nothing is converted.

    [bold]Examples[/]

    linearize evaluate runs/quickstart/model --text book.txt

    linearize evaluate runs/my/model --base models/my-base --text wiki.txt --max-tokens 100000

    linearize evaluate runs/quickstart/model --recall --context 256 --context 512

    linearize evaluate runs/my/model --tasks piqa,questions.jsonl --limit 200

    linearize evaluate runs/quickstart/model --efficiency
    """
    _prepare()
    from linearize import tables
    from linearize.saved import evaluate

    results = evaluate(
        model, text, base=base, length=length, max_tokens=max_tokens, batch_size=batch_size,
        recall=recall, tasks=tuple(tasks.split(",")) if tasks else (), limit=limit,
        efficiency=efficiency, contexts=context, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    _show(results, tables.results, as_json)


@app.command()
def select(
    model: Model,
    text: Annotated[str, typer.Option(help="Text or JSON-lines file to measure on.")],
    base: Annotated[
        str | None, typer.Option(help="Unconverted model; the teacher of a finetuned MODEL.")
    ] = None,
    unit: Annotated[str, typer.Option(help="head (key/value head) or layer.")] = "head",
    layers: Annotated[str, typer.Option(help="all, or only units of these, as in 17,20.")] = "all",
    budget: Annotated[int | None, typer.Option(help="Units that may stay softmax.")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="Budget in bytes instead.")] = None,
    context: Annotated[int, typer.Option(help="Tokens at which bytes are counted.")] = 4096,
    candidates: Annotated[int, typer.Option(help="Units scored again per step.")] = 8,
    recall_weight: Annotated[float, typer.Option(help="Weight of recall; 0: without.")] = 1.0,
    length: Length = 1024,
    max_tokens: Annotated[int, typer.Option(help="Read only the first tokens.")] = 4096,
    output: Annotated[Path | None, typer.Option(help="JSON file; a stop resumes from it.")] = None,
    save_model: Annotated[Path | None, typer.Option(help="Folder for the hybrid model.")] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    progress: Progress = True,
    as_json: AsJson = False,
) -> None:
    """Ranks layers or heads by what restoring each to softmax gains; chooses some within a budget.

    MODEL is converted and its new parameters are trained. Without a budget it only ranks.

    [bold]Examples[/]

    linearize select runs/quickstart/model --text book.txt --unit layer

    linearize select runs/my/model --base models/my-base --text wiki.txt --budget 12
    --output heads.json

    linearize select runs/my/model --text wiki.txt --layers 17,18,20 --cache-bytes 8000000
    --save-model runs/my/hybrid
    """
    _prepare()
    from linearize import tables
    from linearize.selection import select

    chosen = _layers(layers)
    if isinstance(chosen, str) and chosen != "all":
        raise ValueError(f"--layers: {layers!r} is not a list of layers such as 17,20")
    found = select(
        model, text, base=base, unit=unit, layers=None if chosen == "all" else chosen,
        budget=budget, cache_bytes=cache_bytes, context=context, candidates=candidates,
        recall_weight=recall_weight, length=length, max_tokens=max_tokens, output=output,
        save_model=save_model, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        progress=progress,
    )  # fmt: skip
    _show(found, tables.selection, as_json)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Beginning of the text.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest continuation.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Continues a text with a model, converted or not.

    [bold]Examples[/]

    linearize generate runs/quickstart/model "Once upon a time"

    linearize generate runs/quickstart/model "The king said" --temperature 0.8
    """
    _prepare()
    from linearize.saved import generate

    result = generate(
        model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
        dtype=dtype, device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _show(result, lambda result: Text(result["text"]), as_json)


@app.command()
def publish(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="Run, model, or a folder made before.")
    ],
    repo_id: Annotated[
        str | None, typer.Option(help="owner/name on the hub; without it nothing is pushed.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: 'publish' in the run.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make and check; push nothing.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Who may read a new repository.")
    ] = True,
    branch: Annotated[
        str | None, typer.Option("--branch", "--revision", help="Branch to push to, or refs/pr/N.")
    ] = None,
    pull_request: Annotated[
        bool, typer.Option("--pull-request", help="Open a pull request instead.")
    ] = False,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="New parameters and LoRA, without the base.")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Base model on the hub, where the recipe names a folder.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="Such as apache-2.0; default: the base model's.")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Such as en; repeat it; default: the base model's.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Makes a folder that stock transformers loads, checks it, and pushes it to the hub.

    HF_TOKEN (or hf auth login) says who pushes; HF_ENDPOINT names another hub.

    [bold]Examples[/]

    linearize publish runs/quickstart --dry-run

    linearize publish runs/my --repo-id me/my-model --base-model HuggingFaceTB/SmolLM2-135M

    linearize publish runs/my/publish --repo-id my-org/my-model --public --pull-request

    linearize publish runs/my --repo-id me/my-adapter --adapter-only
    """
    _prepare()
    from linearize import tables
    from linearize.publishing import publish

    result = publish(
        source, repo_id=repo_id, output=output, dry_run=dry_run, private=private, branch=branch,
        pull_request=pull_request, adapter_only=adapter_only, base_model=base_model,
        license=license, languages=language or (), max_shard_size=max_shard_size, device=device,
    )  # fmt: skip
    _show(result, tables.publication, as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")], as_json: AsJson = False
) -> None:
    """Writes report.html of a run again: curves, ablation, attention, samples, in one file.

    [bold]Examples[/]

    linearize report runs/quickstart
    """
    _prepare()
    from linearize.stages import report

    _show(report(run), lambda found: Text(found["report"]), as_json)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.")],
    page: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("compare.html"),
    as_json: AsJson = False,
) -> None:
    """Puts several runs side by side: a table here, and charts in one HTML file.

    [bold]Examples[/]

    linearize compare runs/w16 runs/w32

    linearize compare runs/w16 runs/w32 runs/w64 --page windows.html
    """
    _prepare()
    from linearize import tables
    from linearize.stages import compare

    _show(compare(runs, page=page), tables.comparison, as_json)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    dtype: DType = "auto",
    device: Device = "auto",
) -> None:
    """Serves a model over HTTP, with the API of OpenAI, until Ctrl+C: the server of transformers.

    `transformers chat MODEL http://localhost:8000/v1` talks to it, MODEL as given here.

    [bold]Examples[/]

    linearize serve runs/quickstart/model

    linearize serve runs/quickstart/model --port 8123 --device cuda
    """
    _prepare()
    from linearize.saved import serve

    serve(model, host=host, port=port, dtype=dtype, device=device)


@app.command(name="import-lolcats")
def import_lolcats(
    base: Annotated[str, typer.Argument(help="The softmax model that was linearized.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder to write.")],
    file: Annotated[list[Path], typer.Option(help="Torch file: maps, then LoRA; repeat it.")],
    model_config: Annotated[Path, typer.Option(help="YAML file of the model.")],
    finetune_config: Annotated[Path | None, typer.Option(help="YAML file of stage 2.")] = None,
    dtype: DType = "auto",
) -> None:
    """Brings a published LoLCATs checkpoint into this format. Its files are only read as tensors.

    [bold]Example[/]

    linearize import-lolcats meta-llama/Llama-3.1-8B models/lolcats --file distill.pt --file lora.pt
    --model-config distill_llama3_1_8b_lk_smd_wtk64_fd64_w01.yaml
    --finetune-config finetune_lora_qkvo_alpaca_clean.yaml
    """
    from linearize.importing import import_lolcats_folder

    folder = import_lolcats_folder(
        base, list(file), model_config, output_dir, finetune_config=finetune_config, dtype=dtype
    )
    Console().print(Text(f"saved to {folder}"))


@app.command()
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="JSON schema, for editors.")] = False,
) -> None:
    """Lists every key of a recipe with its default and meaning.

    [bold]Examples[/]

    linearize schema

    linearize schema --json > recipe.schema.json
    """
    from linearize import tables
    from linearize.recipe import describe, json_schema

    _show(json_schema() if as_json else list(describe()), tables.keys, as_json)


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


def _prepare() -> None:
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


def _layers(text: str) -> str | list[int]:
    items = text.split(",")
    return [int(item) for item in items] if all(map(str.isdecimal, items)) else text


def _heads(items: Iterable[str]) -> dict[int, list[int]]:
    """{17: [0, 2]} of "17:0,2"."""
    found: dict[int, list[int]] = {}
    for item in items:
        layer, _, heads = item.partition(":")
        numbers = heads.split(",")
        if not all(map(str.isdecimal, (layer, *numbers))):
            raise ValueError(f"--softmax-heads: {item!r} is not layer:head,head such as 17:0,2")
        found.setdefault(int(layer), []).extend(map(int, numbers))
    return found


def _show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """Prints a result as JSON, or as what a function of `tables` makes of it."""
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        Console().print(table(result), markup=False)
