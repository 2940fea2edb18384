// The backward pass.

#pragma once

#include "kernelized/forward.h"

namespace subquad {

// A chunk of the forward sweep: its keys, their level, and z before it (by channel only).
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
    Matrix<T> d_total;  // (n x F): the gradient of the running total at each token
    Matrix<T> out, G, G_t, value_t, phi_t, d_phi, d_x, d_value;
    std::vector<T> e;

    explicit Gradients(const Problem<T>& p)
        : S_t(p.E, p.F), R(p.F, p.E), R_t(p.E, p.F), z(1, p.F), r(1, p.F), d_total(p.chunk, p.F), out(p.chunk, p.E),
          G(p.chunk, p.E), G_t(p.E, p.chunk), value_t(p.E, p.chunk), phi_t(p.F, p.chunk), d_phi(p.chunk, p.F),
          d_x(p.chunk, p.D), d_value(p.chunk, p.E), e(p.chunk) {}

    void clear() {
        for (Matrix<T>* x : {&S_t, &R, &R_t, &z, &r}) x->clear();
    }

    // G and e of n queries.
    void fill(const Problem<T>& p, Index b, Index h, Index start, Index n) {
        load(G, p.call.grad, b, h, start, n);
        if (p.has_sum()) load(out, p.call.out, b, h, start, n);
        for (Index i = 0; i < n; ++i) {
            e[i] = 0;
            if (p.normalizer == CHANNEL || p.normalizer == NONE) continue;
            const T denominator = p.of_row(p.call.denominators, b, h, start + i);
            const bool is_at_floor = p.normalizer == SIGNED && std::abs(denominator) == T(p.call.floor);
            if (p.has_sum() && !is_at_floor) e[i] = -inner(G[i], out[i], p.E) / denominator;
            divide(G[i], denominator, p.E);
        }
    }
};

// Gradients of n queries; `keys` are those of the chunk, if causal. By channel, adds the gradient of the totals to g.d_total.
template <class T>
void query_gradients(const Problem<T>& p, Gradients<T>& g, Queries<T>& q, const Keys<T>* keys, Index b, Index h, Index start,
                     Index n) {
    q.x = fetch(q.scratch, p.call.query, b, h, start, n);
    map_features<T>(p, q.phi, q.x, n, h / p.groups, true, nullptr);
    g.fill(p, b, h, start, n);
    read(g.d_phi, g.G, g.S_t, n);
    if (keys) add_pairs(g.d_phi, g.G, g.value_t, keys->phi, q.pairs, n, EARLIER);
    if (p.has_ones()) running_totals(p, q.total, g.z[0], keys, n);
    for (Index i = 0; i < n; ++i) {
        if (p.has_sum()) add(g.d_phi[i], q.total[i], g.e[i], p.F);
        if (p.normalizer == CHANNEL && keys)
            for (Index f = 0; f < p.F; ++f) {
                const T inverse = 1 / nonzero(q.total[i][f]);
                g.d_phi[i][f] *= inverse;
                g.d_total[i][f] -= q.phi[i][f] * g.d_phi[i][f] * inverse;
            }
    }
    // The factor e^log_mix on all weights of a query acts like one on its features.
    for (Index i = 0; i < n && p.call.d_log_mix; ++i)
        p.of_row(p.call.d_log_mix, b, h, start + i) = inner(q.phi[i], g.d_phi[i], p.F);
    const Rows<T> d_x = rows_at(g.d_x, p.call.d_query, b, h, start);
    map_gradient(p, d_x, g.d_phi, q.phi, q.x, n, true);
    write_back(g.d_x, d_x, p.call.d_query, b, h, start, n);
}

// Gradients of keys, from d_phi, and of values; 0 for pads.
template <class T>
void key_gradients(const Problem<T>& p, Gradients<T>& g, const Keys<T>& keys, const Rows<T>& d_value, Index b, Index h) {
    const Rows<T> d_x = rows_at(g.d_x, p.call.d_key, b, h, keys.start);
    map_gradient(p, d_x, g.d_phi, keys.phi, keys.x, keys.n, false);
    for (Index i = 0; i < keys.n; ++i) {
        if (keys.real[i]) continue;
        std::fill(d_x[i], d_x[i] + p.D, T(0));
        std::fill(d_value[i], d_value[i] + p.E, T(0));
    }
    write_back(g.d_x, d_x, p.call.d_key, b, h, keys.start, keys.n);
    write_back(g.d_value, d_value, p.call.d_value, b, h, keys.start, keys.n);
}

