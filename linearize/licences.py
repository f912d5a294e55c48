"""The licence that a converted model inherits from its base model, with the texts that go along."""

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, list_repo_files
from huggingface_hub.repocard import metadata_load

TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
CARD = "README.md"
CODE_LICENCE = "apache-2.0"  # of the Python files that travel with the weights
# Conditions on derived models that a reader of the licence text easily misses: Llama 3 Community
# License 1.b.i and its later versions; Gemma Terms of Use 3.1.
CONDITIONS = {
    "llama": "asks for 'Built with Llama' on the page and for a name that begins with 'Llama'",
    "gemma": "asks to pass on its terms of use and to say that the files were modified",
}


@dataclass
class Licence:
    """What is known of the licence of a base model: its metadata keys and its text files."""

    metadata: dict[str, Any] = field(default_factory=dict)
    texts: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str | None:
        """The name to show, such as "apache-2.0" or "llama3.2"."""
        known = self.metadata.get("license")
        return self.metadata.get("license_name", known) if known == "other" else known

    def doubts(self) -> Iterator[str]:
        """Yields what the person who publishes should look at."""
        if self.name is None:
            yield (
                "the licence of the base model is unknown; read it before you publish, and name "
                "it: --license apache-2.0"
            )
            return
        parts = self.name.lower().split("-")
        if "nd" in parts:
            yield (
                f"licence {self.name}: it forbids derived works, and a converted model is one; "
                "publish only with the permission of its authors"
            )
        for family, condition in CONDITIONS.items():
            if parts[0].startswith(family):
                yield f"licence {self.name}: it {condition}"


def inherited(
    card: Mapping[str, Any], texts: Sequence[Path] = (), *, name: str | None = None
) -> Licence:
    """Licence of a base model by the metadata of its card; `name` overrides it."""
    keys = ("license", "license_name", "license_link")
    metadata = {key: card[key] for key in keys if card.get(key)}
    if isinstance(metadata.get("license"), list):
        metadata["license"] = metadata["license"][0]
    return Licence({"license": name.lower()} if name else metadata, list(texts))


def read_base(base: str, *, revision: str | None = None) -> tuple[dict[str, Any], list[Path]]:
    """Metadata of a base model's card, and its licence files; empty where they are not there.

    Args:
        base: A folder or a hub name.
        revision: Of a hub model.
    """
    folder = Path(base)
    if folder.is_dir():
        files = [file for file in sorted(folder.iterdir()) if _is_text(file.name)]
        card = folder / CARD
        return (metadata_load(card) or {}) if card.is_file() else {}, files
    try:
        names = list_repo_files(base, revision=revision)
        wanted = [name for name in names if name == CARD or _is_text(name)]
        found = [Path(hf_hub_download(base, name, revision=revision)) for name in wanted]
    except Exception as error:  # whatever the transport raises: no network, gated, gone
        warnings.warn(f"the card of {base} could not be read: {type(error).__name__}", stacklevel=2)
        return {}, []
    cards = [metadata_load(file) or {} for file in found if file.name == CARD]
    return (cards[0] if cards else {}), [file for file in found if file.name != CARD]


def write_texts(licence: Licence, folder: Path, base_name: str) -> None:
    """Writes the texts of the base model's licence, or says which one it is, and that of the code.

    The code's is LICENSE itself where both are the same.
    """
    for file in licence.texts:
        shutil.copyfile(file, folder / file.name)
    has_text = any(file.name.startswith(("LICENSE", "LICENCE")) for file in licence.texts)
    code = distribution("linearize").read_text("licenses/LICENSE")
    assert code is not None, "the wheel holds LICENSE"
    if has_text:
        (folder / "LICENSE.code").write_text(code, encoding="utf-8")
    elif licence.name == CODE_LICENCE:
        (folder / "LICENSE").write_text(code, encoding="utf-8")
    else:
        said = licence.name or "not known to those who published this"
        (folder / "LICENSE").write_text(
            f"The weights are derived from {base_name} and stand under its licence: {said}.\n"
            "The Python files stand under Apache-2.0, see LICENSE.code.\n",
            encoding="utf-8",
        )
        (folder / "LICENSE.code").write_text(code, encoding="utf-8")


def _is_text(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TEXTS)
