"""Turns a pretrained softmax Transformer into one with a constant-size memory.

Importing this package enters the model types `linearized_<family>` in the Auto classes of
transformers, so that linearized checkpoints load without a trust flag.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process is the command `linearize`, whose help and completion need no torch."""
    return Path(*sys.argv[:1]).stem == __name__ or sys.orig_argv[1:3] == ["-m", __name__]


if TYPE_CHECKING or not _is_the_command():
    from linearize.conversion import convert as convert
    from linearize.modeling.attention import branches as branches
    from linearize.modeling.attention import teacher as teacher
    from linearize.modeling.feature_maps import FEATURE_MAPS as FEATURE_MAPS

_LAZY = {  # loaded on first use: they need torch, peft, datasets or pydantic
    "FEATURE_MAPS": "linearize.modeling.feature_maps",
    "branches": "linearize.modeling.attention",
    "convert": "linearize.conversion",
    "teacher": "linearize.modeling.attention",
    "evaluate": "linearize.saved",
    "finetune": "linearize.finetuning",
    "inspect": "linearize.inspection",
    "load_recipe": "linearize.recipe",
    "publish": "linearize.publishing",
    "restored": "linearize.restoration",
    "run": "linearize.stages",
    "save_adapter": "linearize.checkpoint",
    "select": "linearize.selection",
    "transfer_attention": "linearize.transfer",
}
__all__ = list(_LAZY)


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
