"""Times one linearized layer on a CPU: prefill, with backward, a decode step, and their parts.

    python scripts/bench_layer.py --tokens 1024 --dtype bfloat16

CPU time of one thread (other work on the computer disturbs it less than wall time), the fastest of
several runs. Heads and sizes are those of SmolLM2-135M. Softmax is torch's
scaled_dot_product_attention.
"""

import argparse
import time

import torch
import torch.nn.functional as F

from linearize.modeling.chunked import hybrid_chunked
from linearize.modeling.feature_maps import FEATURE_MAPS
from linearize.modeling.ops import Hybrid, empty_state, hybrid_step

H, G, D, W, N = 9, 3, 64, 64, 4


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="prompt, and context of the step")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = layer(options.tokens, getattr(torch, options.dtype), options.runs)
    print(f"{'':24s}{'linearized':>12s}{'softmax':>12s}{'ratio':>8s}")
    for name, (ours, softmax) in rows.items():
        print(f"{name:24s}{ours * 1e3:9.2f} ms{softmax * 1e3:9.2f} ms{softmax / ours:8.2f}")
    print("\n1.2 M numbers, fp32:")
    for name, seconds in elementary(options.runs).items():
        print(f"{name:24s}{seconds * 1e3:9.2f} ms")


def best(function, runs):
    """CPU seconds of the fastest run."""
    function()
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def layer(tokens, dtype, runs):
    """{what: (linearized, softmax)} in seconds."""
    maps = [FEATURE_MAPS["hedgehog"](heads, D) for heads in (H, G)]
    for feature_map in maps:
        feature_map.reset_parameters()
    beta, alpha = torch.full((H,), -2.3).requires_grad_(), torch.zeros(H).requires_grad_()
    op = Hybrid(*maps, beta, alpha, W, N, D**-0.5, G)
    q, k, v = (torch.randn(1, heads, tokens, D, dtype=dtype) for heads in (H, G, G))
    state = empty_state(op, q, k, v, maps[1].num_features)
    with torch.no_grad():
        filled = hybrid_chunked(op, q, k, v, state)[1]
        one = [x[:, :, -1:] for x in (q, k, v)]
        result = {
            "prefill": (
                best(lambda: hybrid_chunked(op, q, k, v, state), runs),
                best(lambda: softmax(q, k, v, causal=True), runs),
            ),
            "decode step": (
                best(lambda: hybrid_step(op, *one, filled, settled=True), 20 * runs),
                best(lambda: grown(one[0], k, v, *one[1:]), runs),
            ),
        }
    for x in (q, k, v):
        x.requires_grad_()
    result["prefill and backward"] = (
        best(lambda: hybrid_chunked(op, q, k, v, state)[0].sum().backward(), runs),
        best(lambda: softmax(q, k, v, causal=True).sum().backward(), runs),
    )
    return result


def softmax(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def grown(q, k, v, new_k, new_v):
    """A step on the default cache, which is concatenated anew for each token."""
    return softmax(q, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), causal=False)


def elementary(runs):
    """Why masks are sums and products here, and why exp has a floor."""
    x = -10 * torch.rand(1_200_000)
    small, masked, low = torch.full_like(x, -90.0), torch.full_like(x, -1e30), x < -5
    return {
        "exp": best(x.exp, runs),
        "exp(-90)": best(small.exp, runs),
        "exp(-1e30)": best(masked.exp, runs),
        "product": best(lambda: x * x, runs),
        "masked_fill": best(lambda: x.masked_fill(low, 0.0), runs),
    }


if __name__ == "__main__":
    main()
