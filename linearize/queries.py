"""Which queries attention transfer computes its loss on, and what each of them counts.

Legend: B batch, T tokens, Q queries, E = W + N positions of a document whose keys are all exact.
"""

import torch

from linearize.modeling.ops import positions


def spread(batch, most):
    """At most `most` indices of real tokens of a batch of one, evenly spread."""
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch["input_ids"][0]) if mask is None else mask[0]
    index = real.nonzero().flatten()
    return index[torch.linspace(0, len(index) - 1, min(most, len(index))).long()]


def eligible(batch, exact):
    """bool [B, T]: tokens that see a linear key, `exact` = W + N or more into their document."""
    valid, place = _places(batch)
    return valid & (place >= exact)


def _places(batch):
    """(which tokens are real, position of each in its document), [B, T]."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    documents = None
    if mask is None and "position_ids" in batch:
        borders = batch["position_ids"].diff(dim=1) != 1
        documents = torch.nn.functional.pad(borders.long().cumsum(1), (1, 0))
    return valid, positions(valid, documents)


def draw_queries(there, num_queries, generator):
    """(queries, weight) [B, Q]: some true entries of `there` [B, T] and what each stands for.

    The n true entries of a row are cut into Q equal strata, one uniform draw from each, with weight
    n / Q: the weighted sum of any function of the entries is an unbiased estimate of its sum over
    all n. A row with n <= Q, or num_queries None, has all its entries with weight 1; what is left
    of its Q places has weight 0.
    """
    count = there.sum(1)  # [B]
    width = max(1, int(count.max()))
    width = width if num_queries is None else min(num_queries, width)
    order = torch.sort(~there, dim=1, stable=True).indices  # the true entries first
    place = torch.arange(width, device=there.device).expand(len(there), width)
    weight = (place < count[:, None]).float()
    if num_queries is not None:
        jitter = torch.rand(len(there), num_queries, generator=generator)[:, :width].to(
            there.device, torch.float64
        )
        size = (count[:, None] / num_queries).double()
        drawn = ((place + jitter) * size).long().clamp(max=(count[:, None] - 1).clamp(min=0))
        many = count[:, None] > num_queries
        place, weight = torch.where(many, drawn, place), torch.where(many, size.float(), weight)
    return order.gather(1, place), weight


# ------------------------------------------------------------------------------ position weights
def _position_terms(kind, batch, exact):
    """(bucket, factor) [B, T]: a query at that place counts factor * table[bucket].

    Buckets are [E, 2E), [2E, 4E), ... with E = `exact`; "distance" has one, and the number of
    linear keys as factor.
    """
    place = _places(batch)[1]
    if kind == "distance":
        return torch.zeros_like(place), (place - exact + 1).clamp(min=1).float()
    doublings = torch.frexp((place // exact).float()).exponent.long() - 1
    return doublings.clamp(min=0), torch.ones_like(place, dtype=torch.float32)


def position_table(kind, batches, exact):
    """Weights by bucket, a list: all buckets count the same, and a query 1 on average."""
    sums, count = torch.zeros(64, dtype=torch.float64), 0
    for batch in batches:
        there = eligible(batch, exact)
        bucket, factor = _position_terms(kind, batch, exact)
        sums.index_add_(0, bucket[there], factor[there].double())
        count += int(there.sum())
    used = int(sums.nonzero().max()) + 1
    return (count / (sums.count_nonzero() * sums[:used])).nan_to_num(posinf=0.0).tolist()


def weigh_positions(kind, batch, exact, table):
    """Weights [B, T] of queries by their place; what lies beyond the last bucket belongs to it."""
    bucket, factor = _position_terms(kind, batch, exact)
    table = torch.tensor(table, device=factor.device)
    return factor * table[bucket.clamp(max=len(table) - 1)]
