"""Which path a call takes: one decision, in one place, with its reason.

The environment variable LINEARIZE_KERNELS, or the argument `mode`, is

    auto    (default) kernels on a GPU that the table knows, where they can do the call
    torch   never
    triton  always; a call that they cannot do is an error that says why
"""

import functools
import importlib.util
import logging
import os

import torch

from .configs import TABLE, architecture, interpreted

INSTALLED = importlib.util.find_spec("triton") is not None
MODES = ("auto", "torch", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD, LARGEST_FEATURES, MOST_SINKS = 128, 256, 64
logger = logging.getLogger("linearize.kernels")


STEP_MAPS = ("hedgehog", "centroids")
logger = logging.getLogger("linearize.kernels")


def find(
    q, k, v, *, window, sinks, features, log_k=False, softcap=None, sink_logit=None, linear=True,
    terraced=False, padded=False, mode=None,
):  # fmt: skip
    """`operators.hybrid` if the kernels can do this call and are wanted, else None.

    Args:
        q: [B, H, T, D] and
        k: [B, G, T, D] and
        v: [B, G, T, Dv] of the call.
        window: W.
        sinks: N.
        features: F of the feature maps.
        log_k: whether the keys have log features.
        softcap: the teacher's, or None.
        sink_logit: the teacher's, or None.
        linear: whether the linear part is on.
        terraced: whether the window is a terrace instead of a sliding one.
        padded: whether rows hold padding.
        mode: auto, torch or triton instead of LINEARIZE_KERNELS.

    Raises:
        ValueError: the mode is unknown, or it is `triton` and the kernels cannot do the call.
    """
    reason = (
        "the keys have log features" if log_k else "rows are padded" if padded else None
    ) or _unable(q, k, v, window, sinks, features, softcap, sink_logit, linear, terraced)
    return _decide("prefill and training", q, v, reason, "hybrid", mode)


def find_step(
    q, k, v, state, *, feature_map, window, sinks, softcap=None, sink_logit=None, linear=True,
    terraced=False, mode=None,
):  # fmt: skip
    """`operators.hybrid_step` if a kernel can do this token and is wanted, else None.

    Args:
        q: [B, H, 1, D] and
        k: [B, G, 1, D] and
        v: [B, G, 1, Dv] of the token.
        state: the tensors that are to be changed in place.
        feature_map: the name of the keys' map.
        window: and the others as in `find`.

    Raises:
        ValueError: as in `find`.
    """
    if feature_map not in STEP_MAPS:
        reason = f"the step has the maps {' and '.join(STEP_MAPS)}"
    elif not all(x.is_contiguous() for x in state):
        reason = "the state is a view into other tensors"
    else:
        features = state[0].shape[2]
        reason = _unable(q, k, v, window, sinks, features, softcap, sink_logit, linear, terraced)
    return _decide("decoding", q, v, reason, "hybrid_step", mode)


def _decide(what, q, v, reason, name, mode):
    """The named operator, or None, said once; reason is why it cannot be done, or None."""
    mode = mode or os.environ.get("LINEARIZE_KERNELS", "auto")
    if mode not in MODES:
        raise ValueError(
            f"LINEARIZE_KERNELS: {mode!r} is not known; choose one of {', '.join(MODES)}"
        )
    if mode == "torch":
        reason = "LINEARIZE_KERNELS=torch"
    else:
        reason = _unavailable(q.device, mode) or reason
    if reason is None:
        _say(f"{what}: triton kernels ({architecture(q.device)}, {str(v.dtype)[6:]})")
        from . import operators  # torch imports Triton to register one

        return getattr(operators, name)
    if mode == "triton":
        raise ValueError(
            f"LINEARIZE_KERNELS: the kernels cannot do this ({what}): {reason}; "
            "set it to auto or torch"
        )
    _say(f"{what}: torch ({reason})")
    return None


def _unavailable(device, mode):
    """Why the kernels cannot run here, or None."""
    if not INSTALLED:
        return "Triton is not installed (pip install triton)"
    if interpreted() and mode == "triton":
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on a GPU"
    if architecture(device) is None:
        name = torch.cuda.get_device_name(device)
        return f"{name} is none of the architectures {', '.join(TABLE)}"
    return None


def _unable(q, k, v, window, sinks, features, softcap, sink_logit, linear, terraced):
    """Why the kernels cannot do this operator, or None."""
    size = max(q.shape[-1], v.shape[-1])
    checks = (
        (v.dtype not in DTYPES, f"dtype {str(v.dtype)[6:]}"),
        (not q.dtype == k.dtype == v.dtype, "q, k and v differ in dtype"),
        (size > LARGEST_HEAD, f"head size {size} is above {LARGEST_HEAD}"),
        (features > LARGEST_FEATURES, f"{features} features are above {LARGEST_FEATURES}"),
        (sinks > MOST_SINKS, f"{sinks} sinks are above {MOST_SINKS}"),
        (window < 1, "there is no window"),
        (not linear, "the linear part is off"),
        (terraced, "the window is a terrace"),
        (softcap is not None, "scores are soft-capped"),
        (sink_logit is not None, "the teacher has a learned sink logit"),
    )
    return next((reason for fails, reason in checks if fails), None)


def _say(message):
    """Logs a message once."""
    if not torch.compiler.is_compiling():
        _log(message)


@functools.cache
def _log(message):
    logger.info("linearized attention, %s", message)
