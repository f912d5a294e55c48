"""The model card: what was converted, how well it went, how to use it and how to make it again.

A section is there if what it shows was measured; nothing is filled in.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from linearize import tables
from linearize.inspection import state_bytes
from linearize.licences import Licence
from linearize.modeling.configuration_linearized import LinearizeConfig

PLACEHOLDER = "OWNER/NAME"  # where the name of the repository is not known yet
SELF, HELD_OUT = "self", "held_out"  # as a recipe writes them
LENGTHS = (1024, 8192, 32768, 131072)
TAGS = ["linearize", "linear-attention", "sliding-window-attention", "constant-memory"]
LANGUAGE = r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual"
PAPERS = {
    "LoLCATs: On Low-Rank Linearizing of Large Language Models": "2410.10254",
    "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry": "2402.04347",
    "Finetuning Pretrained Transformers into RNNs": "2103.13076",
    "Transformers are RNNs": "2006.16236",
    "Simple linear attention language models balance the recall-throughput tradeoff": "2402.18668",
    "Rethinking Attention with Performers": "2009.14794",
    "Fast Transformers with Clustered Attention": "2007.04825",
    "Efficient Streaming Language Models with Attention Sinks": "2309.17453",
    "LoRA: Low-Rank Adaptation of Large Language Models": "2106.09685",
}
MAPS = {  # feature map: where it comes from; see docs/papers.md
    "hedgehog": "2402.04347",
    "hedgehog_exp": "2402.04347",
    "t2r": "2103.13076",
    "elu1": "2006.16236",
    "taylor": "2402.18668",
    "favor": "2009.14794",
    "centroids": "2007.04825",
}


@dataclass(frozen=True)
class Facts:
    """What is known of a converted model.

    base_name is for a reader, base_id a repository of the hub or None; recipe and results are those
    of its run, without what belongs to a computer.
    """

    name: str
    section: LinearizeConfig
    num_layers: int
    dtype: torch.dtype
    licence: Licence
    repo_id: str = PLACEHOLDER
    base_name: str | None = None
    base_id: str | None = None
    languages: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)
    recipe: Mapping[str, Any] | None = None
    results: Mapping[str, Any] = field(default_factory=dict)
    adapter: bool = False


def make_card(facts: Facts) -> ModelCard:
    """The card, with metadata.

    Raises:
        ValueError: A language is no language code.
    """
    sections = (
        _introduction, _use, _conversion, _certificate, _positions, _memory, _speed, _samples,
        _reproduction, _limits, _licence, _citations,
    )  # fmt: skip
    body = "\n\n".join("\n".join(lines) for section in sections if (lines := list(section(facts))))
    return ModelCard(f"---\n{metadata(facts).to_yaml()}\n---\n\n{body}\n")


def check_card(text: str) -> None:
    """Sees to it that the hub will take a card, as far as one can see that offline.

    Raises:
        ValueError: The metadata cannot be read, or a value of it is none that the hub knows.
    """
    try:
        data = ModelCard(text).data.to_dict()
    except Exception as error:  # of the YAML parser, or of the reader of model-index
        raise ValueError(f"README.md: its metadata cannot be read: {error}") from None
    if "library_name" not in data:
        raise ValueError("README.md: it has no metadata between --- lines; publish the run again")
    languages = data.get("language") or []
    for language in [languages] if isinstance(languages, str) else languages:
        if not re.fullmatch(LANGUAGE, str(language)):
            raise ValueError(
                f"--language: {language!r} is no language code; use one such as en, de or zho"
            )
    licence = data.get("license")
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", str(licence)):
        raise ValueError(
            f"--license: {licence!r} is no identifier; use one such as apache-2.0, llama3.2, other"
        )
    for result in (result for model in data.get("model-index", []) for result in model["results"]):
        for metric in result["metrics"]:
            if not math.isfinite(float(metric["value"])):
                raise ValueError(f"README.md: {metric['type']} is {metric['value']}, no number")


def metadata(facts: Facts) -> ModelCardData:
    """The part between the --- lines; what is not known is not there."""
    results = list(_eval_results(facts))
    return ModelCardData(
        license=facts.licence.metadata.get("license"),
        license_name=facts.licence.metadata.get("license_name"),
        license_link=facts.licence.metadata.get("license_link"),
        language=facts.languages or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=facts.base_id,
        base_model_relation=facts.base_id and ("adapter" if facts.adapter else "finetune"),
        datasets=facts.datasets or None,
        tags=[*TAGS, facts.section.feature_map.replace("_", "-")],
        metrics=["perplexity"] if results else None,
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def _eval_results(facts: Facts) -> Iterator[EvalResult]:
    row = facts.results.get("ablation", {}).get("converted")
    if row is None:
        return
    text = _text(facts)
    names = {
        "perplexity": "Perplexity per token",
        "kl_to_teacher": "KL divergence to the base model, nats per token",
        "top1_agreement": "Share of tokens with the base model's first choice",
    }
    for key, name in names.items():
        if isinstance(row[key], float) and math.isfinite(row[key]):
            yield EvalResult(
                task_type="text-generation",
                dataset_type=re.sub(r"[^\w.-]+", "-", text),
                dataset_name=text,
                dataset_args={"length": row["length"], "stride": row["stride"], "bos": row["bos"]},
                metric_type=key,
                metric_name=name,
                metric_value=round(row[key], 4),
            )


def _introduction(facts: Facts) -> Iterator[str]:
    section, converted = facts.section, len(facts.section.layers)
    everything = converted == facts.num_layers
    which = "every attention layer" if everything else f"{converted} of {facts.num_layers} layers"
    base = facts.base_name or f"a pretrained {section.base_model_type} model"
    if facts.base_id:
        base = f"[{facts.base_id}](https://huggingface.co/{facts.base_id})"
    sinks = f", the first {section.sinks} tokens" if section.sinks else ""
    yield f"# {facts.name}"
    yield ""
    yield (
        f"This is {base} with linear attention in {which}: softmax over the last {section.window} "
        f"tokens{sinks}, and a learned linear attention over everything in between, under one "
        f"normaliser. {'It remembers' if everything else 'These layers remember'} a text of any "
        "length in a state of constant size. Made with `linearize`."
    )
    if facts.adapter:
        yield ""
        yield (
            "The repository holds what training added. The base model is loaded by its name, and "
            "its weights are checked by a hash."
        )


def _use(facts: Facts) -> Iterator[str]:
    flag = "" if facts.adapter else ", trust_remote_code=True"
    yield "## Use"
    yield ""
    yield "```python"
    if facts.adapter:
        yield "import linearize"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield f'model = AutoModelForCausalLM.from_pretrained("{facts.repo_id}"{flag})'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{facts.repo_id}"{flag})'
    yield 'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids'
    yield "print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))"
    yield "```"
    yield ""
    if facts.adapter:
        yield "It needs `transformers` 5.20 or later, `peft`, and the package `linearize`."
    else:
        yield (
            "It needs `transformers` 5.20 or later and nothing else; the Python files in this "
            "repository are the model's. Where `linearize` is installed, `import linearize` makes "
            "the trust flag unnecessary."
        )


def _conversion(facts: Facts) -> Iterator[str]:
    section, recipe = facts.section, facts.recipe or {}
    layers = "all" if len(section.layers) == facts.num_layers else _ranges(section.layers)
    rows = {
        "architecture": section.base_model_type,
        "linear layers": f"{layers} ({len(section.layers)} of {facts.num_layers})",
        "window, sinks": f"{section.window}, {section.sinks}",
        "feature map": section.feature_map,
        "mixing rule": section.mixing,
        "weights": f"{_dtype(facts.dtype)}; new parameters float32",
    }
    for stage, meaning in (
        ("transfer", "attention transfer: new parameters, layer by layer"),
        ("finetune", "finetuning"),
    ):
        settings, cost = recipe.get(stage), facts.results.get(stage)
        if settings and cost:
            method = [settings["method"], settings["loss"]] if "method" in settings else []
            rows[", ".join([meaning, *method])] = (
                f"{cost['tokens']:,} tokens, {cost['steps']:,} steps"
            )
    if sources := facts.results.get("data", {}).get("train", {}).get("sources"):
        names = [entry["name"] for entry in sources]
        rows["training text"] = "written by the base model" if names == [SELF] else ", ".join(names)
    yield "## What was converted"
    yield ""
    yield from _table(("", ""), rows.items())


def _certificate(facts: Facts) -> Iterator[str]:
    rows = facts.results.get("ablation")
    if not rows:
        return
    yield "## What the linear attention is worth"
    yield ""
    cells = (
        (
            tables.ROW_NAMES.get(name, name),
            _measured(row, "perplexity", 2),
            _measured(row, "kl_to_teacher", 4),
            f"{100 * row['top1_agreement']:.1f} %",
        )
        for name, row in rows.items()
    )
    yield from _table(("", "perplexity", "KL to teacher (nats)", "top-1 agreement"), cells)
    yield ""
    if said := tables.verdict(rows):
        yield f"**{said}**"
    closed = facts.results.get("gap_closed", {}).get("ablation")
    if closed is not None:
        floor = "swa_sinks_finetuned" if "swa_sinks_finetuned" in rows else "swa_sinks"
        yield (
            f"It closes {100 * closed:.0f} % of the gap in log perplexity between "
            f"“{tables.ROW_NAMES[floor]}” and the base model."
        )
    yield ""
    row = rows["converted"]
    yield (
        f"`teacher` is the base model with its softmax attention. Scored: {row['num_tokens']:,} "
        f"tokens of {_text(facts)} in windows of {row['length']:,}, stride {row['stride']:,}, BOS "
        f"{row['bos']}; ± is one standard error."
    )


def _positions(facts: Facts) -> Iterator[str]:
    rows = facts.results.get("ablation", {})
    shown = [name for name in ("teacher", "converted", "window_only") if name in rows]
    if len(shown) < 2:
        return
    yield "Perplexity by position in the window of text:"
    yield ""
    buckets = zip(*(rows[name]["buckets"] for name in shown), strict=True)
    yield from _table(
        ("position", *(tables.ROW_NAMES.get(name, name) for name in shown)),
        (
            (
                f"{same[0]['from']:,} to {same[0]['to']:,}",
                *(tables.fixed(bucket["perplexity"], 2) for bucket in same),
            )
            for same in buckets
        ),
    )


def _memory(facts: Facts) -> Iterator[str]:
    section = facts.section
    state = sum(state_bytes(section, layer, facts.dtype) for layer in section.layers)
    per_token = sum(
        shape["num_key_value_heads"] * (shape["qk_dim"] + shape["v_dim"]) * facts.dtype.itemsize
        for shape in section.geometry.values()
    )
    yield "## Memory"
    yield ""
    yield (
        f"Per sequence the linear layers hold {tables.size(state)} at any length; the key/value "
        f"cache that they replace grows by {tables.size(per_token)} per token and is the larger "
        f"one from {-(-state // per_token):,} tokens on."
    )
    yield ""
    yield from _table(
        ("tokens", "key/value cache", "state"),
        (
            (f"{length:,}", tables.size(length * per_token), tables.size(state))
            for length in LENGTHS
        ),
    )
    yield ""
    yield f"Computed from the shapes, in {_dtype(facts.dtype)}; sums of the state are float32."


def _speed(facts: Facts) -> Iterator[str]:
    found = facts.results.get("efficiency")
    if not found:
        return
    yield "## Speed"
    yield ""
    yield from _table(
        ("context", "ms per token", "base model"),
        (
            (
                f"{row['context']:,}",
                f"{1000 * row['converted_s']:.1f}",
                f"{1000 * row['teacher_s']:.1f}",
            )
            for row in found["decode"]
        ),
    )
    yield ""
    yield f"Decoding, {found['dtype']}, {_hardware(facts)}."


def _samples(facts: Facts) -> Iterator[str]:
    samples = facts.results.get("samples")
    if not samples:
        return
    yield "## A sample"
    for who, title in (("teacher", "Base model"), ("converted", "This model")):
        yield ""
        yield f"{title}:"
        yield ""
        yield from (f"> {line}".rstrip() for line in samples[0][who].splitlines())


def _reproduction(facts: Facts) -> Iterator[str]:
    results = facts.results
    if facts.recipe is None:
        return
    yield "## How to make it again"
    yield ""
    yield "`recipe.yaml` in this repository holds every setting:"
    yield ""
    yield "```bash"
    yield "linearize run recipe.yaml"
    yield "```"
    yield ""
    if versions := results.get("versions"):
        used = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        commit = f", commit `{results['commit']}`" if results.get("commit") else ""
        yield f"With {used}{commit}, seed {facts.recipe['seed']}."
    if results.get("seconds"):
        yield f"It took {results['seconds']:,.0f} s on {_hardware(facts)}."
    yield (
        "`results.json` holds every figure of this page, the loss curves, and the SHA-256 of the "
        "texts, which are named without their folders."
    )


def _limits(facts: Facts) -> Iterator[str]:
    yield "## Limits"
    yield ""
    yield (
        "- What lies further back than the window is remembered in a state of fixed size: its gist "
        "stays, and exact words, numbers and names may be lost."
    )
    length = facts.recipe["data"]["length"] if facts.recipe else None
    trained = facts.results.keys() & {"transfer", "finetune"}
    if length and trained:
        yield f"- It was trained on rows of {length:,} tokens. Longer texts run; how well is open."
    if not facts.results.get("ablation"):
        yield "- Nothing was measured for this page."
    yield "- Continuous batching, tensor parallelism and `output_attentions` are not supported."
    yield "- Whatever is true of the base model's knowledge, biases and safety is true here too."


def _licence(facts: Facts) -> Iterator[str]:
    yield "## Licence"
    yield ""
    name = facts.licence.name
    if name is None:
        yield "The weights stand under the base model's licence, which was not known here: ask it."
    else:
        yield f"The weights stand under the base model's licence: {name}."
    for condition in facts.licence.doubts() if name else ():
        yield f"({condition[0].upper()}{condition[1:]}.)"
    yield "The Python files are `linearize`'s: Apache-2.0."


def _citations(facts: Facts) -> Iterator[str]:
    section, finetuned = facts.section, (facts.recipe or {}).get("finetune")
    wanted = {"2410.10254", MAPS.get(section.feature_map)}
    if section.sinks:
        wanted.add("2309.17453")
    if finetuned and finetuned["method"] == "lora":
        wanted.add("2106.09685")
    yield "## Papers"
    yield ""
    for title, number in PAPERS.items():
        if number in wanted:
            yield f"- {title}, [arXiv:{number}](https://arxiv.org/abs/{number})"


def _text(facts: Facts) -> str:
    """What was scored."""
    text = facts.recipe["evaluate"]["text"] if facts.recipe else "a text"
    return "rows held out of the training text" if text == HELD_OUT else text


def _hardware(facts: Facts) -> str:
    return facts.results.get("hardware", "hardware that is not recorded")


def _measured(row: Mapping[str, Any], key: str, digits: int) -> str:
    return f"{tables.fixed(row[key], digits)} ± {tables.fixed(row[f'{key}_se'], digits)}"


def _table(head: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _ranges(layers: list[int]) -> str:
    """Whole numbers as "0-3, 5"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
