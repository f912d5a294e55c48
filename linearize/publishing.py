"""A run or a converted model becomes a folder that stock transformers loads, and goes to the hub.

The folder holds weights, config, code, tokenizer, recipe, results, licence and card. It is loaded
in fresh processes and compared with the model that it was made from before anything leaves.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from peft import PeftModel
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint

from linearize import hub, licences, loading, privacy
from linearize.card import PLACEHOLDER, Facts, check_card, make_card
from linearize.checkpoint import ADAPTER, new_parameters, save_adapter
from linearize.conversion import convert
from linearize.finetuning import add_lora, attention_projections
from linearize.modeling.attention import linearized_modules
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.recipe import Recipe, load_recipe
from linearize.training import TENSORS
from linearize.verification import answer, question, verify

logger = logging.getLogger(__name__)

SHARD = "5GB"
CARD = "README.md"


@dataclass
class Source:
    """What is published: the folder of the model, and the run that made it if there is one."""

    path: Path
    model: Path
    recipe: Recipe | None = None
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def is_published(self) -> bool:
        """Whether the folder is one that `publish` made."""
        return _is_published(self.path)


def publish(
    source: str | Path,
    *,
    repo_id: str | None = None,
    output: str | Path | None = None,
    dry_run: bool = False,
    private: bool = True,
    branch: str | None = None,
    pull_request: bool = False,
    adapter_only: bool = False,
    base_model: str | None = None,
    license: str | None = None,
    languages: Sequence[str] = (),
    max_shard_size: str = SHARD,
    device: str = "auto",
) -> dict[str, Any]:
    """{"folder", "files", "bytes", "differences", "pushed"}: what was made, and where it went.

    Args:
        source: A run directory; a folder with a converted model; or a folder that an earlier call
            made, which is pushed as it is, so that its card may be edited before.
        repo_id: Repository of the hub, owner/name; None: nothing is pushed.
        output: The folder to make; None: `publish` in the run directory, or beside the model.
        dry_run: Make and check everything, and push nothing.
        private: Whether a new repository is private.
        branch: Branch to push to, made if it is not there; or refs/pr/N.
        pull_request: Open a pull request instead of changing the main branch.
        adapter_only: New parameters and LoRA alone, to be put on the base model when loaded.
        base_model: Name of the base model on the hub, where the recipe names a folder.
        license: Identifier of the licence; None: the one that the base model's card names.
        languages: Codes such as "en"; none: those of the base model's card.
        max_shard_size: Largest file of weights.
        device: Where the model is loaded and compared.

    Raises:
        ValueError: There is nothing to publish, or what was made is not as it must be.
        FileNotFoundError: The folder is not there.
        ConnectionError: The hub does not answer, or the upload broke off.
    """
    if repo_id is not None:
        hub.check(repo_id, branch=branch, pull_request=pull_request)
        if not dry_run:
            hub.sign_in()  # a wrong token should not cost an hour
    elif branch is not None or pull_request:
        raise ValueError("--repo-id: needed to know where branch or pull request shall be")
    origin = find(Path(source).expanduser())
    place = str(loading.choose_device(device))
    if origin.is_published:
        folder, differences = origin.path, _check_again(origin.path, repo_id, place)
    else:
        folder = _folder(origin, output)
        if folder.exists() and not _is_published(folder):
            raise ValueError(
                f"--output: {folder} is there already and was not made by linearize publish; "
                "choose another folder or delete it"
            )
        draft = folder.with_name(f"{folder.name}-unfinished")
        maker = _Maker(origin, draft, Base.of(origin.recipe, base_model), place)
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        maker.describe(repo_id, license, languages, adapter_only)
        maker.save_adapter() if adapter_only else maker.save(max_shard_size)
        differences = maker.compare(adapter=adapter_only)
        privacy.check_private(draft, get_token())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    pushed = None
    if repo_id is not None and not dry_run:
        logger.info("pushing to %s", repo_id)
        options = {"private": private, "branch": branch, "pull_request": pull_request}
        pushed = hub.push(folder, repo_id, **options)
    return {
        "folder": str(folder),
        "files": [file.relative_to(folder).as_posix() for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "differences": differences,
        "pushed": pushed,
    }


def find(path: Path) -> Source:
    """What lies in a folder: a finished run, a model, or what `publish` made.

    Raises:
        FileNotFoundError: It is no folder, or holds no model.
        ValueError: The run is not finished.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"publish: {path} is no folder (seen from {Path.cwd()})")
    if path.name == "model" and (path.parent / "recipe.yaml").is_file():
        path = path.parent
    if (path / "config.json").is_file():
        return Source(path, path)
    if not (path / "recipe.yaml").is_file():
        raise FileNotFoundError(
            f"publish: {path} holds neither a run (recipe.yaml) nor a model (config.json)"
        )
    stored = path / "results.json"
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    if "finished" not in results:
        raise ValueError(
            f"publish: the run in {path} is not finished; go on with: linearize run "
            f"{path / 'recipe.yaml'} --output-dir {path}"
        )
    with warnings.catch_warnings():  # doubts were said when it ran
        warnings.simplefilter("ignore")
        recipe = load_recipe(path / "recipe.yaml")
    return Source(path, path / "model", recipe, results)


