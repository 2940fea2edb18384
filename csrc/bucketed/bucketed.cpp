// Softmax attention inside buckets: engines/bucketed.py says which keys a query sees.
//
// In each round keys are sorted by (bucket, position), and consecutive queries attend to a run of sorted keys in one small
// product; pairs that the rule excludes, or that an earlier round has shown, are masked one by one. Softmax is accumulated
// online, with the largest score so far; the backward pass recomputes the weights (Dao et al., 2022, arXiv:2205.14135).
//
// B batch, H query heads, K key-value heads, R rounds, n tokens, D channels, E value channels, C tokens per chunk.

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

constexpr Index QUERIES = 64;  // at most, that attend to a run of keys together

struct BucketedCall {
    int64_t batch, heads, kv_heads, tokens, channels, value_channels;
    int64_t rounds, buckets, chunk, shared, is_causal, threads;
    double scale;
    View query, key, value, out, grad, d_query, d_key, d_value;
    const int64_t* query_bucket;  // (B, H, R, n); `buckets` for pads
    const int64_t* key_bucket;    // (B, K, R, n)
    void *top, *sum;              // (B, H, n): the largest score, and sum e^(score - top); 0 and 0 if only its own value counts
};

// One head's tokens in one round. The rank of a key is its place in the sorted order; that of a query, the number of keys before
// it.
struct Round {
    std::vector<int32_t> query_bucket, key_bucket;  // by token; -1 and -2 for pads
    std::vector<int32_t> key_rank, query_rank;      // by token; in chunks if not causal
    std::vector<int32_t> keys, queries;             // tokens in sorted order, without pads
    std::vector<int32_t> sorted_rank;               // of `queries`, in tokens

    Round(const BucketedCall& c, const int64_t* of_queries, const int64_t* of_keys)
        : query_bucket(c.tokens), key_bucket(c.tokens), key_rank(c.tokens), query_rank(c.tokens) {
        std::vector<int32_t> query_start(c.buckets + 1), key_start(c.buckets + 1);
        for (Index i = 0; i < c.tokens; ++i) {
            query_bucket[i] = of_queries[i] == c.buckets ? -1 : int32_t(of_queries[i]);
            key_bucket[i] = of_keys[i] == c.buckets ? -2 : int32_t(of_keys[i]);
            if (query_bucket[i] >= 0) ++query_start[query_bucket[i] + 1];
            if (key_bucket[i] >= 0) ++key_start[key_bucket[i] + 1];
        }
        for (Index b = 0; b < c.buckets; ++b) query_start[b + 1] += query_start[b], key_start[b + 1] += key_start[b];
        keys.resize(key_start[c.buckets]), queries.resize(query_start[c.buckets]), sorted_rank.resize(queries.size());
        for (Index i = 0; i < c.tokens; ++i) {  // key_start counts the keys placed so far, and so the rank
            if (query_bucket[i] >= 0) {
                const int32_t sorted = query_start[query_bucket[i]]++;
                queries[sorted] = int32_t(i);
                query_rank[i] = sorted_rank[sorted] = key_start[query_bucket[i]];
            }
            if (key_bucket[i] >= 0) keys[key_rank[i] = key_start[key_bucket[i]]++] = int32_t(i);
        }
        for (Index i = 0; i < c.tokens && !c.is_causal; ++i) key_rank[i] /= int32_t(c.chunk), query_rank[i] /= int32_t(c.chunk);
    }
};

// The sorted queries `first` to `last`, and the sorted keys `from` to `to` that they may see.
struct Run {
    Index first, last, from, to;
};

std::vector<Run> runs(const BucketedCall& c, const Round& round) {
    std::vector<Run> found;
    const std::vector<int32_t>& rank = round.sorted_rank;
    for (Index i = 0, end; i < Index(rank.size()); i = end) {
        const Index chunk = rank[i] / c.chunk;
        const Index from = std::max<Index>(c.is_causal ? rank[i] - c.chunk : (chunk - 1) * c.chunk, 0);
        for (end = i + 1; end < Index(rank.size()) && end - i < QUERIES; ++end)
            if (c.is_causal ? rank[end] - from > c.chunk + QUERIES : rank[end] / c.chunk != chunk) break;
        const Index to = std::min<Index>(c.is_causal ? rank[end - 1] : (chunk + 1) * c.chunk, round.keys.size());
        if (from < to) found.push_back({i, end, from, to});
    }
    return found;
}

