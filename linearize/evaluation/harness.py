"""Tasks of lm-evaluation-harness (extra "eval"), for the teacher, the converted model and the
window alone.

Most of its tasks have short prompts, which fit into the window: there a column without the linear
branch reads the same, and says so. What the harness does with a model (padding on the right for
likelihoods, where a causal model cannot see it, on the left with a mask for generation, truncation
from the left) needs nothing special from a converted one.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linearize.evaluation.perplexity import mean_and_se
from linearize.evaluation.recall import RECALL_ROWS
from linearize.evaluation.rows import Row, choose_rows
from linearize.modeling.attention import linearized_modules
from linearize.training import evaluating

PROMPTS = {"question": "Question: {{question}}\nAnswer:", "ctx": "{{ctx}}"}  # by a line's key
FILES = (".jsonl", ".yaml", ".yml")
SEPARATOR = ","  # between the name of a metric and its filter, in the harness's results


def harness(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    rows: Sequence[str | Row] = RECALL_ROWS,
    base_model: nn.Module | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Scores of tasks, by row.

    Args:
        model: A converted model, or a softmax model, which is the only row then.
        tokenizer: Its tokenizer.
        tasks: Names that the harness knows; task files of the harness (.yaml); JSON-lines files
            whose lines have "question" or "ctx", "choices" and "label", the number of the right
            one.
        limit: Items of each task; None: all.
        num_fewshot: Solved examples in the prompt; None: what the task says.
        rows: As in `ablation`.
        base_model: As in `ablation`.
        batch_size: Requests per forward pass.
        seed: Of the examples and of everything else that the harness draws.
        progress: Show bars.

    Returns:
        {"tasks", "limit", "num_fewshot", "seed", "lm_eval"}. A task has "task", "num_items",
        "rows": {row: {metric: value, metric + "_se": error}} and, next to converted and
        window_only, "linear_branch": {metric: difference of the two, metric + "_se": error of the
        difference, paired by item}.

    Raises:
        ImportError: The extra is not installed.
        ValueError: A task is not known, or a file is not one.
        FileNotFoundError: A task's file is not there.
    """
    lm_eval = _import_harness()
    has_names = any(Path(name).suffix not in FILES for name in tasks)
    manager = lm_eval.tasks.TaskManager(include_defaults=has_names)  # reads thousands of files
    specifications = [_specification(name, manager) for name in tasks]
    table = {"teacher": Row("teacher", model)}
    if linearized_modules(model):
        names = [row if isinstance(row, str) else row.name for row in rows]
        chosen = choose_rows(model, base_model, rows, 1)
        table = {name: chosen[name] for name in names}
    answers = {}
    for name, row in table.items():
        with ExitStack() as stack:
            stack.enter_context(evaluating(row.model))
            stack.enter_context(row.mode(row.model))
            answers[name] = lm_eval.simple_evaluate(
                model=_wrap(lm_eval, row.model, tokenizer, batch_size, progress),
                tasks=specifications,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=1000,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
    return {
        "tasks": _by_task(answers),
        "limit": limit,
        "num_fewshot": num_fewshot,
        "seed": seed,
        "lm_eval": lm_eval.__version__,
    }


def _import_harness() -> Any:
    try:
        import lm_eval
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise ImportError(
            "evaluate.tasks: needs lm-evaluation-harness, which is not installed "
            f"({error}); pip install 'linearize[eval]'"
        ) from None
    return lm_eval


def _wrap(lm_eval: Any, model: nn.Module, tokenizer: Any, batch_size: int, progress: bool) -> Any:
    """The model as the harness takes it."""

    class Model(lm_eval.models.huggingface.HFLM):
        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **options):
            return super()._loglikelihood_tokens(requests, not progress, **options)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return super().loglikelihood_rolling(requests, not progress)

        def generate_until(self, requests, disable_tqdm=False):
            return super().generate_until(requests, not progress)

    return Model(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=batch_size)


def _specification(name: str, manager: Any) -> str | dict[str, Any]:
    """A task as the harness takes it: its name, or a configuration."""
    path = Path(name)
    if path.suffix in FILES:
        if not path.is_file():
            raise FileNotFoundError(
                f"evaluate.tasks: {name} does not exist, seen from {Path.cwd()}"
            )
        return _from_lines(path) if path.suffix == ".jsonl" else str(path)
    if name not in manager.all_tasks:
        raise ValueError(
            f"evaluate.tasks: '{name}' is not a task of lm-evaluation-harness; "
            "`lm-eval ls tasks` lists them, or name a .yaml or .jsonl file"
        )
    return name


def _from_lines(path: Path) -> dict[str, Any]:
    """The configuration of a multiple-choice task whose items are the lines of a file."""
    with path.open(encoding="utf-8") as lines:
        first = json.loads(lines.readline())
    prompt = next((PROMPTS[key] for key in PROMPTS if key in first), None)
    if prompt is None or not {"choices", "label"} <= first.keys():
        raise ValueError(
            f"evaluate.tasks: {path}: a line needs 'question' or 'ctx', 'choices' and 'label'; "
            f"the first has {', '.join(first)}"
        )
    metrics = [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True}
        for metric in ("acc", "acc_norm")
    ]
    return {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": prompt,
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": metrics,
    }


def _by_task(answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per task from the harness's results by row."""
    some = next(iter(answers.values()))
    found = []
    for task in some["results"]:
        entry: dict[str, Any] = {
            "task": task,
            "num_items": some["n-samples"].get(task, {}).get("effective"),
            "rows": {name: _metrics(answer["results"][task]) for name, answer in answers.items()},
        }
        if {"converted", "window_only"} <= answers.keys():
            pair = [answers[n].get("samples", {}).get(task) for n in ("converted", "window_only")]
            if all(pair):
                entry["linear_branch"] = _gains(*pair)
        found.append(entry)
    return found


def _metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """{metric: value, metric_se: error} from {"acc,none": ..., "acc_stderr,none": ...}."""
    metrics = {}
    for key, value in result.items():
        name, comma, how = key.partition(SEPARATOR)
        if comma and isinstance(value, int | float):
            name = name.replace("_stderr", "_se")
            metrics[name if how == "none" else f"{name} ({how})"] = value
    return metrics


def _gains(with_branch: Sequence[Any], without: Sequence[Any]) -> dict[str, float | None]:
    """Mean difference of each metric of items, and its error."""
    others = {sample["doc_id"]: sample for sample in without}
    gains: dict[str, float | None] = {}
    for metric in with_branch[0]["metrics"]:
        if not isinstance(with_branch[0][metric], int | float):
            continue
        differences = torch.tensor(
            [float(sample[metric] - others[sample["doc_id"]][metric]) for sample in with_branch]
        )
        gains[metric], gains[f"{metric}_se"] = mean_and_se(
            differences, torch.ones(len(differences))
        )
    return gains