@dataclass(frozen=True)
class Base:
    """The base model: where it is loaded from here, its public name, its name on the hub."""

    place: str | None = None
    revision: str | None = None
    name: str | None = None
    hub_id: str | None = None

    @classmethod
    def of(cls, recipe: Recipe | None, base_model: str | None) -> "Base":
        """From a recipe and from what the user says."""
        place = recipe.model.path if recipe else base_model
        named = base_model or place
        if place is None or named is None:
            return cls()
        hub_id = None if named in loading.EMBEDDED or privacy.is_local(named) else named
        revision = recipe.model.revision if recipe else None
        return cls(place, revision, privacy.public_name(named), hub_id)

    def read(self) -> tuple[dict[str, Any], list[Path]]:
        """Metadata of its card and its licence files: of its folder, or else from the hub."""
        for place in (self.place and loading.locate(self.place), self.hub_id):
            if place is not None:
                card, texts = licences.read_base(place, revision=self.revision)
                if card or texts:
                    return card, texts
        return {}, []


class _Maker:
    """Makes the folder of one model: what each step needs to know, and the steps."""

    def __init__(self, origin: Source, folder: Path, base: Base, device: str) -> None:
        self.origin, self.folder, self.base = origin, folder, base
        logger.info("loading %s", origin.model)
        self.model, self.tokenizer = loading.load(origin.model, device=device)
        if not linearized_modules(self.model):
            raise ValueError(
                f"publish: {origin.model} holds a {type(self.model).__name__}, which is not "
                "converted; make one with linearize run"
            )
        self.recipe, self.results = None, privacy.public_results(origin.results)
        if origin.recipe is not None:
            self.recipe = privacy.public_recipe(origin.recipe.model_dump(mode="json"), base.name)

    def describe(
        self, repo_id: str | None, license: str | None, languages: Sequence[str], adapter: bool
    ) -> None:
        """Writes card, licence, recipe and results."""
        read, texts = self.base.read()
        licence = licences.inherited(read, texts, name=license)
        for doubt in licence.doubts():
            warnings.warn(doubt, stacklevel=2)
        spoken = read.get("language") or []
        sources = self.recipe["data"]["sources"] if self.recipe else []
        named = [entry if isinstance(entry, str) else entry["path"] for entry in sources]
        config = self.model.config
        card = make_card(
            Facts(
                name=repo_id.rpartition("/")[2] if repo_id else self.origin.path.resolve().name,
                repo_id=repo_id or PLACEHOLDER,
                section=LinearizeConfig.from_dict(config.linearize_config),
                num_layers=config.get_text_config().num_hidden_layers,
                dtype=self.model.dtype,
                licence=licence,
                base_name=self.base.name,
                base_id=self.base.hub_id,
                languages=list(languages) or ([spoken] if isinstance(spoken, str) else spoken),
                datasets=[name.partition(":")[0] for name in named if "/" in name],
                recipe=self.recipe,
                results=self.results,
                adapter=adapter,
            )
        )
        check_card(str(card))
        card.save(self.folder / CARD)
        licences.write_texts(licence, self.folder, self.base.name or "a pretrained model")
        if self.recipe is not None:
            text = Recipe.model_validate(self.recipe).dump()
            (self.folder / "recipe.yaml").write_text(text, encoding="utf-8")
            text = json.dumps(self.results, indent=2, ensure_ascii=False)
            (self.folder / "results.json").write_text(text + "\n", encoding="utf-8")

    def save(self, max_shard_size: str) -> None:
        """Writes the whole model and its tokenizer."""
        self.model.save_pretrained(self.folder, max_shard_size=max_shard_size)
        self._save_tokenizer()

    def save_adapter(self) -> None:
        """Writes new parameters and LoRA, which name the base model, and the tokenizer."""
        base = self.base
        if base.place is None:
            raise ValueError("--base-model: an adapter needs it; name what the model was made from")
        if base.hub_id is None and base.name not in loading.EMBEDDED:
            raise ValueError(
                f"--base-model: whoever loads the adapter needs the base model, and {base.name} is "
                "a folder of this computer; give its name on the hub, owner/name"
            )
        recipe = self.origin.recipe
        if recipe is not None and recipe.model.gguf_file is not None:
            raise ValueError(
                "--adapter-only: an adapter cannot name a GGUF file as its base model "
                f"({recipe.model.gguf_file}); publish the whole model"
            )
        trained, place = unmerged(self.origin, self.model), loading.locate(base.place)
        if Path(place).is_dir():  # the fresh processes are elsewhere
            place = str(Path(place).resolve())
        save_adapter(trained, self.folder, place, revision=base.revision)
        (self.folder / ADAPTER / CARD).unlink(missing_ok=True)  # peft's, with the path of the base
        if isinstance(trained, PeftModel):
            _change(
                self.folder / ADAPTER / "adapter_config.json", base_model_name_or_path=base.name
            )
        self._save_tokenizer()

    def _save_tokenizer(self) -> None:
        self.tokenizer.save_pretrained(self.folder)
        privacy.clean_tokenizer(self.folder)

    def compare(self, *, adapter: bool) -> dict[str, float]:
        """Differences between the folder, in fresh processes, and the model it was made from."""
        logger.info("comparing %s in fresh processes", self.folder)
        ids = question(self.model)
        expected = answer(self.model, self.tokenizer, ids)
        options = {"dtype": self.model.dtype, "device": str(self.model.device)}
        del self.model  # the fresh processes need the memory
        found = verify(self.folder, expected, ids, without_package=not adapter, **options)
        if adapter:  # from here on the folder is for others
            file = self.folder / "config.json"
            section = json.loads(file.read_text(encoding="utf-8"))["linearize_config"]
            section["delta"]["base_model"] = self.base.name
            _change(file, linearize_config=section)
        return found


