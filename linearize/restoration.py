"""A converted model with some heads softmax again, and how far that is from its teacher.

Legend: B batch, T tokens, P scored positions, V vocabulary, n of them that count.

Two distances to the teacher, both in nats per token:

- kl: KL(teacher || student) over the vocabulary, at positions of a text that see linear keys;
- recall: how much less likely the student finds the answers of synthetic prompts, in which pairs
  of random tokens come again in another order beyond the window (after Arora et al. 2023, Zoology,
  arXiv:2312.04927).

Restoring heads of layer l changes nothing below l, so a pass starts from the hidden states that
were kept there.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from linearize.evaluation.windows import UNSCORED, Text
from linearize.logits import decoder_of, head_logits, run_body
from linearize.modeling.attention import linearized_modules, teacher

ROWS_AT_ONCE = 256  # of logits [rows, V] in fp32
SAMPLES = 64  # numbers of a tensor that enter a hash
PAIRS = 32  # of a recall prompt

Heads = Mapping[int, Sequence[int]]


# ------------------------------------------------------------------------------- restoring heads
@contextmanager
def restored(model: nn.Module, heads: Heads) -> Generator[nn.Module]:
    """Context in which more key/value heads of converted layers, {layer: heads}, are softmax again.

    Raises:
        ValueError: A layer that is not converted, or a head that it does not have.
    """
    modules = linearized_modules(model)
    _check_heads(modules, heads)
    before = {layer: modules[layer].linearize_heads for layer in heads}
    try:
        for layer, kept in heads.items():
            left = tuple(g for g in before[layer] if g not in kept)
            modules[layer].linearize_heads = left
        yield model
    finally:
        for layer, linear in before.items():
            modules[layer].linearize_heads = linear


def restore_(model: Any, heads: Heads) -> None:
    """Makes key/value heads of converted layers softmax again for good, in place; saving keeps it.

    Raises:
        ValueError: As `restored`.
    """
    modules = linearized_modules(model)
    _check_heads(modules, heads)
    for layer, kept in heads.items():
        linear = tuple(g for g in modules[layer].linearize_heads if g not in kept)
        modules[layer].linearize_heads = linear
    section = dict(model.config.linearize_config)
    found = {str(i): list(m.softmax_heads()) for i, m in modules.items() if m.softmax_heads()}
    model.config.linearize_config = section | {"softmax_heads": found}


def _check_heads(modules: Mapping[int, Any], heads: Heads) -> None:
    for layer, kept in heads.items():
        if layer not in modules:
            raise ValueError(f"restored: layer {layer} is not a converted layer of this model")
        last = modules[layer].linearize_kv_heads - 1
        for head in kept:
            if head not in range(last + 1):
                raise ValueError(
                    f"restored: layer {layer} has the key/value heads 0-{last}, not {head}"
                )


def weights_hash(model: nn.Module) -> str:
    """A hash of the new parameters, and of a few numbers of every other."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        stride = 1 if ".linearized." in name else max(1, tensor.numel() // SAMPLES)
        values = tensor.detach().flatten()[::stride].to("cpu", torch.float32)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()


class Unit(NamedTuple):
    """A layer (all heads that are linear now), or one of its key/value heads."""

    layer: int
    heads: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.layer}:{','.join(map(str, self.heads))}"


def units_of(model: nn.Module, *, by_head: bool) -> list[Unit]:
    """Every linear head of a converted model, or every layer with linear heads."""
    linear = {i: m.linearize_heads for i, m in linearized_modules(model).items()}
    if not by_head:
        return [Unit(layer, heads) for layer, heads in linear.items() if heads]
    return [Unit(layer, (head,)) for layer, heads in linear.items() for head in heads]


def merged(units: Iterable[Unit]) -> dict[int, list[int]]:
    """{layer: heads} of several units."""
    found: dict[int, list[int]] = {}
    for layer, heads in units:
        found[layer] = sorted({*found.get(layer, ()), *heads})
    return found


# ------------------------------------------------------------------------------------------ probes
@dataclass(frozen=True)
class Probe:
    """Tokens, and where the student is compared: by KL, or by the answers if there are any."""

    input_ids: Tensor  # [B, T]
    positions: Tensor  # [P]
    counts: Tensor  # [B, P] bool, which of them count
    answers: Tensor | None = None  # [B, P]


def text_probes(
    text: Text, exact: int, length: int, positions: int, batch_size: int
) -> Generator[Probe]:
    """Windows of text, with positions evenly spread over those that see linear keys."""
    for input_ids, targets in text.windows(length=length).batches(batch_size):
        width = input_ids.shape[1]
        if width <= exact:
            continue
        chosen = torch.linspace(exact, width - 1, min(positions, width - exact)).long()
        yield Probe(input_ids, chosen, targets[:, chosen] != UNSCORED)


