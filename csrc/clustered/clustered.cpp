// Attention of clustered queries: engines/clustered.py says what it computes.
//
// A block of clusters attends to all keys together. Scores are stored transposed, one row per key, so that keys are read in place
// and a vector holds consecutive clusters. To find the k top keys of a cluster, keys are divided into short runs: a top key's score
// is at least the k-th largest of the runs' maxima, its peaks, so only few runs need to be searched. The backward pass recomputes
// all weights.
//
// B batch, H query heads, K key-value heads, N queries, M keys, D channels, E value channels, C clusters, k keys of each.

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

constexpr Index MEMBERS = 48;  // queries of a cluster at a time, at most
constexpr Index KEYS = 192;    // at a time; whole runs
constexpr int HALVINGS = 12;   // of the interval that contains the k-th largest peak

struct ClusteredCall {
    int64_t batch, heads, kv_heads, queries, keys, channels, value_channels, clusters, topk, threads;
    double scale;
    View query, key, value, out, grad, d_query, d_key, d_value;
    void* rest;                 // (B, H, C, E): the weighted sum of all values but those of the top keys
    void* mass;                 // (B, H, C): the weight of the top keys
    void *level, *total;        // (B, H, C): the largest score, and sum e^(score - level); 0 and 0 if there are no keys
    const int64_t* assignment;  // (B, H, N)
    const uint8_t* mask;        // (B, M); null: all keys are real
    const uint8_t* real;        // (B, N); null: all queries are real
    int32_t* top;               // (B, H, C, k): the top keys, ascending; -1 if there are fewer
};

// One head's queries, ordered by cluster.
struct Members {
    std::vector<int32_t> start, query, real;  // (C + 1,), (N,); (C,): the number of real ones

    void load(const ClusteredCall& c, Index head) {
        const int64_t* of = c.assignment + head * c.queries;
        const uint8_t* is_real = c.real ? c.real + head / c.heads * c.queries : nullptr;
        start.assign(c.clusters + 1, 0), real.assign(c.clusters, 0), query.resize(c.queries);
        for (Index i = 0; i < c.queries; ++i) ++start[of[i] + 1], real[of[i]] += !is_real || is_real[i];
        std::partial_sum(start.begin(), start.end(), start.begin());
        std::vector<int32_t> next(start);
        for (Index i = 0; i < c.queries; ++i) query[next[of[i]]++] = int32_t(i);
    }
};

std::vector<Members> members_of(const ClusteredCall& c) {
    std::vector<Members> found(c.batch * c.heads);
    FirstError error;
#pragma omp parallel for num_threads(std::max<int>(c.threads, 1))
    for (Index head = 0; head < Index(found.size()); ++head) error.guard([&] { found[head].load(c, head); });
    error.rethrow();
    return found;
}

// A block of clusters of one head.
template <class T, Index VECTORS>
struct Clusters {
    static constexpr Index MOST = VECTORS * LANES<T>;
    static constexpr T NONE = -std::numeric_limits<T>::infinity();

    const ClusteredCall& c;
    Index D, E, b = 0, h = 0, kv = 0, first = 0, n = 0, width = 0;  // n clusters, `width` with padding
    const Members* members = nullptr;
    Matrix<T> mean, mean_t;              // (MOST x D): of the queries, times the scale
    Matrix<T> key_rows, value_rows;      // (KEYS x D), (KEYS x E)
    Matrix<T> query, key, key_t, value;  // of one cluster: (MEMBERS x D), (k x D), (D x k), (k x E)
    Matrix<T> weights;                   // (MEMBERS x k)

    explicit Clusters(const ClusteredCall& c)
        : c(c), D(c.channels), E(c.value_channels), mean(MOST, D), mean_t(D, MOST), key_rows(KEYS, D), value_rows(KEYS, E),
          query(MEMBERS, D), key(c.topk, D), key_t(D, c.topk), value(c.topk, E), weights(MEMBERS, c.topk) {}

    static Index blocks(const ClusteredCall& c) { return (c.clusters + MOST - 1) / MOST; }

