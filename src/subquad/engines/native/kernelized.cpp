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

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#ifndef WIDTH
#define WIDTH 32  // bytes of a vector
#endif

namespace {

using Index = std::ptrdiff_t;

enum Kind { ELU, IDENTITY, UNIT, EXPONENTIAL, RELU, SOFTMAX };
enum Divisor { SUM, MEAN, NONE, CHANNEL };

constexpr Index CHUNK = 32;       // tokens
constexpr Index ROWS = 12;        // of a chunk, whose pairs are computed together
constexpr double SAFE_RISE = 60;  // e^60 and e^-60 are far inside float32
constexpr double RELU_SHIFT = 1e-3;

// ---- vectors ----

template <class T>
struct Simd;
template <>
struct Simd<float> {
    typedef float Vector __attribute__((vector_size(WIDTH), aligned(4), may_alias));
    typedef int32_t Bits __attribute__((vector_size(WIDTH)));
    static constexpr float round = 12582912.0f, high = 0.693359375f, low = -2.12194440e-4f, least = -87.33f, most = 88.37f;
    static constexpr int mantissa = 23, bias = 127, terms = 7;
};
template <>
struct Simd<double> {
    typedef double Vector __attribute__((vector_size(WIDTH), aligned(8), may_alias));
    typedef int64_t Bits __attribute__((vector_size(WIDTH)));
    static constexpr double round = 6755399441055744.0, high = 6.93145751953125e-1, low = 1.42860682030941723212e-6;
    static constexpr double least = -708.39, most = 709.4;
    static constexpr int mantissa = 52, bias = 1023, terms = 13;
};

template <class T>
using Vector = typename Simd<T>::Vector;
template <class T>
constexpr Index LANES = WIDTH / sizeof(T);

template <class T>
Vector<T>& vector(T* x) {
    return *reinterpret_cast<Vector<T>*>(x);
}
template <class T>
const Vector<T>& vector(const T* x) {
    return *reinterpret_cast<const Vector<T>*>(x);
}

// e^x = 2^n e^r with |r| <= ln(2) / 2; 0 below the smallest normal number; NaN stays NaN.
template <class T>
inline Vector<T> exponential(Vector<T> x) {
    using S = Simd<T>;
    using Bits = typename S::Bits;
    const Vector<T> zero = {};
    const auto is_zero = x < S::least;
    x = x < S::least ? zero + S::least : x;
    x = x > S::most ? zero + S::most : x;
    const Vector<T> shifted = x * T(1.4426950408889634) + S::round, n = shifted - S::round;
    const Vector<T> r = (x - n * S::high) - n * S::low;
    Vector<T> sum = zero + T(1);
#pragma GCC unroll 16
    for (int k = S::terms; k > 0; --k) sum = sum * r * T(1.0 / k) + T(1);
    const Bits power = (Bits)shifted - (Bits)(zero + S::round) + S::bias;
    const Vector<T> found = sum * (Vector<T>)(power << S::mantissa);
    return is_zero ? zero : found;
}

template <class T>
T total(Vector<T> x) {
    T sum = 0;
    for (Index i = 0; i < LANES<T>; ++i) sum += x[i];
    return sum;
}

// ---- matrices in scratch: rows padded to whole vectors with zeros ----

template <class T>
Index padded(Index n) {
    return (n + LANES<T> - 1) / LANES<T> * LANES<T>;
}

template <class T>
class Matrix {
   public:
    Index rows, columns, stride;  // columns without padding
    Matrix(Index rows, Index columns) : rows(rows), columns(columns), stride(padded<T>(columns)) {
        if (stride * sizeof(T) % 256 == 0) stride += 64 / sizeof(T);  // rows in different sets of the cache
        const std::size_t bytes = (std::max<Index>(rows, 1) * stride * sizeof(T) + 63) / 64 * 64;
        data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
        std::memset(data_.get(), 0, bytes);
    }
    T* operator[](Index row) { return data_.get() + row * stride; }
    const T* operator[](Index row) const { return data_.get() + row * stride; }
    void clear() { std::memset(data_.get(), 0, std::max<Index>(rows, 1) * stride * sizeof(T)); }