def recall_probe(text: Text, window: int, sinks: int, prompts: int, seed: int) -> Probe:
    """Prompts: text, pairs of random tokens, text that fills the window, the pairs again, shuffled.

    Tokens are drawn from the text, so that no special token is among them.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = torch.cat(list(text.streams))
    known = stream.unique()
    count = min(PAIRS, len(known) // 2)
    front, gap = sinks + 1, 2 * window + sinks
    rows, answers = [], []
    for _ in range(prompts):
        pairs = known[torch.randperm(len(known), generator=generator)[: 2 * count]].view(count, 2)
        again = pairs[torch.randperm(count, generator=generator)]
        begin = int(torch.randint(max(1, len(stream) - gap), (), generator=generator))
        filler = stream[(begin + torch.arange(front + gap)) % len(stream)]
        rows.append(torch.cat([filler[:front], pairs.flatten(), filler[front:], again.flatten()]))
        answers.append(again[:, 1])
    chosen = front + 2 * count + gap + 2 * torch.arange(count)
    found = torch.stack(answers)
    return Probe(torch.stack(rows), chosen, torch.ones_like(found, dtype=torch.bool), found)


# ----------------------------------------------------------------------------------------- scoring
class Distance(NamedTuple):
    """How far from the teacher: nats per token of text, and per answer."""

    kl: float
    recall: float


class Scorer:
    """Measures a student with some units restored, against the teacher, on all probes."""

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        probes: Sequence[Probe],
        progress: bool,
    ) -> None:
        self.model, self.base, self.probes, self.progress = model, base, probes, progress
        self.layers = decoder_layers(model)
        self.place: dict[int, int] = {  # of each attention module among the layers
            layer: next(i for i, x in enumerate(self.layers) if module in set(x.modules()))
            for layer, module in linearized_modules(model).items()
        }
        self._wanted: dict[int, Tensor] = {}  # logits of the teacher by probe

    def measure(
        self,
        chosen: Sequence[Unit],
        units: Sequence[Unit],
        done: list[dict[str, float]],
        save: Callable[[], None] = lambda: None,
    ) -> dict[str, Distance]:
        """Distances with the chosen units restored ("" in the result), and each of units on top.

        `done` holds the sums of the first probes and gets those of the others, each with a save.
        """
        total = (len(self.probes) - len(done)) * (len(units) + 1)
        with tqdm(total=total, unit="pass", disable=not self.progress) as bar:
            for number in range(len(done), len(self.probes)):
                done.append(self._sums(number, chosen, units, bar))
                save()
        found = {}
        for name in ("", *(unit.name for unit in units)):
            means = []
            for kind in (True, False):
                parts = [
                    (part[name], int(probe.counts.sum()))
                    for probe, part in zip(self.probes, done, strict=True)
                    if (probe.answers is None) is kind
                ]
                means.append(sum(x for x, _ in parts) / max(1, sum(n for _, n in parts)))
            found[name] = Distance(*means)
        return found

    def _sums(
        self, number: int, chosen: Sequence[Unit], units: Sequence[Unit], bar: Any
    ) -> dict[str, float]:
        """Summed distances of one probe by name of the unit."""
        probe, found = self.probes[number], {}
        ids = probe.input_ids.to(self.model.device)
        if number not in self._wanted:
            with teacher(self.base):
                body = run_body(self.base, input_ids=ids)
                self._wanted[number] = _logits(self.base, body, probe)
        wanted = self._wanted[number]
        with restored(self.model, merged(chosen)):
            outputs, body = recorded(self.model, self.layers, ids)
            found[""] = _distance(_logits(self.model, body, probe), wanted, probe)
            bar.update()
            for unit in units:
                below = self.place[unit.layer]
                with (
                    restored(self.model, {unit.layer: unit.heads}),
                    skipped(self.layers[:below], outputs[:below]),
                ):
                    body = run_body(self.model, input_ids=ids)
                found[unit.name] = _distance(_logits(self.model, body, probe), wanted, probe)
                bar.update()
        return found


def _logits(model: nn.Module, body: Any, probe: Probe) -> Tensor:
    """Logits [n, V] at the positions that count."""
    hidden = body.last_hidden_state[:, probe.positions.to(body.last_hidden_state.device)]
    hidden = hidden[probe.counts.to(hidden.device)]
    parts = [head_logits(model, body, x[None])[0] for x in hidden.split(ROWS_AT_ONCE)]
    return torch.cat(parts)


def _distance(found: Tensor, wanted: Tensor, probe: Probe) -> float:
    """Summed KL of logits [n, V], or how much less likely the answers are."""
    answers = None if probe.answers is None else probe.answers[probe.counts].to(found.device)
    total = 0.0
    for i in range(0, len(found), ROWS_AT_ONCE):
        rows = slice(i, i + ROWS_AT_ONCE)
        mine, theirs = (x[rows].float().log_softmax(-1) for x in (found, wanted.to(found.device)))
        if answers is None:
            gap = theirs.exp() * (theirs - mine)
        else:
            gap = (theirs - mine).gather(1, answers[rows, None])
        total += float(gap.sum(dtype=torch.float64))
    return total


# ------------------------------------------------------------------------- passes that start midway
def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the decoder, in order: the list that holds the converted attention modules."""
    attention = set(linearized_modules(model).values())
    lists = (m for m in decoder_of(model).modules() if isinstance(m, nn.ModuleList))
    return next(list(found) for found in lists if attention & set(found.modules()))


def recorded(
    model: nn.Module, layers: Sequence[nn.Module], input_ids: Tensor
) -> tuple[list[Any], Any]:
    """(what each layer returned, the decoder's output) of one forward pass."""
    outputs: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
        for layer in layers
    ]
    try:
        body = run_body(model, input_ids=input_ids)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, body


@contextmanager
def skipped(layers: Sequence[nn.Module], outputs: Sequence[Any]) -> Generator[None]:
    """Context in which the first layers return the last of their outputs without any work."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = lambda *args, **kwargs: outputs[-1]
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