    void begin(const std::vector<Members>& all, Index head, Index block) {
        b = head / c.heads, h = head % c.heads, kv = h / (c.heads / c.kv_heads), members = &all[head];
        first = block * MOST, n = std::min<Index>(c.clusters - first, MOST), width = padded<T>(n);
        mean.clear();
        for (Index i = 0; i < n; ++i) {
            for (const int32_t* q = from(i); q < to(i); ++q)
                if (is_real(*q)) add(mean[i], c.query.at<T>(b, h, *q), D);
            scale(mean[i], T(c.scale) / std::max(real(i), 1), D);
        }
        transpose(mean_t, mean, MOST);
    }

    // The members and results of cluster i of the block.
    const int32_t* from(Index i) const { return members->query.data() + members->start[first + i]; }
    const int32_t* to(Index i) const { return members->query.data() + members->start[first + i + 1]; }
    int real(Index i) const { return members->real[first + i]; }
    Index at(Index i) const { return (b * c.heads + h) * c.clusters + first + i; }
    int32_t* top(Index i) const { return c.top + at(i) * c.topk; }
    T& mass(Index i) const { return static_cast<T*>(c.mass)[at(i)]; }
    T& level(Index i) const { return static_cast<T*>(c.level)[at(i)]; }
    T& total_of(Index i) const { return static_cast<T*>(c.total)[at(i)]; }
    T* rest(Index i) const { return static_cast<T*>(c.rest) + at(i) * E; }
    bool is_real(Index q) const { return !c.real || c.real[b * c.queries + q]; }

    static void add(T* row, const T* x, Index n) {
        for (Index j = 0; j < n; ++j) row[j] += x[j];
    }

    Rows<T> keys(Index start, Index m) const { return fetch<T>(key_rows, c.key, b, kv, start, m); }
    Rows<T> values(Index start, Index m) const { return fetch<T>(value_rows, c.value, b, kv, start, m); }

    // Scores (m x MOST) of the keys from `start` on; minus infinity for pads.
    void score(const Rows<T>& scores, const Rows<T>& keys, Index start, Index m) const {
        product(scores[0], scores.stride, keys[0], keys.stride, Index(1), mean_t[0], mean_t.stride, m, D, width, false);
        for (Index j = 0; j < m && c.mask; ++j)
            if (!c.mask[b * c.keys + start + j]) std::fill(scores[j], scores[j] + width, NONE);
    }

    // Copies the top keys of cluster i and their values; returns how many there are.
    Index gather(Index i) {
        const int32_t* top = this->top(i);
        Index k = 0;
        for (; k < c.topk && top[k] >= 0; ++k) {
            std::memcpy(key[k], c.key.at<T>(b, kv, top[k]), D * sizeof(T));
            std::memcpy(value[k], c.value.at<T>(b, kv, top[k]), E * sizeof(T));
        }
        for (Index j = k; j < padded<T>(k); ++j) {  // old contents may be NaN
            std::fill(key[j], key[j] + D, T(0));
            std::fill(value[j], value[j] + E, T(0));
        }
        transpose(key_t, key, k);
        return k;
    }

    // The weights of `count` members for their k top keys.
    void weigh(const int32_t* who, Index count, Index k) {
        for (Index i = 0; i < count; ++i) {
            std::memcpy(query[i], c.query.at<T>(b, h, who[i]), D * sizeof(T));
            scale(query[i], T(c.scale), D);
        }
        product(weights[0], weights.stride, query[0], query.stride, Index(1), key_t[0], key_t.stride, count, D, k, false);
        for (Index i = 0; i < count; ++i) {
            T* row = weights[i];
            std::fill(row + k, row + padded<T>(k), NONE);
            exponentiate(row, k, largest(row, k));
            scale(row, 1 / total(row, k), k);
        }
    }
};

// ---- forward ----

template <class T>
struct ClusteredForward : Clusters<T, 2> {
    using Base = Clusters<T, 2>;
    using Base::b, Base::c, Base::h, Base::n, Base::width, Base::D, Base::E, Base::MOST, Base::NONE;
    struct Candidate {
        T score;
        int32_t key;
    };
    Index run_length;                        // keys per peak: balances the search among peaks and the search inside runs
    Matrix<T> scores, peaks, others, exact;  // (M x MOST), (runs x MOST), (MOST x E), (MEMBERS x E)
    std::vector<Candidate> candidates;

