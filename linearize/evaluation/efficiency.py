"""Time and memory of a converted model against its softmax teacher, side by side in one run.

Teacher and student are one object, measured in turn in the same process, round by round, and the
fastest round counts: on a shared computer the ratios mean something where the seconds do not.
Random tokens; the time does not depend on them.
"""

import gc
import inspect
import threading
import time
from contextlib import nullcontext
from functools import partial

import psutil
import torch
from transformers import DynamicCache, LlamaForCausalLM

from linearize.modeling.attention import linearized_modules, teacher
from linearize.training import preserved
from linearize.transfer import TransferObjective

ROUNDS = 3
CACHE = (  # the argument's name; `cache` since transformers 5.24
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def efficiency(
    model,
    *,
    contexts=(1024, 4096, 16384),
    prefills=(1024, 4096, 8192),
    transfer_tokens=1024,
    decode_tokens=16,
    rounds=ROUNDS,
    seed=0,
):
    """Decode and prefill of a converted model and of its teacher.

    Args:
        model: a converted model; its teacher is the same object in softmax mode.
        contexts: tokens in the cache when a decode step is timed.
        prefills: prompt lengths, each read in one call without a cache.
        transfer_tokens: tokens of a step of attention transfer, on 64 queries.
        decode_tokens: steps per round; the mean of a round is one measurement, and the fastest
            round counts.
        rounds: how often each side is measured, in turn.

    Returns:
        {"decode": [{"context", "converted_s", "teacher_s", "speedup", "converted_cache_bytes",
        "teacher_cache_bytes"}], "prefill": [{"tokens", "converted_s", "teacher_s", "speedup",
        "converted_peak_bytes", "teacher_peak_bytes"}], "transfer_step": {"tokens", "step_s",
        "teacher_s", "ratio"}: a step of stage 1, backward pass included, over the teacher's forward
        pass; "decode_growth": seconds per token at the longest context over those at the shortest,
        "dtype", "threads"}; peak bytes are what the process grew by.

    Raises:
        ValueError: the model is not converted.
    """
    if not linearized_modules(model):
        raise ValueError(
            "efficiency: this model has no linearized layer; convert it first, there is nothing to "
            "compare"
        )
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(
        vocabulary, (1, max(*contexts, *prefills, transfer_tokens)), generator=generator
    ).to(model.device)
    model.eval()
    with torch.no_grad():
        decode = _decode(model, ids, contexts, decode_tokens, rounds)
        prefill = [_prefill(model, ids[:, :n], rounds) for n in prefills]
    return {
        "decode": decode,
        "prefill": prefill,
        "transfer_step": _transfer_step(model, ids[:, :transfer_tokens], rounds),
        "decode_growth": decode[-1]["converted_s"] / decode[0]["converted_s"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _modes(model):
    return {"converted": nullcontext(), "teacher": teacher(model)}


def _decode(model, ids, contexts, steps, rounds):
    """One row per context. All contexts and both models take turns, so that a computer that slows
    down meanwhile does not look like a cost of length.
    """
    caches, seconds, token = {}, {}, ids[:, -1:]
    for n in contexts:
        for name, mode in _modes(model).items():
            with mode:
                caches[n, name] = _filled_cache(model, ids[:, :n], name)
                seconds[n, name] = []
    for _ in range(rounds):
        for name, mode in _modes(model).items():
            with mode:
                for n in contexts:
                    _steps(model, token, caches[n, name], 1)
                    run = partial(_steps, model, token, caches[n, name], steps)
                    seconds[n, name].append(_timed(run, model.device) / steps)
    rows = []
    for n in contexts:
        row = {"context": n, **{f"{name}_s": min(seconds[n, name]) for name in _modes(model)}}
        row["speedup"] = row["teacher_s"] / row["converted_s"]
        size = {f"{name}_cache_bytes": cache_bytes(caches[n, name]) for name in _modes(model)}
        rows.append(row | size)
    return rows


def _steps(model, token, cache, count):
    for _ in range(count):
        model(token, use_cache=True, **{CACHE: cache})


def _filled_cache(model, ids, name, chunk=1024):
    """A cache that holds the tokens ids [1, T].

    The converted model reads them in chunks. The teacher's keys and values are random numbers of
    the right shape: reading a long prompt would take it minutes, and a step takes the same time
    whatever they are.
    """
    cache = DynamicCache(config=model.config)
    if name == "converted":
        for part in ids.split(chunk, 1):
            model(part, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache
    model(ids[:, :1], use_cache=True, **{CACHE: cache})
    for layer in cache.layers:
        B, G, _, D = layer.keys.shape
        more = ids.shape[1] - layer.keys.shape[2]
        layer.update(
            layer.keys.new_empty(B, G, more, D).normal_(),
            layer.values.new_empty(B, G, more, D).normal_(),
        )
    return cache


def cache_bytes(cache):
    """Bytes of the tensors that a cache holds between two calls."""
    total = 0
    for layer in cache.layers:
        kept = getattr(layer, "kept", layer)  # of the heads that stay softmax
        tensors = (*(getattr(layer, "state", None) or ()), kept.keys, kept.values)
        total += sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return total


def _prefill(model, ids, rounds):
    seconds, peaks = {"converted": [], "teacher": []}, {}
    for _ in range(rounds):
        for name, mode in _modes(model).items():
            with mode, _Peak(model.device) as peak:
                seconds[name].append(
                    _timed(lambda: model(ids, use_cache=False, logits_to_keep=1), model.device)
                )
            peaks[name] = max(peaks.get(name, 0), peak.bytes)
    row = {"tokens": ids.shape[1], **{f"{name}_s": min(times) for name, times in seconds.items()}}
    row["speedup"] = row["teacher_s"] / row["converted_s"]
    return row | {f"{name}_peak_bytes": value for name, value in peaks.items()}


def _transfer_step(model, ids, rounds):
    objective = TransferObjective(model, loss="output", attention_weight=0.0, num_queries=64)
    objective.state = {"energy": {str(i): 1.0 for i in linearized_modules(model)}}
    trained = {p for group in objective.groups for p in group}
    generator = torch.Generator().manual_seed(0)
    step_s, teacher_s = [], []

    def step():
        objective(model, {"input_ids": ids}, generator)[0].backward()
        model.zero_grad(set_to_none=True)

    def forward():
        with torch.no_grad(), teacher(model):
            model(ids, use_cache=False, logits_to_keep=1)

    with preserved(model):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
        for _ in range(rounds + 1):  # the first round warms up
            step_s.append(_timed(step, model.device))
            teacher_s.append(_timed(forward, model.device))
    best, reference = min(step_s[1:]), min(teacher_s[1:])
    return {
        "tokens": ids.numel(),
        "step_s": best,
        "teacher_s": reference,
        "ratio": best / reference,
    }


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(function, device):
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


class _Peak:
    """How much memory grew at most inside the context: of the GPU, or of the process, looked at
    every 2 ms.
    """

    def __init__(self, device):
        self.device, self.bytes = device, 0

    def __enter__(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
            return self
        self.process = psutil.Process()
        self.before = self.process.memory_info().rss
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        while not self.stop.wait(0.002):
            self.bytes = max(self.bytes, self.process.memory_info().rss - self.before)

    def __exit__(self, *exception):
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
            return
        self.stop.set()
        self.thread.join()
