"""The recipe: one YAML file that says what a conversion is, checked before any model is touched.

The schema mirrors the keyword arguments of the library functions, name for name and default for
default (`tests/test_recipe.py` compares them). Nothing here knows about devices or processes: how a
computer runs a recipe is said on the command line. Relative paths are relative to the current
directory.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from linearize.advice import explain
from linearize.notation import apply_override, one_line, parse

EMBEDDED_MODEL = "tiny-english"
SELF = "self"
HELD_OUT = "held_out"

FeatureMap = Literal[
    "hedgehog", "hedgehog_exp", "hedgehog_norm", "t2r", "elu1", "relu", "taylor", "favor",
    "centroids",
]  # fmt: skip
Mixing = Literal["calibrated", "lolcats", "kernel"]
KMap = Literal["kv_head", "q_head"]
RecallTask = Literal["associative", "passkey", "needle", "key_value"]
WindowKind = Literal["sliding", "terrace"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


def _reject_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("is a switch, a number is needed")
    return value


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_lengths(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


def _as_sources(value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(item, str | Mapping | Section) for item in values):
        raise ValueError("name files, globs or hub data sets, or 'self'")
    return tuple(
        item if isinstance(item, str) else SourceSection.model_validate(item) for item in values
    )


def _check_layers(value: Any) -> Any:
    is_name = isinstance(value, str) and re.fullmatch(r"all|every:[1-9][0-9]*", value)
    is_list = isinstance(value, list | tuple) and all(
        type(item) is int and item >= 0 for item in value
    )
    if not is_name and not (is_list and value):
        raise ValueError(
            "use 'all', 'every:2' (layers 0, 2, 4, ...) or a list of layers such as [0, 1, 5]"
        )
    return value


Count = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]
Natural = Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_reject_bool), Field(gt=0)]
Weight = Annotated[float, BeforeValidator(_reject_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_reject_bool), Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
RecallTasks = Annotated[tuple[RecallTask, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Lengths = Annotated[tuple[Count, ...], BeforeValidator(_as_lengths), Field(min_length=1)]
Layers = Annotated[str | tuple[int, ...], BeforeValidator(_check_layers)]
Heads = dict[Natural, Annotated[tuple[Natural, ...], Field(min_length=1)]]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class ModelSection(Section):
    """The pretrained softmax model that is converted."""

    path: str = Field(
        EMBEDDED_MODEL, description="Folder, hub name, or the embedded 'tiny-english'."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: DType = Field(
        "float32", description="Type of the weights; new parameters are always float32."
    )
    gguf_file: str | None = Field(None, description="A GGUF file inside `path`; it is dequantised.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


class ConvertSection(Section):
    """Which attention layers become linear, and into what."""

    layers: Layers = Field("all", description="'all', 'every:n' (layers 0, n, 2n, ...) or a list.")
    softmax_heads: Heads | None = Field(
        None, description="{layer: [heads]}: key/value heads that stay softmax; null: none."
    )
    window: Count = Field(64, description="Keys that each query reads exactly, its own included.")
    sinks: Natural = Field(4, description="First tokens that stay exact for ever.")
    feature_map: FeatureMap = Field(
        "hedgehog", description="Map of queries and keys in the linear part."
    )
    feature_dim: Count | None = Field(
        None, description="Width of the features; null: the map's own choice."
    )
    mixing: Mixing = Field("calibrated", description="How exact and linear weights are joined.")
    k_map: KMap = Field(
        "kv_head", description="One map (and state) of keys per key/value or query head."
    )
    window_kind: WindowKind = Field(
        "sliding", description="'terrace': the query's own block of keys, and the one before."
    )


class SourceSection(Section):
    """One source of text with more to say than its name."""

    path: str = Field(description="File, glob or hub data set.")
    column: str = Field("text", description="Column that holds the text.")
    weight: Positive | None = Field(None, description="Share of the tokens; all sources or none.")


Sources = Annotated[tuple[str | SourceSection, ...], BeforeValidator(_as_sources)]


class DataSection(Section):
    """The text that both stages train on."""

    sources: Sources = Field(
        (SELF,), description="Files, globs, hub data sets, or 'self': the teacher writes it."
    )
    length: Count = Field(1024, description="Tokens per packed row.")
    max_tokens: Count | None = Field(None, description="Tokens to read (or, for 'self', to write).")
    held_out: Fraction = Field(0.02, description="Share of the rows that is never trained on.")
    eos_between: bool = Field(True, description="Put the end-of-text token between documents.")
    temperature: Positive = Field(1.0, description="Sampling temperature of 'self'.")
    batch_size: Count = Field(32, description="Documents that 'self' writes at the same time.")


class TransferSection(Section):
    """Stage 1: fit the new parameters to the teacher's attention, layer by layer."""

    loss: Literal["output", "attention", "both"] = Field("output", description="What is compared.")
    attention_weight: Weight = Field(0.1, description="Weight of the attention loss in 'both'.")
    num_queries: Count | None = Field(
        64, description="Query positions per row that enter the loss; null: all."
    )
    window_dropout: Fraction = Field(
        0.0, description="How often a layer learns without its window, at first; falls to 0."
    )
    position_weights: Literal["uniform", "buckets", "distance"] = Field(
        "uniform", description="What a query counts, by its distance from the document's start."
    )
    mixing_start: Literal["fixed", "beta", "beta_alpha"] = Field(
        "fixed", description="Start of β and α: fixed, or from the teacher's weights."
    )
    max_tokens: Count | None = Field(None, description="Tokens; null: one pass over the data.")
    max_steps: Count | None = Field(None, description="Optimiser steps, instead of max_tokens.")
    batch_size: Count = Field(4, description="Rows per forward pass.")
    accumulation: Count = Field(1, description="Forward passes per optimiser step.")
    learning_rate: Positive = Field(1e-2, description="Largest learning rate.")
    warmup: Fraction = Field(0.03, description="Share of the steps with a rising learning rate.")
    clip: Positive | None = Field(1.0, description="Largest gradient norm.")


