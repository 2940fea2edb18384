// What a call says, as kernelized.py lays it out.

#pragma once

#include "common/view.h"

namespace subquad {

enum Kind { ELU, IDENTITY, UNIT, EXPONENTIAL, RELU, SOFTMAX, TRIGONOMETRIC };
enum Divisor { SUM, MEAN, NONE, CHANNEL, SIGNED };

struct Call {
    int64_t batch, heads, kv_heads, queries, keys, channels, value_channels, features;
    int64_t kind, divisor, is_causal, threads;
    double scale, constant, floor;
    View query, key, value, out, grad, d_query, d_key, d_value;
    const uint8_t* mask;  // (B, M), contiguous; null: all real
    void* divisors;       // (B, H, N)
    const void* weight;   // (F, D); of sines and cosines (K, F / 2, D)
    const void* bias;     // (F,)
    const void* sums_in;  // (B, K, F, E), and E + 1 with a divisor of sums; null: none before
    const void* level_in;  // (B, K, 1 or F)
    const void* count_in;  // (B,)
    void* sums_out;
    void* level_out;
    void* count_out;
};

constexpr Index CHUNK = 96, CAUSAL_CHUNK = 48;  // where causal, pairs inside a chunk are computed

template <class T>
struct Problem {
    const Call& call;
    Index D, E, F, groups, chunk;  // tokens a chunk
    Kind kind;
    Divisor divisor;
    Index heads, angles;         // that have weights of their own; weights of each
    Matrix<T> weight, weight_t;  // (heads angles x D), (heads D x angles)

    explicit Problem(const Call& c)
        : call(c), D(c.channels), E(c.value_channels), F(c.features), groups(c.heads / std::max<Index>(c.kv_heads, 1)),
          chunk(std::min(c.is_causal ? CAUSAL_CHUNK : CHUNK, std::max<Index>({c.queries, c.keys, 1}))),
          kind(Kind(c.kind)), divisor(Divisor(c.divisor)), heads(kind == TRIGONOMETRIC ? c.kv_heads : 1),
          angles(kind == TRIGONOMETRIC ? F / 2 : F), weight(c.weight ? heads * angles : 0, D), weight_t(c.weight ? heads * D : 0, angles) {
        const T* from = static_cast<const T*>(c.weight);
        for (Index h = 0; h < (c.weight ? heads : 0); ++h)
            for (Index f = 0; f < angles; ++f)
                for (Index d = 0; d < D; ++d) weight[h * angles + f][d] = weight_t[h * D + d][f] = *from++;
    }
    const T* weight_t_of(Index head) const { return weight_t[heads == 1 ? 0 : head * D]; }
    bool has_sum() const { return divisor == SUM || divisor == SIGNED; }
    bool has_ones() const { return has_sum() || divisor == CHANNEL; }
    Index levels() const { return kind == EXPONENTIAL ? 1 : kind == SOFTMAX ? F : 0; }
    bool is_real(Index b, Index j) const { return !call.mask || call.mask[b * call.keys + j]; }
};

}  // namespace subquad
