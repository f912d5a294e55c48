"""Run directories for the tests of reports: small, made up, with all that a page can show."""

import json

from conftest import tiny_linearized
from tinytext import WORDS, tiny_tokenizer

from linearize.evaluation.fidelity import fidelity
from linearize.evaluation.pictures import picture_student, picture_teacher
from linearize.recipe import Recipe

EVIL = "</script><script>document.title = 'owned'</script><img src=http://evil.example/x.png>"
PLACES = {"window": (0, 4), "next": (4, 8), "far": (8, 16)}


def scores(perplexity, kl):
    found = {"perplexity": perplexity, "kl_to_teacher": kl, "top1_agreement": 1 - kl}
    return {**found, **{f"{name}_se": value / 50 for name, value in found.items()}}


def row(perplexity, kl, **more):
    buckets = [
        {"from": low, "to": high, **scores(perplexity * (1 + i / 9), kl)}
        for i, (low, high) in enumerate(PLACES.values())
    ]
    protocol = {"num_tokens": 999, "length": 16, "stride": 16, "bos": "none", "sha256": "ab" * 32}
    return {**scores(perplexity, kl), "buckets": buckets, **protocol, **more}


def table():
    gains = [
        {"from": low, "to": high, "gain": 0.1, "gain_se": 0.01} for low, high in PLACES.values()
    ]
    branch = {"gain": 0.2, "gain_se": 0.01, "buckets": gains}
    return {
        "teacher": row(20.0, 0.0),
        "converted": row(24.0, 0.1, linear_branch=branch),
        "window_only": row(30.0, 0.3),
        "linear_only": row(999.0, 3.0) | {"perplexity": "inf", "perplexity_se": None},
        "swa_sinks": row(29.0, 0.3),
    }


def history(layers=(0, 1)):
    return [
        {
            "step": i,
            "tokens": 100 * i,
            "loss": 1 / i,
            "layers": {str(n): (n + 1) / i for n in layers},
        }
        for i in (1, 2, 3)
    ]


def recall():
    places = [
        {"from": low, "to": high, "choice_accuracy": 0.5, "choice_accuracy_se": 0.1}
        for low, high in PLACES.values()
    ]
    cells = [
        {"task": "pairs", "length": n, "rows": {"teacher": {"buckets": places}}} for n in (8, 16)
    ]
    return {"cells": cells, "chance": 0.1}


def efficiency():
    def pair(name, **more):
        return {name: 1024, "converted_s": 0.01, "teacher_s": 0.02, **more}

    held = {"converted_cache_bytes": 2**20, "teacher_cache_bytes": 2**24}
    return {
        "decode": [pair("context", **held)], "prefill": [pair("tokens")],
        "dtype": "float32", "threads": 1,
    }  # fmt: skip


def results(**more):
    return {
        "output": "/srv/somebody/runs/run",
        "versions": {"linearize": "0.1.0", "torch": "2"},
        "commit": "0123456789abcdef",
        "hardware": "a computer",
        "seconds_by_step": {"transfer": 12.0},
        "data": {
            "train": {
                "sources": [{"name": "/srv/somebody/text.txt", "documents": 3, "sha256": "cd"}]
            }
        },
        "transfer": {"tokens": 300, "history": history()},
        "finetune": {"tokens": 200, "history": [{"tokens": 100, "loss": 0.5, "kl": 0.5}]},
        "ablation_after_transfer": table(),
        "ablation": table(),
        "gap_closed": {"ablation": 0.5},
        "samples": [{"prompt": "w1 <", "teacher": "w1 <b>w2", "converted": f"w1 <b>{EVIL}"}],
        "recall": recall(),
        "efficiency": efficiency(),
        "tokens": {"transfer": 300},
        "seconds": 34.0,
        **more,
    }


def save_run(folder, *, pictures=True, found=None, **settings):
    """Writes a run directory; returns the folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results() if found is None else found))
    recipe = Recipe.model_validate(
        {"model": {"path": "/srv/somebody/models/tiny"}, "data": {"max_tokens": 9}, **settings}
    )
    (folder / "recipe.yaml").write_text(recipe.dump())
    if pictures:
        model, tokenizer = tiny_linearized(sinks=2), tiny_tokenizer()
        model.config.save_pretrained(folder / "model")
        text = [" ".join(WORDS[(7 * i + j) % 61] for i in range(120)) for j in range(3)]
        picture_teacher(model, tokenizer, text, fidelity(model, tokenizer, text, length=64),
                        folder / "attention")  # fmt: skip
        picture_student(model, folder / "attention")
    return folder