   private:
    struct Free {
        void operator()(T* x) const { std::free(x); }
    };
    std::unique_ptr<T, Free> data_;
};

// c (R rows, V vectors) = or += a b; element (r, k) of a is a[r * row + k * step].
template <class T, int R, int V>
inline void block(T* c, Index c_row, const T* a, Index row, Index step, const T* b, Index b_row, Index inner, bool add) {
    Vector<T> sum[R][V] = {};  // apart from c, which may be far larger
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

// c (rows x columns) = or += a (rows x inner) b (inner x columns), whole vectors of columns.
template <class T>
void product(T* c, Index c_row, const T* a, Index row, Index step, const T* b, Index b_row, Index rows, Index inner,
             Index columns, bool add) {
    columns = padded<T>(columns);
    Index j = 0;
    for (; j + 2 * LANES<T> <= columns; j += 2 * LANES<T>)
        panel<T, 2>(c + j, c_row, a, row, step, b + j, b_row, rows, inner, add);
    if (j < columns) panel<T, 1>(c + j, c_row, a, row, step, b + j, b_row, rows, inner, add);
}

// out (columns x n) from x (n x columns)
template <class T>
void transpose(Matrix<T>& out, const Matrix<T>& x, Index n, Index columns) {
    constexpr Index L = LANES<T>;
    for (Index j = 0; j < columns; j += L)
        for (Index i = 0; i < n; i += L)
            for (Index a = j; a < std::min(j + L, columns); ++a)
                for (Index b = i; b < std::min(i + L, n); ++b) out[a][b] = x[b][a];
}

// ---- the pattern: left_i . sum_j right_j value_j^T ----

enum Order { EARLIER, LATER };  // which pairs of a chunk meet: j <= i, or j >= i

// out (n x e) = [out +] left (n x d) sums (d x e)
template <class T>
void read(Matrix<T>& out, const Matrix<T>& left, const Matrix<T>& sums, Index n, bool add) {
    product(out[0], out.stride, left[0], left.stride, Index(1), sums[0], sums.stride, n, left.columns, sums.columns, add);
}

// out (n x e) += [the pairs of the chunk] left (n x d) right^T (d x n) value (n x e); the pairs stay in `pairs`
template <class T>
void meet(Matrix<T>& out, const Matrix<T>& left, const Matrix<T>& right_t, const Matrix<T>& value, Matrix<T>& pairs, Index n,
          Order order) {
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
void absorb(Matrix<T>& sums, const Matrix<T>& right, const Matrix<T>& value, Index n) {
    product(sums[0], sums.stride, right[0], Index(1), right.stride, value[0], value.stride, sums.rows, n, sums.columns, true);
}

// sum += the n rows of x
template <class T>
void add_rows(T* sum, const Matrix<T>& x, Index n) {
    for (Index j = 0; j < x.columns; j += LANES<T>) {
        Vector<T> chunk = {};
        for (Index i = 0; i < n; ++i) chunk += vector(x[i] + j);
        vector(sum + j) += chunk;
    }
}

// ---- the call ----

struct View {
    void* data;
    int64_t batch, head, token;  // strides, in elements
    template <class T>
    T* at(Index b, Index h, Index i) const {
        return static_cast<T*>(data) + b * batch + h * head + i * token;
    }
};

}  // namespace

extern "C" struct Call {
    int64_t batch, heads, kv_heads, queries, keys, channels, value_channels, features;
    int64_t kind, divisor, is_causal, threads;
    double scale, constant;
    View query, key, value, out, grad, d_query, d_key, d_value;
    const uint8_t* mask;  // (B, M), contiguous; null: all real
    void* divisors;       // (B, H, N)
    const void* weight;   // (F, D)
    const void* bias;     // (F,)
    const void* sums_in;  // (B, K, F, E), and E + 1 with a divisor of sums; null: none before
    const void* level_in;  // (B, K, 1 or F)
    const void* count_in;  // (B,)
    void* sums_out;
    void* level_out;
    void* count_out;
};

namespace {

template <class T>
struct Problem {
    const Call& call;
    Index D, E, F, groups;
    Kind kind;
    Divisor divisor;
    Matrix<T> weight, weight_t;

    explicit Problem(const Call& c)
        : call(c), D(c.channels), E(c.value_channels), F(c.features), groups(c.heads / std::max<Index>(c.kv_heads, 1)),
          kind(Kind(c.kind)), divisor(Divisor(c.divisor)), weight(c.weight ? F : 0, D), weight_t(c.weight ? D : 0, F) {
        if (!c.weight) return;
        for (Index f = 0; f < F; ++f)
            for (Index d = 0; d < D; ++d) weight[f][d] = weight_t[d][f] = static_cast<const T*>(c.weight)[f * D + d];
    }
    bool has_ones() const { return divisor == SUM || divisor == CHANNEL; }
    Index levels() const { return kind == EXPONENTIAL ? 1 : kind == SOFTMAX ? F : 0; }
    bool is_real(Index b, Index j) const { return !call.mask || call.mask[b * call.keys + j]; }
};

template <class T>
void load(Matrix<T>& x, const View& view, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) std::memcpy(x[i], view.at<T>(b, h, start + i), x.columns * sizeof(T));
}

template <class T>
void store(const View& view, const Matrix<T>& x, Index b, Index h, Index start, Index n) {
    for (Index i = 0; i < n; ++i) std::memcpy(view.at<T>(b, h, start + i), x[i], x.columns * sizeof(T));
}

// ---- feature maps ----

template <class T>
void exponentiate(T* row, Index n, T peak) {
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) = exponential<T>(vector(row + j) - peak);
}

template <class T>
T largest(const T* row, Index n) {
    T most = row[0];
    for (Index j = 1; j < n; ++j) most = row[j] > most ? row[j] : most;
    return most;
}

template <class T>
T inner(const T* x, const T* y, Index n) {
    Vector<T> sum = {};
    for (Index j = 0; j < n; j += LANES<T>) sum += vector(x + j) * vector(y + j);
    return total<T>(sum);
}

// Brings x to unit length, in place: its largest entry first, or squares would leave the number range. Returns |x|.
template <class T>
T normalize(T* x, Index n) {
    T most = 0;
    for (Index j = 0; j < n; ++j) most = std::max(most, std::abs(x[j]));
    if (most == 0) return 0;
    T square = 0;
    for (Index j = 0; j < n; ++j) x[j] /= most, square += x[j] * x[j];
    const T norm = std::sqrt(square);
    for (Index j = 0; j < n; ++j) x[j] /= norm;
    return most * norm;
}

// phi (n x F) of x (n x D), up to a factor e^b for each row: of a query it cancels, of a key it is in `b`.
// The keys of SOFTMAX stay exponents, whose level is by channel.
template <class T>
void map(const Problem<T>& p, Matrix<T>& phi, const Matrix<T>& x, Index n, bool is_query, T* b) {
    if (p.kind == EXPONENTIAL || p.kind == RELU) {
        if (p.call.bias)
            for (Index i = 0; i < n; ++i) std::memcpy(phi[i], p.call.bias, p.F * sizeof(T));
        product(phi[0], phi.stride, x[0], x.stride, Index(1), p.weight_t[0], p.weight_t.stride, n, p.D, p.F,
                p.call.bias != nullptr);
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
                row[0] = 1;
                std::memcpy(row + 1, x[i], p.D * sizeof(T));
                normalize(row + 1, p.D);
                break;
            case EXPONENTIAL: {
                const T peak = largest(row, p.F);
                exponentiate(row, p.F, peak);
                if (!is_query) b[i] = peak + T(p.call.constant) - T(p.call.scale / 2) * inner(x[i], x[i], p.D);
                break;
            }
            case RELU:
                for (Index j = 0; j < p.F; j += LANES<T>) {
                    const Vector<T> v = vector(row + j);
                    vector(row + j) = (v > T(0) ? v : Vector<T>{}) + T(RELU_SHIFT);
                }
                break;
            case SOFTMAX:
                std::memcpy(row, x[i], p.D * sizeof(T));
                if (is_query) {
                    exponentiate(row, p.F, largest(row, p.F));
                    T sum = 0;
                    for (Index j = 0; j < p.F; ++j) sum += row[j];
                    for (Index j = 0; j < p.F; ++j) row[j] /= sum;
                }
                break;
        }
        std::fill(row + p.F, row + padded<T>(p.F), T(0));
    }
}