// The forward pass has stored the sums over keys.
template <class T>
void bidirectional_gradients(const Problem<T>& p, Gradients<T>& g, Keys<T>& keys, Queries<T>& q, Index b, Index h) {
    Sums<T> sums(p);
    sums.load(p, b, h);
    if (p.normalizer == CHANNEL) sums.normalize_channels();
    transpose(g.S_t, sums.S, p.F);
    std::memcpy(g.z[0], sums.z[0], padded<T>(p.F) * sizeof(T));
    for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head)
        for (Index i = 0; i < p.call.queries; i += p.chunk) {
            const Index n = std::min(p.chunk, p.call.queries - i);
            query_gradients<T>(p, g, q, nullptr, b, head, i, n);
            for (Index row = 0; row < n && p.has_sum(); ++row) add(g.r[0], q.phi[row], g.e[row], p.F);
            accumulate(g.R, q.phi, g.G, n);
        }
    for (Index f = 0; f < p.F && p.normalizer == CHANNEL; ++f) {
        const T inverse = 1 / nonzero(g.z[0][f]);
        g.r[0][f] = -inner(sums.S[f], g.R[f], p.E) * inverse;
        scale(g.R[f], inverse, p.E);
    }
    transpose(g.R_t, g.R, p.F);
    for (Index j = 0; j < p.call.keys; j += keys.n) {
        keys.refill(p, b, h, j, std::min(p.chunk, p.call.keys - j), sums.level);
        const Rows<T> d_value = rows_at(g.d_value, p.call.d_value, b, h, j);
        read(d_value, keys.phi, g.R, keys.n);
        read(g.d_phi, keys.value, g.R_t, keys.n);
        for (Index i = 0; i < keys.n && p.has_ones(); ++i) add(g.d_phi[i], g.r[0], T(1), p.F);
        key_gradients(p, g, keys, d_value, b, h);
    }
}

template <class T>
void causal_gradients(const Problem<T>& p, Gradients<T>& g, Keys<T>& keys, Queries<T>& q, Index b, Index h) {
    std::vector<Chunk<T>> chunks;
    std::vector<T> level(p.levels(), NO_LEVEL<T>);
    for (Index j = 0; j < p.call.keys; j += keys.n) {
        keys.fill(p, b, h, j, p.call.keys, level, true);
        decay_columns(g.S_t, level, keys.level);
        decay_columns(g.z, level, keys.level);
        level = keys.level;
        chunks.push_back({j, keys.n, level, {}});
        if (p.normalizer == CHANNEL) chunks.back().z.assign(g.z[0], g.z[0] + g.z.stride);
        transpose(g.value_t, keys.value, keys.n);
        g.d_total.clear();
        for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head)
            query_gradients(p, g, q, &keys, b, head, j, keys.n);
        // d_key holds d_total until the gradients of the keys are computed.
        if (p.normalizer == CHANNEL) store(p.call.d_key, g.d_total, b, h, j, keys.n);
        accumulate(g.S_t, keys.value, keys.phi, keys.n);
        if (p.has_ones()) add_rows(g.z[0], keys.phi, keys.n);
    }
    for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
        const Index n = chunk->n;
        decay_columns(g.r, chunk->level, level);  // by e^(this level - the later one)
        decay_rows(g.R, chunk->level, level);
        level = chunk->level;
        transpose(g.R_t, g.R, p.F);
        keys.refill(p, b, h, chunk->start, n, level);
        const Rows<T> d_value = rows_at(g.d_value, p.call.d_value, b, h, chunk->start);
        read(d_value, keys.phi, g.R, n);
        read(g.d_phi, keys.value, g.R_t, n);
        g.d_total.clear();
        if (p.normalizer == CHANNEL) load(g.d_total, p.call.d_key, b, h, chunk->start, n);
        for (Index head = h * p.groups; head < (h + 1) * p.groups; ++head) {
            q.x = fetch(q.scratch, p.call.query, b, head, chunk->start, n);
            map_features<T>(p, q.phi, q.x, n, h, true, nullptr);
            if (p.normalizer == CHANNEL) {
                running_totals(p, q.total, chunk->z.data(), &keys, n);
                divide_by_total(p, q.phi, q.total, n);
            }
            g.fill(p, b, head, chunk->start, n);
            transpose(g.phi_t, q.phi, n);
            transpose(g.G_t, g.G, n);
            add_pairs(d_value, keys.phi, g.phi_t, g.G, q.pairs, n, LATER);
            add_pairs(g.d_phi, keys.value, g.G_t, q.phi, q.pairs, n, LATER);
            for (Index i = 0; i < n && p.has_sum(); ++i) add(g.d_total[i], q.phi[i], g.e[i], p.F);
            accumulate(g.R, q.phi, g.G, n);
        }
        for (Index i = n - 1; i >= 0 && p.has_ones(); --i) {
            add(g.r[0], g.d_total[i], T(1), p.F);
            add(g.d_phi[i], g.r[0], T(1), p.F);
        }
        key_gradients(p, g, keys, d_value, b, h);
    }
}

template <class T>
void backward(const Call& call) {
    const Problem<T> p(call);
    const Index units = call.batch * call.kv_heads;
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(call.threads, 1))
    {
        std::optional<Keys<T>> keys;
        std::optional<Queries<T>> q;
        std::optional<Gradients<T>> g;
        error.guard([&] { keys.emplace(p), q.emplace(p), g.emplace(p); });
#pragma omp for schedule(dynamic)
        for (Index unit = 0; unit < units; ++unit)
            error.guard([&] {
                g->clear();
                const auto run = call.is_causal ? causal_gradients<T> : bidirectional_gradients<T>;
                run(p, *g, *keys, *q, unit / call.kv_heads, unit % call.kv_heads);
            });
    }
    error.rethrow();
}

}  // namespace subquad