def unmerged(origin: Source, converted: Any) -> Any:
    """The model of a run with its LoRA weights apart, as `save_adapter` wants it.

    Raises:
        ValueError: Finetuning changed all weights, or its last checkpoint is not there.
    """
    recipe = origin.recipe
    if recipe is None or recipe.finetune is None:
        return converted
    if recipe.finetune.method == "full":
        raise ValueError(
            "--adapter-only: finetune.method is full, so every weight is another one than the "
            "base model's; publish the whole model"
        )
    stage = origin.path / "checkpoints" / "finetune"
    last = get_last_checkpoint(stage) if stage.is_dir() else None
    if last is None:
        raise ValueError(
            f"--adapter-only: the LoRA weights are in {stage}, which holds no checkpoint any more; "
            "publish the whole model"
        )
    base, _ = loading.load(**recipe.model.model_dump(), device=str(converted.device))
    student: Any = convert(base, **recipe.convert.model_dump(), seed=recipe.seed)
    student.load_state_dict(new_parameters(converted), strict=False)
    settings = recipe.finetune
    trained = add_lora(
        student,
        settings.targets or attention_projections(student),
        rank=settings.rank,
        alpha=settings.alpha,
        train_linearized=False,  # the new parameters lie in a file of their own
    ).eval()
    stored = load_file(Path(last, TENSORS))
    lora = {name: tensor for name, tensor in stored.items() if ".lora_" in name}
    trained.load_state_dict(lora, strict=False)
    return trained


def _check_again(folder: Path, repo_id: str | None, device: str) -> dict[str, float]:
    """Checks a folder that was made before, whose card may have been edited since."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8")
    if repo_id is not None and PLACEHOLDER in text:
        text = text.replace(PLACEHOLDER, repo_id)
        card.write_text(text, encoding="utf-8")
    check_card(text)
    model, tokenizer = loading.load(folder, device=device)
    ids, adapter = question(model), (folder / ADAPTER).is_dir()
    options = {"dtype": model.dtype, "device": device, "without_package": not adapter}
    differences = verify(folder, answer(model, tokenizer, ids), ids, **options)
    privacy.check_private(folder, get_token())
    return differences


def _folder(origin: Source, output: str | Path | None) -> Path:
    if output is not None:
        return Path(output).expanduser()
    if origin.recipe is not None:
        return origin.path / "publish"
    return origin.path.with_name(f"{origin.path.resolve().name}-publish")


def _is_published(folder: Path) -> bool:
    config, licence = folder / "config.json", [*folder.glob("LICEN[CS]E*")]
    if not (licence and config.is_file() and (folder / CARD).is_file()):
        return False
    return hub.MARK in config.read_text(encoding="utf-8")


def _change(file: Path, **entries: Any) -> None:
    """Replaces entries of a JSON file."""
    content = json.loads(file.read_text(encoding="utf-8")) | entries
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
