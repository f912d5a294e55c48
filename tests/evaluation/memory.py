"""Models that surely remember: what a measurement of recall must find, and what it must not."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

HEAD, SLOW = 128, 24  # head size; rotary pairs from here on hardly turn within a thousand tokens
THETA = 1e12


def induction_llama(vocab=64):
    """A Llama whose answer is what followed the last token when it stood there before.

    Layer 0 looks one token back: its query is its key, turned by one position. Layer 1 looks for
    the current token among the tokens before each position, in rotary pairs that hardly turn, and
    copies what stands there. Both see every distance alike, so that only what is in sight matters.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    one, token, before, answer = 0, 1, 1 + vocab, 1 + 2 * vocab  # where each begins in the stream
    names = torch.arange(vocab)
    slow = torch.cat([torch.arange(SLOW, HEAD // 2), torch.arange(HEAD // 2 + SLOW, HEAD)])[names]
    angle = THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight[:, one] = 1
        model.model.embed_tokens.weight[names, token + names] = 1
        first, second = (layer.self_attn for layer in model.model.layers)
        first.q_proj.weight[:, one] = 8 * torch.cat([angle.cos(), -angle.sin()])
        first.k_proj.weight[: HEAD // 2, one] = 1
        first.v_proj.weight[names, token + names] = 1
        first.o_proj.weight[before + names, names] = 0.1
        second.q_proj.weight[slow, token + names] = 2
        second.k_proj.weight[slow, before + names] = 2
        second.v_proj.weight[names, token + names] = 1
        second.o_proj.weight[answer + names, names] = 1
        model.lm_head.weight[names, answer + names] = 2
    return model


class Copier(nn.Module):
    """Answers with what followed the longest repetition of the last tokens, if it is in sight."""

    def __init__(self, vocab, sight=None):
        super().__init__()
        self.config = LlamaConfig(vocab_size=vocab, num_hidden_layers=1)
        self.sight, self.device = sight, torch.device("cpu")

    def forward(self, input_ids, *, use_cache, logits_to_keep, **caches):
        (cache,) = caches.values()
        seen = getattr(cache, "copied", input_ids[:, :0])
        cache.copied = torch.cat([seen, input_ids], 1)
        logits = torch.zeros(len(input_ids), 1, self.config.vocab_size)
        for row, ids in enumerate(cache.copied.tolist()):
            visible = ids if self.sight is None else ids[-self.sight :]
            logits[row, 0, _next(visible)] = 20
        return CausalLMOutput(logits=logits)


def _next(ids):
    """The token after the longest earlier repetition of the end."""
    best, answer = -1, ids[-1]
    for end in range(1, len(ids)):
        length = 0
        while length < end and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length > best:
            best, answer = length, ids[end]
    return answer