// The gradient of x (n x D) from that of phi (n x F), which is overwritten.
template <class T>
void map_back(const Problem<T>& p, Matrix<T>& d_x, Matrix<T>& d_phi, const Matrix<T>& phi, const Matrix<T>& x, Index n,
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
                T along = 0;
                for (Index j = 0; j < p.D; ++j) along += f[1 + j] * d[1 + j], d_x[i][j] = x[i][j];
                const T norm = normalize(d_x[i], p.D);
                for (Index j = 0; j < p.D; ++j) d_x[i][j] = norm == 0 ? T(0) : (d[1 + j] - f[1 + j] * along) / norm;
                break;
            }
            case EXPONENTIAL:
                for (Index j = 0; j < p.F; j += LANES<T>) vector(d + j) *= vector(f + j);
                if (!is_query) {
                    T sum = 0;
                    for (Index j = 0; j < p.F; ++j) sum += d[j];
                    for (Index j = 0; j < p.D; ++j) d_x[i][j] = -T(p.call.scale) * sum * x[i][j];
                }
                break;
            case RELU:
                for (Index j = 0; j < p.F; ++j) d[j] = f[j] > T(RELU_SHIFT) ? d[j] : T(0);
                break;
            case SOFTMAX: {
                const T along = is_query ? inner(f, d, p.F) : T(0);
                for (Index j = 0; j < p.F; ++j) d_x[i][j] = f[j] * (d[j] - along);
                break;
            }
        }
    }
    if (p.kind == EXPONENTIAL || p.kind == RELU)
        product(d_x[0], d_x.stride, d_phi[0], d_phi.stride, Index(1), p.weight[0], p.weight.stride, n, p.F, p.D,
                p.kind == EXPONENTIAL && !is_query);
}

