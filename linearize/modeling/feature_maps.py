"""Feature maps phi: one class per map, and `FEATURE_MAPS`, the dict that names them.

Legend: B batch, H heads, T tokens, D head size, F features.

A map takes one tensor of queries or keys after the rotary embedding, [B, H, T, D], and returns [B,
H, T, F] in fp32 (fp64 for fp64 input) whatever the dtype of its weights. Weights are per head. A
map whose features are exponentials without a bound sets `log_space` and returns the *logarithms* of
its features: the operator keeps the sums in range (see `ops`), so nothing overflows and nothing is
clamped.

`feature_dim` is the size of the learned or random projection; `num_features` is F, the size of the
output.
"""

import math

import torch
from torch import nn
from transformers import initialization as init


class FeatureMap(nn.Module):
    """Features [B, H, T, F] of queries or keys [B, H, T, D]."""

    log_space = False  # True: forward returns log features
    positive = "yes"  # "yes", or what else is known about the sign
    estimates_exp = False  # True: phi(q).phi(k) starts as an estimate of exp(scaling q.k)
    query_map = None  # the class of the queries' map, where it is another one
    step_kernel = None  # the name under which the kernel of one token knows the map

    def __init__(self, num_heads, head_dim, feature_dim=None, *, scaling=None, seed=0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.feature_dim = self.default_dim(head_dim) if feature_dim is None else feature_dim
        self.scaling = head_dim**-0.5 if scaling is None else scaling
        self.seed = seed
        if self.feature_dim < 1:
            raise ValueError(
                f"convert.feature_dim: {feature_dim} is not allowed; give a positive number or null"
            )
        self.build()

    @staticmethod
    def default_dim(head_dim):
        return head_dim

    def build(self):
        """Creates the parameters, if the map has any."""

    def reset_parameters(self):
        """Sets the start values; tensors that were just loaded from a checkpoint are left alone."""

    @property
    def num_features(self):
        return self.feature_dim

    def forward(self, x):
        raise NotImplementedError

    def eye(self):
        """The identity, cut or padded to [H, D, feature_dim]."""
        return torch.eye(self.head_dim, self.feature_dim).expand(self.num_heads, -1, -1)

    def extra_repr(self):
        return f"heads={self.num_heads}, head_dim={self.head_dim}, features={self.num_features}"


def _compute(x, *weights):
    """The tensors in the dtype that features are computed in: fp32, or fp64 if the input is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(t.to(dtype) for t in (x, *weights))


class Hedgehog(FeatureMap):
    """Two softmax halves, [softmax(xW), softmax(-xW)]: positive, each half sums to 1.

    Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, after the Hedgehog of arXiv:2402.04347. W [H, D,
    f] starts as the identity, no bias; F = 2f. Differs: f = D by default where the published
    checkpoints have D/2, which reads half of each rotary pair.
    """

    step_kernel = "hedgehog"

    def build(self):
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.feature_dim))
        self.register_parameter("bias", None)

    def reset_parameters(self):
        init.copy_(self.weight, self.eye())

    @property
    def num_features(self):
        return 2 * self.feature_dim

    def forward(self, x):
        x, weight = _compute(x, self.weight)
        z = x @ weight  # [B, H, T, f]
        halves = torch.cat([z, -z], dim=-1).unflatten(-1, (2, -1))
        return halves.softmax(-1).flatten(-2)


class HedgehogNorm(Hedgehog):
    """The direction of `Hedgehog` with the length of its input, |x| f(x) / |f(x)|: non-negative.

    The norm-preserving map of STILL, arXiv:2602.02180: softmax halves forget how long a key or a
    query was. Differs: f is `Hedgehog`.
    """

    positive = "non-negative"  # zero for x = 0 alone

    def forward(self, x):
        features = super().forward(x)
        (x,) = _compute(x)
        length = x.norm(dim=-1, keepdim=True) / features.norm(dim=-1, keepdim=True)
        return features * length


class HedgehogExp(FeatureMap):
    """The exponential with mirrored features, [exp(xW + b), exp(-xW - b)]: positive, unbounded,
    kept as logarithms.

    Zhang et al. 2024 (Hedgehog), arXiv:2402.04347, section 4.2. W [H, D, f] starts as the identity,
    b [H, f] as zero; F = 2f. Differs: q and k have weights of their own, and weights are per head.
    """

    log_space = True

    def build(self):
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.feature_dim))
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.feature_dim))

    def reset_parameters(self):
        init.copy_(self.weight, self.eye())
        init.zeros_(self.bias)

    @property
    def num_features(self):
        return 2 * self.feature_dim

    def forward(self, x):
        x, weight, bias = _compute(x, self.weight, self.bias)
        z = x @ weight + bias[:, None]
        return torch.cat([z, -z], dim=-1)


class T2R(FeatureMap):
    """relu(xW + b): non-negative, may be all zero.

    Kasai et al. 2021 (T2R), arXiv:2103.13076, eq. 4. W [H, D, F] starts as the identity, b [H, F]
    as zero; F = D by default.
    """

    positive = "non-negative"

    def build(self):
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.feature_dim))
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.feature_dim))

    def reset_parameters(self):
        init.copy_(self.weight, self.eye())
        init.zeros_(self.bias)

    def forward(self, x):
        x, weight, bias = _compute(x, self.weight, self.bias)
        return torch.relu(x @ weight + bias[:, None])


class _Fixed(FeatureMap):
    """A map without parameters: F = D."""

    def build(self):
        if self.feature_dim != self.head_dim:
            name = next(n for n, c in FEATURE_MAPS.items() if c is type(self))
            raise ValueError(
                f"convert.feature_dim: {self.feature_dim} is not possible with feature_map "
                f"{name!r}, which keeps the "
                f"head size ({self.head_dim}); leave feature_dim out"
            )


class Elu1(_Fixed):
    """elu(x) + 1: positive, no parameters, F = D.

    Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7. Computed as x + 1 for x > 0 and exp(x)
    otherwise, which stays positive where expm1(x) + 1 rounds to zero.
    """

    def forward(self, x):
        (x,) = _compute(x)
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


class Relu(_Fixed):
    """max(x, 0): non-negative, may be all zero, no parameters, F = D.

    Positively homogeneous: a longer query scales all weights alike, so it cannot sharpen.
    """

    positive = "non-negative"

    def forward(self, x):
        (x,) = _compute(x)
        return torch.relu(x)


class Taylor(FeatureMap):
    """The second-order expansion of exp on a projection: phi(q).phi(k) = 1 + s + s^2 / 2 >= 1/2, s
    = (q'P).(k'P).

    Arora et al. 2024 (Based), arXiv:2402.18668, eq. 4. x' = x sqrt(scaling), P [H, D, d], d = 16 by
    default; F = 1 + d + d (d + 1) / 2. Differs: equal second-order terms are merged, which gives
    the same kernel with 153 features instead of 273 at d = 16; P is per head and learned, and
    starts as one random orthonormal basis for all heads, scaled so that s keeps its expectation.
    """

    positive = "features signed, kernel at least 1/2"

    @staticmethod
    def default_dim(head_dim):
        return min(16, head_dim)

    def build(self):
        if self.feature_dim > self.head_dim:
            raise ValueError(
                f"convert.feature_dim: {self.feature_dim} is larger than the head size "
                f"{self.head_dim}, which is the "
                "most that feature_map 'taylor' can project to"
            )
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.feature_dim))

    def reset_parameters(self):
        generator = torch.Generator().manual_seed(self.seed)
        basis = torch.linalg.qr(torch.randn(self.head_dim, self.feature_dim, generator=generator))[
            0
        ]
        init.copy_(
            self.weight,
            (basis * math.sqrt(self.head_dim / self.feature_dim)).expand_as(self.weight),
        )

    @property
    def num_features(self):
        return 1 + self.feature_dim + self.feature_dim * (self.feature_dim + 1) // 2

    def forward(self, x):
        x, weight = _compute(x, self.weight)
        y = x * math.sqrt(self.scaling) @ weight  # [B, H, T, d]
        rows, cols = torch.triu_indices(
            self.feature_dim, self.feature_dim, offset=1, device=x.device
        )
        return torch.cat(
            [torch.ones_like(y[..., :1]), y, y * y / math.sqrt(2), y[..., rows] * y[..., cols]],
            dim=-1,
        )


class Favor(FeatureMap):
    """Positive orthogonal random features, exp(Omega x' - |x'|^2 / 2) / sqrt(F): positive,
    unbounded, kept as logarithms.

    Choromanski et al. 2021 (Performer, FAVOR+), arXiv:2009.14794, lemma 1 and section 2.4. x' = x
    sqrt(scaling), so that E phi(q).phi(k) = exp(scaling q.k) with the model's own temperature.
    Omega [F, D] is shared by the heads and by q and k, drawn from the seed and stored with the
    weights; F = 256 by default. Not trained. A baseline, not a map for quality: at head size 128
    the relative variance of the estimate is far above 1.
    """

    log_space = True

    @staticmethod
    def default_dim(head_dim):
        return 256

    def build(self):
        self.register_buffer("omega", torch.empty(self.feature_dim, self.head_dim))

    def reset_parameters(self):
        generator = torch.Generator().manual_seed(self.seed)
        size, blocks = self.head_dim, []
        for _ in range(math.ceil(self.feature_dim / size)):
            q, r = torch.linalg.qr(torch.randn(size, size, generator=generator))
            lengths = torch.randn(size, size, generator=generator).norm(dim=1, keepdim=True)
            blocks.append(
                q * r.diagonal().sign() * lengths
            )  # rows of a Haar matrix with chi(D) lengths
        init.copy_(self.omega, torch.cat(blocks)[: self.feature_dim])

    def forward(self, x):
        x, omega = _compute(x, self.omega)
        x = x * math.sqrt(self.scaling)
        return x @ omega.mT - x.square().sum(-1, keepdim=True) / 2 - math.log(self.feature_dim) / 2


class CentroidQueries(FeatureMap):
    """The queries' half of `Centroids`: exp(xW + b), kept as logarithms."""

    log_space = True

    @staticmethod
    def default_dim(head_dim):
        return 2 * head_dim

    def build(self):
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.feature_dim))
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.feature_dim))

    def reset_parameters(self):
        centroids = random_directions(self.head_dim, self.feature_dim, self.seed)
        init.copy_(self.weight, (self.scaling * centroids.mT).expand_as(self.weight))
        init.zeros_(self.bias)

    def forward(self, x):
        x, weight, bias = _compute(x, self.weight, self.bias)
        return x @ weight + bias[:, None]


