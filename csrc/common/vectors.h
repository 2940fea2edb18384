// Vectors of the processor's width, and functions of rows of them. Rows are padded to whole vectors, so that no loop has a
// remainder.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#ifndef WIDTH
#define WIDTH 32  // bytes per vector
#endif

namespace subquad {

using Index = std::ptrdiff_t;

// Constants per type. For e^x = 2^n e^r: ln 2 in two parts, the range of x, and the polynomial for |r| <= ln(2) / 2. For sines
// and cosines: pi / 2 in three parts, whose multiples are exact below `far`, and the number of terms.
template <class T>
struct Simd;
template <>
struct Simd<float> {
    typedef float Vector __attribute__((vector_size(WIDTH), aligned(4), may_alias));
    typedef int32_t Bits __attribute__((vector_size(WIDTH)));
    typedef uint32_t Unsigned __attribute__((vector_size(WIDTH)));
    static constexpr float round = 12582912.0f, high = 0.693359375f, low = -2.12194440e-4f, least = -87.33f, most = 88.37f;
    static constexpr int mantissa = 23, bias = 127, degree = 6;
    static constexpr float e[] = {1.0f, 1.000000038f, 0.5000000108f, 0.1666641497f,
                                  0.04166621738f, 0.008375170787f, 0.001394864065f};
    static constexpr float half_pi[] = {1.5703125f, 4.837512969970703e-4f, 7.549789954891882e-8f}, far = 8192;
    static constexpr int terms = 5;
};
template <>
struct Simd<double> {
    typedef double Vector __attribute__((vector_size(WIDTH), aligned(8), may_alias));
    typedef int64_t Bits __attribute__((vector_size(WIDTH)));
    typedef uint64_t Unsigned __attribute__((vector_size(WIDTH)));
    static constexpr double round = 6755399441055744.0, high = 6.93145751953125e-1, low = 1.42860682030941723212e-6;
    static constexpr double least = -708.39, most = 709.4;
    static constexpr int mantissa = 52, bias = 1023, degree = 13;
    static constexpr double e[] = {1.0,          1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
                                   1.0 / 120,    1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                   1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    static constexpr double half_pi[] = {1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21}, far = 1e6;
    static constexpr int terms = 9;
};

template <class T>
using Vector = typename Simd<T>::Vector;
template <class T>
constexpr Index LANES = WIDTH / sizeof(T);
template <class T>
using Whole = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;  // a lane of a comparison

template <class T>
Index padded(Index n) {
    return (n + LANES<T> - 1) / LANES<T> * LANES<T>;
}

template <class T>
Vector<T>& vector(T* x) {
    return *reinterpret_cast<Vector<T>*>(x);
}
template <class T>
const Vector<T>& vector(const T* x) {
    return *reinterpret_cast<const Vector<T>*>(x);
}

// e^x; 0 below the smallest normal number; NaN stays NaN.
template <class T>
inline Vector<T> exponential(Vector<T> x) {
    using S = Simd<T>;
    using Bits = typename S::Unsigned;  // the bits of a NaN may overflow
    const Vector<T> zero = {}, given = x;
    x = x < S::least ? zero + S::least : x;
    x = x > S::most ? zero + S::most : x;
    const Vector<T> shifted = x * T(1.4426950408889634) + S::round, n = shifted - S::round;
    const Vector<T> r = (x - n * S::high) - n * S::low;
    Vector<T> sum = zero + S::e[S::degree];
#pragma GCC unroll 16
    for (int k = S::degree - 1; k >= 0; --k) sum = sum * r + S::e[k];
    const Bits power = (Bits)shifted - (Bits)(zero + S::round) + S::bias;
    return given < S::least ? zero : sum * (Vector<T>)(power << S::mantissa);
}

// sin x and cos x: x is reduced to |r| <= pi / 4 by multiples of pi / 2, kept in three parts; beyond `far`, libm computes them.
template <class T>
inline void sine_and_cosine(Vector<T> x, Vector<T>& sine, Vector<T>& cosine) {
    using S = Simd<T>;
    using Bits = typename S::Unsigned;
    const Vector<T> zero = {}, magnitude = x < T(0) ? -x : x;
    const Vector<T> shifted = x * T(0.63661977236758134) + S::round, n = shifted - S::round;
    const Bits turn = (Bits)shifted - (Bits)(zero + S::round);
    const Vector<T> r = ((x - n * S::half_pi[0]) - n * S::half_pi[1]) - n * S::half_pi[2], square = r * r;
    Vector<T> s = zero, c = zero;
#pragma GCC unroll 16
    for (int k = S::terms; k > 0; --k) {  // Taylor series in Horner form
        s = T(-1.0 / (2 * k * (2 * k + 1))) * square * (s + T(1));
        c = T(-1.0 / (2 * k * (2 * k - 1))) * square * (c + T(1));
    }
    s = s * r + r, c = c + T(1);
    const typename S::Bits is_odd = (turn & 1) != 0, minus_s = (turn & 2) != 0, minus_c = ((turn + 1) & 2) != 0;
    sine = is_odd ? c : s, cosine = is_odd ? s : c;
    sine = minus_s ? -sine : sine, cosine = minus_c ? -cosine : cosine;
    bool is_far = false;
    for (Index i = 0; i < LANES<T>; ++i) is_far |= !(magnitude[i] < S::far);
    for (Index i = 0; i < (is_far ? LANES<T> : 0); ++i) sine[i] = std::sin(x[i]), cosine[i] = std::cos(x[i]);
}

template <class T>
T total(Vector<T> x) {
    T sum = 0;
    for (Index i = 0; i < LANES<T>; ++i) sum += x[i];
    return sum;
}

// ---- rows of n numbers, padded with zeros to whole vectors ----

template <class T>
T inner(const T* x, const T* y, Index n) {
    Vector<T> sum = {};
    for (Index j = 0; j < n; j += LANES<T>) sum += vector(x + j) * vector(y + j);
    return total<T>(sum);
}

template <class T>
T total(const T* x, Index n) {
    Vector<T> sum = {};
    for (Index j = 0; j < n; j += LANES<T>) sum += vector(x + j);
    return total<T>(sum);
}

template <class T>
T largest(const T* x, Index n) {
    Vector<T> most = {};
    most += x[0];
    for (Index j = 0; j + LANES<T> <= n; j += LANES<T>) most = vector(x + j) > most ? vector(x + j) : most;
    T found = most[0];
    for (Index i = 1; i < LANES<T>; ++i) found = most[i] > found ? most[i] : found;
    for (Index j = n / LANES<T> * LANES<T>; j < n; ++j) found = x[j] > found ? x[j] : found;  // padding does not count
    return found;
}

template <class T>
T largest_magnitude(const T* x, Index n) {
    Vector<T> most = {};
    for (Index j = 0; j < n; j += LANES<T>) {
        const Vector<T> v = vector(x + j) < T(0) ? -vector(x + j) : vector(x + j);
        most = v > most ? v : most;
    }
    return largest(reinterpret_cast<const T*>(&most), LANES<T>);
}

// row += factor x
template <class T>
void add(T* row, const T* x, T factor, Index n) {
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) += factor * vector(x + j);
}

template <class T>
void scale(T* row, T factor, Index n) {
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) *= factor;
}

