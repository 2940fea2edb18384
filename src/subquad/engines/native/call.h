// What a call says, as kernelized.py lays it out.

#pragma once

#include "matrices.h"

namespace subquad {

enum Kind { ELU, IDENTITY, UNIT, EXPONENTIAL, RELU, SOFTMAX, TRIGONOMETRIC };
enum Divisor { SUM, MEAN, NONE, CHANNEL, SIGNED };

struct View {
    void* data;
    int64_t batch, head, token;  // strides, in elements
    template <class T>
    T* at(Index b, Index h, Index i) const {
        return static_cast<T*>(data) + b * batch + h * head + i * token;
    }
};

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

template <class T>
void load(const Rows<T>& x, const View& view, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) std::memcpy(x[i], view.at<T>(b, h, start + i), x.columns * sizeof(T));
}

template <class T>
void store(const View& view, const Rows<T>& x, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) std::memcpy(view.at<T>(b, h, start + i), x[i], x.columns * sizeof(T));
}

// Asks for the next chunk of tokens, those from `start` to `end`: by itself the processor looks ahead to the end of a page.
template <class T>
void anticipate(const View& view, Index b, Index h, Index start, Index end, Index columns) {
    for (Index i = start; i < end; ++i)
        for (Index j = 0; j < columns; j += 64 / Index(sizeof(T))) __builtin_prefetch(view.at<T>(b, h, i) + j);
}

// The tokens from `start` on where they stand, if their rows are whole vectors; otherwise `scratch`.
template <class T>
Rows<T> place(const Rows<T>& scratch, const View& view, Index b, Index h, Index start) {
    if (scratch.columns % LANES<T>) return scratch;
    return {view.at<T>(b, h, start), scratch.columns, Index(view.token)};
}

// n of them, to read
template <class T>
Rows<T> fetch(const Rows<T>& scratch, const View& view, Index b, Index h, Index start, Index n) {
    const Rows<T> found = place(scratch, view, b, h, start);
    if (found.data == scratch.data) load(scratch, view, b, h, start, n);
    return found;
}

// n of them that were written to what `place` gave
template <class T>
void keep(const Rows<T>& scratch, const Rows<T>& written, const View& view, Index b, Index h, Index start, Index n) {
    if (written.data == scratch.data) store(view, scratch, b, h, start, n);
}

}  // namespace subquad