class Centroids(CentroidQueries):
    """Soft assignment of keys to f learned centroids, softmax(xW + b); queries have
    exp(xW + b), see `CentroidQueries`.

    phi(q).phi(k) = sum_f p(f | k) exp(q.c_f scaling) is softmax attention with each key replaced by
    its centroid (after Vyas et al. 2020, Clustered Attention, arXiv:2007.04825, which clusters
    queries, hard). W [H, D, f] and b [H, f] start from random centroids, and `fit` from those of
    real keys; F = f = 2 D by default, the features of `hedgehog`.
    """

    log_space = False
    estimates_exp = True
    query_map = CentroidQueries
    step_kernel = "centroids"
    SHARPNESS = 4.0  # log odds that a key at the mean distance from its centroid gives up
    ROUNDS = 10  # of k-means

    def reset_parameters(self):
        centroids = random_directions(self.head_dim, self.feature_dim, self.seed)
        self.assign(
            init.copy_, centroids.expand(self.num_heads, -1, -1), torch.tensor(self.head_dim / 2)
        )

    def assign(self, copy_, centroids, spread):
        """Sets the parameters to log p(f | x) = -SHARPNESS |x - c_f|^2 / spread + const."""
        scale = self.SHARPNESS / spread
        copy_(self.weight, 2 * scale * centroids.mT)
        copy_(self.bias, -(scale * centroids.square().sum(-1, keepdim=True)).squeeze(-1))

    @torch.no_grad()
    def fit(self, queries, x):
        """Starts this map and that of the queries, [H', D, f] with H' a multiple of H, from
        k-means of keys x [H, n, D].
        """
        centroids, spread = k_means(x.float(), self.feature_dim, self.ROUNDS, self.seed)
        self.assign(torch.Tensor.copy_, centroids, spread)
        repeat = queries.num_heads // self.num_heads
        queries.weight.copy_(self.scaling * centroids.repeat_interleave(repeat, 0).mT)
        queries.bias.zero_()

    def forward(self, x):
        x, weight, bias = _compute(x, self.weight, self.bias)
        return (x @ weight + bias[:, None]).softmax(-1)