    explicit ClusteredForward(const ClusteredCall& c)
        : Base(c), run_length(length(c)), scores(c.keys, MOST), peaks((c.keys + run_length - 1) / run_length, MOST),
          others(MOST, c.value_channels), exact(MEMBERS, c.value_channels) {}

    static Index length(const ClusteredCall& c) {
        Index found = 4;
        while (found < 64 && found * found * c.topk < c.keys) found *= 2;
        return found;
    }

    void run() {
        for (Index start = 0; start < c.keys; start += KEYS) {
            const Index m = std::min<Index>(c.keys - start, KEYS);
            const Rows<T> part{scores[start], MOST, scores.stride};
            this->score(part, this->keys(start, m), start, m);
            for (Index j = 0; j < m; j += run_length)
                peak(peaks[(start + j) / run_length], part[j], std::min(run_length, m - j));
        }
        T least[MOST], most[MOST];
        bound(least, most);
        for (Index i = 0; i < n; ++i) choose(i, least[i]);
        attend_centroids(most);
        for (Index i = 0; i < n; ++i) attend_members(i);
    }

   private:
    void peak(T* to, const T* from, Index m) const {
        for (Index i = 0; i < width; i += LANES<T>) {
            Vector<T> most = Vector<T>{} + NONE;
            for (Index j = 0; j < m; ++j) {
                const Vector<T>& score = vector(from + j * scores.stride + i);
                most = score > most ? score : most;  // never a NaN
            }
            vector(to + i) = most;
        }
    }

    // The largest peak, and a score that at least k peaks reach, if there are k, and not many more; found by bisection.
    void bound(T* least, T* most) const {
        using Bits = typename Simd<T>::Bits;
        for (Index i = 0; i < width; i += LANES<T>) {
            const auto reaching = [this, i](Vector<T> bound) {
                Bits count = {};
                for (Index r = 0; r < peaks.rows; ++r) count -= vector(peaks[r] + i) >= bound;
                return count;
            };
            Vector<T> low = Vector<T>{} - NONE, high = Vector<T>{} + NONE;
            for (Index r = 0; r < peaks.rows; ++r) {
                const Vector<T>& peak = vector(peaks[r] + i);
                high = peak > high ? peak : high;
                low = peak < low ? (peak > NONE ? peak : low) : low;
            }
            vector(most + i) = high;
            const Bits are_enough = reaching(low) >= Whole<T>(c.topk);
            for (int step = 0; step < HALVINGS; ++step) {
                const Vector<T> middle = low * T(0.5) + high * T(0.5);
                const Bits is_reached = reaching(middle) >= Whole<T>(c.topk);
                low = is_reached ? middle : low;
                high = is_reached ? high : middle;
            }
            vector(least + i) = are_enough ? low : Vector<T>{} + NONE;
        }
    }

