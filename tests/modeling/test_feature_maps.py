"""The feature maps: worked examples, what each paper promises, start values, half precision."""

import math

import pytest
import torch
from definition import ALWAYS_POSITIVE, FEATURE_DIMS, LOG_SPACE, distance, plain_features
from tolerances import FLOAT64

from linearize.modeling.feature_maps import FEATURE_MAPS, k_means

HEADS, DIM = 3, 6


def make(name, dim=DIM, feature_dim=None, *, spread=0.5, dtype=torch.float64, **options):
    """A map with random weights; spread=0 gives the start values."""
    module = FEATURE_MAPS[name](HEADS, dim, feature_dim, **options)
    module.reset_parameters()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype)


def normal(*shape, size=1.0, seed=1, dtype=torch.float64):
    return (
        size
        * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).to(dtype)


def features(module, x):
    """phi(x), not its logarithm."""
    out = module(x)
    return out.exp() if module.log_space else out


# ---------------------------------------------------------------- all maps
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_formula_of_the_paper(name):
    q, k = normal(2, HEADS, 7, DIM), normal(2, HEADS, 7, DIM, seed=2)
    for feature_dim in {None, FEATURE_DIMS[name]}:
        module = make(name, feature_dim=feature_dim)
        kernel = features(module, q) @ features(module, k).mT
        for b in range(2):
            for head in range(HEADS):
                plain = [plain_features(name, module, head, x[b, head]) for x in (q, k)]
                assert distance(kernel[b, head], plain[0] @ plain[1].mT) < FLOAT64


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_num_features_is_the_size_of_the_output(name):
    for feature_dim in {None, FEATURE_DIMS[name]}:
        module = make(name, feature_dim=feature_dim)
        assert module(normal(1, HEADS, 2, DIM)).shape == (1, HEADS, 2, module.num_features)
        assert f"heads=3, head_dim=6, features={module.num_features}" in repr(module)


@pytest.mark.parametrize(
    ("name", "dim", "feature_dim", "expected"),
    [
        ("hedgehog", 64, None, 128), ("hedgehog", 64, 32, 64), ("hedgehog_exp", 64, None, 128),
        ("t2r", 64, 96, 96), ("elu1", 64, None, 64), ("relu", 64, None, 64),
        ("taylor", 128, None, 153), ("favor", 64, None, 256), ("centroids", 64, None, 128),
    ],
)  # fmt: skip
def test_default_sizes(name, dim, feature_dim, expected):
    assert FEATURE_MAPS[name](2, dim, feature_dim).num_features == expected


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_are_fp32_for_any_weights_and_inputs(name, dtype):
    exact, module = make(name), make(name).to(dtype)
    with torch.no_grad():
        exact.load_state_dict(module.state_dict())  # the same rounded numbers
    x = normal(1, HEADS, 9, DIM, dtype=dtype)
    out = module(x)
    assert out.dtype == torch.float32
    assert distance(out, exact(x.double())) < 1e-5


@pytest.mark.parametrize("name", [n for n in ALWAYS_POSITIVE if n not in LOG_SPACE])
def test_positivity_in_bf16(name):
    module = make(name, dtype=torch.bfloat16)
    size = 1 if name == "centroids" else 5  # sharper than the others
    out = module(normal(1, HEADS, 50, DIM, size=size, dtype=torch.bfloat16))
    if name == "taylor":  # the features are signed, the kernel is at least 1/2
        assert (out.double() @ out.double().mT > 0.5 - 1e-4).all()
    else:
        assert (out > 0).all()
    far = module(
        normal(1, HEADS, 50, DIM, size=1000, dtype=torch.bfloat16)
    )  # here exp may round to zero
    assert torch.isfinite(far).all()
    assert name == "taylor" or (far >= 0).all()


@pytest.mark.parametrize("name", ["t2r", "relu"])
def test_rectified_features_are_not_negative(name):
    out = make(name)(normal(1, HEADS, 50, DIM))
    assert (out >= 0).all()
    assert (out == 0).any()
    assert FEATURE_MAPS[name].positive == "non-negative"


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_heads_have_weights_of_their_own(name):
    module = make(name)
    x = normal(1, 1, 5, DIM).expand(-1, HEADS, -1, -1)
    out = module(x)
    shared = name in ("elu1", "relu", "favor")
    assert torch.equal(out[:, 0], out[:, 1]) is shared