class FinetuneSection(Section):
    """Stage 2: train end to end against the teacher's logits, the labels, or both."""

    method: Literal["lora", "full"] = Field("lora", description="LoRA, or all weights.")
    targets: Names | None = Field(
        None, description="Layers that get LoRA; null: every projection of the converted attention."
    )
    rank: Count = Field(8, description="Rank of LoRA.")
    alpha: Positive = Field(16, description="LoRA adds alpha / rank times its product.")
    loss: Literal["kl", "ce", "mix"] = Field("kl", description="Teacher's logits, labels or both.")
    kl_weight: Weight = Field(1.0, description="Weight of the KL term of 'mix'.")
    ce_weight: Weight = Field(0.0, description="Weight of the cross-entropy of 'mix'.")
    top_k: Count | None = Field(None, description="KL on the teacher's k best tokens; null: all.")
    train_linearized: bool = Field(True, description="Train the new parameters too.")
    max_tokens: Count | None = Field(None, description="Tokens; null: one pass over the data.")
    max_steps: Count | None = Field(None, description="Optimiser steps, instead of max_tokens.")
    batch_size: Count = Field(2, description="Rows per forward pass.")
    accumulation: Count = Field(4, description="Forward passes per optimiser step.")
    learning_rate: Positive = Field(1e-4, description="Largest learning rate.")
    linearized_learning_rate: Positive | None = Field(
        None, description="The one of the new parameters; null: the same."
    )
    warmup: Fraction = Field(0.03, description="Share of the steps with a rising learning rate.")
    clip: Positive | None = Field(1.0, description="Largest gradient norm.")
    baselines: bool = Field(
        True, description="Also train the teacher, and window + sinks only, the same way."
    )


class RecallSection(Section):
    """Facts far back in a text, asked for at its end: by task, length and distance."""

    tasks: RecallTasks = Field(
        ("associative", "passkey", "needle", "key_value"), description="Kinds of facts."
    )
    lengths: Lengths = Field((256, 1024), description="Tokens that are read before the answer.")
    samples: Count = Field(32, description="Contexts of each task and length.")


class EvaluateSection(Section):
    """The ablation table: perplexity, KL to the teacher and agreement for every row."""

    text: str = Field(
        HELD_OUT, description="A text or JSON-lines file, or 'held_out': unseen rows of `data`."
    )
    length: Count = Field(1024, description="Tokens per evaluation window.")
    max_tokens: Count | None = Field(None, description="Score only the first tokens of the text.")
    batch_size: Count = Field(8, description="Windows per forward pass.")
    recall: RecallSection | None = Field(
        None, description="Also measure recall ('recall: {}'); null: not."
    )


class GenerateSection(Section):
    """Texts written before and after the conversion, for a human eye."""

    prompts: Names = Field(description="Beginnings that the models continue.")
    max_new_tokens: Count = Field(64, description="Longest continuation.")
    temperature: Weight = Field(0.0, description="0: greedy.")