def random_directions(size, count, seed):
    """[count, size]: orthogonal in blocks, of the length of a standard normal vector."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [
        torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
        for _ in range(math.ceil(count / size))
    ]
    return math.sqrt(size) * torch.cat(blocks)[:count]


def k_means(x, count, rounds, seed):
    """(centroids [H, count, D], mean squared distance to the nearest [H, 1, 1]) of x [H, n, D].

    Lloyd's rounds from a random sample of x; a centroid without points stays where it is.
    """
    H, n, D = x.shape
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(max(n, count), generator=generator)[:count] % n
    centroids = x[:, order.to(x.device)]
    size = x.square().sum(-1)  # [H, n]
    for i in range(rounds + 1):
        distance = centroids.square().sum(-1)[:, None] - 2 * x @ centroids.mT  # less |x|^2
        nearest, index = distance.min(-1)  # [H, n]
        if i == rounds:
            break
        members = x.new_zeros(H, count).scatter_add_(1, index, torch.ones_like(size))[..., None]
        sums = torch.zeros_like(centroids).scatter_add_(1, index[..., None].expand(-1, -1, D), x)
        centroids = torch.where(members > 0, sums / members.clamp(min=1), centroids)
    spread = (nearest + size).clamp(min=0).mean(1)
    floor = 1e-3 * size.mean(1) + 1e-6  # equal keys
    return centroids, torch.maximum(spread, floor)[:, None, None]


FEATURE_MAPS = {
    "hedgehog": Hedgehog,
    "hedgehog_exp": HedgehogExp,
    "hedgehog_norm": HedgehogNorm,
    "t2r": T2R,
    "elu1": Elu1,
    "relu": Relu,
    "taylor": Taylor,
    "favor": Favor,
    "centroids": Centroids,
}
