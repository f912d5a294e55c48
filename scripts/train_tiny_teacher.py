"""Trains the embedded default teacher: a tiny Llama and its own tokenizer, from nothing.

The text is a folder of JSON lines files, one {"text": ...} per document (see SOURCES). The result
is an ordinary Hugging Face folder with a card that holds the figures measured on it. A run can be
killed and resumed; resumed with fewer --tokens it goes straight to the learning rate's decay.

    python scripts/train_tiny_teacher.py ../shared/data/train
    python scripts/train_tiny_teacher.py ../shared/data/train --evaluate  # only the card's figures

Legend: B batch, H query heads, T tokens, D head size, W window.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "linearize" / "assets" / "tiny-english"
CARD = HERE / "tiny_teacher_card.md"
BOS, EOS, PAD = 0, 1, 2
SINKS, WINDOWS, FIRST_SCORED = 4, (16, 32), 64
MAX_BYTES = 4_000_000


@dataclass(frozen=True)
class Source:
    """One file of the training folder, and the share of the training rows that begin in it."""

    file: str
    share: float
    title: str
    licence: str


SOURCES = (
    Source("tinystories.jsonl", 0.7, "TinyStories (Eldan & Li 2023), a sample", "CDLA-Sharing-1.0"),
    Source(
        "books_standard_ebooks.jsonl",
        0.3,
        "17 English books, Standard Ebooks editions",
        "public domain, editions CC0-1.0",
    ),
)


def read_documents(folder: Path, seed: int) -> dict[str, tuple[list[str], list[str]]]:
    """{file: (training documents, held-out documents)}; after a shuffle every 40th is held out."""
    documents = {}
    for source in SOURCES:
        path = folder / source.file
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the training folder needs {[s.file for s in SOURCES]}"
            )
        with path.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"].strip() for line in lines]
        random.Random(seed).shuffle(texts)
        held_out = texts[::40]
        documents[source.file] = ([t for i, t in enumerate(texts) if i % 40], held_out)
    return documents


def train_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE (any text comes back exactly) that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[torch.Tensor]:
    """One int64 tensor per document: <s>, its tokens, </s>."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return [torch.tensor([*encoding.ids, EOS]) for encoding in encodings]


@dataclass(frozen=True)
class Phase:
    """How rows are drawn for a while: their length, and the shares of repeating and shuffled."""

    length: int
    repeats: float
    shuffled: float


