// The feature maps, and the gradients through them.

#pragma once

#include <cmath>
#include <limits>

#include "kernelized/call.h"

namespace subquad {

// Scales x to unit length, in place, and returns |x|. Divides by the largest entry first: squares could leave the number range.
template <class T>
T to_unit_length(T* x, Index n) {
    const T most = largest_magnitude(x, n);
    if (most == 0) return 0;
    for (Index j = 0; j < n; ++j) x[j] /= most;
    const T norm = std::sqrt(inner(x, x, n));
    for (Index j = 0; j < n; ++j) x[j] /= norm;
    return most * norm;
}

// softmax of n numbers, in place; they need not be padded to whole vectors.
template <class T>
void to_softmax(T* x, Index n) {
    const T most = largest(x, n);
    const Index whole = n / LANES<T> * LANES<T>;
    exponentiate(x, whole, most);
    T sum = total(x, whole);
    if (whole < n) {
        Vector<T> rest = {};
        for (Index j = whole; j < n; ++j) rest[j - whole] = x[j] - most;
        rest = exponential<T>(rest);
        for (Index j = whole; j < n; ++j) sum += x[j] = rest[j - whole];
    }
    for (Index j = 0; j < n; ++j) x[j] /= sum;
}

// The gradient of n numbers from that of their softmax f, added to d_x times `sign`; rows need not be padded to whole vectors.
template <class T>
void add_softmax_gradient(T* d_x, const T* d, const T* f, Index n, T sign) {
    const Index whole = n / LANES<T> * LANES<T>;
    T along = inner(f, d, whole);
    for (Index j = whole; j < n; ++j) along += f[j] * d[j];
    for (Index j = 0; j < n; ++j) d_x[j] += sign * f[j] * (d[j] - along);
}

// phi (n x F) of x (n x D), up to a factor e^b for each row, which cancels for a query and is returned in `b` for a key.
// The keys of SOFTMAX stay exponents, each channel with a level of its own.
template <class T>
void map_features(const Problem<T>& p, const Rows<T>& phi, const Rows<T>& x, Index n, Index head, bool is_query, T* b) {
    if (p.kind == EXPONENTIAL || p.kind == RELU) {
        for (Index i = 0; i < n; ++i) {
            if (p.call.bias) std::memcpy(phi[i], p.call.bias, p.F * sizeof(T));
            if (p.call.weight) continue;
            if (p.call.bias) add(phi[i], x[i], T(1), p.F);
            else std::memcpy(phi[i], x[i], p.F * sizeof(T));
        }
        if (p.call.weight)
            product(phi[0], phi.stride, x[0], x.stride, Index(1), p.weight_t[0], p.weight_t.stride, n, p.D, p.F,
                    p.call.bias != nullptr);
    }
    const T shift = p.call.constant;  // of RELU
    if (p.kind == TRIGONOMETRIC && p.call.weight) {
        const Matrix<T> unit(n, p.D);
        for (Index i = 0; i < n; ++i) {
            std::memcpy(unit[i], x[i], p.D * sizeof(T));
            to_unit_length(unit[i], p.D);
        }
        product(phi[0], phi.stride, unit[0], unit.stride, Index(1), p.weight_t_of(head), p.weight_t.stride, n, p.D, p.angles,
                false);
    }
    for (Index i = 0; i < n; ++i) {
        T* row = phi[i];
        switch (p.kind) {
            case ELU:
                for (Index j = 0; j < p.D; j += LANES<T>) {
                    const Vector<T> v = vector(x[i] + j);
                    vector(row + j) = v > T(0) ? v + T(1) : exponential<T>(v);
                }
                break;
            case IDENTITY:
                for (Index j = 0; j < p.D; j += LANES<T>) vector(row + j) = vector(x[i] + j) * T(is_query ? p.call.scale : 1);
                break;
            case UNIT:
                std::memcpy(row, x[i], padded<T>(p.D) * sizeof(T));
                to_unit_length(row, p.D);
                row[p.D] = 1;
                break;
            case EXPONENTIAL: {
                const T peak = largest(row, p.F);
                exponentiate(row, p.F, peak);
                if (!is_query) b[i] = peak + T(p.call.constant) - T(p.call.scale / 2) * inner(x[i], x[i], p.D);
                break;
            }
            case RELU:
                for (Index j = 0; j < p.F; j += LANES<T>) {
                    const Vector<T> v = vector(row + j), sum = (v < T(0) ? Vector<T>{} : v) + shift;  // keeps a NaN
                    // However small v is, its feature is above the shift: that is how the gradient knows its sign.
                    const Vector<T> above = Vector<T>{} + std::nextafter(shift, std::numeric_limits<T>::max());
                    vector(row + j) = v > T(0) ? (sum > shift ? sum : above) : sum;
                }
                break;
            case TRIGONOMETRIC:
                for (Index j = 0; j < p.angles; j += LANES<T>) {
                    Vector<T> sine, cosine;
                    sine_and_cosine<T>(vector((p.call.weight ? row : x[i]) + j), sine, cosine);
                    sine *= T(p.call.scale), cosine *= T(p.call.scale);
                    if (j + LANES<T> <= p.angles) vector(row + j) = sine, vector(row + p.angles + j) = cosine;
                    else
                        for (Index k = j; k < p.angles; ++k) row[k] = sine[k - j], row[p.angles + k] = cosine[k - j];
                }
                break;
            case SOFTMAX:
                std::memcpy(row, x[i], p.D * sizeof(T));
                if (is_query) {
                    to_softmax(row, p.F);
                } else if (p.F == 1) {  // one channel: its exponent is that of the whole key
                    b[i] = row[0], row[0] = 1;
                }
                break;
            case HEDGEHOG:
                for (Index j = 0; j < p.D; ++j) row[j] = x[i][j], row[p.D + j] = -x[i][j];
                to_softmax(row, p.D);
                to_softmax(row + p.D, p.D);
                break;
        }
        std::fill(row + p.F, row + padded<T>(p.F), T(0));
    }
}

// The gradient of x (n x D) from that of phi (n x F), which it overwrites.
template <class T>
void map_gradient(const Problem<T>& p, const Rows<T>& d_x, const Rows<T>& d_phi, const Rows<T>& phi, const Rows<T>& x, Index n,
              bool is_query) {
    for (Index i = 0; i < n; ++i) {
        T* d = d_phi[i];
        const T* f = phi[i];
        switch (p.kind) {
            case ELU:
                for (Index j = 0; j < p.D; j += LANES<T>) {
                    const Vector<T> v = vector(f + j);
                    vector(d_x[i] + j) = vector(d + j) * (v < T(1) ? v : Vector<T>{} + T(1));
                }
                break;
            case IDENTITY:
                for (Index j = 0; j < p.D; ++j) d_x[i][j] = d[j] * T(is_query ? p.call.scale : 1);
                break;
            case UNIT: {
                const T along = inner(f, d, p.F) - f[p.D] * d[p.D];
                std::memcpy(d_x[i], x[i], padded<T>(p.D) * sizeof(T));
                const T norm = to_unit_length(d_x[i], p.D);
                for (Index j = 0; j < p.D; ++j) d_x[i][j] = norm == 0 ? T(0) : (d[j] - f[j] * along) / norm;
                break;
            }
            case EXPONENTIAL:
                for (Index j = 0; j < p.F; j += LANES<T>) vector(d + j) *= vector(f + j);
                if (!is_query) {
                    const T factor = -T(p.call.scale) * total(d, p.F);
                    for (Index j = 0; j < p.D; ++j) d_x[i][j] = factor * x[i][j];
                }
                break;
            case RELU:
                for (Index j = 0; j < p.F; ++j) d[j] = f[j] <= T(p.call.constant) ? T(0) : d[j];
                break;
            case TRIGONOMETRIC:
                for (Index j = 0; j < p.D; ++j) d_x[i][j] = d[j] * f[p.D + j] - d[p.D + j] * f[j];
                break;
            case SOFTMAX:
                for (Index j = 0; j < p.F; ++j) d_x[i][j] = is_query ? T(0) : f[j] * d[j];
                if (is_query) add_softmax_gradient(d_x[i], d, f, p.F, T(1));
                break;
            case HEDGEHOG:
                std::fill(d_x[i], d_x[i] + p.D, T(0));
                add_softmax_gradient(d_x[i], d, f, p.D, T(1));
                add_softmax_gradient(d_x[i], d + p.D, f + p.D, p.D, T(-1));
                break;
        }
    }
    if (p.kind != EXPONENTIAL && p.kind != RELU) return;
    const bool adds = p.kind == EXPONENTIAL && !is_query;
    if (p.call.weight)
        product(d_x[0], d_x.stride, d_phi[0], d_phi.stride, Index(1), p.weight[0], p.weight.stride, n, p.F, p.D, adds);
    for (Index i = 0; i < n && !p.call.weight; ++i)
        for (Index j = 0; j < p.D; ++j) d_x[i][j] = d_phi[i][j] + (adds ? d_x[i][j] : T(0));
}

}  // namespace subquad
