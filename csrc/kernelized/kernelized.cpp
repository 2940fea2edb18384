// The kernelized engine's inner loops for CPUs: what kernelized.py does with PyTorch, fused, in chunks that stay in cache.
//
// Forward, for every query i (all keys j, or j <= i where causal):
//
//     o_i = phi(q_i) S_i / (phi(q_i) . z_i),    S_i = sum_j phi(k_j) v_j^T,    z_i = sum_j phi(k_j)
//
// Backward, with g_i the gradient of o_i, d_i the divisor, G_i = g_i / d_i and e_i = -(g_i . o_i) / d_i:
//
//     d phi(q_i) = sum_j (G_i . v_j + e_i) phi(k_j)
//     d phi(k_j) = sum_i (v_j . G_i + e_i) phi(q_i)
//     d v_j      = sum_i (phi(k_j) . phi(q_i)) G_i
//
// All of them are one pattern, `left_i . sum_j right_j value_j^T`: `absorb` adds a chunk to the sums, `meet` reads them and
// the pairs inside the chunk. Features, sums and gradients are recomputed, never kept for the whole sequence.
//
// Where phi(k) = e^b f, sums are relative to the largest b so far, the level; a chunk ends where the level rises so far that
// its earlier keys would vanish.
//
// B batch, H query heads, K key-value heads, N queries, M keys, D channels, E value channels, F features.

#include "kernelized/backward.h"

extern "C" {
const char* subquad_sources() { return SOURCES; }  // the fingerprint of what this was compiled from
void subquad_forward_float32(const subquad::Call* call) { subquad::forward<float>(*call); }
void subquad_forward_float64(const subquad::Call* call) { subquad::forward<double>(*call); }
void subquad_backward_float32(const subquad::Call* call) { subquad::backward<float>(*call); }
void subquad_backward_float64(const subquad::Call* call) { subquad::backward<double>(*call); }
}