// ---- sums over keys ----

template <class T>
struct Sums {
    Matrix<T> S;  // (F x E)
    Matrix<T> z;  // (1 x F)
    std::vector<T> level;
    T count = 0;

    explicit Sums(const Problem<T>& p) : S(p.F, p.E), z(1, p.F), level(p.levels(), lowest()) {}
    static constexpr T lowest() { return std::numeric_limits<T>::lowest() / 4; }

    // Weighs what was summed so far relative to a new level.
    void raise(const std::vector<T>& to) {
        if (level == to) return;
        for (Index f = 0; f < S.rows; ++f) {
            const std::size_t l = level.size() == 1 ? 0 : f;
            const T decay = std::exp(level[l] - to[l]);
            if (decay == 1) continue;
            for (Index j = 0; j < S.columns; ++j) S[f][j] *= decay;
            z[0][f] *= decay;
        }
        level = to;
    }

    void add(Sums& other) {
        std::vector<T> to = level;
        for (std::size_t l = 0; l < to.size(); ++l) to[l] = std::max(level[l], other.level[l]);
        raise(to);
        other.raise(to);
        for (Index f = 0; f < S.rows; ++f) {
            for (Index j = 0; j < S.columns; ++j) S[f][j] += other.S[f][j];
            z[0][f] += other.z[0][f];
        }
        count += other.count;
    }

    void load(const Problem<T>& p, Index b, Index h) {
        if (!p.call.sums_in) return;
        const Index unit = b * p.call.kv_heads + h, width = p.E + p.has_ones();
        const T* from = static_cast<const T*>(p.call.sums_in) + unit * p.F * width;
        for (Index f = 0; f < p.F; ++f) {
            std::memcpy(S[f], from + f * width, p.E * sizeof(T));
            if (p.has_ones()) z[0][f] = from[f * width + p.E];
        }
        for (std::size_t l = 0; l < level.size(); ++l)
            level[l] = static_cast<const T*>(p.call.level_in)[unit * level.size() + l];
        if (p.call.count_in) count = static_cast<const T*>(p.call.count_in)[b];
    }

    void store(const Problem<T>& p, Index b, Index h) const {
        if (!p.call.sums_out) return;
        const Index unit = b * p.call.kv_heads + h, width = p.E + p.has_ones();
        T* to = static_cast<T*>(p.call.sums_out) + unit * p.F * width;
        for (Index f = 0; f < p.F; ++f) {
            std::memcpy(to + f * width, S[f], p.E * sizeof(T));
            if (p.has_ones()) to[f * width + p.E] = z[0][f];
        }
        for (std::size_t l = 0; l < level.size(); ++l) static_cast<T*>(p.call.level_out)[unit * level.size() + l] = level[l];
        if (p.call.count_out && h == 0) static_cast<T*>(p.call.count_out)[b] = count;
    }
};

// A chunk of keys and values, mapped.
template <class T>
struct Keys {
    Matrix<T> x, phi, phi_t, value;
    std::vector<T> b, level;
    std::vector<char> real;
    Index start = 0, n = 0;

    explicit Keys(const Problem<T>& p)
        : x(CHUNK, p.D), phi(CHUNK, p.F), phi_t(p.F, CHUNK), value(CHUNK, p.E), b(CHUNK), level(p.levels()), real(CHUNK) {}

    // From `start` on, at most to `end`; pads count for nothing. `before` is the level so far; where `is_causal`, the chunk ends
    // before the level would rise too far above that of its first key.
    void fill(const Problem<T>& p, Index batch, Index head, Index from, Index end, const std::vector<T>& before, bool is_causal) {
        start = from, n = std::min(CHUNK, end - from);
        read_rows(p, batch, head);
        level = before;
        std::vector<T> first;
        for (Index i = 0; i < n && !level.empty(); ++i) {
            if (!real[i]) continue;
            std::vector<T> higher = level;
            for (std::size_t l = 0; l < level.size(); ++l) higher[l] = std::max(level[l], level.size() == 1 ? b[i] : phi[i][l]);
            if (first.empty()) first = higher;
            bool too_far = false;
            for (std::size_t l = 0; l < level.size(); ++l) too_far |= higher[l] - first[l] > T(SAFE_RISE);
            if (is_causal && too_far) {
                n = i;
                break;
            }
            level = higher;
        }
        weigh(p);
    }

