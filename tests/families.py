"""Small configs of every supported family, and of those that mix two kinds of layers.

Head size 16, hidden size 64: four query heads, two key/value heads where the family has them apart.
"""

import inspect

import pytest
import transformers
from transformers import LlamaForCausalLM
from transformers.models.gptj import modeling_gptj

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
VOCAB = 97

_COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=512, head_dim=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_NO_HEAD_DIM = dict(head_dim=None)  # None: the family has no such key
_MHA = dict(head_dim=None, num_key_value_heads=None)
_GPT = dict(**_MHA, n_embd=64, n_head=4, n_layer=2, n_inner=96, n_positions=256)
_CAPPED = dict(attn_implementation="eager")  # the default since transformers 5.24
_ALL_FULL = dict(layer_types=[FULL] * 2)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)

_FAMILIES = dict(
    cohere=_NO_HEAD_DIM,
    cohere2=dict(**_NO_HEAD_DIM, **_ALL_FULL),
    deepseek_v3=dict(
        head_dim=None, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    exaone4=_ALL_FULL,
    gemma={},
    gemma2=dict(query_pre_attn_scalar=16, **_ALL_FULL, **_CAPPED),
    gemma3_text=dict(query_pre_attn_scalar=16, **_ALL_FULL),
    glm4={},
    gpt2=_GPT,
    gpt_neox=_MHA,
    gpt_oss=dict(num_local_experts=4, **_ALL_FULL),
    gptj=dict(**_GPT, rotary_dim=8),
    granite=_NO_HEAD_DIM,
    hunyuan_v1_dense={},
    lfm2=dict(**_NO_HEAD_DIM, **_ALL_FULL),
    llama={},
    llama4_text=dict(
        num_local_experts=2, intermediate_size_mlp=96, no_rope_layers=[1, 0], **_ALL_FULL
    ),
    ministral3={},
    mistral=dict(sliding_window=None),
    mixtral=dict(**_NO_HEAD_DIM, num_local_experts=4),
    nemotron={},
    olmo2=_NO_HEAD_DIM,
    olmo3=dict(**_NO_HEAD_DIM, **_ALL_FULL),
    opt=dict(**_MHA, ffn_dim=96, word_embed_proj_dim=64),
    phi=_NO_HEAD_DIM,
    phi3=_NO_HEAD_DIM,
    qwen2={},
    qwen2_moe=dict(**_NO_HEAD_DIM, **_MOE, shared_expert_intermediate_size=32),
    qwen3={},
    qwen3_moe=_MOE,
    smollm3=_NO_HEAD_DIM,
    stablelm=_NO_HEAD_DIM,
    starcoder2=_NO_HEAD_DIM,
)  # fmt: skip

_ALTERNATING = dict(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, sliding_window=8)
_MIXED = dict(
    cohere2=_ALTERNATING,
    exaone4=_ALTERNATING,
    gemma2=_ALTERNATING,
    gemma3_text=_ALTERNATING,
    gpt_oss=_ALTERNATING,
    lfm2=dict(num_hidden_layers=4, layer_types=["conv", FULL] * 2),
    llama4_text=dict(
        num_hidden_layers=4, layer_types=[CHUNKED, FULL] * 2, no_rope_layers=[1, 0] * 2,
        attention_chunk_size=16,
    ),
    olmo3=_ALTERNATING,
    qwen2=dict(**_ALTERNATING, use_sliding_window=True),
    qwen3=dict(**_ALTERNATING, use_sliding_window=True),
    smollm3=dict(num_hidden_layers=4, no_rope_layers=[1, 0] * 2),
)  # fmt: skip


def _settings(*parts):
    merged = {name: value for part in (_COMMON, *parts) for name, value in part.items()}
    absent = ("head_dim", "num_key_value_heads")
    return {name: value for name, value in merged.items() if not (value is None and name in absent)}


ALL_FULL = {family: _settings(part) for family, part in _FAMILIES.items()}
MIXED = {family: _settings(_FAMILIES[family], part) for family, part in _MIXED.items()}


CACHE_NAME = (  # `cache` since transformers 5.24
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def cache_argument(cache):
    """The cache as a keyword argument."""
    return {CACHE_NAME: cache}


def skip_if_unavailable(family):
    """GPT-J came to the attention interface after transformers 5.20."""
    if family == "gptj" and "ALL_ATTENTION_FUNCTIONS" not in vars(modeling_gptj):
        pytest.skip(f"gptj has no attention interface in transformers {transformers.__version__}")