@pytest.mark.parametrize("name", LOG_SPACE)
def test_log_features_do_not_overflow(name):
    out = make(name, dtype=torch.float32)(normal(1, HEADS, 5, DIM, size=1e4, dtype=torch.float32))
    assert torch.isfinite(out).all()
    assert out.abs().max() > 100


# ---------------------------------------------------------------- one by one
def test_elu1_example():
    q = torch.tensor([[0.0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    k = torch.tensor([[1.0, 0], [0, 1], [0, 0]], dtype=torch.float64)
    module = FEATURE_MAPS["elu1"](1, 2)
    assert module(q[None, None])[0, 0].tolist() == [[1, 1], [2, 1], [1, 2]]
    weights = module(q[None, None]) @ module(k[None, None]).mT
    assert weights[0, 0].tril().tolist() == [[3, 0, 0], [5, 4, 0], [4, 5, 3]]


def test_elu1_stays_positive_where_expm1_rounds_to_minus_one():
    x = torch.linspace(-12, 4, 2000).bfloat16()[None, None]
    assert (torch.expm1(x) + 1 == 0).any()
    assert (FEATURE_MAPS["elu1"](1, 2000)(x) > 0).all()


def test_hedgehog_halves_each_sum_to_one():
    for size in (0, 1, 100):
        out = make("hedgehog")(normal(1, HEADS, 9, DIM, size=size))
        for half in out.chunk(2, dim=-1):
            assert distance(half.sum(-1), torch.ones(1, HEADS, 9)) < FLOAT64
        assert distance(out.sum(-1), 2 * torch.ones(1, HEADS, 9)) < FLOAT64
        assert (out @ out.mT <= 2 + 1e-12).all()


def test_hedgehog_exp_at_the_start_is_a_sum_of_cosh():
    q, k = normal(1, HEADS, 4, DIM), normal(1, HEADS, 4, DIM, seed=2)
    module = make("hedgehog_exp", spread=0)
    kernel = features(module, q) @ features(module, k).mT
    expected = 2 * (q.unsqueeze(3) + k.unsqueeze(2)).cosh().sum(-1)
    assert distance(kernel, expected) < FLOAT64


def test_relu_is_homogeneous():
    """A longer query scales all weights alike, so it cannot be sharper."""
    x, module = normal(1, HEADS, 4, DIM), make("relu")
    assert distance(module(3 * x), 3 * module(x)) < FLOAT64


@pytest.mark.parametrize(("score", "expected"), [(5, 18.5), (-1, 0.5), (-3, 2.5), (0, 1)])
def test_taylor_kernel(score, expected):
    """1 + s + s^2 / 2 of the score, with an identity for the projection."""
    module = FEATURE_MAPS["taylor"](1, 2, 2, scaling=1.0).double()
    with torch.no_grad():
        module.weight.copy_(torch.eye(2))
    if score == 5:
        q, k = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])
    else:
        q, k = torch.tensor([1.0, 0.0]), torch.tensor([float(score), 0.0])
    q, k = (module(x.double()[None, None, None]) for x in (q, k))
    assert distance((q * k).sum(), torch.tensor(expected)) < FLOAT64


def test_taylor_merges_equal_terms():
    assert FEATURE_MAPS["taylor"](1, 16, 16).num_features == 1 + 16 + 16 * 17 // 2 == 153


def test_taylor_starts_near_the_score():
    """One random projection for q, k and all heads keeps the score on average."""
    dim, gaps = 32, []
    q, k = normal(1, 1, 300, dim), normal(1, 1, 300, dim, seed=2)
    score = (q * k).sum(-1) * dim**-0.5
    for seed in range(40):
        module = FEATURE_MAPS["taylor"](2, dim, 16, seed=seed)
        module.reset_parameters()
        assert torch.equal(module.weight[0], module.weight[1])
        module = module.double()
        linear = [module(x.expand(-1, 2, -1, -1))[:, :1, :, 1:17] for x in (q, k)]
        gaps.append(((linear[0] * linear[1]).sum(-1) - score).mean())
    gaps = torch.stack(gaps)
    assert abs(gaps.mean()) < 4 * gaps.std() / math.sqrt(len(gaps))
    full = FEATURE_MAPS["taylor"](1, 8, 8)
    full.reset_parameters()
    assert distance(full.weight[0] @ full.weight[0].mT, torch.eye(8)) < 1e-5


def test_favor_is_unbiased():
    """The mean over many Omega is exp(scaling q.k), with less spread than independent rows have."""
    dim, count, size, scaling = 8, 16, 600, 0.3
    q, k = normal(1, 1, 1, dim), normal(1, 1, 1, dim, seed=2)
    estimates = []
    for seed in range(size):
        module = FEATURE_MAPS["favor"](1, dim, count, scaling=scaling, seed=seed)
        module.reset_parameters()
        module.double()
        estimates.append((features(module, q) * features(module, k)).sum())
    estimates = torch.stack(estimates) / torch.exp(scaling * (q * k).sum())
    assert abs(estimates.mean() - 1) < 4 * estimates.std() / math.sqrt(size)
    independent = torch.expm1(scaling * (q + k).square().sum()) / count
    assert estimates.var() < independent


def omega(dim, count, seed):
    module = FEATURE_MAPS["favor"](1, dim, count, seed=seed)
    module.reset_parameters()
    return module.omega.double()


def test_favor_rows_are_orthogonal_within_a_block():
    for block in omega(8, 20, seed=0).split(8):  # two blocks and half of a third
        directions = block / block.norm(dim=1, keepdim=True)
        assert distance(directions @ directions.T, torch.eye(len(block))) < 1e-5


def test_favor_directions_are_uniform_and_lengths_are_those_of_normal_vectors():
    """Without the signs of QR some entries would always have one sign; lengths are chi(D)."""
    blocks = torch.stack([omega(4, 4, seed) for seed in range(800)])
    assert (blocks.mean(0).abs() < 4 / math.sqrt(800)).all()
    assert distance(blocks.square().mean(0), torch.ones(4, 4)) < 0.3
    squares = blocks.square().sum(-1)
    assert abs(squares.mean() - 4) < 4 * math.sqrt(8 / squares.numel())
    assert abs(squares.var() - 8) < 1.5


def test_favor_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = omega(4, 8, seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, omega(4, 8, seed=3))
    assert not torch.equal(first, omega(4, 8, seed=4))
    assert "omega" in FEATURE_MAPS["favor"](1, 4, 8).state_dict()


# ---------------------------------------------------------------- centroids
def clustered(points, count, noise, dim=DIM):
    """(centres [HEADS, points, dim], x [HEADS, points * count, dim] around them)."""
    centres = normal(HEADS, points, dim, size=2, seed=3, dtype=torch.float32)
    near = noise * normal(HEADS, points * count, dim, seed=4, dtype=torch.float32)
    return centres, centres.repeat(1, count, 1) + near


def fitted(x, feature_dim, dim=DIM):
    key_map = make("centroids", dim, feature_dim, spread=0, dtype=torch.float32)
    query_map = key_map.query_map(2 * HEADS, dim, feature_dim, scaling=key_map.scaling)
    query_map.reset_parameters()
    key_map.fit(query_map, x)
    return query_map, key_map


def test_fitted_centroids_estimate_the_exponential_of_the_score():
    """With a centroid for every key the products are exp(scaling q.k) itself."""
    centres, x = clustered(points=5, count=40, noise=1e-4)
    query_map, key_map = fitted(x, feature_dim=60)
    q = normal(1, 2 * HEADS, 7, DIM, dtype=torch.float32)
    keys = centres[None]
    kernel = query_map(q).exp().unflatten(1, (HEADS, 2)) @ key_map(keys).unsqueeze(2).mT
    scores = DIM**-0.5 * q.unflatten(1, (HEADS, 2)) @ keys.unsqueeze(2).mT
    assert distance(kernel / scores.exp(), torch.ones_like(kernel)) < 0.01


def test_random_centroids_are_where_the_maps_start():
    key_map = make("centroids", spread=0)
    query_map = key_map.query_map(HEADS, DIM, seed=key_map.seed, scaling=0.3)
    query_map.reset_parameters()
    centroids = query_map.weight.mT / 0.3  # [H, f, D]
    assert distance(centroids.norm(dim=-1), torch.full((HEADS, 2 * DIM), DIM**0.5)) < 1e-5
    x = normal(1, HEADS, 9, DIM)
    gap = (x[:, :, :, None] - centroids[None, :, None].double()).square().sum(-1)
    expected = (-key_map.SHARPNESS * gap / (DIM / 2)).softmax(-1)
    assert distance(key_map(x), expected) < 1e-6


def test_k_means_finds_clusters_and_their_size():
    centres, x = clustered(points=4, count=500, noise=0.2)
    found, spread = k_means(x, 32, 10, seed=0)
    nearest = (centres[:, :, None] - found[:, None]).norm(dim=-1).amin(-1)
    assert (nearest < 0.4).all()
    assert ((spread > 0) & (spread < DIM * 0.2**2)).all()
    again, _ = k_means(x, 32, 10, seed=0)
    assert torch.equal(found, again)
    assert not torch.equal(found, k_means(x, 32, 10, seed=1)[0])


@pytest.mark.parametrize("keys", [1, 3, 40])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e4])
def test_fit_stands_few_keys_and_equal_keys(keys, size):
    x = torch.full((HEADS, keys, DIM), size)
    query_map, key_map = fitted(x, feature_dim=12)
    for module in (query_map, key_map):
        assert all(p.isfinite().all() for p in module.parameters())
    weights = key_map(x[None])
    assert distance(weights.sum(-1), torch.ones(1, HEADS, keys)) < 1e-5