// A run of queries and its keys, and their scores.
template <class T>
struct Pairs {
    const BucketedCall& c;
    Index D, E, n = 0, m = 0;  // n queries, m keys
    const int32_t *queries = nullptr, *keys = nullptr;
    Matrix<T> query, key, key_t, value, weights, result;
    std::vector<int32_t> bucket, rank;  // of the keys

    explicit Pairs(const BucketedCall& c)
        : c(c), D(c.channels), E(c.value_channels), query(QUERIES, D), key(most(c), D), key_t(D, most(c)), value(most(c), E),
          weights(QUERIES, most(c)), result(QUERIES, std::max(D, E)), bucket(padded<T>(most(c))), rank(padded<T>(most(c))) {}
    static Index most(const BucketedCall& c) { return std::max<Index>(2 * c.chunk, c.chunk + QUERIES); }

    // The scores of all pairs, minus infinity for masked ones.
    void score(const std::vector<Round>& rounds, std::size_t now, const Run& run, Index b, Index h, Index kv) {
        n = run.last - run.first, m = run.to - run.from;
        queries = rounds[now].queries.data() + run.first, keys = rounds[now].keys.data() + run.from;
        for (Index i = 0; i < n; ++i) {
            std::memcpy(query[i], c.query.at<T>(b, h, queries[i]), D * sizeof(T));
            scale(query[i], T(c.scale), D);
        }
        for (Index j = 0; j < m; ++j) {
            std::memcpy(key[j], c.key.at<T>(b, kv, keys[j]), D * sizeof(T));
            std::memcpy(value[j], c.value.at<T>(b, kv, keys[j]), E * sizeof(T));
        }
        transpose(key_t, key, m);
        product(weights[0], weights.stride, query[0], query.stride, Index(1), key_t[0], key_t.stride, n, D, m, false);
        for (std::size_t round = 0; round <= now; ++round) mask(rounds[round], round < now);
        for (Index i = 0; i < n; ++i) {
            T* row = weights[i];
            for (Index j = 0; j < m && !c.is_causal; ++j)
                if (keys[j] == queries[i]) row[j] = masked();
            std::fill(row + m, row + padded<T>(m), masked());
        }
    }

    static constexpr T masked() { return -std::numeric_limits<T>::infinity(); }

   private:
    // Masks the pairs that a round does not show; of an earlier round, those that it does.
    void mask(const Round& round, bool is_earlier) {
        for (Index j = 0; j < m; ++j) bucket[j] = round.key_bucket[keys[j]], rank[j] = round.key_rank[keys[j]];
        const uint32_t reach = c.is_causal ? uint32_t(c.chunk - 1) : 1;
        for (Index i = 0; i < n; ++i) {
            T* row = weights[i];
            const int32_t own = round.query_bucket[queries[i]], at = round.query_rank[queries[i]] - int32_t(c.is_causal);
            for (Index j = 0; j < m; ++j) {
                const bool is_shown = (bucket[j] == own) & (uint32_t(at - rank[j]) <= reach);
                row[j] = is_shown != is_earlier ? row[j] : masked();
            }
        }
    }
};

// ---- forward ----

template <class T>
struct Softmax {
    Matrix<T> out;           // (n x E), not normalized yet
    std::vector<T> top, sum;  // by query: the largest score so far, and sum e^(score - top)

    explicit Softmax(const BucketedCall& c) : out(c.tokens, c.value_channels), top(c.tokens), sum(c.tokens) {}

    void begin(const BucketedCall& c, const Round& round, Index b, Index h, Index kv) {
        out.clear();
        std::fill(top.begin(), top.end(), Pairs<T>::masked());
        std::fill(sum.begin(), sum.end(), T(0));
        if (c.shared) return;
        for (Index i = 0; i < c.tokens; ++i) {  // its own key
            if (round.query_bucket[i] < 0) continue;
            const T *q = c.query.at<T>(b, h, i), *k = c.key.at<T>(b, kv, i);
            T score = 0;
            for (Index d = 0; d < c.channels; ++d) score += q[d] * T(c.scale) * k[d];
            top[i] = score, sum[i] = score == Pairs<T>::masked() ? T(0) : std::isnan(score) ? score : T(1);  // NaN must show
            std::memcpy(out[i], c.value.at<T>(b, kv, i), c.value_channels * sizeof(T));
        }
    }

