// Sums over keys, and chunks of keys.

#pragma once

#include <limits>
#include <vector>

#include "kernelized/features.h"

namespace subquad {

constexpr double SAFE_RISE = 60;  // e^60 and e^-60 are far inside float32

// 1 in place of 0: a sum over nothing, divided by it, stays 0.
template <class T>
T nonzero(T x) {
    return x == 0 ? T(1) : x;
}

// A level of minus infinity means that there has been no key. Exponents are then relative to 0: no infinity less infinity.
template <class T>
constexpr T NO_LEVEL = -std::numeric_limits<T>::infinity();

template <class T>
T base_of(T level) {
    return level == NO_LEVEL<T> ? T(0) : level;
}

// The factor on feature f of a sum when its level changes; there is one level for all features, or one for each.
template <class T>
T decay(const std::vector<T>& from, const std::vector<T>& to, Index f) {
    const std::size_t l = from.size() == 1 ? 0 : f;
    return from[l] == to[l] ? T(1) : std::exp(from[l] - to[l]);
}

template <class T>
void decay_rows(const Matrix<T>& x, const std::vector<T>& from, const std::vector<T>& to) {
    for (Index f = 0; f < x.rows && from != to; ++f)
        if (const T factor = decay(from, to, f); factor != T(1)) scale(x[f], factor, x.columns);
}

template <class T>
void decay_columns(const Matrix<T>& x, const std::vector<T>& from, const std::vector<T>& to) {
    for (Index f = 0; f < x.columns && from != to; ++f) {
        const T factor = decay(from, to, f);
        for (Index i = 0; i < x.rows; ++i) x[i][f] *= factor;
    }
}

template <class T>
struct Sums {
    Matrix<T> S;  // (F x E)
    Matrix<T> z;  // (1 x F)
    std::vector<T> level;
    T count = 0;

    explicit Sums(const Problem<T>& p) : S(p.F, p.E), z(1, p.F), level(p.levels(), NO_LEVEL<T>) {}

    // Rescales the sums to a new level.
    void raise_level(const std::vector<T>& to) {
        decay_rows(S, level, to);
        decay_columns(z, level, to);
        level = to;
    }

    void add(Sums& other) {
        std::vector<T> to = level;
        for (std::size_t l = 0; l < to.size(); ++l) to[l] = std::max(level[l], other.level[l]);
        raise_level(to);
        other.raise_level(to);
        for (Index f = 0; f < S.rows; ++f) {
            for (Index j = 0; j < S.columns; ++j) S[f][j] += other.S[f][j];
            z[0][f] += other.z[0][f];
        }
        count += other.count;
    }

    // Divides each feature by its own total.
    void normalize_channels() {
        for (Index f = 0; f < S.rows; ++f) scale(S[f], 1 / nonzero(z[0][f]), S.columns);
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
    Matrix<T> scratch, phi, phi_t, value_scratch;
    Rows<T> x, value;  // (n x D) and (n x E), in place or in scratch
    std::vector<T> b, level;
    std::vector<char> real;
    Index start = 0, n = 0;

    explicit Keys(const Problem<T>& p)
        : scratch(p.chunk, p.D), phi(p.chunk, p.F), phi_t(p.F, p.chunk), value_scratch(p.chunk, p.E), x(scratch),
          value(value_scratch), b(p.chunk), level(p.levels()), real(p.chunk), first(p.levels()), higher(p.levels()) {}

    // Reads keys from `from` on, at most to `end`; pads have weight 0. `before` is the level so far. If `is_causal`, the chunk
    // ends before the level would rise too far above that of its first key.
    void fill(const Problem<T>& p, Index batch, Index head, Index from, Index end, const std::vector<T>& before,
              bool is_causal) {
        start = from, n = std::min(p.chunk, end - from);
        read_rows(p, batch, head);
        level = before;
        bool is_first = true;
        for (Index i = 0; i < n && !level.empty(); ++i) {
            if (!real[i]) continue;
            const T* row = level.size() == 1 ? &b[i] : phi[i];
            if (!is_causal) {
                T* to = level.data();
                for (std::size_t l = 0; l < level.size(); ++l) to[l] = row[l] > to[l] ? row[l] : to[l];
                continue;
            }
            for (std::size_t l = 0; l < level.size(); ++l) higher[l] = row[l] > level[l] ? row[l] : level[l];
            if (is_first) first = higher;
            is_first = false;
            if (is_causal && rises_too_far()) {
                n = i;
                break;
            }
            std::swap(level, higher);
        }
        apply_level(p);
    }

    // Reads a chunk whose level is known.
    void refill(const Problem<T>& p, Index batch, Index head, Index from, Index count, const std::vector<T>& known) {
        start = from, n = count, level = known;
        read_rows(p, batch, head);
        apply_level(p);
    }

   private:
    std::vector<T> first, higher;  // levels up to the first key, and up to the current one

    bool rises_too_far() const {
        bool too_far = false;
        for (std::size_t l = 0; l < level.size(); ++l) too_far |= higher[l] - first[l] > T(SAFE_RISE);
        return too_far;
    }

    void read_rows(const Problem<T>& p, Index batch, Index head) {
        x = fetch(scratch, p.call.key, batch, head, start, n);
        value = value_scratch;
        if (p.call.mask) load(value, p.call.value, batch, head, start, n);
        else value = fetch(value_scratch, p.call.value, batch, head, start, n);
        for (Index i = 0; i < n; ++i) {
            real[i] = p.is_real(batch, start + i);
            if (!real[i]) std::fill(value[i], value[i] + p.E, T(0));
        }
        map_features(p, phi, x, n, head, false, b.data());
    }

    // Makes phi relative to `level`.
    void apply_level(const Problem<T>& p) {
        for (Index i = 0; i < n; ++i) {
            if (!real[i]) std::fill(phi[i], phi[i] + padded<T>(p.F), T(0));
            else if (level.size() == 1) {
                scale(phi[i], T(std::exp(b[i] - base_of(level[0]))), p.F);
            } else if (!level.empty()) {
                Index j = 0;
                for (; j + LANES<T> <= p.F; j += LANES<T>) {
                    const Vector<T> to = vector(level.data() + j);
                    vector(phi[i] + j) = exponential<T>(vector(phi[i] + j) - (to == NO_LEVEL<T> ? Vector<T>{} : to));
                }
                for (; j < p.F; ++j) phi[i][j] = std::exp(phi[i][j] - base_of(level[j]));
            }
            std::fill(phi[i] + p.F, phi[i] + padded<T>(p.F), T(0));
        }
    }
};

template <class T>
void add_keys(Sums<T>& sums, const Problem<T>& p, const Keys<T>& keys) {
    accumulate(sums.S, keys.phi, keys.value, keys.n);
    if (p.has_ones()) add_rows(sums.z[0], keys.phi, keys.n);
    for (Index i = 0; i < keys.n; ++i) sums.count += keys.real[i];
}

}  // namespace subquad
