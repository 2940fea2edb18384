"""Every mechanism against the public implementations that install here, and against PyTorch's fused attention, on this machine.

    make peers                                                                  # installs them, then everything
    python benchmarks/peers.py --methods linear,local --lengths 1024,4096       # a first look
    python benchmarks/peers.py --docs                                           # only the table, from the JSON that is there

`PEERS` has one line for each: both sides get the same tensors and the same settings, and where the functions are the same they
get the same weights, and must agree before they are timed. Then all of them run in turn, in shuffled order, round after round,
in one process; the two sides of a line run one after the other, and a ratio is that of one round, so that what disturbs the
machine disturbs both. A figure is the median over rounds; the interval holds the middle 80 percent of them. Training is a
forward and a backward pass. Both sides are in evaluation mode, without dropout, in both passes.

Where a public layer cannot be called without its projections, ours has the same ones, and there are two figures: of the whole
layers, and with the time of the projections alone, taken in the same round, off both sides. The backward pass of a layer goes
to the tokens and to all parameters, otherwise to queries, keys and values.

A package that cannot be imported is left out by name. A call that fails, takes too much memory, or would take more than
`--limit` seconds is noted with the reason. Ctrl-C ends a run with what is done by then, which is printed and written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import subquad as sq
from subquad import files
from subquad.bench.machine import free_memory

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, too
from benchmarks.common import command, machine, middle, new_table, numbers, write

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
PASSES = ("forward", "training")
FEW_ROUNDS = 3  # beyond 4,096 tokens
WINDOW, FEATURES, LANDMARKS, RANK, CHUNK, HASHES, BUCKETS = 256, 256, 64, 256, 64, 4, 64
BLOCK, RANDOM = 64, 3
CLUSTERED: dict[str, Any] = {"clusters": 100, "bits": 32, "iterations": 10}
SAME = 1e-3  # the largest relative difference between two that compute the same in float32
OUT = Path(__file__).with_name("peers.json")
DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
START, END = "<!-- made from benchmarks/peers.json -->", "<!-- end -->"

PACKAGES = {  # what is imported to see whether a package is there
    "pytorch-fast-transformers": "fast_transformers.attention",
    "performer-pytorch": "performer_pytorch",
    "linear-attention-transformer": "linear_attention_transformer",
    "local-attention": "local_attention",
    "reformer-pytorch": "reformer_pytorch",
    "routing-transformer": "routing_transformer",
    "linformer": "linformer",
    "nystrom-attention": "nystrom_attention",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: a function of (q, k, v), or of the tokens where it is a layer."""

    call: Callable[..., Tensor]
    length_first: bool = False  # q, k, v and the output are (B, N, H, D), else (B, H, N, D)
    layer: nn.Module | None = None
    projections: tuple[nn.Module, ...] = ()  # of the layer, applied to the tokens: timed alone, too


@dataclass(frozen=True)
class Peer:
    """One line of the comparison. `make(length, is_causal)` gives our side and theirs."""

    package: str
    variant: str
    method: str
    make: Callable[[int, bool], tuple[Side, Side]]
    ours: str
    theirs: str
    directions: tuple[bool, ...] = (False, True)  # is_causal
    same: tuple[bool, ...] = (False, True)  # the directions in which both compute the same, up to a constant factor
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.package}, {self.variant}" if self.variant else self.package


def with_projections(call: Callable[[Tensor], Tensor], layer: nn.Module, *projections: nn.Module) -> Side:
    return Side(call, layer=layer, projections=projections)


# Our side.


def ours(config: sq.Config, is_causal: bool, **weights: Tensor) -> Side:
    """The mechanism with `weights` in the place of its own."""
    module = config.build(heads=HEADS, head_dim=HEAD_DIM).eval().requires_grad_(False)
    take(module, weights)
    if config.shares_query_and_key:
        return Side(lambda q, _, v: module(q, q, v, is_causal=is_causal))
    return Side(lambda q, k, v: module(q, k, v, is_causal=is_causal))


def our_layer(config: sq.Config, is_causal: bool, linears: dict[str, nn.Linear], **weights: Tensor) -> Side:
    """The layer with the other side's projections: their very modules. One that is not there is left out here, too."""
    layer = sq.Attention(WIDTH, HEADS, config).eval()
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if getattr(layer, name) is not None:
            setattr(layer, name, linears.get(name, nn.Identity()))
    take(layer.mechanism, weights)
    return with_projections(lambda x: layer(x, is_causal=is_causal), layer, *linears.values())


@torch.no_grad()
def take(module: nn.Module, weights: dict[str, Tensor]) -> None:
    own = module.state_dict(keep_vars=True)
    for name, weight in weights.items():
        own[name].copy_(weight)


# Their side: one function a kind of peer.


