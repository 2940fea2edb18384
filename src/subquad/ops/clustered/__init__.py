"""Clustered attention: its tensors (`inputs`), the operators (`operator`), and their bodies (`native`; `kmeans`, `pytorch`).

    o_i = m_c sum_(j in T_c) softmax_(j in T_c)(s q_i . k_j) v_j + sum_(j not in T_c) A_cj v_j,    m_c = sum_(j in T_c) A_cj

for query i of cluster c. A_c is the softmax over keys of the mean of the cluster's queries, T_c its *top keys*: the k keys of
largest A_c. Clusters come from k-means on codes of +1 and -1.
"""

from subquad.ops.clustered.inputs import ClusterAttention, ClusteredInputs

__all__ = ["ClusterAttention", "ClusteredInputs"]