    // The k keys of largest score, the first of equal ones. NaN counts as the largest.
    void choose(Index i, T bound) {
        int32_t* top = this->top(i);
        std::fill(top, top + c.topk, -1);
        if (!c.topk) return;
        candidates.clear();
        const uint8_t* mask = c.mask ? c.mask + b * c.keys : nullptr;
        for (Index r = 0; r < peaks.rows; ++r) {
            if (peaks[r][i] < bound) continue;
            for (Index j = r * run_length; j < std::min<Index>((r + 1) * run_length, c.keys); ++j) {
                const T score = scores[j][i];
                if (score < bound || (mask && !mask[j])) continue;
                candidates.push_back({score == score ? score : -NONE, int32_t(j)});
            }
        }
        const Index k = std::min<Index>(c.topk, candidates.size());
        std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), [](const auto& x, const auto& y) {
            return x.score > y.score || (x.score == y.score && x.key < y.key);
        });
        for (Index j = 0; j < k; ++j) top[j] = candidates[j].key;
        std::sort(top, top + k);
    }

    // The weights of all keys, their mass on the top keys, and the sum over all others.
    void attend_centroids(T* most) {
        T sum[MOST] = {};
        for (Index i = 0; i < width; ++i) most[i] = most[i] == NONE ? T(0) : most[i];  // there are no keys
        for (Index start = 0; start < c.keys; start += KEYS)
            for (Index i = 0; i < width; i += LANES<T>) {
                Vector<T> part = {};
                for (Index j = start; j < std::min<Index>(start + KEYS, c.keys); ++j) {
                    Vector<T>& score = vector(scores[j] + i);
                    score = exponential<T>(score - vector(most + i));
                    part += score;
                }
                vector(sum + i) += part;
            }
        T factor[MOST] = {};
        for (Index i = 0; i < n; ++i) {
            factor[i] = sum[i] == 0 ? T(0) : 1 / sum[i];
            this->level(i) = most[i], this->total_of(i) = sum[i];
            T mass = 0;
            const int32_t* top = this->top(i);
            for (Index k = 0; k < c.topk && top[k] >= 0; ++k) {
                mass += scores[top[k]][i];
                scores[top[k]][i] = 0;
            }
            this->mass(i) = mass * factor[i];
        }
        others.clear();
        for (Index start = 0; start < c.keys; start += KEYS) {
            const Index m = std::min<Index>(c.keys - start, KEYS);
            for (Index j = start; j < start + m; ++j)  // weights of sum 1: the sum of the values themselves may overflow
                for (Index i = 0; i < width; i += LANES<T>) vector(scores[j] + i) *= vector(factor + i);
            const Rows<T> value = this->values(start, m);
            product(others[0], others.stride, scores[start], Index(1), scores.stride, value[0], value.stride, n, m, E, true);
        }
        for (Index i = 0; i < n; ++i) std::memcpy(this->rest(i), others[i], E * sizeof(T));
    }

    // The output of the members of cluster i.
    void attend_members(Index i) {
        const Index k = this->from(i) < this->to(i) ? this->gather(i) : 0;
        const T mass = this->mass(i);
        for (const int32_t* who = this->from(i); who < this->to(i); who += MEMBERS) {
            const Index count = std::min<Index>(this->to(i) - who, MEMBERS);
            if (k) {
                this->weigh(who, count, k);
                product(exact[0], exact.stride, this->weights[0], this->weights.stride, Index(1), this->value[0],
                        this->value.stride, count, k, E, false);
            }
            for (Index q = 0; q < count; ++q) {
                T* to = c.out.template at<T>(b, h, who[q]);
                for (Index e = 0; e < E; ++e) to[e] = (k ? mass * exact[q][e] : T(0)) + others[i][e];
            }
        }
    }
};

template <class T>
void clustered_forward(const ClusteredCall& c) {
    const std::vector<Members> members = members_of(c);
    const Index blocks = ClusteredForward<T>::blocks(c);
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<ClusteredForward<T>> clusters;
        error.guard([&] { clusters.emplace(c); });
#pragma omp for schedule(dynamic)
        for (Index u = 0; u < c.batch * c.heads * blocks; ++u)
            error.guard([&] {
                clusters->begin(members, u / blocks, u % blocks);
                clusters->run();
            });
    }
    error.rethrow();
}

// ---- backward ----

template <class T>
struct ClusteredBackward : Clusters<T, 4> {
    using Base = Clusters<T, 4>;
    using Base::b, Base::c, Base::h, Base::n, Base::width, Base::D, Base::E, Base::MOST, Base::NONE;
    Matrix<T> sum, sum_t, d_mean;                                 // (MOST x E), its transpose; (MOST x D)
    Matrix<T> scores, d_scores;                                   // (KEYS x MOST)
    Matrix<T> grad, value_t, d_weights, d_query, d_key, d_value;  // of one cluster
    std::vector<T> d_mass;

    explicit ClusteredBackward(const ClusteredCall& c)
        : Base(c), sum(MOST, E), sum_t(E, MOST), d_mean(MOST, D), scores(KEYS, MOST), d_scores(KEYS, MOST), grad(MEMBERS, E),
          value_t(E, c.topk), d_weights(MEMBERS, c.topk), d_query(MEMBERS, D), d_key(c.topk, D), d_value(c.topk, E),
          d_mass(MOST) {}

