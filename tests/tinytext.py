"""A word tokenizer for `tiny_llama`, random text in its words, and both in a model folder."""

import json

import torch
from conftest import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(61)]


def tiny_tokenizer():
    """64 tokens: unknown, begin, end and 61 words."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def save_base(folder):
    """Saves `tiny_llama` and its tokenizer; returns the folder."""
    model = tiny_llama()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_corpus(file, documents=20, words=60):
    """Writes JSON lines of random words; returns the file."""
    generator = torch.Generator().manual_seed(0)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(documents):
            text = [WORDS[i] for i in torch.randint(61, (words,), generator=generator)]
            lines.write(json.dumps({"text": " ".join(text)}) + "\n")
    return file


CHAT_TEMPLATE = (
    "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def chat_tokenizer():
    """`tiny_tokenizer` with a chat template; pads are on the left."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
