// The forward pass.

#pragma once

#include <optional>

#include "kernelized/sums.h"

namespace subquad {

// The scratch memory of one thread for a chunk of queries.
template <class T>
struct Queries {
    Matrix<T> scratch, phi, out, pairs, total;
    Rows<T> x;  // (n x D), in place or in scratch
    explicit Queries(const Problem<T>& p)
        : scratch(p.chunk, p.D), phi(p.chunk, p.F), out(p.chunk, p.E), pairs(p.chunk, p.chunk), total(p.chunk, p.F),
          x(scratch) {}
};

// total (n x F): at each query, z before the chunk plus the chunk's keys up to that query; without `keys`, z itself.
template <class T>
void running_totals(const Problem<T>& p, const Rows<T>& total, const T* z, const Keys<T>* keys, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; j += LANES<T>)
            vector(total[i] + j) = keys ? vector(i ? total[i - 1] + j : z + j) + vector(keys->phi[i] + j) : vector(z + j);
}

template <class T>
void divide_by_total(const Problem<T>& p, const Rows<T>& phi, const Rows<T>& total, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; ++j) phi[i][j] /= nonzero(total[i][j]);
}

// Merges the far part of a query, `numerator` / `denominator`, into its output, which is that of the near part. The near weights
// are relative to e^top and add up to `sum`, both 0 if there are none; so are all weights afterwards. Far weights whose sum
// underflows count as 0.
template <class T>
void merge(const Problem<T>& p, const T* numerator, T denominator, Index b, Index h, Index i) {
    T &top = p.of_row(p.call.top, b, h, i), &sum = p.of_row(p.call.sum, b, h, i), *out = p.call.out.template at<T>(b, h, i);
    const T log_far = static_cast<const T*>(p.call.log_mix)[h] + std::log(denominator);
    const bool is_far = !(denominator < std::numeric_limits<T>::min() || log_far == NO_LEVEL<T>);  // or NaN
    p.of_row(p.call.denominators, b, h, i) = is_far ? denominator : T(0);
    if (!is_far) return;
    const T level = sum == 0 || log_far > top ? log_far : top;
    const T near = sum == 0 ? T(0) : sum * std::exp(top - level), far = std::exp(log_far - level);
    top = level, sum = near + far;
    const T near_share = near / sum, far_share = far / sum;
    for (Index e = 0; e < p.E; ++e) out[e] = out[e] * near_share + numerator[e] / denominator * far_share;
}

// Outputs of n queries, over the sums and, if causal, over the keys of the chunk up to their own.
template <class T>
void attend_queries(const Problem<T>& p, Queries<T>& q, const Sums<T>& sums, const Keys<T>* keys, Index b, Index h, Index start,
                    Index n) {
    q.x = fetch(q.scratch, p.call.query, b, h, start, n);
    if (!keys) prefetch<T>(p.call.query, b, h, start + n, std::min(start + 2 * n, Index(p.call.queries)), p.D);
    map_features<T>(p, q.phi, q.x, n, h / p.groups, true, nullptr);
    const Rows<T> out = p.call.log_mix ? q.out : rows_at(q.out, p.call.out, b, h, start);
    if (p.normalizer == CHANNEL && keys) {
        running_totals(p, q.total, sums.z[0], keys, n);
        divide_by_total(p, q.phi, q.total, n);
    }
    read(out, q.phi, sums.S, n);
    if (keys) add_pairs(out, q.phi, keys->phi_t, keys->value, q.pairs, n, EARLIER);
    T count = sums.count;
    for (Index i = 0; i < n; ++i) {
        T denominator = 1;
        if (p.has_sum()) {
            denominator = inner(q.phi[i], sums.z[0], p.F);
            if (keys) denominator += total(q.pairs[i], i + 1);
            const T floor = p.call.floor;
            if (p.normalizer == SIGNED && std::abs(denominator) < floor) denominator = std::copysign(floor, denominator);
        } else if (p.normalizer == MEAN) {
            if (keys) count += keys->real[i];
            denominator = count;
        }
        if (p.call.log_mix) {
            merge(p, out[i], denominator, b, h, start + i);
            continue;
        }
        denominator = nonzero(denominator);
        if (p.call.denominators) p.of_row(p.call.denominators, b, h, start + i) = denominator;
        divide(out[i], denominator, p.E);
    }
    if (!p.call.log_mix) write_back(q.out, out, p.call.out, b, h, start, n);
}

