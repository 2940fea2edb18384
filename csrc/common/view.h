// A tensor (batch, heads, tokens, channels) as an address with strides, and chunks of its tokens.

#pragma once

#include "common/matrices.h"

namespace subquad {

struct View {
    void* data;
    int64_t batch, head, token;  // strides, in elements
    template <class T>
    T* at(Index b, Index h, Index i) const {
        return static_cast<T*>(data) + b * batch + h * head + i * token;
    }
    // The same tokens, the last one first.
    template <class T>
    void reverse(Index tokens) {
        if (data) data = static_cast<T*>(data) + (tokens - 1) * token;
        token = -token;
    }
};

// Zeros up to whole vectors: a row that was multiplied by NaN has left NaN there.
template <class T>
void load(const Rows<T>& x, const View& view, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) {
        std::memcpy(x[i], view.at<T>(b, h, start + i), x.columns * sizeof(T));
        std::fill(x[i] + x.columns, x[i] + padded<T>(x.columns), T(0));
    }
}

template <class T>
void store(const View& view, const Rows<T>& x, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) std::memcpy(view.at<T>(b, h, start + i), x[i], x.columns * sizeof(T));
}

// Prefetches the next chunk of tokens, `start` to `end`: the hardware prefetcher stops at the end of a page.
template <class T>
void prefetch(const View& view, Index b, Index h, Index start, Index end, Index columns) {
    for (Index i = start; i < end; ++i)
        for (Index j = 0; j < columns; j += 64 / Index(sizeof(T))) __builtin_prefetch(view.at<T>(b, h, i) + j);
}

// The tokens from `start` on: their own memory if their rows are whole vectors, otherwise `scratch`.
template <class T>
Rows<T> rows_at(const Rows<T>& scratch, const View& view, Index b, Index h, Index start) {
    if (scratch.columns % LANES<T>) return scratch;
    return {view.at<T>(b, h, start), scratch.columns, Index(view.token)};
}

// The same, with n tokens copied into `scratch` if they are not read in place.
template <class T>
Rows<T> fetch(const Rows<T>& scratch, const View& view, Index b, Index h, Index start, Index n) {
    const Rows<T> found = rows_at(scratch, view, b, h, start);
    if (found.data == scratch.data) load(scratch, view, b, h, start, n);
    return found;
}

// Stores n tokens that were written to what `rows_at` returned, if that was `scratch`.
template <class T>
void write_back(const Rows<T>& scratch, const Rows<T>& written, const View& view, Index b, Index h, Index start, Index n) {
    if (written.data == scratch.data) store(view, scratch, b, h, start, n);
}

}  // namespace subquad
