"""The files that travel inside a checkpoint: flat, and with no import but torch, transformers and
each other.
"""