// The inverse of a very small denominator can be infinite where the quotients are finite.
template <class T>
void divide(T* row, T denominator, Index n) {
    if (const T inverse = 1 / denominator; std::isfinite(inverse)) return scale(row, inverse, n);
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) /= denominator;
}

// e^(x - peak), in place
template <class T>
void exponentiate(T* row, Index n, T peak) {
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) = exponential<T>(vector(row + j) - peak);
}

// ---- the transpose of a square of vectors, in log2(lanes) steps that swap smaller and smaller blocks across the diagonal ----

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, typename Simd<T>::Bits{__VA_ARGS__})
#endif

template <class T, int H, std::size_t... I>
inline void swap_blocks(Vector<T>& a, Vector<T>& b, std::index_sequence<I...>) {
    constexpr int L = LANES<T>;
    const Vector<T> upper = SHUFFLE(a, b, (int(I) & H ? L + int(I) - H : int(I))...);
    b = SHUFFLE(a, b, (int(I) & H ? L + int(I) : int(I) + H)...);
    a = upper;
}

template <class T, int H = LANES<T> / 2>
inline void transpose_square(Vector<T>* rows) {
    if constexpr (H > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES<T>; ++i)
            if (!(i & H)) swap_blocks<T, H>(rows[i], rows[i + H], std::make_index_sequence<LANES<T>>());
        transpose_square<T, H / 2>(rows);
    }
}

}  // namespace subquad
