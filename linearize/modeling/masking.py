"""Which tokens are real and which document they belong to, from what a caller passed.

Legend: B batch, T tokens of this call.
"""

import torch
import torch.nn.functional as F


def padding_of(mask, B, T, past):
    """Which of the current tokens are real, [B, T] bool, from whatever mask reaches the layer; None
    if all are.

    2D masks are sliced; in a 4D mask a token is real if it may attend to itself. past is the number
    of earlier tokens, or None.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        raise NotImplementedError(
            f"attention_mask: {type(mask).__name__} is not supported by linearized layers; load "
            "the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    compiling = torch.compiler.is_compiling()
    if T == 1 and past and compiling:
        return (
            None  # a decoded token is never padding, and the diagonal would recompile at every step
        )
    if mask.ndim == 2:
        valid = mask[:, -T:].bool()
    else:
        width = mask.shape[-1]
        # a static cache gives as many columns as it can hold, with this chunk at [past, past + T)
        offset = past if past is not None and past + T <= width else width - T
        valid = torch.diagonal(mask[:, 0], offset=offset, dim1=1, dim2=2)[:, :T]
        valid = valid if valid.dtype == torch.bool else valid == 0
    if not compiling and valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid.expand(B, T)


def check_mask(mask, past):
    """Refuses a 4D mask [B, 1, T, S] that hides more than padding and what is to come; past is the
    number of earlier tokens.

    Raises:
        NotImplementedError: such as for masks of packed documents, prefixes or trees.
    """
    T, width = mask.shape[2:]
    offset = past if past + T <= width else width - T
    allowed = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]  # [B, T, S]
    real = torch.diagonal(allowed, offset=offset, dim1=1, dim2=2)[..., None]  # [B, T, 1]
    causal = torch.ones(T, T, dtype=torch.bool, device=mask.device).tril() & real.mT
    old = allowed[..., :offset]
    expected = torch.cat([(old & real).any(1, keepdim=True).expand_as(old), causal], 2)
    if mask.shape[1] != 1 or bool(((allowed[..., : offset + T] != expected) & real).any()):
        raise NotImplementedError(
            "attention_mask: a 4D mask may hide padding and later tokens only; linearized layers "
            "cannot keep single tokens apart. "
            "For packed documents pass position_ids that restart, use_cache=False and no mask"
        )


def padding_mask(batch_size, q_length, kv_length, attention_mask=None, **kwargs):
    """Mask function for models whose every layer is linearized: the 2D padding mask itself."""
    return attention_mask


def documents_of(position_ids, seq_idx, cu_seq_lens, B, T, device):
    """Which document each token belongs to, [B, T] int, from what the caller passed; None if there
    is one per row.

    In this order: seq_idx [B, T]; cu_seq_lens [n + 1] for one row; position_ids [B, T], which break
    where they do not go up by one.
    """
    if seq_idx is not None:
        documents = seq_idx.expand(B, T)
    elif cu_seq_lens is not None:
        documents = torch.bucketize(
            torch.arange(T, device=device), cu_seq_lens[1:].to(device), right=True
        )[None]
        if B != 1:
            raise ValueError(
                f"cu_seq_lens_q describes one packed row, but the batch has {B}; pass seq_idx [B, "
                "T]"
            )
    elif (
        position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == T and T > 1
    ):
        steps = position_ids.diff(dim=1) != 1
        if torch.compiler.is_compiling():
            torch._assert_async(
                ~steps.any(), "packed documents cannot be compiled: run them without torch.compile"
            )
            return None
        documents = F.pad(steps.long(), (1, 0)).cumsum(1).expand(B, T)
    else:
        return None
    return documents if bool((documents != documents[:, :1]).any()) else None


def merge_padding(documents, valid):
    """Documents [B, T] without the borders that padding makes: a document begins where a real token
    follows a real one.
    """
    border = documents[:, 1:] != documents[:, :-1]
    border = border & valid[:, 1:] & valid[:, :-1]
    merged = F.pad(border.long(), (1, 0)).cumsum(1)
    return merged if bool(border.any()) else None