class Recipe(Section):
    """Everything that decides what the converted model is."""

    model: ModelSection = ModelSection()
    convert: ConvertSection = ConvertSection()
    data: DataSection = DataSection()
    transfer: TransferSection | None = Field(TransferSection(), description="Stage 1; null: skip.")
    finetune: FinetuneSection | None = Field(None, description="Stage 2; null: skip.")
    evaluate: EvaluateSection | None = Field(EvaluateSection(), description="null: skip.")
    generate: GenerateSection | None = Field(None, description="Sample texts; null: none.")
    seed: Natural = Field(0, description="Seeds maps, data order, query sampling and dropout.")
    output: str = Field(
        "runs/recipe", description="Run directory; default runs/<name of the recipe file>."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> "Recipe":
        exact = self.convert.window + self.convert.sinks
        trains = self.transfer is not None or self.finetune is not None
        if trains and self.data.length <= exact:
            raise ValueError(
                f"data.length: {self.data.length} tokens fit into convert.window + "
                f"convert.sinks = {exact}, so the linear branch would never be trained; use a "
                f"length of at least {3 * exact} or a smaller window"
            )
        if trains and SELF in self.data.sources:
            if len(self.data.sources) > 1:
                raise ValueError(
                    "data.sources: 'self' cannot be mixed with other sources; use it alone"
                )
            if self.data.max_tokens is None:
                raise ValueError(
                    "data.max_tokens: 'self' needs to know how many tokens the teacher writes"
                )
        for name in ("transfer", "finetune"):
            stage = getattr(self, name)
            if stage is not None and stage.max_tokens is not None and stage.max_steps is not None:
                raise ValueError(f"{name}.max_steps: set max_tokens or max_steps, not both")
        stage = self.finetune
        if stage is not None and stage.loss == "mix" and not stage.kl_weight * stage.ce_weight:
            raise ValueError(
                "finetune.loss: 'mix' needs kl_weight and ce_weight above 0; or use 'kl' or 'ce'"
            )
        return self

    def doubts(self) -> Iterator[str]:
        """Yields settings that are allowed and probably not what was meant."""
        exact = self.convert.window + self.convert.sinks
        if self.evaluate is not None and self.evaluate.length <= exact:
            yield (
                f"evaluate.length: {self.evaluate.length} tokens fit into convert.window + "
                f"convert.sinks = {exact}; nothing in the table will differ from the teacher"
            )
        if self.convert.mixing == "kernel" and self.convert.feature_map == "hedgehog":
            yield (
                "convert.mixing: 'kernel' reads feature products as estimates of exp(score); "
                "'hedgehog' features are bounded and carry no size; use centroids, "
                "hedgehog_exp, taylor, favor or another mixing"
            )
        idle = {
            "transfer.attention_weight": ("both",),
            "finetune.kl_weight": ("mix",),
            "finetune.ce_weight": ("mix",),
            "finetune.top_k": ("kl", "mix"),
        }
        for key, losses in idle.items():
            section, _, name = key.partition(".")
            stage = getattr(self, section)
            if stage is None or stage.loss in losses:
                continue
            if getattr(stage, name) != type(stage).model_fields[name].default:
                yield f"{key}: has no effect with loss '{stage.loss}'; use loss '{losses[0]}'"

    def dump(self) -> str:
        """The recipe as YAML, every default written out; loading it gives an equal recipe."""
        return yaml.safe_dump(
            self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
        )

    def settings(self) -> dict[str, Any]:
        """Every setting under its whole key, such as `convert.window`."""
        return dict(_leaves(self.model_dump(mode="json")))

    def differences(self, other: "Recipe") -> list[str]:
        """Names the settings that differ in another recipe; `output` does not count."""
        mine, theirs = self.settings(), other.settings()
        keys = sorted((mine.keys() | theirs.keys()) - {"output"})
        return [
            f"{key}: {_show(theirs.get(key))} there, {_show(mine.get(key))} here"
            for key in keys
            if mine.get(key) != theirs.get(key)
        ]


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Recipe of a YAML file, with overrides such as `"convert.window=32"` applied on top.

    Raises ValueError that names every wrong key and its place, or FileNotFoundError.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"recipe {path} does not exist (seen from {Path.cwd()})")
    places: dict[str, str] = {}
    values = parse(path.read_text(encoding="utf-8"), str(path), places)
    for override in overrides:
        apply_override(values, override, places)
    values.setdefault("output", f"runs/{path.stem}")
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        keys = [key for key, _ in _fields(Recipe)]
        lines = [explain(item, places, keys) for item in error.errors(include_url=False)]
        raise ValueError("\n".join(lines)) from None
    for doubt in recipe.doubts():
        warnings.warn(doubt, stacklevel=2)
    return recipe


def describe() -> Iterator[tuple[str, str, str]]:
    """Yields (key, default, meaning) of everything that a recipe can say, in order."""
    for key, field in _fields(Recipe):
        section = _section_of(field.annotation)
        default = "" if section or field.is_required() else one_line(field.default)
        meaning = field.description or (section.__doc__ if section else "")
        yield key, default, meaning or ""


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors and documentation."""
    return Recipe.model_json_schema() | {"title": "linearize recipe"}


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every dotted key of the schema with its field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next(
        (item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)),
        None,
    )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _show(value: Any) -> str:
    return "off" if value is None else repr(value)
