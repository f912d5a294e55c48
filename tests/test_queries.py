"""Which queries enter the loss: unbiased draws, and weights by position."""

import pytest
import torch

from linearize.queries import draw_queries, eligible, position_table, spread, weigh_positions
from tests.test_transfer import MIXED, Packed


def test_eligible_tokens_lie_beyond_window_and_sinks_of_their_document():
    there = eligible(MIXED.batch(), 6)
    expected = torch.zeros(4, 24, dtype=torch.bool)
    for row, places in enumerate([(11, 12, 13, *range(20, 24)), range(6, 24), range(8, 24)]):
        expected[row, list(places)] = True
    expected[3, [*range(6, 12), *range(18, 24)]] = True
    assert torch.equal(there, expected)


def test_all_queries_have_weight_one():
    there = eligible(MIXED.batch(), 6)
    queries, weight = draw_queries(there, None, torch.Generator())
    found = torch.zeros(4, 24).scatter_add(1, queries, weight)
    assert torch.equal(found, there.float())


def test_each_stratum_gives_one_query():
    there = eligible(MIXED.batch(), 6)
    queries, weight = draw_queries(there, 5, torch.Generator().manual_seed(0))
    for row in range(4):
        places = there[row].nonzero().flatten()
        rank = [(places == q).nonzero().item() for q in queries[row].tolist()]
        size = len(places) / 5
        assert all(int(i * size) <= r < (i + 1) * size for i, r in enumerate(rank))
        assert torch.allclose(weight[row], torch.tensor(size))


def test_the_weights_of_many_draws_average_to_one_everywhere():
    there, generator = eligible(MIXED.batch(), 6), torch.Generator().manual_seed(0)
    draws, total = 1500, torch.zeros(4, 24)
    for _ in range(draws):
        queries, weight = draw_queries(there, 5, generator)
        total.scatter_add_(1, queries, weight)
    mean = total / draws
    assert mean[~there].eq(0).all()
    assert (mean[there] - 1).abs().max() < 0.2  # 5 standard errors
    assert (mean.sum(1) - there.sum(1)).abs().max() < 1e-3


def test_keys_of_padding_do_not_become_centroids():
    """They are zero here, and no real key is."""
    batch = {
        "input_ids": torch.arange(6)[None],
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
    }
    assert spread(batch, 9).tolist() == [2, 3, 4, 5]
    assert spread(batch, 2).tolist() == [2, 5]
    del batch["attention_mask"]
    assert spread(batch, 3).tolist() == [0, 2, 5]


# ------------------------------------------------------------------------------ position weights
def weights_of(kind, data, exact):
    """(weights, eligible tokens) [B, T] of all rows, measured on the same rows."""
    batch = data.batch()
    rows = [{k: v[None] for k, v in row.items()} for row in data]
    return weigh_positions(kind, batch, exact, position_table(kind, rows, exact)), eligible(
        batch, exact
    )


@pytest.mark.parametrize("kind", ["buckets", "distance"])
@pytest.mark.parametrize("exact", [3, 5])
def test_a_query_counts_one_on_average(kind, exact):
    weight, there = weights_of(kind, MIXED, exact)
    assert weight[there].mean() == pytest.approx(1, rel=1e-6)
    assert weight[there].std() > 0.1


def test_every_doubling_of_the_distance_counts_the_same():
    data = Packed((40,), (14, 26), (7, 33))
    weight, there = weights_of("buckets", data, 3)
    place = data.positions
    sums = [
        weight[there & (place >= low) & (place < 2 * low)].sum().item() for low in (3, 6, 12, 24)
    ]
    assert sums == pytest.approx([there.sum().item() / 4] * 4, rel=1e-6)


def test_a_query_counts_as_many_as_its_linear_keys():
    weight, there = weights_of("distance", MIXED, 6)
    linear_keys = (MIXED.positions - 5)[there]
    ratio = weight[there] / linear_keys
    assert torch.allclose(ratio, ratio[0].expand_as(ratio))


def test_a_place_that_was_not_measured_counts_as_the_last_bucket():
    table = position_table("buckets", [Packed((12, 12)).batch()], 3)
    weight = weigh_positions("buckets", Packed((24,)).batch(), 3, table)
    assert len(table) == 2 and weight[0, 20] == weight[0, 11] != weight[0, 4]


def test_an_empty_bucket_has_no_weight():
    """With more sinks than the window is long the first places beyond it are in no bucket."""
    table = position_table("buckets", [{"input_ids": torch.zeros(1, 24, dtype=torch.long)}], 9)
    assert table == pytest.approx([1, 1][: len(table)], abs=0.5) and min(table) > 0