    // A chunk whose level is known.
    void refill(const Problem<T>& p, Index batch, Index head, Index from, Index count, const std::vector<T>& known) {
        start = from, n = count, level = known;
        read_rows(p, batch, head);
        weigh(p);
    }

   private:
    void read_rows(const Problem<T>& p, Index batch, Index head) {
        load(x, p.call.key, batch, head, start, n);
        load(value, p.call.value, batch, head, start, n);
        for (Index i = 0; i < n; ++i) {
            real[i] = p.is_real(batch, start + i);
            if (real[i]) continue;
            std::fill(x[i], x[i] + p.D, T(0));
            std::fill(value[i], value[i] + p.E, T(0));
        }
        map(p, phi, x, n, false, b.data());
    }

    // phi relative to `level`
    void weigh(const Problem<T>& p) {
        for (Index i = 0; i < n; ++i) {
            if (!real[i]) std::fill(phi[i], phi[i] + padded<T>(p.F), T(0));
            else if (level.size() == 1) {
                const T factor = std::exp(b[i] - level[0]);
                for (Index j = 0; j < p.F; j += LANES<T>) vector(phi[i] + j) *= factor;
            } else if (!level.empty()) {
                for (Index j = 0; j < p.F; ++j) phi[i][j] -= level[j];
                exponentiate(phi[i], p.F, T(0));
            }
            std::fill(phi[i] + p.F, phi[i] + padded<T>(p.F), T(0));
        }
    }
};

template <class T>
void take(Sums<T>& sums, const Problem<T>& p, const Keys<T>& keys) {
    absorb(sums.S, keys.phi, keys.value, keys.n);
    if (p.has_ones()) add_rows(sums.z[0], keys.phi, keys.n);
    for (Index i = 0; i < keys.n; ++i) sums.count += keys.real[i];
}

template <class T>
T nonzero(T x) {
    return x == 0 ? T(1) : x;
}

// What a thread needs for queries.
template <class T>
struct Queries {
    Matrix<T> x, phi, out, pairs, total;
    explicit Queries(const Problem<T>& p)
        : x(CHUNK, p.D), phi(CHUNK, p.F), out(CHUNK, p.E), pairs(CHUNK, CHUNK), total(CHUNK, p.F) {}
};

// total (n x F): z before the chunk and the chunk's keys up to each query, or all of z where there are no keys.
template <class T>
void run_totals(const Problem<T>& p, Matrix<T>& total, const T* z, const Keys<T>* keys, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; j += LANES<T>)
            vector(total[i] + j) = keys ? vector(i ? total[i - 1] + j : z + j) + vector(keys->phi[i] + j) : vector(z + j);
}

template <class T>
void divide_by_total(const Problem<T>& p, Matrix<T>& phi, const Matrix<T>& total, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; ++j) phi[i][j] /= nonzero(total[i][j]);
}

// Outputs of `n` queries: over the sums, and where causal over the keys of the chunk up to their own.
template <class T>
void answer(const Problem<T>& p, Queries<T>& q, const Sums<T>& sums, const Keys<T>* keys, Index b, Index h, Index start, Index n) {
    load(q.x, p.call.query, b, h, start, n);
    map<T>(p, q.phi, q.x, n, true, nullptr);
    if (p.divisor == CHANNEL) {
        run_totals(p, q.total, sums.z[0], keys, n);
        divide_by_total(p, q.phi, q.total, n);
    }
    read(q.out, q.phi, sums.S, n, false);
    if (keys) meet(q.out, q.phi, keys->phi_t, keys->value, q.pairs, n, EARLIER);
    T count = sums.count;
    for (Index i = 0; i < n; ++i) {
        T divisor = 1;
        if (p.divisor == SUM) {
            divisor = inner(q.phi[i], sums.z[0], p.F);
            for (Index j = 0; keys && j <= i; ++j) divisor += q.pairs[i][j];
        } else if (p.divisor == MEAN) {
            if (keys) count += keys->real[i];
            divisor = count;
        }
        divisor = nonzero(divisor);
        if (p.call.divisors) static_cast<T*>(p.call.divisors)[(b * p.call.heads + h) * p.call.queries + start + i] = divisor;
        const T factor = 1 / divisor;
        for (Index j = 0; j < p.E; j += LANES<T>) vector(q.out[i] + j) *= factor;
    }
    store(p.call.out, q.out, b, h, start, n);
}

// Keys `start` to `end` into the sums; where causal, their queries are answered on the way.
template <class T>
void walk(const Problem<T>& p, Sums<T>& sums, Keys<T>& keys, Queries<T>* q, Index b, Index h, Index start, Index end) {
    for (Index i = start; i < end; i += keys.n) {
        keys.fill(p, b, h, i, end, sums.level, q != nullptr);
        sums.raise(keys.level);
        if (q) {
            transpose(keys.phi_t, keys.phi, keys.n, p.F);
            for (Index g = 0; g < p.groups; ++g) answer(p, *q, sums, &keys, b, h * p.groups + g, i, keys.n);
        }
        take(sums, p, keys);
    }
}

