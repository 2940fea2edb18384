// Convolution along the sequence, one kernel per query head: ops/convolution.py defines it.
//
// A few consecutive outputs are one product of matrices: the kernel, shifted by one from row to row, times the values around them.
//
// B batch, H query heads, K key-value heads, N tokens, E channels, c taps.

#include <optional>
#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

struct ConvolutionCall {
    int64_t batch, heads, kv_heads, tokens, channels, taps, threads;
    View value, base, out, grad, d_value;  // (B, K, N, E), d_value too; (B, H, N, E): out is base plus the convolution
    const void* kernel;                    // (H, c)
    void* d_kernel;                        // (B, H, c)
};

constexpr Index OUTPUTS = 6, TAPS = 8;  // computed at a time

// One head's kernel, with zeros around it.
template <class T>
struct Kernel {
    Index taps;
    std::vector<T> padded;
    Kernel(const T* from, Index taps, bool is_reversed) : taps(taps), padded(taps + 2 * OUTPUTS) {
        for (Index t = 0; t < taps; ++t) padded[OUTPUTS + t] = from[is_reversed ? taps - 1 - t : t];
    }

    // out_i = or += sum_t kernel_t x_(i + t - c / 2), after `begin(i, n)` for every n outputs from i on
    template <class Begin>
    void apply(const Rows<T>& out, const Rows<T>& x, Index tokens, bool add, Begin begin) const {
        for (Index i = 0; i < tokens; i += OUTPUTS) {
            begin(i, std::min(OUTPUTS, tokens - i));
            const Index rows = std::min(OUTPUTS, tokens - i), start = i - taps / 2;
            const Index from = std::max<Index>(start, 0), to = std::min(start + rows + taps - 1, tokens);
            product(out[i], out.stride, padded.data() + OUTPUTS + from - start, Index(-1), Index(1), x[from], x.stride, rows,
                    to - from, out.columns, add);
        }
    }
};

// A head's tokens, with rows of whole vectors.
template <class T>
Rows<T> rows_of(const Matrix<T>& scratch, const View& view, Index b, Index h, Index tokens) {
    return fetch(scratch, view, b, h, 0, tokens);
}

// Memory of one thread for the tokens of a head, unless they are used in place.
template <class T>
struct ConvolutionScratch {
    Matrix<T> value, grad, result;
    explicit ConvolutionScratch(const ConvolutionCall& c)
        : value(tokens(c), c.channels), grad(c.grad.data ? tokens(c) : 0, c.channels), result(tokens(c), c.channels) {}
    static Index tokens(const ConvolutionCall& c) { return c.channels % LANES<T> ? c.tokens : 0; }
};

template <class T>
void convolution_forward(const ConvolutionCall& c) {
    const Index group = c.heads / c.kv_heads;
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<ConvolutionScratch<T>> scratch;
        error.guard([&] { scratch.emplace(c); });
#pragma omp for schedule(dynamic) collapse(2)
        for (Index b = 0; b < c.batch; ++b)
            for (Index h = 0; h < c.heads; ++h)
                error.guard([&] {
                    const Kernel<T> kernel(static_cast<const T*>(c.kernel) + h * c.taps, c.taps, false);
                    const Rows<T> out = rows_at<T>(scratch->result, c.out, b, h, 0);
                    const Rows<T> value = rows_of(scratch->value, c.value, b, h / group, c.tokens);
                    kernel.apply(out, value, c.tokens, true, [&](Index i, Index n) {
                        load(Rows<T>{out[i], out.columns, out.stride}, c.base, b, h, i, n);
                    });
                    write_back<T>(scratch->result, out, c.out, b, h, 0, c.tokens);
                });
    }
    error.rethrow();
}

// d_kernel_t = sum_i grad_i . value_(i + t - c / 2)
template <class T>
void kernel_gradient(T* to, const Rows<T>& grad, const Rows<T>& value, Index taps, Index tokens) {
    for (Index first = 0; first < taps; first += TAPS) {
        const Index n = std::min(TAPS, taps - first), shift = first - taps / 2;
        Vector<T> sum[TAPS] = {};
        for (Index i = 0; i < tokens; ++i) {
            const Index from = std::max<Index>(-(i + shift), 0), end = std::min(n, tokens - i - shift);
            for (Index j = 0; j < grad.columns; j += LANES<T>) {
                const Vector<T> g = vector(grad[i] + j);
                if (from == 0 && end == TAPS)
                    for (Index t = 0; t < TAPS; ++t) sum[t] += g * vector(value[i + shift + t] + j);
                else
                    for (Index t = from; t < end; ++t) sum[t] += g * vector(value[i + shift + t] + j);
            }
        }
        for (Index t = 0; t < n; ++t) to[first + t] = total<T>(sum[t]);
    }
}

template <class T>
void convolution_backward(const ConvolutionCall& c) {
    const Index group = c.heads / c.kv_heads;
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<ConvolutionScratch<T>> scratch;
        error.guard([&] { scratch.emplace(c); });
#pragma omp for schedule(dynamic) collapse(2)
        for (Index b = 0; b < c.batch; ++b)
            for (Index kv = 0; kv < c.kv_heads; ++kv)
                error.guard([&] {
                    const Rows<T> x = rows_of(scratch->value, c.value, b, kv, c.tokens);
                    const Rows<T> d_x = rows_at<T>(scratch->result, c.d_value, b, kv, 0);
                    for (Index h = kv * group; h < (kv + 1) * group; ++h) {
                        const Rows<T> grad = rows_of(scratch->grad, c.grad, b, h, c.tokens);
                        const Kernel<T> kernel(static_cast<const T*>(c.kernel) + h * c.taps, c.taps, true);
                        kernel.apply(d_x, grad, c.tokens, h > kv * group, [](Index, Index) {});
                        kernel_gradient(static_cast<T*>(c.d_kernel) + (b * c.heads + h) * c.taps, grad, x, c.taps, c.tokens);
                    }
                    write_back<T>(scratch->result, d_x, c.d_value, b, kv, 0, c.tokens);
                });
    }
    error.rethrow();
}

}  // namespace subquad

LAYOUT(ConvolutionCall, batch, heads, kv_heads, tokens, channels, taps, threads, value, base, out, grad, d_value, kernel, d_kernel)
EXPORT(convolution_forward, ConvolutionCall)
EXPORT(convolution_backward, ConvolutionCall)
