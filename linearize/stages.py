"""A recipe, run: load, data, convert, transfer, evaluate, finetune, evaluate, save.

A run directory holds `recipe.yaml` (every default written out), `results.json` (rewritten whole
after each step), `checkpoints/` (what the stages resume from), `attention/` (a few heads, to look
at), `model/` (the converted model and its tokenizer) and, at the end, `report.html`. The same call
on the same directory goes on where the last one stopped: a finished stage hands back its weights, a
finished measurement its numbers.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from linearize import budget, loading
from linearize.conversion import convert
from linearize.data import Splits, generate_data, load_data
from linearize.evaluation.ablation import ablation
from linearize.evaluation.fidelity import fidelity
from linearize.evaluation.mass import linear_mass
from linearize.evaluation.parity import parity
from linearize.evaluation.pictures import picture_student, picture_teacher
from linearize.evaluation.recall import recall
from linearize.evaluation.rows import ROWS, Row
from linearize.finetuning import finetune
from linearize.inspection import build_empty, inspect
from linearize.modeling.attention import branches, teacher
from linearize.recipe import HELD_OUT, SELF, Recipe, load_recipe
from linearize.report.comparison import compare_runs
from linearize.report.page import public
from linearize.report.single import PAGE, write_report
from linearize.rundir import RunDirectory, load_splits, save_splits
from linearize.saved import read_evaluation_text, write
from linearize.tracking import trackers
from linearize.transfer import transfer_attention

logger = logging.getLogger(__name__)

SAVE_STEPS = 100
FINETUNED_ROWS = ("converted", "window_only", "linear_only", "no_attention")
BASELINES = {  # row: what is trained, and how the result answers
    "teacher_finetuned": ("softmax", teacher),
    "swa_sinks_finetuned": ("window", partial(branches, linear=False)),
}


def run(
    recipe: Recipe | str | Path,
    *,
    output_dir: str | Path | None = None,
    device: str = "auto",
    resume: bool = True,
    save_steps: int | None = SAVE_STEPS,
    gradient_checkpointing: bool = False,
    teacher_cache: str | Path | None = None,
    progress: bool = True,
    report_to: str | Sequence[str] = (),
) -> dict[str, Any]:
    """Results of a recipe, as in `results.json`; the model lies in `model/` of the run directory.

    Args:
        recipe: A recipe, or the path of its file.
        output_dir: Run directory, instead of the recipe's `output`.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the best there is.
        resume: Go on with what the run directory holds; False refuses a directory with a run.
        save_steps: Optimiser steps between checkpoints; None: only at the end of a stage.
        gradient_checkpointing: Stage 2 in less memory and more time.
        teacher_cache: Folder that keeps the teacher's logits of stage 2 (`finetune.top_k` of each
            token) for its baselines, for later runs, and for going on; None: no cache.
        progress: Show progress bars.
        report_to: Experiment trackers, by the names of TrainingArguments, such as "wandb".

    Raises:
        ValueError: The recipe does not fit the model or data, or the directory holds another run.
        FileNotFoundError: The model, the data or the evaluation text is not there.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    place = loading.choose_device(device)
    section = recipe.finetune
    if teacher_cache and section and section.loss != "ce" and section.top_k is None:
        raise ValueError(
            "teacher_cache: it holds the teacher's most probable tokens; set finetune.top_k, for "
            "example to 64"
        )
    trackers(report_to)  # one that is missing should not cost an hour
    directory = RunDirectory(
        output_dir or recipe.output,
        recipe.dump(),
        lambda stored: recipe.differences(load_recipe(stored)),
        resume=resume,
    )
    if "finished" not in directory.results:
        training = dict(
            save_steps=save_steps, progress=progress, seed=recipe.seed, report_to=report_to
        )
        stage_2 = {"gradient_checkpointing": gradient_checkpointing, "teacher_cache": teacher_cache}
        job = _Job(recipe, directory, str(place), training, stage_2)
        job.run()
    if not (directory.path / PAGE).exists():
        try:
            _report(directory.path, recipe)
        except Exception as error:  # the run is complete; a page must not take it away
            logger.warning(
                "the report could not be written (%s: %s); `linearize report %s` tries again",
                type(error).__name__, error, directory.path,
            )  # fmt: skip
    return directory.results


