"""The clustered engine: similar queries share one row of attention weights, and each recomputes its largest ones.

`subquad.ops.clustered` does the computation, and says what it is; this module prepares its inputs. Cost: O(N C bits) time for
each iteration of k-means, and O((C M + N k) (D + Dv)).

B batch, H query heads, N queries, M keys, D channels, Dv value channels, C clusters, k top keys.
"""

from __future__ import annotations

from torch import Tensor

from subquad.engines.call import Call
from subquad.masks import zero_pads
from subquad.ops import dispatch
from subquad.ops.clustered import ClusteredInputs, kmeans, operator, pytorch
from subquad.ops.precision import upcast


def attend(call: Call, projection: Tensor, *, clusters: int, iterations: int, topk: int) -> Tensor:
    """The output (B, H, N, Dv), for queries clustered by the signs of projection (bits, D).

    With as many queries as keys, the padding mask applies to the queries too: their pads do not influence the clusters.
    """
    query, queries, keys = call.query, call.query.shape[2], call.key.shape[2]
    if queries == 0 or keys == 0:
        return query.new_zeros(*query.shape[:3], call.value.shape[-1]) + call.value.sum()  # 0, and keeps the autograd graph
    mask, real = call.key_padding_mask, call.key_padding_mask if queries == keys else None
    scale, q = call.softmax_scale, upcast(query)
    key, value = (zero_pads(x.to(q.dtype), mask) for x in (call.key, call.value))
    code = q.detach() @ projection.to(q.dtype).mT
    if dispatch.choose("clustered", (q, key, value)):
        assignment = operator.ASSIGN(code, real, clusters, iterations)  # (B, H, N)
        inputs = ClusteredInputs(q, key, value, assignment, mask, real)
        return operator.attend(inputs, clusters, topk, scale).to(query.dtype)
    clusters, topk = min(clusters, queries), min(topk, keys)
    inputs = ClusteredInputs(q, key, value, kmeans.assign(code, real, clusters, iterations), mask, real)
    return pytorch.attend(inputs, clusters, topk, scale)[0].to(query.dtype)