// Adds keys `start` to `end` to the sums and, if causal (with `q`), computes the outputs of their queries on the way.
template <class T>
void scan_keys(const Problem<T>& p, Sums<T>& sums, Keys<T>& keys, Queries<T>* q, Index b, Index h, Index start, Index end) {
    for (Index i = start; i < end; i += keys.n) {
        if (!q) {  // if causal, computing takes longer than reading
            const Index next = i + p.chunk, last = std::min(next + p.chunk, end);
            prefetch<T>(p.call.key, b, h, next, last, p.D);
            prefetch<T>(p.call.value, b, h, next, last, p.E);
        }
        keys.fill(p, b, h, i, end, sums.level, q != nullptr);
        sums.raise_level(keys.level);
        if (q) {
            transpose(keys.phi_t, keys.phi, keys.n);
            for (Index g = 0; g < p.groups; ++g) attend_queries(p, *q, sums, &keys, b, h * p.groups + g, i, keys.n);
        }
        add_keys(sums, p, keys);
    }
}

template <class T>
void forward(const Call& call) {
    const Problem<T> p(call);
    const Index units = call.batch * call.kv_heads, threads = std::max<Index>(call.threads, 1);
    // With fewer sequences than threads, each sequence is cut into parts.
    Index parts = units && units < threads ? (threads + units - 1) / units : 1;
    parts = std::max<Index>(std::min(parts, std::max(call.keys, call.queries) / (4 * p.chunk)), 1);
    const auto cut = [parts, &p](Index length, Index part) { return length * part / parts / p.chunk * p.chunk; };
    const auto end = [parts, cut](Index length, Index part) { return part + 1 == parts ? length : cut(length, part + 1); };
    std::vector<Sums<T>> sums;
    for (Index i = 0; i < units * (parts + 1); ++i) sums.emplace_back(p);
    const bool is_causal = call.is_causal;
    FirstError error;
#pragma omp parallel num_threads(threads)
    {
        std::optional<Keys<T>> keys;
        std::optional<Queries<T>> q;
        error.guard([&] { keys.emplace(p), q.emplace(p); });
        if (!is_causal || parts > 1) {
#pragma omp for schedule(dynamic) collapse(2)
            for (Index unit = 0; unit < units; ++unit)
                for (Index part = 0; part < parts; ++part)
                    error.guard([&] {
                        scan_keys<T>(p, sums[unit * (parts + 1) + part + 1], *keys, nullptr, unit / call.kv_heads,
                                     unit % call.kv_heads, cut(call.keys, part), end(call.keys, part));
                    });
        }
        // Sum i becomes the sum over everything before part i; the last one, the sum over all keys.
#pragma omp for schedule(static)
        for (Index unit = 0; unit < units; ++unit)
            error.guard([&] {
                Sums<T>* s = &sums[unit * (parts + 1)];
                s[0].load(p, unit / call.kv_heads, unit % call.kv_heads);
                for (Index part = 0; part < parts; ++part) {
                    Sums<T> before(p);
                    before.add(s[part]);
                    s[part + 1].add(before);
                }
                if (is_causal) return;
                s[parts].store(p, unit / call.kv_heads, unit % call.kv_heads);
                if (p.normalizer == CHANNEL) s[parts].normalize_channels();
            });
#pragma omp for schedule(dynamic) collapse(2)
        for (Index unit = 0; unit < units; ++unit)
            for (Index part = 0; part < parts; ++part)
                error.guard([&] {
                    const Index b = unit / call.kv_heads, h = unit % call.kv_heads;
                    Sums<T>* s = &sums[unit * (parts + 1)];
                    if (is_causal) {
                        scan_keys(p, s[part], *keys, &*q, b, h, cut(call.keys, part), end(call.keys, part));
                        if (part + 1 == parts) s[part].store(p, b, h);
                        return;
                    }
                    for (Index g = 0; g < p.groups; ++g)
                        for (Index i = cut(call.queries, part); i < end(call.queries, part); i += p.chunk)
                            attend_queries<T>(p, *q, s[parts], nullptr, b, h * p.groups + g, i,
                                              std::min(p.chunk, end(call.queries, part) - i));
                });
    }
    error.rethrow();
}

}  // namespace subquad
