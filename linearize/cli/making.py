"""Commands that make a converted model, or say what it would be."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from linearize.cli.terminal import (
    AsJson,
    Device,
    DType,
    GradientCheckpointing,
    Length,
    Model,
    Progress,
    TrustRemoteCode,
    app,
    heads_of,
    layers_of,
    prepare,
    show,
)


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
        prepare()
        from linearize.stages import preview

        report = preview(recipe, gradient_checkpointing=gradient_checkpointing)
    elif overrides:
        raise ValueError(f"{overrides[0]}: key=value belongs to a recipe; use options for a model")
    else:
        prepare()
        from linearize.inspection import LENGTHS, inspect

        report = inspect(
            model, layers=layers_of(layers), softmax_heads=heads_of(softmax_heads or ()),
            window=window, sinks=sinks, feature_map=feature_map, feature_dim=feature_dim,
            mixing=mixing, k_map=k_map, lengths=tuple(length or LENGTHS), dtype=dtype,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    from linearize import tables

    show(report, tables.inspection, as_json)


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
    prepare()
    from linearize import tables
    from linearize.stages import run

    results = run(
        loaded, output_dir=output_dir, device=device, resume=resume, save_steps=save_steps,
        gradient_checkpointing=gradient_checkpointing, teacher_cache=teacher_cache,
        progress=progress, report_to=report_to or (),
    )  # fmt: skip
    show(results, tables.results, as_json)


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
    prepare()
    from linearize import tables
    from linearize.selection import select

    chosen = layers_of(layers)
    if isinstance(chosen, str) and chosen != "all":
        raise ValueError(f"--layers: {layers!r} is not a list of layers such as 17,20")
    found = select(
        model, text, base=base, unit=unit, layers=None if chosen == "all" else chosen,
        budget=budget, cache_bytes=cache_bytes, context=context, candidates=candidates,
        recall_weight=recall_weight, length=length, max_tokens=max_tokens, output=output,
        save_model=save_model, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
        progress=progress,
    )  # fmt: skip
    show(found, tables.selection, as_json)


@app.command(name="import-lolcats")
def import_lolcats(
    base: Annotated[str, typer.Argument(help="The softmax model that was linearized.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder to write.")],
    file: Annotated[list[Path], typer.Option(help="Torch file: maps, then LoRA; repeat it.")],
    model_config: Annotated[Path, typer.Option(help="YAML file of the model.")],
    finetune_config: Annotated[Path | None, typer.Option(help="YAML file of stage 2.")] = None,
    dtype: DType = "auto",
    as_json: AsJson = False,
) -> None:
    """Brings a published LoLCATs checkpoint into this format. Its files are only read as tensors.

    [bold]Examples[/]

    linearize import-lolcats meta-llama/Llama-3.1-8B models/lolcats --file distill.pt --file lora.pt
    --model-config distill_llama3_1_8b_lk_smd_wtk64_fd64_w01.yaml
    --finetune-config finetune_lora_qkvo_alpaca_clean.yaml
    """
    prepare()
    from linearize.importing import import_lolcats_folder

    folder = import_lolcats_folder(
        base, list(file), model_config, output_dir, finetune_config=finetune_config, dtype=dtype
    )
    show({"folder": str(folder)}, lambda found: Text(f"saved to {found['folder']}"), as_json)


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

    show(json_schema() if as_json else list(describe()), tables.keys, as_json)
