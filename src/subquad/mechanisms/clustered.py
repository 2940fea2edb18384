"""Clustered attention: similar queries share their attention weights, and each sets the largest of them anew.

    o_i = m_c sum_(j in T_c) softmax_(j in T_c)(s q_i . k_j) v_j + sum_(j not in T_c) A_cj v_j,    s = 1/sqrt(D)
    A_cj = softmax_j(s q_c . k_j),    m_c = sum_(j in T_c) A_cj

for query i of cluster c; q_c is the mean query of the cluster, and T_c the k keys of largest A_c. Queries are clustered in each
head by k-means in Hamming space: the code of a query is the signs of random projections; centroids start as the codes of
queries, at equal steps, and become the signs of the sum of their members' codes. Which cluster a query joins, and which keys
are T_c, takes no gradient; mean queries do.

Vyas, Katharopoulos and Fleuret, 2020. O(N C bits iterations + (C M + N k) D) time, never N M pairs.

Where there are as many queries as keys, the pads of the keys are taken for pads of the queries too, which shape no cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subquad.engines import clustered
from subquad.engines.call import Call
from subquad.families.base import Info, Mechanism, Sizes
from subquad.families.random_features import gaussian
from subquad.state import StateTensors

INFO = Info(
    name="clustered",
    family="bucketed",
    engine="clustered",
    idea="similar queries share the attention of their mean, and each weighs the keys that matter most for itself",
    paper="Vyas et al., 2020, Fast Transformers with Clustered Attention, arXiv:2007.04825",
    time="O(N C bits iterations + (C M + N k) D)",
    memory="O(N (bits + D) + C k)",
    random="the directions whose signs are the codes",
    refuses={
        "is_causal": "clusters are formed over all queries, later ones included",
        "decoder_cross": "clusters are formed over all queries, so that each would see those after it",
        "attn_mask": "queries of a cluster share their weights, so no pair of a query and a key can be masked alone",
        "dropout_p": "queries of a cluster share their weights, so none is dropped alone; put dropout on the output instead",
        "decode": "every new query would change the clusters of those before",
    },
)


@dataclass(frozen=True, kw_only=True)
class Clustered(Mechanism):
    """Attention from clusters of queries.

    Args:
        clusters: C, at most; never more than there are queries.
        topk: k, the keys of each cluster that its queries weigh for themselves; 0 for none.
        bits: of a query's code.
        iterations: of k-means, always all of them.
        seed: what the directions are drawn from.
    """

    info: ClassVar[Info] = INFO
    clusters: int = 100
    topk: int = 32
    bits: int = 32
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("clusters", "bits", "iterations")
        self._require_whole("topk")
        self._require_seed()

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"projection": gaussian(self.bits, sizes.head_dim, self.seed)}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        out = clustered.attend(
            call.query,
            call.key,
            call.value,
            call.weights["projection"],
            clusters=self.clusters,
            iterations=self.iterations,
            topk=self.topk,
            scale=call.key.shape[-1] ** -0.5 if call.scale is None else call.scale,
            key_padding_mask=call.key_padding_mask,
        )
        return out, None