template <class T>
void forward(const Call& call) {
    const Problem<T> p(call);
    const Index units = call.batch * call.kv_heads, threads = std::max<Index>(call.threads, 1);
    // Where there are fewer sequences than threads, each is cut into parts.
    Index parts = units && units < threads ? (threads + units - 1) / units : 1;
    parts = std::max<Index>(std::min(parts, std::max(call.keys, call.queries) / (4 * CHUNK)), 1);
    const auto cut = [parts](Index length, Index part) { return length * part / parts / CHUNK * CHUNK; };
    const auto end = [parts, cut](Index length, Index part) { return part + 1 == parts ? length : cut(length, part + 1); };
    std::vector<Sums<T>> sums;
    for (Index i = 0; i < units * (parts + 1); ++i) sums.emplace_back(p);
    const bool is_causal = call.is_causal;
#pragma omp parallel num_threads(threads)
    {
        Keys<T> keys(p);
        Queries<T> q(p);
        if (!is_causal || parts > 1) {
#pragma omp for schedule(dynamic) collapse(2)
            for (Index unit = 0; unit < units; ++unit)
                for (Index part = 0; part < parts; ++part)
                    walk<T>(p, sums[unit * (parts + 1) + part + 1], keys, nullptr, unit / call.kv_heads, unit % call.kv_heads,
                            cut(call.keys, part), end(call.keys, part));
        }
        // The sums before each part; after the last one, of all.
#pragma omp for schedule(static)
        for (Index unit = 0; unit < units; ++unit) {
            Sums<T>* s = &sums[unit * (parts + 1)];
            s[0].load(p, unit / call.kv_heads, unit % call.kv_heads);
            for (Index part = 0; part < parts; ++part) {
                Sums<T> before(p);
                before.add(s[part]);
                s[part + 1].add(before);
            }
        }
#pragma omp for schedule(dynamic) collapse(2)
        for (Index unit = 0; unit < units; ++unit)
            for (Index part = 0; part < parts; ++part) {
                const Index b = unit / call.kv_heads, h = unit % call.kv_heads;
                Sums<T>* s = &sums[unit * (parts + 1)];
                if (is_causal) {
                    walk(p, s[part], keys, &q, b, h, cut(call.keys, part), end(call.keys, part));
                    if (part + 1 == parts) s[part].store(p, b, h);
                    continue;
                }
                for (Index g = 0; g < p.groups; ++g)
                    for (Index i = cut(call.queries, part); i < end(call.queries, part); i += CHUNK)
                        answer<T>(p, q, s[parts], nullptr, b, h * p.groups + g, i,
                                  std::min(CHUNK, end(call.queries, part) - i));
                if (part + 1 == parts) s[parts].store(p, b, h);
            }
    }
}

// ---- backward ----

// A chunk of the forward sweep: its keys, their level, and z before it.
template <class T>
struct Chunk {
    Index start, n;
    std::vector<T> level, z;
};

template <class T>
struct Gradients {
    Matrix<T> S_t;     // (E x F): the sums over keys, transposed
    Matrix<T> R, R_t;  // (F x E) and (E x F): sum_i phi(q_i) G_i^T
    Matrix<T> z, r;    // (1 x F): sum_j phi(k_j); sum_i e_i phi(q_i), or by channel the gradient of z
    Matrix<T> G, G_t, value_t, phi_t, d_phi, d_x, d_value, tail;
    std::vector<T> e;

    explicit Gradients(const Problem<T>& p)
        : S_t(p.E, p.F), R(p.F, p.E), R_t(p.E, p.F), z(1, p.F), r(1, p.F), G(CHUNK, p.E), G_t(p.E, CHUNK), value_t(p.E, CHUNK),
          phi_t(p.F, CHUNK), d_phi(CHUNK, p.F), d_x(CHUNK, p.D), d_value(CHUNK, p.E), tail(CHUNK, p.F), e(CHUNK) {}

    void clear() {
        for (Matrix<T>* x : {&S_t, &R, &R_t, &z, &r}) x->clear();
    }

    // G and e of n queries
    void fill(const Problem<T>& p, Index b, Index h, Index start, Index n) {
        load(G, p.call.grad, b, h, start, n);
        for (Index i = 0; i < n; ++i) {
            e[i] = 0;
            if (p.divisor == CHANNEL || p.divisor == NONE) continue;
            const T factor = 1 / static_cast<const T*>(p.call.divisors)[(b * p.call.heads + h) * p.call.queries + start + i];
            if (p.divisor == SUM) {
                const T* o = p.call.out.template at<T>(b, h, start + i);
                for (Index j = 0; j < p.E; ++j) e[i] -= G[i][j] * o[j] * factor;
            }
            for (Index j = 0; j < p.E; j += LANES<T>) vector(G[i] + j) *= factor;
        }
    }
};

