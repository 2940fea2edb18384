// The compiled kernel of the kernelized engine, for CPUs: what src/subquad/engines/kernelized.py does in PyTorch, fused, in
// chunks that stay in cache.
//
// Forward, for each query i, over all keys j, or over j <= i if causal:
//
//     o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)
//
// Backward, with g_i the gradient of o_i, d_i the denominator, G_i = g_i / d_i and e_i = -(g_i . o_i) / d_i:
//
//     d phi(q_i) = sum_j (G_i . v_j + e_i) phi(k_j)
//     d phi(k_j) = sum_i (v_j . G_i + e_i) phi(q_i)
//     d v_j      = sum_i (phi(k_j) . phi(q_i)) G_i
//
// All of them are one pattern, `left_i . sum_j right_j value_j^T`: `accumulate` adds a chunk to the sums, `read` multiplies by
// the sums, and `add_pairs` adds the pairs inside the chunk. Features, sums and gradients are recomputed, never stored for the
// whole sequence.
//
// If phi(k) = e^b f, the sums are relative to the largest b so far, the level. A chunk ends before the level would rise so far
// that the chunk's first keys vanish.
//
// B batch, H query heads, K key-value heads, N queries, M keys, D channels, E value channels, F features.

#include "common/layout.h"
#include "kernelized/backward.h"

extern "C" const char* subquad_sources() { return SOURCES; }  // the hash of the sources, which native_library.py checks
LAYOUT(View, data, batch, head, token)
LAYOUT(Call, batch, heads, kv_heads, queries, keys, channels, value_channels, features, kind, normalizer, is_causal, is_reversed,
       row_stride, threads, scale, constant, floor, query, key, value, out, grad, d_query, d_key, d_value, mask, denominators,
       weight, bias, sums_in, level_in, count_in, sums_out, level_out, count_out, log_mix, top, sum, d_log_mix)
EXPORT(forward, Call)
EXPORT(backward, Call)