    // Adds the pairs to the sums of their queries.
    void add_pairs(Pairs<T>& x) {
        std::vector<T> decay(x.n);
        for (Index i = 0; i < x.n; ++i) {
            const int32_t token = x.queries[i];
            const T most = std::max(top[token], largest(x.weights[i], padded<T>(x.m)));
            const T level = most == Pairs<T>::masked() ? T(0) : most;  // nothing seen yet: no infinity less infinity
            decay[i] = std::exp(top[token] - level);
            exponentiate(x.weights[i], x.m, level);
            top[token] = most;
            sum[token] = sum[token] * decay[i] + total(x.weights[i], x.m);
        }
        product(x.result[0], x.result.stride, x.weights[0], x.weights.stride, Index(1), x.value[0], x.value.stride, x.n, x.m, x.E,
                false);
        for (Index i = 0; i < x.n; ++i) {
            T* row = out[x.queries[i]];
            for (Index j = 0; j < x.E; j += LANES<T>) vector(row + j) = vector(row + j) * decay[i] + vector(x.result[i] + j);
        }
    }

    void finish(const BucketedCall& c, const Round& round, Index b, Index h, Index kv) {
        const Index first = (b * c.heads + h) * c.tokens;
        for (Index i = 0; i < c.tokens; ++i) {
            T* to = c.out.at<T>(b, h, i);
            const bool is_real = round.query_bucket[i] >= 0, has_seen = is_real && sum[i] != 0;  // a NaN has been seen
            static_cast<T*>(c.top)[first + i] = has_seen ? top[i] : T(0);
            static_cast<T*>(c.sum)[first + i] = has_seen ? sum[i] : T(0);
            if (has_seen) {
                scale(out[i], 1 / sum[i], c.value_channels);
                std::memcpy(to, out[i], c.value_channels * sizeof(T));
            } else if (is_real) std::memcpy(to, c.value.at<T>(b, kv, i), c.value_channels * sizeof(T));
            else std::fill(to, to + c.value_channels, T(0));
        }
    }
};

std::vector<Round> rounds_of(const BucketedCall& c, Index b, Index h, Index kv) {
    std::vector<Round> found;
    for (Index r = 0; r < c.rounds; ++r)
        found.emplace_back(c, c.query_bucket + ((b * c.heads + h) * c.rounds + r) * c.tokens,
                           c.key_bucket + ((b * c.kv_heads + kv) * c.rounds + r) * c.tokens);
    return found;
}

template <class T>
void bucketed_forward(const BucketedCall& c) {
    const Index group = c.heads / c.kv_heads;
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<Pairs<T>> pairs;
        std::optional<Softmax<T>> softmax;
        error.guard([&] { pairs.emplace(c), softmax.emplace(c); });
#pragma omp for schedule(dynamic) collapse(2)
        for (Index b = 0; b < c.batch; ++b)
            for (Index h = 0; h < c.heads; ++h)
                error.guard([&] {
                    const Index kv = h / group;
                    const std::vector<Round> rounds = rounds_of(c, b, h, kv);
                    softmax->begin(c, rounds[0], b, h, kv);
                    for (std::size_t now = 0; now < rounds.size(); ++now)
                        for (const Run& run : runs(c, rounds[now])) {
                            pairs->score(rounds, now, run, b, h, kv);
                            softmax->add_pairs(*pairs);
                        }
                    softmax->finish(c, rounds[0], b, h, kv);
                });
    }
    error.rethrow();
}

// ---- backward ----

template <class T>
struct BucketedGradients {
    Matrix<T> d_query, d_key, d_value;  // (n x D), (n x D), (n x E)
    Matrix<T> grad, value_t, d_scores, found;
    const T *top = nullptr, *sum = nullptr;  // by query, from the forward pass
    std::vector<T> along;                    // by query: the product of its output and the gradient

    explicit BucketedGradients(const BucketedCall& c)
        : d_query(c.tokens, c.channels), d_key(c.tokens, c.channels), d_value(c.tokens, c.value_channels),
          grad(QUERIES, c.value_channels), value_t(c.value_channels, Pairs<T>::most(c)),
          d_scores(QUERIES, Pairs<T>::most(c)), found(Pairs<T>::most(c), std::max(c.channels, c.value_channels)),
          along(c.tokens) {}