def test_k_means_keeps_a_centroid_that_loses_its_points():
    x = torch.tensor([[[0.0], [0.0], [1.0], [1.0]]])
    found, _ = k_means(x, 4, 5, seed=0)
    assert sorted(found.flatten().tolist()) == [0.0, 0.0, 1.0, 1.0]


# ---------------------------------------------------------------- start values
@pytest.mark.parametrize("name", ["hedgehog", "hedgehog_exp", "t2r"])
@pytest.mark.parametrize("feature_dim", [None, 4, 9])
def test_maps_start_as_the_identity(name, feature_dim):
    module = make(name, feature_dim=feature_dim, spread=0)
    width = feature_dim or DIM
    assert all(torch.equal(w, torch.eye(DIM, width, dtype=torch.float64)) for w in module.weight)
    assert name == "hedgehog" or not module.bias.any()
    x = normal(1, HEADS, 4, DIM)
    z = torch.nn.functional.pad(x, (0, max(width - DIM, 0)))[..., :width]
    expected = {
        "hedgehog": torch.cat([z.softmax(-1), (-z).softmax(-1)], -1),
        "hedgehog_exp": torch.cat([z, -z], -1),
        "t2r": z.clamp(min=0),
    }  # fmt: skip
    assert distance(module(x), expected[name]) < FLOAT64


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_feature_dim_must_be_positive(name):
    with pytest.raises(
        ValueError, match=r"convert.feature_dim: 0 is not allowed; give a positive number or null"
    ):
        FEATURE_MAPS[name](1, 8, 0)


@pytest.mark.parametrize("name", ["elu1", "relu"])
def test_maps_without_parameters_keep_the_head_size(name):
    message = (
        rf"convert.feature_dim: 4 is not possible with .*'{name}', which keeps the head size \(8\)"
    )
    with pytest.raises(ValueError, match=message):
        FEATURE_MAPS[name](1, 8, 4)


def test_taylor_cannot_project_upwards():
    with pytest.raises(ValueError, match=r"convert.feature_dim: 9 is larger than the head size 8"):
        FEATURE_MAPS["taylor"](1, 8, 9)
