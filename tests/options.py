"""Options that the contract is tested with, by mechanism: small ones in place of the defaults, and variants beside those.

A mechanism that is not listed is tested with its default options.
"""

OPTIONS = {
    "bigbird": (
        {"block": 8},
        (
            {"block": 5, "window": 1, "random": 2, "globals": 3},
            {"block": 4, "mode": "etc", "globals": 1},
            {"block": 6, "random": 1, "globals": 0},
        ),
    ),
    "clustered": ({"clusters": 5, "topk": 4, "bits": 16, "iterations": 3}, ({"topk": 0}, {"clusters": 400})),
    "hybrid": ({"window": 5}, ({"map": "t2r", "features": 7, "window": 1}, {"map": "linear", "window": 0}, {"window": 100})),
    "induced": ({"points": 11}, ({"points": 2},)),
    "linformer": (
        {"rank": 5, "max_length": 300},
        ({"share": "none", "rank": 3}, {"share": "kv", "rank": 13}, {"share": "layer"}),
    ),
    "local": ({"window": 12}, ({"window": 5, "dilation": 3}, {"window": 100})),
    "longformer": (
        {"window": 12},
        (
            {"num_global": 3, "dilation": 2},
            {"num_global": 0, "window": 4},
            {"num_global": 2, "global_projections": True},
        ),
    ),
    "nystrom": ({"landmarks": 3}, ({"landmarks": 16}, {"conv": 5})),
    "performer": (
        {"features": 64},
        (
            {"kind": "hyperbolic", "features": 32},
            {"kind": "trig", "features": 64},
            {"kind": "relu", "features": 64, "orthogonal": False},
            {"kind": "favor++", "features": 64, "regularized": True},
            {"kind": "favor++", "features": 64, "p": 0.5},
        ),
    ),
    "plain": ({}, ({"normalize": "none"},)),
    "pooled": ({"stride": 6, "window": 9}, ({"stride": 1, "window": 0}, {"stride": 40, "window": 3})),
    "reformer": ({"buckets": 6, "chunk": 8, "rounds": 3}, ({"shared_qk": False}, {"buckets": 2, "chunk": 3, "rounds": 1})),
    "rfa": ({}, ({"gated": True, "features": 16},)),
    "routing": ({"clusters": 5, "chunk": 8}, ({"clusters": 2, "chunk": 5},)),
    "sparse_fixed": (
        {},
        ({"stride": 7, "summary": 2}, {"stride": 64, "summary": 3, "heads": "split"}, {"stride": 4, "summary": 4}),
    ),
    "sparse_strided": ({}, ({"stride": 7}, {"stride": 5, "heads": "split"}, {"heads": "split"})),
    "svd": ({"rank": 3}, ({"rank": 11},)),
    "t2r": ({"features": 7}, ({"features": 3},)),
}


def small(name):
    """Options that make a mechanism small enough for the contract."""
    return OPTIONS.get(name, ({}, ()))[0]


def variants(name):
    """Options besides the small ones."""
    return OPTIONS.get(name, ({}, ()))[1]