def report(folder: str | Path) -> dict[str, str]:
    """{"report": the page of a run}, written again from what lies in its folder.

    Raises:
        FileNotFoundError: The folder is not that of a run.
        ValueError: Its recipe is one of another version.
    """
    return {"report": str(_report(Path(folder), load_recipe(Path(folder, "recipe.yaml"))))}


def compare(folders: Sequence[str | Path], *, page: str | Path = "compare.html") -> dict[str, Any]:
    """Figures of several runs side by side, also written as a page; see `report.comparison`.

    Raises:
        FileNotFoundError: A folder is not that of a run.
        ValueError: Fewer than two runs, or a recipe is one of another version.
    """
    recipes = [load_recipe(Path(folder, "recipe.yaml")) for folder in folders]
    settings = [public(recipe.settings()) for recipe in recipes]
    return compare_runs(folders, settings=settings, page=page)


def _report(folder: Path, recipe: Recipe) -> Path:
    shown = Recipe.model_validate(public(recipe.model_dump(mode="json")))
    return write_report(folder, settings=shown.model_dump(mode="json"), recipe=shown.dump())


def preview(recipe: Recipe | str | Path, *, gradient_checkpointing: bool = False) -> dict[str, Any]:
    """What `run` would convert and what its stages need: `inspect`, and "training" as in `budget`.

    No weights are loaded, and no data is read.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    source, section = recipe.model, recipe.convert.model_dump()
    where = {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
    report = inspect(source.path, **section, dtype=source.dtype, **where)
    model = build_empty(source.path, **where).to(loading.DTYPES[report["model"]["dtype"]])
    report["training"] = budget.training(
        model,
        section,
        report["layers"],
        length=recipe.data.length,
        transfer=None if recipe.transfer is None else recipe.transfer.model_dump(),
        finetune=None if recipe.finetune is None else recipe.finetune.model_dump(),
        gradient_checkpointing=gradient_checkpointing,
    )
    return report


class _Job:
    """One run: what every stage needs to know, and the stages in order."""

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        device: str,
        training: Mapping[str, Any],
        stage_2: Mapping[str, Any],
    ) -> None:
        self.recipe, self.directory, self.device = recipe, directory, device
        self.training, self.progress = training, training["progress"]
        self.stage_2 = stage_2
        self.splits: Splits | None = None
        self.text: Sequence[Any] = ()

    def run(self) -> None:
        """Takes every step that an earlier call has not taken."""
        self.directory.record(output=str(self.directory.path), **loading.provenance())
        self._read_text()
        tokenizer = self._make_student()
        self._baselines(tokenizer)
        totals = _summary(self.directory.results, self.recipe)
        self.directory.record(**totals, finished=True)

    def _make_student(self) -> Any:
        """Makes, measures and saves the converted model; returns the tokenizer."""
        recipe, directory = self.recipe, self.directory
        base, tokenizer = self._load_base()
        directory.once("teacher_texts", lambda: self._texts(base, tokenizer))
        self._prepare_data(base, tokenizer)
        student = self._transfer(self._convert(base))
        first = "ablation" if recipe.finetune is None else "ablation_after_transfer"
        self._measure(first, student, tokenizer)
        directory.once("fidelity", lambda: self._fidelity(student, tokenizer))
        if recipe.finetune is not None:
            student = self._finetune(student, "finetune")
            self._measure_again(student, tokenizer)
        self._certify(student, tokenizer)
        if directory.results["fidelity"]:
            picture_student(student, directory.attention)
        directory.once("converted_texts", lambda: self._texts(student, tokenizer))
        loading.save(student, tokenizer, directory.model)
        return tokenizer

    def _read_text(self) -> None:
        """Reads the evaluation text first of all: a wrong path should not cost an hour."""
        section = self.recipe.evaluate
        if section is not None and section.text != HELD_OUT:
            self.text = read_evaluation_text(section.text)

    def _load_base(self) -> tuple[Any, Any]:
        logger.info("loading %s", self.recipe.model.path)
        return loading.load(**self.recipe.model.model_dump(), device=self.device)

    def _convert(self, base: Any) -> Any:
        return convert(base, **self.recipe.convert.model_dump(), seed=self.recipe.seed)

    def _prepare_data(self, model: Any, tokenizer: Any) -> None:
        recipe, section = self.recipe, self.recipe.data
        evaluates_held_out = recipe.evaluate is not None and recipe.evaluate.text == HELD_OUT
        if recipe.transfer is None and recipe.finetune is None and not evaluates_held_out:
            return
        file = self.directory.checkpoints / "data.safetensors"
        if not file.exists():
            with self.directory.timed("data"):
                save_splits(self._make_data(model, tokenizer), file)
        pad_id = tokenizer.eos_token_id or 0
        self.splits = load_splits(file, length=section.length, pad_id=pad_id)
        train, held_out = self.splits.train, self.splits.held_out
        self.directory.record(data={"train": train.description, "held_out": held_out.description})
        if evaluates_held_out:
            self.text = held_out.documents()
            if not self.text:
                raise ValueError(
                    f"data.held_out: {section.held_out} of this text is not one document; "
                    "hold out more, or name an evaluate.text"
                )

    def _make_data(self, model: Any, tokenizer: Any) -> Splits:
        section = self.recipe.data
        shared = {"length": section.length, "held_out": section.held_out, "seed": self.recipe.seed}
        if section.sources == (SELF,):
            assert section.max_tokens is not None, "the recipe checks it"
            logger.info("the teacher writes %s tokens", f"{section.max_tokens:,}")
            return generate_data(
                model,
                tokenizer,
                num_tokens=section.max_tokens,
                temperature=section.temperature,
                batch_size=section.batch_size,
                progress=self.progress,
                **shared,
            )
        logger.info("reading %s", ", ".join(map(str, section.sources)))
        return load_data(
            section.model_dump()["sources"],
            tokenizer,
            max_tokens=section.max_tokens,
            eos_between=section.eos_between,
            **shared,
        )

    def _transfer(self, student: Any) -> Any:
        section = self.recipe.transfer
        if section is not None:
            logger.info("stage 1: attention transfer")
            metrics = transfer_attention(
                student,
                self.splits.train,
                output_dir=self.directory.checkpoints / "transfer",
                **section.model_dump(),
                **self.training,
            )
            self.directory.record(transfer=metrics)
            self.directory.set_seconds("transfer", metrics["seconds"])
        return student

    def _finetune(self, student: Any, name: str, mode: str = "linear") -> Any:
        logger.info("stage 2: finetuning (%s)", name)
        trained, metrics = finetune(
            student,
            self.splits.train,
            output_dir=self.directory.checkpoints / name,
            mode=mode,
            **self.recipe.finetune.model_dump(exclude={"baselines"}),
            **self.stage_2,
            **self.training,
        )
        self.directory.record(**{name: metrics})
        self.directory.set_seconds(name, metrics["seconds"])
        return trained.eval()

    def _measure(self, name: str, student: Any, tokenizer: Any) -> None:
        """The ablation table of the student against the untouched base model."""
        if self.recipe.evaluate is None:
            return
        logger.info("evaluation: %s", name.replace("_", " "))
        self.directory.once(name, lambda: self._ablation(student, tokenizer))

    def _fidelity(self, student: Any, tokenizer: Any) -> dict[str, float] | None:
        """Means over heads; what the report shows of each head goes into `attention/`."""
        text = self.text or (self.splits.held_out.documents() if self.splits else ())
        if not text:
            return None
        logger.info("evaluation: fidelity of every head")
        length = (self.recipe.evaluate or self.recipe.data).length
        found = fidelity(student, tokenizer, text, length=length)
        if not found:
            return None
        folder = self.directory.attention
        picture_teacher(student, tokenizer, text, found, folder, max_length=length)
        return {name: float(values.nanmean()) for name, values in found.items()}

    def _measure_again(self, student: Any, tokenizer: Any) -> None:
        """The table after stage 2; what does not depend on the student is taken from stage 1."""
        if self.recipe.evaluate is None or "ablation" in self.directory.results:
            return
        logger.info("evaluation: result")
        before = self.directory.results["ablation_after_transfer"]
        with self.directory.timed("ablation"):
            after = self._ablation(student, tokenizer, rows=FINETUNED_ROWS, base=True)
        self.directory.record(ablation=before | after)

    def _certify(self, student: Any, tokenizer: Any) -> None:
        """What lies beyond perplexity: where the attention is, whether all ways agree, recall."""
        section, once = self.recipe.evaluate, self.directory.once
        if section is None:
            return
        options = {"length": section.length}
        once("linear_mass", lambda: linear_mass(student, tokenizer, self.text, **options))
        once("parity", lambda: parity(student))
        if section.recall is None:
            return
        logger.info("evaluation: recall")
        settings = {"batch_size": section.batch_size, "seed": self.recipe.seed}
        once("recall", lambda: recall(
            student,
            tokenizer,
            base_model=None if self.recipe.finetune is None else self._load_base()[0],
            **section.recall.model_dump(),
            **settings,
            progress=self.progress,
        ))  # fmt: skip

    def _baselines(self, tokenizer: Any) -> None:
        """Rows of models that had the same stage 2 without a linear branch."""
        section = self.recipe.finetune
        if section is None or not section.baselines or self.recipe.evaluate is None:
            return
        for name, (mode, answer) in BASELINES.items():
            table = self.directory.results["ablation"]
            if name in table:
                continue
            if mode == "softmax" and section.loss == "kl":
                # the teacher's divergence from itself is zero, and so is its gradient
                self.directory.record(ablation=table | {name: table["teacher"]})
                continue
            trained = self._finetune(self._convert(self._load_base()[0]), name, mode)
            with self.directory.timed(f"ablation {name}"):
                rows = (Row(name, trained, answer),)
                table = table | self._ablation(trained, tokenizer, rows=rows, base=True)
            self.directory.record(ablation=table)

    def _ablation(
        self, model: Any, tokenizer: Any, *, rows: Sequence[Any] = ROWS, base: bool = False
    ) -> dict[str, Any]:
        return ablation(
            model,
            tokenizer,
            self.text,
            rows=rows,
            base_model=self._load_base()[0] if base else None,
            **self.recipe.evaluate.model_dump(exclude={"text", "recall"}),
            progress=self.progress,
        )

    def _texts(self, model: Any, tokenizer: Any) -> list[str]:
        section = self.recipe.generate
        if section is None:
            return []
        options = section.model_dump(exclude={"prompts"})
        return write(model, tokenizer, section.prompts, **options, seed=self.recipe.seed)


def gap_closed(rows: Mapping[str, Any], *, floor: str, ceiling: str) -> float | None:
    """Share of the gap in log perplexity between two rows that the converted model closes."""
    if not {floor, ceiling, "converted"} <= rows.keys():
        return None
    low, mid, high = (math.log(rows[name]["perplexity"]) for name in (ceiling, "converted", floor))
    return (high - mid) / (high - low) if high != low else None


def _summary(results: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Totals of a finished run."""
    before, after = results["teacher_texts"], results["converted_texts"]
    prompts = recipe.generate.prompts if recipe.generate else ()
    samples = [
        {"prompt": prompt, "teacher": teacher, "converted": converted}
        for prompt, teacher, converted in zip(prompts, before, after, strict=True)
    ]
    untrained = {"floor": "swa_sinks", "ceiling": "teacher"}
    finetuned = {"floor": "swa_sinks_finetuned", "ceiling": "teacher_finetuned"}
    ends = {"ablation_after_transfer": untrained, "ablation": untrained}
    if recipe.finetune is not None:
        ends["ablation"] = finetuned
    closed = {name: gap_closed(results.get(name, {}), **rows) for name, rows in ends.items()}
    return {
        "samples": samples,
        "gap_closed": {name: share for name, share in closed.items() if share is not None},
        "tokens": {
            stage: results[stage]["tokens"]
            for stage in ("transfer", "finetune")
            if stage in results
        },
        "seconds": round(sum(results["seconds_by_step"].values()), 1),
    }