    // Adds to the gradients of the head's keys and values.
    void run(const Matrix<T>& keys, const Matrix<T>& values) {
        sum.clear();
        for (Index i = 0; i < n; ++i) add_members(i, keys, values);
        add_centroids(keys, values);
        for (Index i = 0; i < n; ++i) {
            scale(d_mean[i], T(c.scale) / std::max(this->real(i), 1), D);
            for (const int32_t* q = this->from(i); q < this->to(i); ++q)
                if (this->is_real(*q)) this->add(c.d_query.template at<T>(b, h, *q), d_mean[i], D);
        }
    }

   private:
    // The gradients through the members of cluster i and its top keys.
    void add_members(Index i, const Matrix<T>& keys, const Matrix<T>& values) {
        const Index k = this->from(i) < this->to(i) ? this->gather(i) : 0;
        const T mass = this->mass(i);
        transpose(value_t, this->value, k);
        d_key.clear(), d_value.clear();
        d_mass[i] = 0;
        for (const int32_t* who = this->from(i); who < this->to(i); who += MEMBERS) {
            const Index count = std::min<Index>(this->to(i) - who, MEMBERS);
            for (Index q = 0; q < count; ++q) std::memcpy(grad[q], c.grad.template at<T>(b, h, who[q]), E * sizeof(T));
            add_rows<T>(sum[i], grad, count);
            if (k) d_mass[i] += add_top_keys(who, count, k, mass);
            for (Index q = 0; q < count; ++q) {
                T* to = c.d_query.template at<T>(b, h, who[q]);
                for (Index d = 0; d < D; ++d) to[d] = k ? T(c.scale) * d_query[q][d] : T(0);
            }
        }
        for (Index j = 0; j < k; ++j) {
            subquad::add(keys[this->top(i)[j]], d_key[j], T(1), D);
            subquad::add(values[this->top(i)[j]], d_value[j], T(1), E);
        }
    }

    // `count` members and their k top keys; returns their share of the gradient of the mass.
    T add_top_keys(const int32_t* who, Index count, Index k, T mass) {
        Matrix<T>& weights = this->weights;
        this->weigh(who, count, k);
        const Index stride = d_weights.stride;
        product(d_weights[0], stride, grad[0], grad.stride, Index(1), value_t[0], value_t.stride, count, E, k, false);
        T d_mass = 0;
        for (Index q = 0; q < count; ++q) {
            const T along = inner(weights[q], d_weights[q], k);
            d_mass += along;
            for (Index j = 0; j < k; j += LANES<T>) {
                Vector<T>&weight = vector(weights[q] + j), &found = vector(d_weights[q] + j);
                weight *= mass;
                found = weight * (found - along);
            }
        }
        product(d_value[0], d_value.stride, weights[0], Index(1), weights.stride, grad[0], grad.stride, k, count, E, true);
        product(d_key[0], d_key.stride, d_weights[0], Index(1), stride, this->query[0], this->query.stride, k, count, D, true);
        product(d_query[0], d_query.stride, d_weights[0], stride, Index(1), this->key[0], this->key.stride, count, k, D, false);
        return d_mass;
    }

