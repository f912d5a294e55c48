"""Turns a pretrained softmax Transformer into one with a constant-size memory.

Importing this package enters the model types `linearized_<family>` in the Auto classes of
transformers, so that linearized checkpoints load without a trust flag.
"""

import importlib

from linearize.conversion import convert
from linearize.modeling.attention import branches, teacher
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.modeling_linearized import register as _register

__version__ = "0.1.0"

_LAZY = {  # loaded on first use: they need peft, datasets or pydantic
    "evaluate": "linearize.saved",
    "finetune": "linearize.finetuning",
    "inspect": "linearize.inspection",
    "load_recipe": "linearize.recipe",
    "restored": "linearize.restoration",
    "run": "linearize.stages",
    "save_adapter": "linearize.checkpoint",
    "select": "linearize.selection",
    "transfer_attention": "linearize.transfer",
}
__all__ = ["FEATURE_MAPS", "branches", "convert", "teacher", *_LAZY]

_register()


def __getattr__(name):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
