// Matrices in scratch memory, their products, and the one pattern that all passes of the kernelized kernel are made of.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/errors.h"
#include "common/vectors.h"

namespace subquad {

// Rows of whole vectors, anywhere in memory.
template <class T>
struct Rows {
    T* data;
    Index columns, stride;  // columns without padding
    T* operator[](Index row) const { return data + row * stride; }
};

// Rows in scratch memory; rows and columns are padded to whole vectors, and all entries start at 0.
template <class T>
class Matrix : public Rows<T> {
   public:
    Index rows;
    Matrix(Index rows, Index columns) : Rows<T>{nullptr, columns, padded<T>(columns)}, rows(rows) {
        if (this->stride * sizeof(T) % 256 == 0) this->stride += 64 / sizeof(T);  // puts rows into different cache sets
        if (rows > MOST_ENTRIES / this->stride - LANES<T>) throw std::bad_alloc();
        memory_.reset(static_cast<T*>(std::aligned_alloc(64, (bytes() + 63) / 64 * 64)));
        if (!memory_) throw std::bad_alloc();
        this->data = memory_.get();
        clear();
    }
    void clear() { std::memset(this->data, 0, bytes()); }

   private:
    static constexpr Index MOST_ENTRIES = PTRDIFF_MAX / Index(sizeof(T));
    std::size_t bytes() const { return padded<T>(std::max<Index>(rows, 1)) * this->stride * sizeof(T); }
    struct Free {
        void operator()(T* x) const { std::free(x); }
    };
    std::unique_ptr<T, Free> memory_;
};

// c (R rows, V vectors) = or += a b; element (r, k) of a is a[r * row + k * step].
template <class T, int R, int V>
inline void block(T* c, Index c_row, const T* a, Index row, Index step, const T* b, Index b_row, Index inner, bool add) {
    Vector<T> sum[R][V] = {};  // in registers; c may be far larger
#pragma GCC unroll 4
    for (Index k = 0; k < inner; ++k) {
        Vector<T> right[V];
        for (int v = 0; v < V; ++v) right[v] = vector(b + k * b_row + v * LANES<T>);
        for (int r = 0; r < R; ++r) {
            const T left = a[r * row + k * step];
            for (int v = 0; v < V; ++v) sum[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            Vector<T>& place = vector(c + r * c_row + v * LANES<T>);
            place = add ? place + sum[r][v] : sum[r][v];
        }
}

template <class T, int V>
inline void panel(T* c, Index c_row, const T* a, Index row, Index step, const T* b, Index b_row, Index rows, Index inner,
                  bool add) {
    Index r = 0;
    for (; r + 6 <= rows; r += 6) block<T, 6, V>(c + r * c_row, c_row, a + r * row, row, step, b, b_row, inner, add);
    c += r * c_row, a += r * row;
    switch (rows - r) {
        case 5: return block<T, 5, V>(c, c_row, a, row, step, b, b_row, inner, add);
        case 4: return block<T, 4, V>(c, c_row, a, row, step, b, b_row, inner, add);
        case 3: return block<T, 3, V>(c, c_row, a, row, step, b, b_row, inner, add);
        case 2: return block<T, 2, V>(c, c_row, a, row, step, b, b_row, inner, add);
        case 1: return block<T, 1, V>(c, c_row, a, row, step, b, b_row, inner, add);
    }
}

// c (rows x columns) = or += a (rows x inner) b (inner x columns), in whole vectors of columns.
template <class T>
void product(T* c, Index c_row, const T* a, Index row, Index step, const T* b, Index b_row, Index rows, Index inner,
             Index columns, bool add) {
    columns = padded<T>(columns);
    Index j = 0;
    for (; j + 2 * LANES<T> <= columns; j += 2 * LANES<T>)
        panel<T, 2>(c + j, c_row, a, row, step, b + j, b_row, rows, inner, add);
    if (j < columns) panel<T, 1>(c + j, c_row, a, row, step, b + j, b_row, rows, inner, add);
}

// out (columns x n) = factor x^T of x (n x columns), and zeros up to whole vectors
template <class T>
void transpose(const Matrix<T>& out, const Rows<T>& x, Index n, T factor = 1) {
    constexpr Index L = LANES<T>;
    for (Index i = 0; i < n; i += L)
        for (Index j = 0; j < x.columns; j += L) {
            Vector<T> square[L] = {};
            if (i + L <= n)
                for (Index k = 0; k < L; ++k) square[k] = vector(x[i + k] + j) * factor;
            else
                for (Index k = 0; k < n - i; ++k) square[k] = vector(x[i + k] + j) * factor;
            transpose_square<T>(square);
            for (Index k = 0; k < L; ++k) vector(out[j + k] + i) = square[k];
        }
}

// sum += the n rows of x
template <class T>
void add_rows(T* sum, const Rows<T>& x, Index n) {
    for (Index j = 0; j < x.columns; j += LANES<T>) {
        Vector<T> chunk = {};
        for (Index i = 0; i < n; ++i) chunk += vector(x[i] + j);
        vector(sum + j) += chunk;
    }
}

// ---- the pattern: left_i . sum_j right_j value_j^T ----

constexpr Index ROWS = 12;  // rows of a chunk whose pairs are computed together

enum Order { EARLIER, LATER };  // which pairs of a chunk count: j <= i, or j >= i

// out (n x e) = left (n x d) sums (d x e)
template <class T>
void read(const Rows<T>& out, const Rows<T>& left, const Rows<T>& sums, Index n) {
    product(out[0], out.stride, left[0], left.stride, Index(1), sums[0], sums.stride, n, left.columns, sums.columns, false);
}

// out (n x e) += pairs value, with pairs (n x n) = left (n x d) right^T (d x n), 0 where `order` excludes the pair
template <class T>
void add_pairs(const Rows<T>& out, const Rows<T>& left, const Rows<T>& right_t, const Rows<T>& value, const Rows<T>& pairs,
               Index n, Order order) {
    for (Index i = 0; i < n; i += ROWS) {
        const Index rows = std::min(ROWS, n - i);
        const Index first = order == EARLIER ? 0 : i / LANES<T> * LANES<T>, end = order == EARLIER ? i + rows : n;
        product(pairs[i] + first, pairs.stride, left[i], left.stride, Index(1), right_t[0] + first, right_t.stride, rows,
                left.columns, end - first, false);
        for (Index r = i; r < i + rows; ++r) {
            if (order == EARLIER) std::fill(pairs[r] + r + 1, pairs[r] + padded<T>(end), T(0));
            else std::fill(pairs[r] + first, pairs[r] + r, T(0));
        }
        product(out[i], out.stride, pairs[i] + first, pairs.stride, Index(1), value[first], value.stride, rows, end - first,
                out.columns, true);
    }
}

// sums (d x e) += right^T (d x n) value (n x e)
template <class T>
void accumulate(const Matrix<T>& sums, const Rows<T>& right, const Rows<T>& value, Index n) {
    product(sums[0], sums.stride, right[0], Index(1), right.stride, value[0], value.stride, sums.rows, n, sums.columns, true);
}

}  // namespace subquad