    // The gradients through the attention of the centroids, KEYS keys at a time.
    void add_centroids(const Matrix<T>& keys, const Matrix<T>& values) {
        T level[MOST] = {}, factor[MOST] = {}, along[MOST] = {};  // A_j = e^(score - level) times the factor; sum_j A_j dA_j
        Index next[MOST] = {};
        for (Index i = 0; i < n; ++i) {
            level[i] = this->level(i), factor[i] = this->total_of(i) == 0 ? T(0) : 1 / this->total_of(i);
            along[i] = d_mass[i] * this->mass(i);
            for (Index e = 0; e < E; ++e) along[i] += sum[i][e] * this->rest(i)[e];
        }
        transpose(sum_t, sum, MOST);
        d_mean.clear();
        for (Index start = 0; start < c.keys; start += KEYS) {
            const Index m = std::min<Index>(c.keys - start, KEYS);
            const Rows<T> key = this->keys(start, m), value = this->values(start, m);
            this->score(scores, key, start, m);
            product(d_scores[0], d_scores.stride, value[0], value.stride, Index(1), sum_t[0], sum_t.stride, m, E, width, false);
            for (Index j = 0; j < m; ++j)
                for (Index i = 0; i < width; i += LANES<T>) {
                    Vector<T>&weight = vector(scores[j] + i), &found = vector(d_scores[j] + i);
                    weight = exponential<T>(weight - vector(level + i)) * vector(factor + i);
                    found = weight * (found - vector(along + i));
                }
            for (Index i = 0; i < n; ++i) {
                const int32_t* top = this->top(i);
                for (; next[i] < c.topk && top[next[i]] >= 0 && top[next[i]] < start + m; ++next[i]) {
                    T& weight = scores[top[next[i]] - start][i];
                    d_scores[top[next[i]] - start][i] = weight * (d_mass[i] - along[i]);
                    weight = 0;
                }
            }
            const Index stride = scores.stride;
            product(values[start], values.stride, scores[0], stride, Index(1), sum[0], sum.stride, m, n, E, true);
            product(keys[start], keys.stride, d_scores[0], stride, Index(1), this->mean[0], this->mean.stride, m, n, D, true);
            product(d_mean[0], d_mean.stride, d_scores[0], Index(1), stride, key[0], key.stride, n, m, D, true);
        }
    }
};

// The gradients of one head's keys and values.
template <class T>
struct KeyGradients {
    Matrix<T> key, value;  // (M x D), (M x E)

    explicit KeyGradients(const ClusteredCall& c) : key(c.keys, c.channels), value(c.keys, c.value_channels) {}
    void clear() { key.clear(), value.clear(); }
    void add(const KeyGradients& other) {
        for (Index j = 0; j < key.rows; ++j) {
            subquad::add(key[j], other.key[j], T(1), key.columns);
            subquad::add(value[j], other.value[j], T(1), value.columns);
        }
    }
    void store(const ClusteredCall& c, Index head) const {
        subquad::store<T>(c.d_key, key, head / c.kv_heads, head % c.kv_heads, 0, c.keys);
        subquad::store<T>(c.d_value, value, head / c.kv_heads, head % c.kv_heads, 0, c.keys);
    }
};

template <class T>
void clustered_backward(const ClusteredCall& c) {
    const std::vector<Members> members = members_of(c);
    const Index heads = c.batch * c.kv_heads, group = c.heads / c.kv_heads, blocks = ClusteredBackward<T>::blocks(c);
    // Clusters share keys, so one thread takes a whole head. With more threads than heads, several threads share a head, each
    // with partial gradients of its own.
    const Index each = std::clamp<Index>((c.threads + heads - 1) / std::max<Index>(heads, 1), 1, group * blocks);
    std::vector<std::unique_ptr<KeyGradients<T>>> partial(each > 1 ? heads * each : 0);
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<ClusteredBackward<T>> clusters;
        std::unique_ptr<KeyGradients<T>> own;
        error.guard([&] { clusters.emplace(c), own = std::make_unique<KeyGradients<T>>(c); });
#pragma omp for schedule(dynamic)
        for (Index u = 0; u < heads * each; ++u)
            error.guard([&] {
                const Index head = u / each, share = u % each, all = group * blocks;
                own->clear();
                for (Index w = all * share / each; w < all * (share + 1) / each; ++w) {
                    clusters->begin(members, head * group + w / blocks, w % blocks);
                    clusters->run(own->key, own->value);
                }
                if (each == 1) own->store(c, head);
                else partial[u] = std::exchange(own, std::make_unique<KeyGradients<T>>(c));
            });
#pragma omp for
        for (Index head = 0; head < (each > 1 ? heads : 0); ++head)
            error.guard([&] {
                KeyGradients<T>& sum = *partial[head * each];
                for (Index share = 1; share < each; ++share) sum.add(*partial[head * each + share]);
                sum.store(c, head);
            });
    }
    error.rethrow();
}

}  // namespace subquad

LAYOUT(ClusteredCall, batch, heads, kv_heads, queries, keys, channels, value_channels, clusters, topk, threads, scale, query, key,
       value, out, grad, d_query, d_key, d_value, rest, mass, level, total, assignment, mask, real, top)
EXPORT(clustered_forward, ClusteredCall)
EXPORT(clustered_backward, ClusteredCall)
