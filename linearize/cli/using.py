"""Commands that use what was made: measure, write, serve, show, publish."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from linearize.cli.terminal import (
    AsJson,
    Device,
    DType,
    Length,
    MaxTokens,
    Model,
    Progress,
    TrustRemoteCode,
    app,
    prepare,
    show,
)


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
    prepare()
    from linearize import tables
    from linearize.saved import evaluate

    results = evaluate(
        model, text, base=base, length=length, max_tokens=max_tokens, batch_size=batch_size,
        recall=recall, tasks=tuple(tasks.split(",")) if tasks else (), limit=limit,
        efficiency=efficiency, contexts=context, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    show(results, tables.results, as_json)


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
    prepare()
    from linearize.saved import generate

    result = generate(
        model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
        dtype=dtype, device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    show(result, lambda result: Text(result["text"]), as_json)


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
    prepare()
    from linearize.saved import serve

    serve(model, host=host, port=port, dtype=dtype, device=device)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")], as_json: AsJson = False
) -> None:
    """Writes report.html of a run again: curves, ablation, attention, samples, in one file.

    [bold]Examples[/]

    linearize report runs/quickstart
    """
    prepare()
    from linearize.stages import report

    show(report(run), lambda found: Text(found["report"]), as_json)


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
    prepare()
    from linearize import tables
    from linearize.stages import compare

    show(compare(runs, page=page), tables.comparison, as_json)


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
    prepare()
    from linearize import tables
    from linearize.publishing import publish

    result = publish(
        source, repo_id=repo_id, output=output, dry_run=dry_run, private=private, branch=branch,
        pull_request=pull_request, adapter_only=adapter_only, base_model=base_model,
        license=license, languages=language or (), max_shard_size=max_shard_size, device=device,
    )  # fmt: skip
    show(result, tables.publication, as_json)