def phase(progress: float, context: int) -> Phase:
    """Short rows and many repeats at first; the last 40 % of the tokens look like the result."""
    if progress < 0.2:
        return Phase(context // 4, repeats=1 / 2, shuffled=1 / 2)
    if progress < 0.6:
        return Phase(context // 2, repeats=1 / 3, shuffled=1 / 2)
    return Phase(context, repeats=1 / 6, shuffled=0)


class Rows:
    """Training rows [B, T], drawn with a seed.

    A row is documents in a random order, cut at T; three in four rows begin where a document
    begins, the others in its middle. A share of the rows is instead `repeat_row`: text that comes
    back later in the row, so that heads which look far back (induction heads) form early.
    """

    def __init__(self, documents: dict[str, list[torch.Tensor]], seed: int):
        self.documents = documents
        self.random = random.Random(seed)
        self.shares = [source.share for source in SOURCES]
        self.lengths = {name: [len(d) for d in docs] for name, docs in documents.items()}

    def draw(self) -> torch.Tensor:
        """One document, with probability by length; a chapter from a random place on."""
        (source,) = self.random.choices(SOURCES, self.shares)
        (document,) = self.random.choices(self.documents[source.file], self.lengths[source.file])
        if len(document) > 1024:
            start = self.random.randrange(1, len(document) - 512)
            document = torch.cat([document[:1], document[start:]])
        return document

    def repeat_row(self, length: int, shuffled: float) -> torch.Tensor:
        """<s> A B A B ...: a passage A that returns after B, 16 to T/4 tokens of another text.

        A share `shuffled` has the tokens of A and B in random order, and no <s>: only a head that
        looks back can tell what comes next.
        """
        a, b = (self.draw()[1:-1][: self.random.randint(16, length // 4)] for _ in range(2))
        start = [torch.tensor([BOS])]
        if self.random.random() < shuffled:
            a, b = (x[torch.tensor(self.random.sample(range(len(x)), len(x)))] for x in (a, b))
            start = []
        return torch.cat([*start, *[a, b] * (length // (len(a) + len(b)) + 1)])[:length]

    def row(self, phase: Phase) -> torch.Tensor:
        """One row [T]."""
        if self.random.random() < phase.repeats:
            return self.repeat_row(phase.length, phase.shuffled)
        first = self.draw()
        if self.random.random() < 1 / 4:
            first = first[self.random.randrange(1, max(2, len(first) // 2)) :]
        parts = [first]
        while sum(map(len, parts)) < phase.length:
            parts.append(self.draw())
        return torch.cat(parts)[: phase.length]

    def batch(self, tokens: int, phase: Phase) -> torch.Tensor:
        """Rows [B, T] of `tokens` tokens together."""
        return torch.stack([self.row(phase) for _ in range(tokens // phase.length)])


def causal_attention(module, query, key, value, attention_mask, scaling, **_):
    """Softmax attention [B, T, H, D] of rows without padding; in fp32, the faster one on a CPU."""
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2).to(query.dtype), None


def new_model(vocab_size: int, context: int) -> LlamaForCausalLM:
    """An untrained tiny Llama; the output layers of each block begin small, as in GPT-2."""
    AttentionInterface.register("causal_only", causal_attention)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        use_cache=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="causal_only")
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


def new_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=0.015, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def rate(progress: float) -> float:
    """Share of the peak learning rate: 2 % warm-up, constant, down to 2 % over the last 40 %."""
    return min(1.0, 0.05 + progress / 0.02, max(0.02, (1.0 - progress) / 0.4))


def row_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in nats, for rows [B, T]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=PAD
    )


class Run:
    """A training run, and all that a later process needs to go on with it bit for bit."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, documents: dict):
        torch.manual_seed(args.seed)
        self.args = args
        self.model = new_model(vocab_size, args.context)
        self.optimizers = new_optimizers(self.model)
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.rows = Rows(documents, args.seed)
        self.spent: dict = {"tokens": 0, "seconds": 0.0, "cpu_seconds": 0.0}
        self.spent["budgets"] = {0: args.tokens}
        self.checkpoint = args.work_dir / "checkpoint.pt"

    def save(self) -> None:
        """Writes the checkpoint in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": self.rows.random.getstate(),
            "spent": self.spent,
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        os.replace(self.checkpoint.with_suffix(".tmp"), self.checkpoint)

    def resume(self) -> None:
        """Goes back to the checkpoint, where there is one, and notes a change of the budget."""
        if not self.checkpoint.exists():
            return
        # our own file, and the random state in it is a tuple
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rows.random.setstate(state["random"])
        self.spent = state["spent"]
        if self.args.tokens != list(self.spent["budgets"].values())[-1]:
            self.spent["budgets"][self.spent["tokens"]] = self.args.tokens
        print(f"resumed at {self.spent['tokens']:,} tokens from {self.checkpoint}", flush=True)

    def step(self) -> tuple[float, int]:
        """(loss, row length) of one step."""
        wall, cpu = time.monotonic(), time.process_time()
        progress = self.spent["tokens"] / self.args.tokens
        ids = self.rows.batch(self.args.batch_tokens, phase(progress, self.args.context))
        loss = row_loss(self.model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad()
        self.spent["tokens"] += ids.numel()
        self.spent["seconds"] += time.monotonic() - wall
        self.spent["cpu_seconds"] += time.process_time() - cpu
        return loss.item(), ids.shape[1]

    def train(self) -> None:
        """Steps until the budget is spent."""
        self.model.train()
        losses, saved_at = [], time.monotonic()
        while self.spent["tokens"] < self.args.tokens:
            loss, length = self.step()
            losses.append(loss)
            if len(losses) == 50:
                self.report(sum(losses) / len(losses), length)
                losses = []
            if time.monotonic() - saved_at > 60 * self.args.save_minutes:
                self.save()
                saved_at = time.monotonic()
        self.save()

    def report(self, loss: float, length: int) -> None:
        """One line of progress."""
        tokens, seconds = self.spent["tokens"], self.spent["seconds"]
        share = self.spent["cpu_seconds"] / seconds
        print(
            f"{tokens:>10,} tokens  T {length}  loss {loss:.3f}  {seconds / 60:.1f} min"
            f"  {tokens / seconds:.0f} tokens/s on {share:.1f} cores",
            flush=True,
        )


def band(length: int, window: int | None, sinks: int = SINKS) -> torch.Tensor:
    """Keys that a query sees, bool [1, 1, T, T]: its last `window` and the first `sinks`."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = key <= query
    if window is not None:
        mask &= (query - key < window) | (key < sinks)
    return mask[None, None]


def held_out_rows(documents: list[torch.Tensor], context: int, limit: int) -> torch.Tensor:
    """Rows [B, T]: <s>, one document (a long one in several rows), padding."""
    rows = []
    for document in documents:
        for start in range(1, len(document) - FIRST_SCORED, context - 1):
            row = torch.cat([torch.tensor([BOS]), document[start : start + context - 1]])
            rows.append(F.pad(row, (0, context - len(row)), value=PAD))
    random.Random(0).shuffle(rows)
    return torch.stack(rows[:limit])


def repeated_rows(documents: list[torch.Tensor], context: int, limit: int) -> torch.Tensor:
    """Rows [B, T] <s> A B A: 100 tokens of one document that return after 100 tokens of another."""
    long_enough = [d[1:101] for d in documents if len(d) > 102]
    pairs = list(zip(long_enough[::2], long_enough[1::2]))[:limit]
    rows = [torch.cat([torch.tensor([BOS]), a, b, a]) for a, b in pairs]
    return torch.stack([F.pad(row, (0, context - len(row)), value=PAD) for row in rows])


@torch.no_grad()
def row_nll(model: LlamaForCausalLM, ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Nats per token [B, T-1] for rows [B, T]; nan where the next token is padding."""
    nll = []
    for rows in ids.split(8):
        mask, targets = band(rows.shape[1], window), rows[:, 1:]
        logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
        nll.append(loss.masked_fill(targets == PAD, math.nan))
    return torch.cat(nll)


def evaluate(folder: Path, held_out: dict[str, list[str]], rows: int) -> dict:
    """Perplexities of the folder as it is shipped, by held-out text.

    "all" counts every token; "full" and "W=..." count those with 64 tokens or more before them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    context = model.config.max_position_embeddings
    encoded = {name: encode(tokenizer, texts) for name, texts in held_out.items()}
    sets = {name: held_out_rows(documents, context, rows) for name, documents in encoded.items()}
    sets["repeated passage"] = repeated_rows(encoded["tinystories.jsonl"], context, rows)
    results = {}
    for name, ids in sets.items():
        first = 201 if name == "repeated passage" else FIRST_SCORED
        full = row_nll(model, ids, None)
        buckets = [(0, 16), (16, 64), (64, 128), (128, 256), (256, 511)]
        results[name] = {
            "rows": len(ids),
            "tokens": int(full.isfinite().sum()),
            "all": full.nanmean().exp().item(),
            "full": full[:, first:].nanmean().exp().item(),
            **{f"W={w}": row_nll(model, ids, w)[:, first:].nanmean().exp().item() for w in WINDOWS},
            "buckets": {f"{a}-{b}": full[:, a:b].nanmean().exp().item() for a, b in buckets},
        }
        print(json.dumps({name: results[name]}), flush=True)
    return results


def figures(results: dict) -> str:
    """The results as the card's Markdown table."""
    lines = [
        "| held-out text | tokens | all | from token 64 on | the same, W=32 | the same, W=16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['tokens']:,} | {row['all']:.2f} | {row['full']:.2f}"
            f" | {row['W=32']:.2f} | {row['W=16']:.2f} |"
        )
    return "\n".join(lines)


def sample(folder: Path, seed: int) -> str:
    """160 new tokens after the opening of a story, drawn at temperature 0.7."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(seed)
    prompt = tokenizer("Once upon a time, there was a little dog named Max.", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=160, do_sample=True, temperature=0.7, top_k=0)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def hardware() -> str:
    """The processor's name and the threads in use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((x.split(": ", 1)[1] for x in lines if x.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def card(args, model, tokenizer, results: dict, spent: dict, size: int, written: str) -> str:
    """The folder's README, with the figures that were measured on it."""
    config = model.config
    script = "python scripts/train_tiny_teacher.py ../shared/data/train"
    stories = results["tinystories.jsonl"]["buckets"]
    return CARD.read_text(encoding="utf-8").format(
        parameters=sum(p.numel() for p in model.parameters()),
        config=config,
        size=size,
        sources="\n".join(
            f"| {s.title} (`{s.file}`) | {s.share:.0%} | {s.licence} |" for s in SOURCES
        ),
        figures=figures(results),
        buckets=", ".join(f"tokens {name} {value:.2f}" for name, value in stories.items()),
        date=datetime.date.today().isoformat(),
        hardware=hardware(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokens=spent["tokens"],
        cpu=spent["cpu_seconds"] / 60,
        wall=spent["seconds"] / 60,
        budgets=", ".join(f"{n:,} from token {at:,} on" for at, n in spent["budgets"].items()),
        seed=args.seed,
        train=f"{script} --tokens {args.tokens} --seed {args.seed}",
        evaluate=f"{script} --evaluate",
        sample=written.replace("\n", "\n> "),
    )


def write_folder(args: argparse.Namespace, model, tokenizer, held_out: dict, spent: dict) -> None:
    """Writes a new folder, measures it, adds the card, and puts it in the place of args.output."""
    staging = args.output.with_name(args.output.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    results = evaluate(staging, held_out, args.rows)
    size = sum(path.stat().st_size for path in staging.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"the folder has {size:,} bytes, {MAX_BYTES:,} are allowed: lower --vocab")
    text = card(args, model, tokenizer, results, spent, size, sample(staging, args.seed))
    (staging / "README.md").write_text(text, encoding="utf-8")
    old = args.output.with_name(args.output.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if args.output.exists():
        os.replace(args.output, old)
    os.replace(staging, args.output)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{args.output}: {size:,} bytes")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="folder with the JSON lines files of SOURCES")
    add("--output", type=Path, default=FOLDER, help="folder to write (default: %(default)s)")
    add("--work-dir", type=Path, default=Path("runs/tiny-teacher"), help="for the checkpoint")
    add("--evaluate", action="store_true", help="only measure --output again")
    add("--tokens", type=int, default=4_000_000, help="training budget (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, help="tokens per step (default: %(default)s)")
    add("--context", type=int, default=512, help="tokens of the longest rows")
    add("--vocab", type=int, default=1536, help="tokens in the vocabulary (default: %(default)s)")
    add("--rows", type=int, default=64, help="held-out rows per source (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    add("--save-minutes", type=float, default=2.0, help="between checkpoints")
    return parser.parse_args(arguments)


def prepare_tokenizer(args: argparse.Namespace, documents: dict) -> PreTrainedTokenizerFast:
    """The tokenizer of the work folder, trained there the first time on 4 MB of each source."""
    folder = args.work_dir / "tokenizer"
    if not folder.exists():
        texts = []
        for train_texts, _ in documents.values():
            size = sum(map(len, train_texts))
            texts += train_texts[: 1 + 4_000_000 * len(train_texts) // size]
        train_tokenizer(texts, args.vocab, args.context).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Trains, measures and writes the folder, or only measures it."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    documents = read_documents(args.data, args.seed)
    held_out = {name: texts for name, (_, texts) in documents.items()}
    if args.evaluate:
        print(figures(evaluate(args.output, held_out, args.rows)))
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(args, documents)
    encoded = {name: encode(tokenizer, train) for name, (train, _) in documents.items()}
    for name, tensors in encoded.items():
        characters = sum(map(len, documents[name][0]))
        tokens = sum(map(len, tensors))
        print(f"{name}: {tokens:,} tokens of {characters / tokens:.2f} characters", flush=True)
    run = Run(args, len(tokenizer), encoded)
    run.resume()
    run.train()
    write_folder(args, run.model, tokenizer, held_out, run.spent)


if __name__ == "__main__":
    main()