    // What does not depend on other tokens: the product of output and gradient, and the query's own key or value.
    void begin(const BucketedCall& c, const Round& round, Index b, Index h, Index kv) {
        const Index first = (b * c.heads + h) * c.tokens;
        top = static_cast<const T*>(c.top) + first, sum = static_cast<const T*>(c.sum) + first;
        d_query.clear();
        for (Index i = 0; i < c.tokens; ++i) {
            if (round.query_bucket[i] < 0) continue;
            const T *g = c.grad.at<T>(b, h, i), *o = c.out.at<T>(b, h, i), *v = c.value.at<T>(b, kv, i);
            along[i] = 0;
            for (Index e = 0; e < c.value_channels; ++e) along[i] += g[e] * o[e];
            T weight = 0, d_score = 0;
            if (sum[i] == 0) weight = 1;
            else if (!c.shared) {
                const T *q = c.query.at<T>(b, h, i), *k = c.key.at<T>(b, kv, i);
                T score = 0;
                for (Index d = 0; d < c.channels; ++d) score += q[d] * T(c.scale) * k[d];
                weight = std::exp(score - top[i]) / sum[i];
                d_score = -along[i];
                for (Index e = 0; e < c.value_channels; ++e) d_score += g[e] * v[e];
                d_score *= weight * T(c.scale);
                for (Index d = 0; d < c.channels; ++d) d_query[i][d] += d_score * k[d], d_key[i][d] += d_score * q[d];
            }
            for (Index e = 0; e < c.value_channels; ++e) d_value[i][e] += weight * g[e];
        }
    }

    // Adds the gradients of the pairs.
    void add_pairs(Pairs<T>& x, Index b, Index h) {
        for (Index i = 0; i < x.n; ++i) {
            const int32_t token = x.queries[i];
            std::memcpy(grad[i], x.c.grad.template at<T>(b, h, token), x.E * sizeof(T));
            exponentiate(x.weights[i], x.m, top[token]);  // 0 if the query has seen no key
            if (sum[token] != 0) scale(x.weights[i], 1 / sum[token], x.m);
        }
        add_transposed(d_value, x.keys, x.weights, grad, x.m, x.n);
        transpose(value_t, x.value, x.m);
        product(d_scores[0], d_scores.stride, grad[0], grad.stride, Index(1), value_t[0], value_t.stride, x.n, x.E, x.m, false);
        for (Index i = 0; i < x.n; ++i)
            for (Index j = 0; j < x.m; j += LANES<T>)
                vector(d_scores[i] + j) = (vector(d_scores[i] + j) - along[x.queries[i]]) * vector(x.weights[i] + j);
        add_transposed(d_key, x.keys, d_scores, x.query, x.m, x.n);  // the query is scaled already
        read(Rows<T>{x.result[0], x.D, x.result.stride}, Rows<T>{d_scores[0], x.m, d_scores.stride}, x.key, x.n);
        for (Index i = 0; i < x.n; ++i) add(d_query[x.queries[i]], x.result[i], T(x.c.scale), x.D);
    }

   private:
    // Rows `at` of `sums` += left^T (m x n) right (n x columns)
    void add_transposed(const Matrix<T>& sums, const int32_t* at, const Matrix<T>& left, const Matrix<T>& right, Index m, Index n) {
        product(found[0], found.stride, left[0], Index(1), left.stride, right[0], right.stride, m, n, right.columns, false);
        for (Index j = 0; j < m; ++j) add(sums[at[j]], found[j], T(1), right.columns);
    }
};

template <class T>
void bucketed_backward(const BucketedCall& c) {
    const Index group = c.heads / c.kv_heads;
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<Pairs<T>> pairs;
        std::optional<BucketedGradients<T>> g;
        error.guard([&] { pairs.emplace(c), g.emplace(c); });
#pragma omp for schedule(dynamic) collapse(2)
        for (Index b = 0; b < c.batch; ++b)
            for (Index kv = 0; kv < c.kv_heads; ++kv)
                error.guard([&] {
                    g->d_key.clear();
                    g->d_value.clear();
                    for (Index h = kv * group; h < (kv + 1) * group; ++h) {
                        const std::vector<Round> rounds = rounds_of(c, b, h, kv);
                        g->begin(c, rounds[0], b, h, kv);
                        for (std::size_t now = 0; now < rounds.size(); ++now)
                            for (const Run& run : runs(c, rounds[now])) {
                                pairs->score(rounds, now, run, b, h, kv);
                                g->add_pairs(*pairs, b, h);
                            }
                        store<T>(c.d_query, g->d_query, b, h, 0, c.tokens);
                    }
                    store<T>(c.d_key, g->d_key, b, kv, 0, c.tokens);
                    store<T>(c.d_value, g->d_value, b, kv, 0, c.tokens);
                });
    }
    error.rethrow();
}

}  // namespace subquad

LAYOUT(BucketedCall, batch, heads, kv_heads, tokens, channels, value_channels, rounds, buckets, chunk, shared, is_causal, threads,
       scale, query, key, value, out, grad, d_query, d_key, d_value, query_bucket, key_bucket, top, sum)
EXPORT(bucketed_forward, BucketedCall)
EXPORT(bucketed_backward, BucketedCall)
