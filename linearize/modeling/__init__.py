"""The files that travel inside a checkpoint: flat, and with no import but torch, transformers and
each other.

This file stays behind. Importing it enters the model types in the Auto classes of transformers, so
whatever of the package handles a model finds them there.
"""

from .modeling_linearized import register

register()
