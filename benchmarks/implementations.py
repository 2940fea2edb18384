"""The public implementations that `peers.py` compares with, each with ours: one entry per peer in `PEERS`, at the end.

Both sides of an entry have the same settings and, if they compute the same function, the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subquad as sq

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
WINDOW, FEATURES, LANDMARKS, RANK, CHUNK, HASHES, BUCKETS = 256, 256, 64, 256, 64, 4, 64
BLOCK, RANDOM = 64, 3
CLUSTERED: dict[str, Any] = {"clusters": 100, "bits": 32, "iterations": 10}

PACKAGES = {  # package -> module to import
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
    """One side of a comparison: a function of (q, k, v), or of the tokens if it is a layer."""

    call: Callable[..., Tensor]
    length_first: bool = False  # q, k, v and the output are (B, N, H, D), else (B, H, N, D)
    layer: nn.Module | None = None
    projections: tuple[nn.Module, ...] = ()  # of the layer, applied to the tokens; also timed by themselves


Pair = tuple[Side, Side]  # ours and theirs
Make = Callable[[int, bool], Pair]  # from the length and is_causal


@dataclass(frozen=True)
class Peer:
    """One entry of the comparison."""

    package: str
    variant: str
    method: str
    make: Make
    ours: str
    theirs: str
    directions: tuple[bool, ...] = (False, True)  # is_causal
    same: tuple[bool, ...] = (
        False,
        True,
    )  # is_causal for which both compute the same, up to a constant factor
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.package}, {self.variant}" if self.variant else self.package


def with_projections(call: Callable[[Tensor], Tensor], layer: nn.Module, *projections: nn.Module) -> Side:
    return Side(call, layer=layer, projections=projections)


# Our side.


def ours(mechanism: sq.Mechanism, is_causal: bool, **weights: Tensor) -> Side:
    """The mechanism, with `weights` instead of its own."""
    module = mechanism.build(heads=HEADS, head_dim=HEAD_DIM).eval().requires_grad_(False)
    copy_weights(module, weights)
    if mechanism.shares_query_and_key:
        return Side(lambda q, _, v: module(q, q, v, is_causal=is_causal))
    return Side(lambda q, k, v: module(q, k, v, is_causal=is_causal))


def our_layer(mechanism: sq.Mechanism, is_causal: bool, linears: dict[str, nn.Linear], **weights: Tensor) -> Side:
    """Our layer, with the projection modules of the other side; a projection that it lacks is left out here, too."""
    layer = sq.Attention(WIDTH, HEADS, mechanism).eval()
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if getattr(layer, name) is not None:
            setattr(layer, name, linears.get(name, nn.Identity()))
    copy_weights(layer.mechanism, weights)
    return with_projections(lambda x: layer(x, is_causal=is_causal), layer, *linears.values())


@torch.no_grad()
def copy_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    own = module.state_dict(keep_vars=True)
    for name, weight in weights.items():
        own[name].copy_(weight)


# Their side: one function for each kind of peer.


def fast(attention: Any, length: int, is_causal: bool, all_pairs: bool = False) -> Side:
    """A module of fast-transformers; its masks are made beforehand."""
    masking = import_module("fast_transformers.masking")
    every = masking.LengthMask(torch.tensor([length]))
    size = length if all_pairs else 1  # most modules only ask whether the mask is full
    mask = masking.TriangularCausalMask(length) if is_causal else masking.FullMask(size)
    attention.eval()
    return Side(lambda q, k, v: attention(q, k, v, mask, every, every), length_first=True)


def fast_kernelized(length: int, is_causal: bool, features: Callable[[int], nn.Module] | None = None) -> tuple[Any, Side]:
    """Its linear attention with random features that are drawn once, instead of in every call."""
    module = import_module("fast_transformers.attention")
    attention = (module.CausalLinearAttention if is_causal else module.LinearAttention)(HEAD_DIM, features)
    attention.feature_map.new_feature_map("cpu")
    attention.feature_map.new_feature_map = lambda device: None
    return attention, fast(attention, length, is_causal)


def fast_linear(length: int, is_causal: bool) -> Pair:
    return ours(sq.Linear(), is_causal), fast_kernelized(length, is_causal)[1]


def fast_favor(length: int, is_causal: bool) -> Pair:
    favor = import_module("fast_transformers.feature_maps").Favor.factory(n_dims=FEATURES)
    attention, side = fast_kernelized(length, is_causal, favor)
    mechanism = sq.Performer(kind="hyperbolic", features=FEATURES // 2)
    return ours(mechanism, is_causal, projection=attention.feature_map.omega.T), side


def fast_fourier(length: int, is_causal: bool) -> Pair:
    fourier = import_module("fast_transformers.feature_maps").RandomFourierFeatures.factory(n_dims=128, softmax_temp=1.0)
    attention, side = fast_kernelized(length, is_causal, fourier)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return side.call(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)

    return ours(sq.RFA(features=64), is_causal, projection=attention.feature_map.omega.T), replace(side, call=call)


def fast_local(length: int, is_causal: bool) -> Pair:
    attention = import_module("fast_transformers.attention").LocalAttention(2 * WINDOW + 1, attention_dropout=0.0)
    return ours(sq.Local(window=WINDOW), is_causal), fast(attention, length, is_causal, all_pairs=True)


def fast_reformer(length: int, is_causal: bool) -> Pair:
    module = import_module("fast_transformers.attention")
    attention = module.ReformerAttention(chunk_size=CHUNK, bits=BUCKETS // 2, rounds=HASHES, attention_dropout=0.0)
    mechanism = sq.Reformer(buckets=BUCKETS, chunk=CHUNK, rounds=HASHES)
    return ours(mechanism, is_causal), fast(attention, length, is_causal)


def fast_clustered(topk: int) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        module = import_module("fast_transformers.attention")
        options = {**CLUSTERED, "hash_bias": False, "attention_dropout": 0.0}
        attention = module.ImprovedClusteredAttention(topk=topk, **options) if topk else module.ClusteredAttention(**options)
        return ours(sq.Clustered(topk=topk, **CLUSTERED), is_causal), fast(attention, length, is_causal)

    return make


def performer_linear(length: int, is_causal: bool) -> Pair:
    module = import_module("performer_pytorch.performer_pytorch")
    attend = module.causal_linear_attention_noncuda if is_causal else module.linear_attention
    return ours(sq.Linear(), is_causal), Side(lambda q, k, v: attend(F.elu(q) + 1, F.elu(k) + 1, v))


def performer(mechanism: sq.Mechanism, **options: object) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        attention = import_module("performer_pytorch").FastAttention(HEAD_DIM, FEATURES, causal=is_causal, **options).eval()
        weights = {"projection": attention.projection_matrix} if isinstance(mechanism, sq.Performer) else {}
        return ours(mechanism, is_causal, **weights), Side(attention)

    return make


def efficient(blind_spot: int) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        module = import_module("linear_attention_transformer.linear_attention_transformer")
        if is_causal:
            return ours(sq.Efficient(), True), Side(lambda *x: module.causal_linear_attn(*x, bucket_size=blind_spot))
        return ours(sq.Efficient(), False), Side(module.linear_attn)

    return make


def local(block: int) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        blocks = WINDOW // block
        attention = import_module("local_attention").LocalAttention(
            block, causal=is_causal, look_backward=blocks, look_forward=0 if is_causal else blocks, exact_windowsize=True
        )
        return ours(sq.Local(window=WINDOW), is_causal), Side(attention.eval())

    return make


def reformer(**options: bool) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        module = import_module("reformer_pytorch")
        attention = module.LSHAttention(bucket_size=CHUNK, n_hashes=HASHES, causal=is_causal, **options).eval()
        mechanism = sq.Reformer(buckets=length // CHUNK, chunk=CHUNK, rounds=HASHES)
        return ours(mechanism, is_causal), Side(lambda q, _, v: attention(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v))

    return make


def routing(length: int, is_causal: bool) -> Pair:
    module, clusters = import_module("routing_transformer.routing_transformer"), length // (2 * CHUNK)
    attention = module.KmeansAttention(clusters, 2 * CHUNK, HEADS, HEAD_DIM, causal=is_causal).eval().requires_grad_(False)
    return ours(sq.Routing(clusters=clusters, chunk=CHUNK), is_causal), Side(lambda q, k, v: attention(q, k, v)[0])


# Layers that include their projections.


def linformer(length: int, is_causal: bool) -> Pair:
    layer = import_module("linformer").LinformerSelfAttention(WIDTH, length, k=RANK, heads=HEADS).eval()
    linears = {"q_proj": layer.to_q, "k_proj": layer.to_k, "v_proj": layer.to_v, "out_proj": layer.to_out}
    mechanism = sq.Linformer(rank=RANK, max_length=length, share="head")
    mine = our_layer(mechanism, is_causal, linears, key_projection=layer.proj_k.T, value_projection=layer.proj_v.T)
    return mine, with_projections(layer, layer, *linears.values())


def nystrom(conv: int | None) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
        layer = import_module("nystrom_attention").NystromAttention(
            WIDTH, HEAD_DIM, HEADS, num_landmarks=LANDMARKS, residual=conv is not None, residual_conv_kernel=conv or 1
        )
        linears = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        for linear, weight in zip(linears.values(), layer.to_qkv.weight.chunk(3), strict=True):
            copy_weights(linear, {"weight": weight})
        linears["out_proj"] = layer.to_out[0]
        weights = {} if conv is None else {"kernel": layer.res_conv.weight[:, 0, :, 0]}
        mine = our_layer(sq.Nystrom(landmarks=LANDMARKS, conv=conv), is_causal, linears, **weights)
        return mine, with_projections(layer.eval(), layer, layer.to_qkv, layer.to_out[0])

    return make


def published(layer: Any) -> dict[str, nn.Linear]:
    """The projections of Hugging Face's self-attention; the output projection is in another module there."""
    return {"q_proj": layer.query, "k_proj": layer.key, "v_proj": layer.value}


def hf_config(model: str, **options: object) -> Any:
    return getattr(import_module("transformers"), f"{model}Config")(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_probs_dropout_prob=0.0, **options
    )


def hf_layer(family: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def hf_nystrom(conv: int | None) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
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


def hf_longformer(num_global: int) -> Make:
    def make(length: int, is_causal: bool) -> Pair:
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


def hf_bigbird(length: int, is_causal: bool) -> Pair:
    config = hf_config("BigBird", block_size=BLOCK, num_random_blocks=RANDOM, max_position_embeddings=length)
    layer = hf_layer("big_bird", "BigBirdBlockSparseAttention")(config, seed=0).eval()
    masks = hf_layer("big_bird", "BigBirdModel").create_masks_for_block_sparse_attn(torch.ones(1, length), BLOCK)
    blocked, band, rows, columns = masks
    linears = published(layer)
    mine = our_layer(sq.BigBird(block=BLOCK, random=RANDOM), is_causal, linears)
    return mine, with_projections(lambda x: layer(x, band, rows, columns, blocked, blocked)[0], layer, *linears.values())


def hf_reformer(length: int, is_causal: bool) -> Pair:
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