def fast(attention: Any, length: int, is_causal: bool, all_pairs: bool = False) -> Side:
    """A module of fast-transformers, its masks made beforehand."""
    masking = import_module("fast_transformers.masking")
    every = masking.LengthMask(torch.tensor([length]))
    size = length if all_pairs else 1  # most ask only whether it is full
    mask = masking.TriangularCausalMask(length) if is_causal else masking.FullMask(size)
    attention.eval()
    return Side(lambda q, k, v: attention(q, k, v, mask, every, every), length_first=True)


def fast_kernelized(length: int, is_causal: bool, features: Callable[[int], nn.Module] | None = None) -> tuple[Any, Side]:
    """Its linear attention, the random features drawn once: it would draw anew in every call."""
    module = import_module("fast_transformers.attention")
    attention = (module.CausalLinearAttention if is_causal else module.LinearAttention)(HEAD_DIM, features)
    attention.feature_map.new_feature_map("cpu")
    attention.feature_map.new_feature_map = lambda device: None
    return attention, fast(attention, length, is_causal)


def fast_linear(length: int, is_causal: bool) -> tuple[Side, Side]:
    return ours(sq.Linear(), is_causal), fast_kernelized(length, is_causal)[1]


def fast_favor(length: int, is_causal: bool) -> tuple[Side, Side]:
    favor = import_module("fast_transformers.feature_maps").Favor.factory(n_dims=FEATURES)
    attention, side = fast_kernelized(length, is_causal, favor)
    config = sq.Performer(kind="hyperbolic", features=FEATURES // 2)
    return ours(config, is_causal, projection=attention.feature_map.omega.T), side


def fast_fourier(length: int, is_causal: bool) -> tuple[Side, Side]:
    fourier = import_module("fast_transformers.feature_maps").RandomFourierFeatures.factory(n_dims=128, softmax_temp=1.0)
    attention, side = fast_kernelized(length, is_causal, fourier)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return side.call(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)

    return ours(sq.RFA(features=64), is_causal, projection=attention.feature_map.omega.T), replace(side, call=call)


def fast_local(length: int, is_causal: bool) -> tuple[Side, Side]:
    attention = import_module("fast_transformers.attention").LocalAttention(2 * WINDOW + 1, attention_dropout=0.0)
    return ours(sq.Local(window=WINDOW), is_causal), fast(attention, length, is_causal, all_pairs=True)


def fast_reformer(length: int, is_causal: bool) -> tuple[Side, Side]:
    module = import_module("fast_transformers.attention")
    attention = module.ReformerAttention(chunk_size=CHUNK, bits=BUCKETS // 2, rounds=HASHES, attention_dropout=0.0)
    config = sq.Reformer(buckets=BUCKETS, chunk=CHUNK, rounds=HASHES)
    return ours(config, is_causal), fast(attention, length, is_causal)


def fast_clustered(topk: int) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        module = import_module("fast_transformers.attention")
        options = {**CLUSTERED, "hash_bias": False, "attention_dropout": 0.0}
        attention = module.ImprovedClusteredAttention(topk=topk, **options) if topk else module.ClusteredAttention(**options)
        return ours(sq.Clustered(topk=topk, **CLUSTERED), is_causal), fast(attention, length, is_causal)

    return make


def performer_linear(length: int, is_causal: bool) -> tuple[Side, Side]:
    module = import_module("performer_pytorch.performer_pytorch")
    attend = module.causal_linear_attention_noncuda if is_causal else module.linear_attention
    return ours(sq.Linear(), is_causal), Side(lambda q, k, v: attend(F.elu(q) + 1, F.elu(k) + 1, v))


def performer(config: sq.Config, **options: object) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        attention = import_module("performer_pytorch").FastAttention(HEAD_DIM, FEATURES, causal=is_causal, **options).eval()
        weights = {"projection": attention.projection_matrix} if isinstance(config, sq.Performer) else {}
        return ours(config, is_causal, **weights), Side(attention)

    return make


def efficient(blind_spot: int) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        module = import_module("linear_attention_transformer.linear_attention_transformer")
        if is_causal:
            return ours(sq.Efficient(), True), Side(lambda *x: module.causal_linear_attn(*x, bucket_size=blind_spot))
        return ours(sq.Efficient(), False), Side(module.linear_attn)

    return make


def local(block: int) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        blocks = WINDOW // block
        attention = import_module("local_attention").LocalAttention(
            block, causal=is_causal, look_backward=blocks, look_forward=0 if is_causal else blocks, exact_windowsize=True
        )
        return ours(sq.Local(window=WINDOW), is_causal), Side(attention.eval())

    return make


def reformer(**options: bool) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        module = import_module("reformer_pytorch")
        attention = module.LSHAttention(bucket_size=CHUNK, n_hashes=HASHES, causal=is_causal, **options).eval()
        config = sq.Reformer(buckets=length // CHUNK, chunk=CHUNK, rounds=HASHES)
        return ours(config, is_causal), Side(lambda q, _, v: attention(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v))

    return make


def routing(length: int, is_causal: bool) -> tuple[Side, Side]:
    module, clusters = import_module("routing_transformer.routing_transformer"), length // (2 * CHUNK)
    attention = module.KmeansAttention(clusters, 2 * CHUNK, HEADS, HEAD_DIM, causal=is_causal).eval().requires_grad_(False)
    return ours(sq.Routing(clusters=clusters, chunk=CHUNK), is_causal), Side(lambda q, k, v: attention(q, k, v)[0])


# Layers that have their projections inside.


def linformer(length: int, is_causal: bool) -> tuple[Side, Side]:
    layer = import_module("linformer").LinformerSelfAttention(WIDTH, length, k=RANK, heads=HEADS).eval()
    linears = {"q_proj": layer.to_q, "k_proj": layer.to_k, "v_proj": layer.to_v, "out_proj": layer.to_out}
    config = sq.Linformer(rank=RANK, max_length=length, share="head")
    mine = our_layer(config, is_causal, linears, key_projection=layer.proj_k.T, value_projection=layer.proj_v.T)
    return mine, with_projections(layer, layer, *linears.values())


def nystrom(conv: int | None) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        layer = import_module("nystrom_attention").NystromAttention(
            WIDTH, HEAD_DIM, HEADS, num_landmarks=LANDMARKS, residual=conv is not None, residual_conv_kernel=conv or 1
        )
        linears = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        for linear, weight in zip(linears.values(), layer.to_qkv.weight.chunk(3), strict=True):
            take(linear, {"weight": weight})
        linears["out_proj"] = layer.to_out[0]
        weights = {} if conv is None else {"kernel": layer.res_conv.weight[:, 0, :, 0]}
        mine = our_layer(sq.Nystrom(landmarks=LANDMARKS, conv=conv), is_causal, linears, **weights)
        return mine, with_projections(layer.eval(), layer, layer.to_qkv, layer.to_out[0])

    return make


def published(layer: Any) -> dict[str, nn.Linear]:
    """The projections of Hugging Face's self-attention; the one of the output is in another module there."""
    return {"q_proj": layer.query, "k_proj": layer.key, "v_proj": layer.value}


def hf_config(model: str, **options: object) -> Any:
    return getattr(import_module("transformers"), f"{model}Config")(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_probs_dropout_prob=0.0, **options
    )


def hf_layer(family: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def hf_nystrom(conv: int | None) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        options = {"num_landmarks": LANDMARKS, "segment_means_seq_len": length, "conv_kernel_size": conv or 1}
        layer = hf_layer("nystromformer", "NystromformerSelfAttention")(hf_config("Nystromformer", **options)).eval()
        weights = {} if conv is None else {"kernel": layer.conv.weight[:, 0, :, 0]}
        if conv is None:
            del layer.conv
            layer.conv_kernel_size = None
        linears = published(layer)
        mine = our_layer(sq.Nystrom(landmarks=LANDMARKS, conv=conv), is_causal, linears, **weights)
        return mine, with_projections(lambda x: layer(x)[0], layer, *linears.values())

    return make


def hf_longformer(num_global: int) -> Callable[[int, bool], tuple[Side, Side]]:
    def make(length: int, is_causal: bool) -> tuple[Side, Side]:
        config = hf_config("Longformer", attention_window=[2 * WINDOW], num_hidden_layers=1)
        layer = hf_layer("longformer", "LongformerSelfAttention")(config, layer_id=0).eval()
        linears, weights = published(layer), {}
        if num_global:
            parts = [(name, part) for name in ("query", "key", "value") for part in ("weight", "bias")]
            weights = {f"global_{name}_{part}": getattr(getattr(layer, f"{name}_global"), part) for name, part in parts}
        mechanism = sq.Longformer(window=WINDOW, num_global=num_global, global_projections=num_global > 0)
        is_global = torch.arange(length)[None] < num_global
        mask, no_pads = 10000.0 * is_global, torch.zeros_like(is_global)

        def call(x: Tensor) -> Tensor:
            return layer(x, mask, no_pads, is_global, num_global > 0)[0]

        return our_layer(mechanism, is_causal, linears, **weights), with_projections(call, layer, *linears.values())

    return make


def hf_bigbird(length: int, is_causal: bool) -> tuple[Side, Side]:
    config = hf_config("BigBird", block_size=BLOCK, num_random_blocks=RANDOM, max_position_embeddings=length)
    layer = hf_layer("big_bird", "BigBirdBlockSparseAttention")(config, seed=0).eval()
    masks = hf_layer("big_bird", "BigBirdModel").create_masks_for_block_sparse_attn(torch.ones(1, length), BLOCK)
    blocked, band, rows, columns = masks
    linears = published(layer)
    mine = our_layer(sq.BigBird(block=BLOCK, random=RANDOM), is_causal, linears)
    return mine, with_projections(lambda x: layer(x, band, rows, columns, blocked, blocked)[0], layer, *linears.values())


def hf_reformer(length: int, is_causal: bool) -> tuple[Side, Side]:
    config = import_module("transformers").ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=HEAD_DIM,
        num_buckets=BUCKETS,
        num_hashes=HASHES,
        lsh_attn_chunk_length=CHUNK,
        lsh_attention_probs_dropout_prob=0.0,
        is_decoder=is_causal,
    )
    layer = hf_layer("reformer", "LSHSelfAttention")(config).eval()
    linears = {"q_proj": layer.query_key, "v_proj": layer.value}
    mine = our_layer(sq.Reformer(buckets=BUCKETS, chunk=CHUNK, rounds=HASHES), is_causal, linears)
    return mine, with_projections(lambda x: layer(x)[0], layer, *linears.values())


FAST = "pytorch-fast-transformers"
BOTH, ONE_WAY, CAUSAL, NEVER = (False, True), (False,), (True,), ()
SEES = f"every query sees the {2 * WINDOW + 1} keys within {WINDOW} tokens, when causal the {WINDOW + 1} up to its own"
NYSTROM = f"{LANDMARKS} landmarks, 6 steps of the pseudo-inverse"
SHARED_START = "its pseudo-inverse starts from one number for all heads, ours from one for each"
LSH = f"chunks of {CHUNK}, {HASHES} rounds"
OWN_HASHES = "each side draws its own hashes"
LEAKS = "the published causal form chooses keys by chunks that later tokens move, ours by the last tokens of a bucket"
RUNNING = "when causal it divides by one sum for all channels, ours by one for each"

# fmt: off
PEERS = (
    Peer(FAST, "", "linear", fast_linear, "elu + 1", "elu + 1; causal: its C++ kernel"),
    Peer("performer-pytorch", "its linear attention of elu + 1", "linear", performer_linear, "elu + 1", "elu + 1"),
    Peer(
        "linear-attention-transformer", "", "efficient", efficient(1), "no options",
        "causal: no blind spot, as in its layer by default", same=ONE_WAY, note=RUNNING,
    ),
    Peer(
        "linear-attention-transformer", "blind spot", "efficient", efficient(64), "no options",
        "a blind spot of up to 64 tokens", directions=CAUSAL, same=NEVER,
        note=f"{RUNNING}; a query does not see the 64 tokens of its own block",
    ),
    Peer(
        "performer-pytorch", "no projection", "efficient", performer(sq.Efficient(), no_projection=True),
        "no options", "no_projection", same=ONE_WAY, note=RUNNING,
    ),
    Peer(
        "performer-pytorch", "", "performer", performer(sq.Performer(features=FEATURES)),
        f"{FEATURES} positive features", f"{FEATURES} positive features, the same directions", same=NEVER,
        note="it divides the keys' features by the largest of the sequence, later ones included, and adds 1e-4 to each, "
        "which outweighs them on these inputs; without the 1e-4 both are the same",
    ),
    Peer(
        "performer-pytorch", "ReLU", "performer",
        performer(sq.Performer(kind="relu", features=FEATURES), generalized_attention=True),
        f"{FEATURES} ReLU features", f"{FEATURES} ReLU features, the same directions",
    ),
    Peer(
        FAST, "Favor", "performer", fast_favor, f"{FEATURES // 2} directions, hyperbolic: {FEATURES} features",
        f"Favor with n_dims={FEATURES}, the same {FEATURES // 2} directions, drawn once",
    ),
    Peer(
        FAST, "random Fourier features", "rfa", fast_fourier, "64 directions, 128 features, no gate",
        "linear attention of 128 random Fourier features of unit vectors, the same directions, drawn once",
    ),
    Peer(
        "local-attention", "blocks of 256", "local", local(256), f"window={WINDOW}: {SEES}",
        "window_size=256, one block to each side, exact_windowsize: the same keys, by masking 768",
    ),
    Peer(
        "local-attention", "blocks of 128", "local", local(128), f"window={WINDOW}: {SEES}",
        "window_size=128, two blocks to each side, exact_windowsize: the same keys, by masking 640",
    ),
    Peer(
        FAST, "", "local", fast_local, f"window={WINDOW}: {SEES}",
        f"local_context={2 * WINDOW + 1}: the same keys; it needs a mask of all pairs, which is made beforehand",
    ),
    Peer(
        "transformers", "Longformer, no global token", "longformer", hf_longformer(0), f"window={WINDOW}, num_global=0",
        f"attention_window={2 * WINDOW}: the same keys", directions=ONE_WAY,
    ),
    Peer(
        "transformers", "Longformer, one global token", "longformer", hf_longformer(1),
        f"window={WINDOW}, num_global=1, global_projections", f"attention_window={2 * WINDOW}, the first token global",
        directions=ONE_WAY, note="only the three projections of all tokens are taken off, not those for the global token",
    ),
    Peer(
        "transformers", "BigBird", "bigbird", hf_bigbird, f"blocks of {BLOCK}, a window of 3, {RANDOM} random, 2 global",
        f"the same numbers: {5 + RANDOM} blocks for every block of queries", directions=ONE_WAY, same=NEVER,
        note="in evaluation its random blocks are all block 0, the same work; ours are drawn over the whole sequence",
    ),
    Peer(
        "reformer-pytorch", "", "reformer",
        reformer(attend_across_buckets=False, allow_duplicate_attention=False, random_rotations_per_head=True),
        f"{LSH}, N/{CHUNK} buckets",
        f"{LSH}, N/{CHUNK} buckets, own rotations a head, other buckets masked, duplicates counted once",
        same=NEVER, note=f"{OWN_HASHES}; its scores are {HEAD_DIM ** 0.5:.0f} times smaller; {LEAKS}",
    ),
    Peer(
        "reformer-pytorch", "defaults", "reformer", reformer(), f"{LSH}, N/{CHUNK} buckets",
        f"{LSH}, N/{CHUNK} buckets", same=NEVER,
        note="it does less: other buckets are not masked, duplicates count double, all heads share their rotations",
    ),
    Peer(
        "transformers", "Reformer", "reformer", hf_reformer, f"{LSH}, {BUCKETS} buckets", f"{LSH}, {BUCKETS} buckets",
        same=NEVER,
        note=f"{OWN_HASHES}; it does less: other buckets are not masked, duplicates count double; {LEAKS}",
    ),
    Peer(
        FAST, "", "reformer", fast_reformer, f"{LSH}, {BUCKETS} buckets", f"{LSH}, {BUCKETS} buckets", same=NEVER,
        note=f"{OWN_HASHES}; it does less: it averages the rounds, sees its own key, does not mask other buckets; {LEAKS}",
    ),
    Peer(
        "routing-transformer", "", "routing", routing,
        f"N/{2 * CHUNK} clusters, chunks of {CHUNK}: a query sees up to {2 * CHUNK} keys of its cluster",
        f"N/{2 * CHUNK} clusters of window_size={2 * CHUNK}: each attends among the {2 * CHUNK} tokens nearest to it",
        same=NEVER, note="its clusters choose their tokens, so that a token may be in several or in none; in ours it is in one",
    ),
    Peer(
        FAST, "improved clustered", "clustered", fast_clustered(32), "100 clusters, 32 bits, 10 iterations, topk=32",
        "the same numbers, no hash bias", directions=ONE_WAY, same=NEVER,
        note="each side draws its own hashes and first centroids",
    ),
    Peer(
        FAST, "clustered", "clustered", fast_clustered(0), "100 clusters, 32 bits, 10 iterations, topk=0",
        "the same numbers, no hash bias", directions=ONE_WAY, same=NEVER,
        note="each side draws its own hashes and first centroids",
    ),
    Peer("linformer", "", "linformer", linformer, f"rank={RANK}, one E and one F", f"k={RANK}, the same", directions=ONE_WAY),
    Peer(
        "nystrom-attention", "", "nystrom", nystrom(None), NYSTROM, NYSTROM, directions=ONE_WAY, same=NEVER, note=SHARED_START,
    ),
    Peer(
        "nystrom-attention", "convolution", "nystrom", nystrom(33), f"{NYSTROM}, a convolution of 33", "the same",
        directions=ONE_WAY, same=NEVER, note=SHARED_START,
    ),
    Peer(
        "transformers", "Nystromformer", "nystrom", hf_nystrom(None), NYSTROM, f"{NYSTROM}, its convolution switched off",
        directions=ONE_WAY, same=NEVER, note=SHARED_START,
    ),
    Peer(
        "transformers", "Nystromformer, convolution", "nystrom", hf_nystrom(65), f"{NYSTROM}, a convolution of 65", "the same",
        directions=ONE_WAY, same=NEVER, note=SHARED_START,
    ),
)
# fmt: on


# The run.


@dataclass
class Line:
    """A peer at one length, direction and pass."""

    peer: Peer
    runs: dict[str, Callable[[], object]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: str = ""
    found: dict[str, float] = field(default_factory=dict)  # how far apart they are


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.docs:
        write_docs()
        return
    peers, left_out = available([p for p in PEERS if p.method in options.methods and p.package in options.peers])
    results: dict[str, Any] = {
        "command": command(__file__, arguments),
        "machine": machine(),
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"},
        "finished": False,
        "versions": {package: metadata.version(package) for package in dict.fromkeys(p.package for p in peers)},
        "left_out": left_out,
        "without_a_peer": [m for m in sq.methods() if m not in {"softmax", *(p.method for p in PEERS)}],
        "peers": [{"peer": p.name, "method": p.method, "ours": p.ours, "theirs": p.theirs, "note": p.note} for p in peers],
        "time": [],
    }
    try:
        with bounded_memory():
            for length in options.lengths:
                for is_causal, which in ((c, w) for c in (False, True) for w in options.passes):
                    chosen = [p for p in peers if is_causal in p.directions]
                    results["time"] += measure(chosen, length, is_causal, which, options, results["time"])
                if options.out:
                    write(options.out, results)
        results["finished"] = True
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted; this is what was done.")
    if options.out:
        write(options.out, results)
    show(results)
    if not results["finished"]:
        raise SystemExit(130)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = list(dict.fromkeys(peer.method for peer in PEERS))
    parser.add_argument("--methods", default=",".join(methods), help="names, between commas")
    parser.add_argument("--peers", default=",".join(PACKAGES), help="packages, between commas")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward, training or both, between commas")
    parser.add_argument("--rounds", type=int, default=11, help=f"up to 4,096 tokens; {FEW_ROUNDS} at most for longer sequences")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a call may take")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument(
        "--docs", action="store_true", help=f"measure nothing; write the table in docs/{DOCS.name} from {OUT.name}"
    )
    options = parser.parse_args(arguments)
    for name, known in (("methods", methods), ("peers", PACKAGES), ("passes", PASSES)):
        chosen = getattr(options, name).split(",")
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"--{name} are among {', '.join(known)}; got {', '.join(unknown)}.")
        setattr(options, name, chosen)
    try:
        options.lengths = sorted(set(numbers(options.lengths)))
    except ValueError:
        parser.error(f"--lengths are whole numbers, between commas; got {options.lengths!r}.")
    if min(*options.lengths, options.rounds) < 1:
        parser.error("--lengths and --rounds are at least 1.")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out is a file in a directory that exists; got {options.out}.")
    return options


def available(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """The peers whose package is here, and why the others are left out."""
    left_out = {}
    for package in dict.fromkeys(peer.package for peer in peers):
        if why := missing(package):
            left_out[package] = why
    return [peer for peer in peers if peer.package not in left_out], left_out


def missing(package: str) -> str:
    """Why it cannot be imported; empty if it can."""
    try:
        with quietly():
            import_module(PACKAGES[package])
    except Exception as error:  # one that is too old for this Python or PyTorch may raise anything
        return reason(error)
    return ""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Old packages warn, and print, about what is no matter here."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What would not fit into memory fails, and can be noted, instead of ending the process. On Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData")) * 1024
    most = int(used + 0.8 * free_memory())
    resource.setrlimit(resource.RLIMIT_DATA, (most if before[1] < 0 else min(most, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def reason(error: BaseException) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def measure(
    peers: Sequence[Peer], length: int, is_causal: bool, which: str, options: argparse.Namespace, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of all peers at one length, direction and pass."""
    if not peers:
        return []
    rounds = options.rounds if length <= 4096 else min(options.rounds, FEW_ROUNDS)
    training = which == "training"
    torch.manual_seed(0)
    drawn = torch.randn(3, 1, HEADS, length, HEAD_DIM)
    inputs = {
        "heads first": [x.clone().requires_grad_(training) for x in drawn],
        "length first": [x.transpose(1, 2).contiguous().requires_grad_(training) for x in drawn],
        "tokens": [torch.randn(1, length, WIDTH, requires_grad=training)],
    }
    lines = [Line(peer) for peer in peers]
    for line in lines:
        line.failed = too_slow(
            [r for r in before if identity(r) == (line.peer.method, line.peer.name, is_causal) and r["pass"] == which],
            length,
            options.limit,
        )
    fused = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    sdpa = Line(peers[0], {"sdpa": runner(fused, inputs["heads first"], [], training)})
    label = f"{length:,} tokens, {'causal, ' if is_causal else ''}{which}"
    order = random.Random(0)
    with quietly(), Progress(transient=True, console=Console(stderr=True)) as progress, torch.set_grad_enabled(training):
        task = progress.add_task(label, total=(rounds + 1) * len(lines))
        for line in lines:
            attempt(start, line, length, is_causal, training, inputs, options.limit)
            progress.advance(task)
        run(sdpa, False)
        sdpa.seconds.clear()
        for number in range(rounds):
            run(sdpa, False)
            for line in order.sample(lines, len(lines)):
                attempt(run, line, number % 2 == 1)
                progress.advance(task)
    return [row(line, length, is_causal, which, sdpa.seconds["sdpa"]) for line in lines]


def too_slow(shorter: list[dict[str, Any]], length: int, limit: float) -> str:
    """Why a peer is not tried, from its rows at shorter lengths; empty if it is. None of them claims more than linear time."""
    if any(TimeoutError.__name__ in r.get("failed", "") for r in shorter):
        return f"{TimeoutError.__name__}: not tried, since a shorter one took more than {limit:.0f} s"
    expected = max((r.get("peer_milliseconds", 0.0) / 1e3 * length / r["length"] for r in shorter), default=0.0)
    return f"{TimeoutError.__name__}: not tried, a call would take about {expected:.0f} s" if expected > limit else ""


def attempt(do: Callable[..., None], line: Line, *arguments: object) -> None:
    """What fails is noted, and not tried again."""
    if line.failed:
        return
    try:
        do(line, *arguments)
    except Exception as error:
        line.failed = reason(error)
        line.runs.clear()


def start(line: Line, length: int, is_causal: bool, training: bool, inputs: dict[str, list[Tensor]], limit: float) -> None:
    """Build both sides, run each once, and compare what they give."""
    peer = line.peer
    sides = dict(zip(("ours", "peer"), peer.make(length, is_causal), strict=True))
    given = {name: inputs[takes(side)] for name, side in sides.items()}
    for name, side in sides.items():
        weights = [p for p in side.layer.parameters() if p.requires_grad] if side.layer and training else []
        line.runs[name] = runner(side.call, given[name], weights, training)
        if side.projections:
            line.runs[f"{name}_projections"] = runner(applied(side.projections), given[name], weights, training)
    run(line, False)
    slowest = max(seconds[0] for seconds in line.seconds.values())
    line.seconds.clear()
    if slowest > limit:
        raise TimeoutError(f"a call took {slowest:.0f} s")
    with torch.no_grad():
        outs = {name: side.call(*given[name]) for name, side in sides.items()}
    first, second = (outs[name].transpose(1, 2) if side.length_first else outs[name] for name, side in sides.items())
    if first.shape != second.shape or not (first.isfinite().all() and second.isfinite().all()):
        raise ValueError(f"not comparable: shapes {tuple(first.shape)} and {tuple(second.shape)}, or not finite")
    factor = float((first * second).sum() / second.square().sum())
    difference = float((first - factor * second).norm() / first.norm())
    line.found = {"relative_difference": difference, "factor": factor}
    if is_causal in peer.same and not difference <= SAME:
        raise ValueError(f"not the same function: off by {difference:.2e}")


def takes(side: Side) -> str:
    return "tokens" if side.layer else "length first" if side.length_first else "heads first"


def applied(projections: Sequence[nn.Module]) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [projection(x) for projection in projections]


def runner(
    call: Callable[..., Tensor | list[Tensor]], inputs: Sequence[Tensor], weights: Sequence[Tensor], training: bool
) -> Callable[[], object]:
    """Forward, or forward and backward with a gradient that is drawn beforehand."""
    if not training:
        return lambda: call(*inputs)
    gradients: list[Tensor] = []

    def both() -> object:
        out = call(*inputs)
        outs = out if isinstance(out, list) else [out]
        if not gradients:  # in the first call, which is not timed
            gradients.extend(torch.randn_like(o) for o in outs)
        return torch.autograd.grad(outs, [*inputs, *weights], gradients, allow_unused=True)

    return both


def run(line: Line, backwards: bool) -> None:
    """All of a line's calls once, in turn; every second round the other way round."""
    for name in sorted(line.runs, reverse=backwards):
        begin = time.perf_counter()
        line.runs[name]()
        line.seconds.setdefault(name, []).append(time.perf_counter() - begin)


def row(line: Line, length: int, is_causal: bool, which: str, sdpa: list[float]) -> dict[str, Any]:
    peer = line.peer
    found: dict[str, Any] = {"length": length, "method": peer.method, "peer": peer.name, "is_causal": is_causal, "pass": which}
    if line.failed:
        return {**found, "failed": line.failed}
    s = line.seconds
    found |= {"rounds": len(s["ours"]), "same_function": is_causal in peer.same, **line.found}
    found |= {f"{who}_milliseconds": milliseconds(taken) for who, taken in s.items()}
    found |= {"sdpa_milliseconds": milliseconds(sdpa), **ratio("times_peer", s["peer"], s["ours"])}
    if "ours_projections" in s:
        net = {who: [a - b for a, b in zip(s[who], s[f"{who}_projections"], strict=True)] for who in ("ours", "peer")}
        found |= ratio("times_peer_without_projections", net["peer"], net["ours"])
        return {**found, **ratio("times_sdpa_without_projections", sdpa, net["ours"])}
    return {**found, **ratio("times_sdpa", sdpa, s["ours"])}


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def ratio(name: str, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """By round. Where projections take nearly all the time, what is left may fall below 0: then there is no ratio."""
    ratios = [t / o for t, o in zip(theirs, ours, strict=True) if t > 0 and o > 0]
    if len(ratios) <= len(ours) // 2:
        return {name: None, f"{name}_80_percent": None}
    return {name: round(statistics.median(ratios), 3), f"{name}_80_percent": [round(edge, 3) for edge in middle(ratios)]}


# What is told.


def goal(row: dict[str, Any]) -> float:
    """How many times faster we want to be."""
    if row["length"] < 4096:
        return 1.0
    return {"linear": 3.0, "performer": 10.0}.get(row["method"], 2.0) if row["is_causal"] else 2.0


def reached(row: dict[str, Any]) -> float | None:
    """Without projections where there are any."""
    return row.get("times_peer_without_projections", row.get("times_peer"))


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def show(results: dict[str, Any]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(results["machine"])
    for package, why in results["left_out"].items():
        console.print(f"Left out: {package}. {why}", markup=False)
    title = f"B=1, H={HEADS}, D={HEAD_DIM}, float32; times faster than the peer, in brackets without projections"
    headings = "tokens", "pass", "causal", "method", "peer", "ours ms", "peer ms", "times", "80% of rounds", "goal"
    table = new_table(title, *headings)
    for r in results["time"]:
        cells = f"{r['length']:,}", r["pass"], "yes" if r["is_causal"] else "no", r["method"], r["peer"]
        if "failed" in r:
            table.add_row(*cells, "-", "-", "-", r["failed"], "")
            continue
        low, high = r["times_peer_80_percent"]
        value = reached(r)
        mark = "" if value is None or value >= goal(r) else f"below {goal(r):.0f}"
        speed = f"{r['ours_milliseconds']:.2f}", f"{r['peer_milliseconds']:.2f}"
        table.add_row(*cells, *speed, cell(r), f"{low:.2f} - {high:.2f}", mark)
    console.print(table)


def cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "-"
    net = f" ({figure(row['times_peer_without_projections'])})" if "times_peer_without_projections" in row else ""
    return figure(row["times_peer"]) + net


def section(results: dict[str, Any] | None) -> str:
    """What stands between the marks in docs/performance.md."""
    if results is None:
        return "Not measured yet: `make peers` does it."
    by = {(*identity(r), r["pass"], r["length"]): r for r in results["time"]}
    columns = sorted({(r["pass"], r["length"]) for r in results["time"]})
    order = [(p["method"], p["peer"], is_causal) for p in results["peers"] for is_causal in (False, True)]
    where, shape = results["machine"], results["shape"]
    heads = [f"{which} {n:,}" for which, n in columns]
    lines = [
        f"{where['processor']}, {where['cores']} cores, {where['threads']} threads, {where['system']}, "
        f"PyTorch {where['torch']}, Python {where['python']}. "
        f"Batch {shape['batch']}, {shape['heads']} heads of {shape['head_dim']} channels, {shape['dtype']}.",
        "",
        " | ".join(["| method", "against", "causal", *heads]) + " |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for method, name, is_causal in sorted({identity(r) for r in results["time"]}, key=order.index):
        cells = [cell(by.get((method, name, is_causal, *column))) for column in columns]
        lines.append(" | ".join([f"| `{method}`", name, "yes" if is_causal else "no", *cells]) + " |")
    lines += ["", "Settings, ours and then theirs:", ""]
    for p in results["peers"]:
        note = f" {p['note'][0].upper()}{p['note'][1:]}." if p["note"] else ""
        lines.append(f"- `{p['method']}`, {p['peer']}: {p['ours']} / {p['theirs']}.{note}")
    failed = [f"- {told(r)}: {r['failed']}" for r in results["time"] if "failed" in r]
    lines += ["", "What did not run:", "", *failed] if failed else []
    left = [f"- {package}: {why}" for package, why in results["left_out"].items()]
    lines += ["", "Left out, since they could not be imported:", "", *left] if left else []
    alone = ", ".join(f"`{method}`" for method in results["without_a_peer"])
    lines += ["", f"No implementation in these packages: {alone}."]
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    return "\n".join([*lines, "", f"Versions: {versions}. The command: `{results['command']}`."])


def identity(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["method"], row["peer"], row["is_causal"]


def told(row: dict[str, Any]) -> str:
    return f"`{row['method']}`, {row['peer']}, {'causal, ' if row['is_causal'] else ''}{row['pass']} at {row['length']:,}"


def with_section(text: str, results: dict[str, Any] | None) -> str:
    before, rest = text.split(START)
    return f"{before}{START}\n{section(results)}\n{END}{rest.split(END, 1)[1]}"


def measured(path: Path = OUT) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def write_docs() -> None:
    files.write(DOCS, with_section(DOCS.read_text(), measured()).encode())


if __name__ == "__main__":
    main()
