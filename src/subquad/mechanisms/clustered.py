"""Clustered attention: similar queries share their attention weights, and each recomputes the largest of them.

    o_i = m_c sum_(j in T_c) softmax_(j in T_c)(s q_i . k_j) v_j + sum_(j not in T_c) A_cj v_j,    s = 1/sqrt(D)
    A_cj = softmax_j(s q_c . k_j),    m_c = sum_(j in T_c) A_cj

for query i of cluster c; q_c is the mean query of the cluster, and T_c the k keys of largest A_c. In each head, queries are
clustered by k-means in Hamming space: the code of a query is the signs of random projections; the initial centroids are the
codes of equally spaced queries, and each iteration replaces them by the signs of the sum of their members' codes. No gradient
flows through the choice of clusters and of T_c; it flows through the mean queries.

Vyas, Katharopoulos and Fleuret, 2020. O(N C bits iterations + (C M + N k) D) time, never N M pairs.

With as many queries as keys, the padding mask applies to the queries too: their pads do not influence the clusters.
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
    idea="similar queries share the attention of their mean, and each recomputes the weights of the most important keys",
    paper="Vyas et al., 2020, Fast Transformers with Clustered Attention, arXiv:2007.04825",
    time="O(N C bits iterations + (C M + N k) D)",
    memory="O(N (bits + D) + C k)",
    random="the projections whose signs are the codes",
    refuses={
        "is_causal": "clusters are formed over all queries, later ones included",
        "decoder_cross": "clusters are formed over all queries, so each would depend on later ones",
        "attn_mask": "queries of a cluster share their weights, so no single pair can be masked",
        "dropout_p": "queries of a cluster share their weights, so no single one can be dropped; drop outputs instead",
        "decode": "every new query would change the clusters of earlier ones",
    },
)


@dataclass(frozen=True, kw_only=True)
class Clustered(Mechanism):
    """Attention from clusters of queries.

    Args:
        clusters: C, the number of clusters; with fewer queries, that of the queries.
        topk: k, the number of keys per cluster whose weights each query recomputes; 0 for none.
        bits: the length of a query's code.
        iterations: the number of iterations of k-means.
        seed: the seed of the projections.
    """

    info: ClassVar[Info] = INFO
    clusters: int = 100
    topk: int = 32
    bits: int = 32
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_count("clusters")
        self._require_count("iterations", most=1000)
        self._require_rows("bits")
        self._require_whole("topk")
        self._require_seed()

    def buffers(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"projection": gaussian(self.bits, sizes.head_dim, self.seed)}

    def run(self, call: Call) -> tuple[Tensor, StateTensors | None]:
        projection = call.weights["projection"]
        out = clustered.attend(call, projection, clusters=self.clusters, iterations=self.iterations, topk=self.topk)
        return out, None
