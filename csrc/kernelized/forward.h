// The forward pass.

#pragma once

#include "kernelized/sums.h"

namespace subquad {

// What a thread needs for queries.
template <class T>
struct Queries {
    Matrix<T> scratch, phi, out, pairs, total;
    Rows<T> x;  // (n x D), in place or in scratch
    explicit Queries(const Problem<T>& p)
        : scratch(p.chunk, p.D), phi(p.chunk, p.F), out(p.chunk, p.E), pairs(p.chunk, p.chunk), total(p.chunk, p.F), x(scratch) {}
};

// total (n x F): z before the chunk and the chunk's keys up to each query, or all of z where there are no keys.
template <class T>
void run_totals(const Problem<T>& p, const Rows<T>& total, const T* z, const Keys<T>* keys, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; j += LANES<T>)
            vector(total[i] + j) = keys ? vector(i ? total[i - 1] + j : z + j) + vector(keys->phi[i] + j) : vector(z + j);
}

template <class T>
void divide_by_total(const Problem<T>& p, const Rows<T>& phi, const Rows<T>& total, Index n) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < p.F; ++j) phi[i][j] /= nonzero(total[i][j]);
}

// Outputs of `n` queries: over the sums, and where causal over the keys of the chunk up to their own.
template <class T>
void answer(const Problem<T>& p, Queries<T>& q, const Sums<T>& sums, const Keys<T>* keys, Index b, Index h, Index start, Index n) {
    q.x = fetch(q.scratch, p.call.query, b, h, start, n);
    if (!keys) anticipate<T>(p.call.query, b, h, start + n, std::min(start + 2 * n, Index(p.call.queries)), p.D);
    map<T>(p, q.phi, q.x, n, h / p.groups, true, nullptr);
    const Rows<T> out = place(q.out, p.call.out, b, h, start);
    if (p.divisor == CHANNEL && keys) {
        run_totals(p, q.total, sums.z[0], keys, n);
        divide_by_total(p, q.phi, q.total, n);
    }
    read(out, q.phi, sums.S, n);
    if (keys) meet(out, q.phi, keys->phi_t, keys->value, q.pairs, n, EARLIER);
    T count = sums.count;
    for (Index i = 0; i < n; ++i) {
        T divisor = 1;
        if (p.has_sum()) {
            divisor = inner(q.phi[i], sums.z[0], p.F);
            if (keys) divisor += total(q.pairs[i], i + 1);
            if (p.divisor == SIGNED && std::abs(divisor) < T(p.call.floor)) divisor = std::copysign(T(p.call.floor), divisor);
        } else if (p.divisor == MEAN) {
            if (keys) count += keys->real[i];
            divisor = count;
        }
        divisor = nonzero(divisor);
        if (p.call.divisors) static_cast<T*>(p.call.divisors)[(b * p.call.heads + h) * p.call.queries + start + i] = divisor;
        divide(out[i], divisor, p.E);
    }
    keep(q.out, out, p.call.out, b, h, start, n);
}

// Keys `start` to `end` into the sums; where causal, their queries are answered on the way.
template <class T>
void walk(const Problem<T>& p, Sums<T>& sums, Keys<T>& keys, Queries<T>* q, Index b, Index h, Index start, Index end) {
    for (Index i = start; i < end; i += keys.n) {
        if (!q) {  // where causal there is more to compute than to read
            const Index next = i + p.chunk, last = std::min(next + p.chunk, end);
            anticipate<T>(p.call.key, b, h, next, last, p.D);
            anticipate<T>(p.call.value, b, h, next, last, p.E);
        }
        keys.fill(p, b, h, i, end, sums.level, q != nullptr);
        sums.raise(keys.level);
        if (q) {
            transpose(keys.phi_t, keys.phi, keys.n);
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
    parts = std::max<Index>(std::min(parts, std::max(call.keys, call.queries) / (4 * p.chunk)), 1);
    const auto cut = [parts, &p](Index length, Index part) { return length * part / parts / p.chunk * p.chunk; };
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
            if (is_causal) continue;
            s[parts].store(p, unit / call.kv_heads, unit % call.kv_heads);
            if (p.divisor == CHANNEL) s[parts].normalize();
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
                    for (Index i = cut(call.queries, part); i < end(call.queries, part); i += p.chunk)
                        answer<T>(p, q, s[parts], nullptr, b, h * p.groups + g, i,
                                  std::min(p.chunk, end(call.queries, part) - i));
            }
    }
}

}  // namespace subquad