// Weighs the columns, by feature, from one level to another.
template <class T>
void decay_columns(Matrix<T>& x, const std::vector<T>& from, const std::vector<T>& to) {
    if (from == to) return;
    for (Index f = 0; f < x.columns; ++f) {
        const std::size_t l = from.size() == 1 ? 0 : f;
        const T decay = std::exp(from[l] - to[l]);
        for (Index i = 0; i < x.rows; ++i) x[i][f] *= decay;
    }
}

template <class T>
void decay_rows(Matrix<T>& x, const std::vector<T>& from, const std::vector<T>& to) {
    if (from == to) return;
    for (Index f = 0; f < x.rows; ++f) {
        const std::size_t l = from.size() == 1 ? 0 : f;
        const T decay = std::exp(from[l] - to[l]);
        for (Index j = 0; j < x.columns; ++j) x[f][j] *= decay;
    }
}

// row += factor * x
template <class T>
void add(T* row, const T* x, T factor, Index n) {
    for (Index j = 0; j < n; j += LANES<T>) vector(row + j) += factor * vector(x + j);
}

// Gradients of n queries; `keys` are those of the chunk where causal. What flows into the totals of SOFTMAX goes to g.tail.
template <class T>
void query_gradients(const Problem<T>& p, Gradients<T>& g, Queries<T>& q, const Keys<T>* keys, Index b, Index h, Index start,
                     Index n) {
    load(q.x, p.call.query, b, h, start, n);
    map<T>(p, q.phi, q.x, n, true, nullptr);
    g.fill(p, b, h, start, n);
    read(g.d_phi, g.G, g.S_t, n, false);
    if (keys) meet(g.d_phi, g.G, g.value_t, keys->phi, q.pairs, n, EARLIER);
    if (p.has_ones()) run_totals(p, q.total, g.z[0], keys, n);
    for (Index i = 0; i < n; ++i) {
        if (p.divisor == SUM) add(g.d_phi[i], q.total[i], g.e[i], p.F);
        if (p.divisor == CHANNEL)
            for (Index f = 0; f < p.F; ++f) {
                const T inverse = 1 / nonzero(q.total[i][f]);
                g.d_phi[i][f] *= inverse;
                g.tail[i][f] -= q.phi[i][f] * g.d_phi[i][f] * inverse;
            }
    }
    map_back(p, g.d_x, g.d_phi, q.phi, q.x, n, true);
    store(p.call.d_query, g.d_x, b, h, start, n);
}

// Gradients of keys and values from d_phi and d_value; pads get 0.
template <class T>
void key_gradients(const Problem<T>& p, Gradients<T>& g, const Keys<T>& keys, Index b, Index h) {
    map_back(p, g.d_x, g.d_phi, keys.phi, keys.x, keys.n, false);
    for (Index i = 0; i < keys.n; ++i) {
        if (keys.real[i]) continue;
        std::fill(g.d_x[i], g.d_x[i] + p.D, T(0));
        std::fill(g.d_value[i], g.d_value[i] + p.E, T(0));
    }
    store(p.call.d_key, g.d_x, b, h, keys.start, keys.n);
    store(p.call.d_value, g.d_value, b, h, keys.start, keys.n);
}

template <class T>
void take(Gradients<T>& g, const Problem<T>& p, const Keys<T>& keys) {
    absorb(g.S_t, keys.value, keys.phi, keys.n);
    if (p.has_ones()) add_rows(g.z[0], keys.phi, keys.n);
}

// Queries into R.
template <class T>
void take(Gradients<T>& g, const Queries<T>& q, Index n) {
    absorb(g.R, q.phi, g.G, n);
    absorb(g.R_t, g.G, q.phi, n);
}

