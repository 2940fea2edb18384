// The arguments of a call. src/subquad/ops/kernelized.py has the same fields and enums, in the same order.

#pragma once

#include "common/view.h"

namespace subquad {

enum Kind { ELU, IDENTITY, UNIT, EXPONENTIAL, RELU, SOFTMAX, TRIGONOMETRIC, HEDGEHOG };
enum Normalizer { SUM, MEAN, NONE, CHANNEL, SIGNED };

struct Call {
    int64_t batch, heads, kv_heads, queries, keys, channels, value_channels, features;
    int64_t kind, normalizer, is_causal, is_reversed, row_stride, threads;
    double scale, constant, floor;
    View query, key, value, out, grad, d_query, d_key, d_value;
    const uint8_t* mask;   // (B, M), contiguous; null: no pads
    void* denominators;    // (B, H, N), heads `row_stride` apart; null: not wanted
    const void* weight;    // (F, D); TRIGONOMETRIC (K, F / 2, D); null: the identity
    const void* bias;      // (F,)
    const void* sums_in;   // (B, K, F, E), or E + 1 if there are ones; null: no past
    const void* level_in;  // (B, K, 1 or F)
    const void* count_in;  // (B,)
    void* sums_out;
    void* level_out;
    void* count_out;
    // Of hybrid attention, where `out` already has the near part: see `merge`. Rows as those of `denominators`; null: no near part.
    const void* log_mix;  // (H,)
    void *top, *sum;      // (B, H, N)
    void* d_log_mix;      // (B, H, N)
};

constexpr Index CHUNK = 96, CAUSAL_CHUNK = 48;  // tokens; smaller if causal, when all pairs inside a chunk are computed

template <class T>
struct Problem {
    Call call;
    Index D, E, F, groups, chunk;  // query heads per key-value head; tokens per chunk
    Kind kind;
    Normalizer normalizer;
    Index heads, angles;         // how many heads have their own weights; rows of weights per head
    Matrix<T> weight, weight_t;  // (heads angles x D), (heads D x angles)

    explicit Problem(const Call& c)
        : call(c), D(c.channels), E(c.value_channels), F(c.features), groups(c.heads / std::max<Index>(c.kv_heads, 1)),
          chunk(std::min(c.is_causal ? CAUSAL_CHUNK : CHUNK, std::max<Index>({c.queries, c.keys, 1}))),
          kind(Kind(c.kind)), normalizer(Normalizer(c.normalizer)), heads(kind == TRIGONOMETRIC ? c.kv_heads : 1),
          angles(kind == TRIGONOMETRIC ? F / 2 : F), weight(c.weight ? heads * angles : 0, D),
          weight_t(c.weight ? heads * D : 0, angles) {
        if (call.is_reversed) {
            for (View* view : {&call.query, &call.out, &call.grad, &call.d_query}) view->reverse<T>(call.queries);
            for (View* view : {&call.key, &call.value, &call.d_key, &call.d_value}) view->reverse<T>(call.keys);
        }
        const T* from = static_cast<const T*>(c.weight);
        for (Index h = 0; h < (c.weight ? heads : 0); ++h)
            for (Index f = 0; f < angles; ++f)
                for (Index d = 0; d < D; ++d) weight[h * angles + f][d] = weight_t[h * D + d][f] = *from++;
    }
    const T* weight_t_of(Index head) const { return weight_t[heads == 1 ? 0 : head * D]; }
    // The number of query i in `rows` (B, H, N).
    T& of_row(void* rows, Index b, Index h, Index i) const {
        const Index at = call.is_reversed ? call.queries - 1 - i : i;
        return static_cast<T*>(rows)[(b * call.heads + h) * call.row_stride + at];
    }
    bool has_sum() const { return normalizer == SUM || normalizer == SIGNED; }
    bool has_ones() const { return has_sum() || normalizer == CHANNEL; }
    Index levels() const { return kind == EXPONENTIAL ? 1 : kind == SOFTMAX ? F : 0; }
    bool is_real(Index b, Index j) const {
        return !call.mask || call.mask[b * call.keys + (call.is_reversed ? call.keys - 1 - j : j)];
    }
};

}  // namespace subquad