template <class T>
void bidirectional_gradients(const Problem<T>& p, Gradients<T>& g, Keys<T>& keys, Queries<T>& q, Index b, Index h) {
    std::vector<T> level(p.levels(), Sums<T>::lowest());
    for (Index j = 0; j < p.call.keys; j += keys.n) {
        keys.fill(p, b, h, j, p.call.keys, level, false);
        decay_columns(g.S_t, level, keys.level);
        decay_columns(g.z, level, keys.level);
        level = keys.level;
        take(g, p, keys);
    }
    for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head)
        for (Index i = 0; i < p.call.queries; i += CHUNK) {
            const Index n = std::min(CHUNK, p.call.queries - i);
            g.tail.clear();
            query_gradients<T>(p, g, q, nullptr, b, head, i, n);
            for (Index row = 0; row < n; ++row)
                if (p.divisor == CHANNEL) add(g.r[0], g.tail[row], T(1), p.F);
                else add(g.r[0], q.phi[row], g.e[row], p.F);
            if (p.divisor == CHANNEL) divide_by_total(p, q.phi, q.total, n);
            take(g, q, n);
        }
    for (Index j = 0; j < p.call.keys; j += keys.n) {
        keys.refill(p, b, h, j, std::min(CHUNK, p.call.keys - j), level);
        read(g.d_value, keys.phi, g.R, keys.n, false);
        read(g.d_phi, keys.value, g.R_t, keys.n, false);
        for (Index i = 0; i < keys.n; ++i) add(g.d_phi[i], g.r[0], T(1), p.F);
        key_gradients(p, g, keys, b, h);
    }
}

template <class T>
void causal_gradients(const Problem<T>& p, Gradients<T>& g, Keys<T>& keys, Queries<T>& q, Index b, Index h) {
    std::vector<Chunk<T>> chunks;
    std::vector<T> level(p.levels(), Sums<T>::lowest());
    for (Index j = 0; j < p.call.keys; j += keys.n) {
        keys.fill(p, b, h, j, p.call.keys, level, true);
        decay_columns(g.S_t, level, keys.level);
        decay_columns(g.z, level, keys.level);
        level = keys.level;
        chunks.push_back({j, keys.n, level, {}});
        if (p.divisor == CHANNEL) chunks.back().z.assign(g.z[0], g.z[0] + g.z.stride);
        transpose(g.value_t, keys.value, keys.n, p.E);
        g.tail.clear();
        for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head)
            query_gradients(p, g, q, &keys, b, head, j, keys.n);
        if (p.divisor == CHANNEL) store(p.call.d_key, g.tail, b, h, j, keys.n);  // until the keys' own gradients are known
        take(g, p, keys);
    }
    for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
        const Index n = chunk->n;
        for (Matrix<T>* x : {&g.R_t, &g.r}) decay_columns(*x, chunk->level, level);  // e^(this level - the later one)
        decay_rows(g.R, chunk->level, level);
        level = chunk->level;
        keys.refill(p, b, h, chunk->start, n, level);
        read(g.d_value, keys.phi, g.R, n, false);
        read(g.d_phi, keys.value, g.R_t, n, false);
        g.tail.clear();
        if (p.divisor == CHANNEL) load(g.tail, p.call.d_key, b, h, chunk->start, n);
        for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head) {
            load(q.x, p.call.query, b, head, chunk->start, n);
            map<T>(p, q.phi, q.x, n, true, nullptr);
            if (p.divisor == CHANNEL) {
                run_totals(p, q.total, chunk->z.data(), &keys, n);
                divide_by_total(p, q.phi, q.total, n);
            }
            g.fill(p, b, head, chunk->start, n);
            transpose(g.phi_t, q.phi, n, p.F);
            transpose(g.G_t, g.G, n, p.E);
            meet(g.d_value, keys.phi, g.phi_t, g.G, q.pairs, n, LATER);
            meet(g.d_phi, keys.value, g.G_t, q.phi, q.pairs, n, LATER);
            for (Index i = 0; i < n && p.divisor == SUM; ++i) add(g.tail[i], q.phi[i], g.e[i], p.F);
            take(g, q, n);
        }
        for (Index i = n - 1; i >= 0; --i) {
            add(g.r[0], g.tail[i], T(1), p.F);
            add(g.d_phi[i], g.r[0], T(1), p.F);
        }
        key_gradients(p, g, keys, b, h);
    }
}

template <class T>
void backward(const Call& call) {
    const Problem<T> p(call);
    const Index units = call.batch * call.kv_heads;
#pragma omp parallel num_threads(std::max<int>(call.threads, 1))
    {
        Keys<T> keys(p);
        Queries<T> q(p);
        Gradients<T> g(p);
#pragma omp for schedule(dynamic)
        for (Index unit = 0; unit < units; ++unit) {
            g.clear();
            const auto run = call.is_causal ? causal_gradients<T> : bidirectional_gradients<T>;
            run(p, g, keys, q, unit / call.kv_heads, unit % call.kv_heads);
        }
    }
}

}  // namespace

extern "C" {
void subquad_forward_float32(const Call* call) { forward<float>(*call); }
void subquad_forward_float64(const Call* call) { forward<double>(*call); }
void subquad_backward_float32(const Call* call) { backward<float>(*call); }
void subquad_backward_float64(const Call* call) { backward<double>(*call); }
}
