// One token per sequence with a state of single tokens: its key and value become the last row of the state, and its queries
// attend, by softmax, to the rows that they see.
//
// A query at position i sees the row of position j <= i if the rules of its head say so (block-sparse patterns), or if both are in
// the same bucket in one of R rounds and j is among the last C earlier ones there (bucketed attention). Rows of segments stand for
// tokens that all lie before i. Extra rows are seen by all.
//
// B batch, H query heads, K key-value heads, G = H / K, S rows, D channels, E value channels.

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

// src/subquad/ops/rows.py has the same kinds and fields, in the same order.
enum RuleKind { WINDOW, BLOCKS, BLOCK_ENDS, SELECTED };

struct RowRule {
    int64_t kind, size, before, rest;
    // WINDOW      at most `before` steps of `size` tokens back, -1: any number; not i itself if rest
    // BLOCKS      blocks of `size` tokens, at most `before` blocks back; only the last `rest` tokens of each and i, -1: all
    // BLOCK_ENDS  the last `rest` tokens of the blocks of `size` tokens before that of i
    // SELECTED    the blocks of `size` tokens that are listed for the head
};

struct RowsCall {
    int64_t batch, heads, kv_heads, rows, segments, extra, channels, value_channels;
    int64_t rules, first_global, segment_size, selected, rounds, chunk, is_shared, threads;
    double scale;
    View query, new_key, new_value, out;
    View key, value, number;                           // (B, K, S, ...); the last row is written
    View bucket;                                       // (B, K, S, R), int64
    View segment_key, segment_value, segment;          // (B, K, segments, ...)
    View extra_key, extra_value;                       // (1, K, extra, ...)
    const int64_t* rule;                               // (rules, 4)
    const uint8_t* rule_heads;                         // (rules, H): whether the rule is one of the head
    const int64_t* selected_blocks;                    // (B, H, selected), -1 for none
    const int64_t *query_bucket, *key_bucket;          // (B, H, R), (B, K, R)
    const int64_t* count_in;                           // (B,): the position of the new token
    int64_t* count_out;
};

// A row that a query sees.
template <class T>
struct SeenRow {
    const T *key, *value;
};

inline bool applies(const RowRule& rule, Index i, Index j, const int64_t* selected, Index count) {
    switch (rule.kind) {
        case WINDOW:
            return (i - j) % rule.size == 0 && (rule.before < 0 || i - j <= rule.before * rule.size) && !(rule.rest && i == j);
        case BLOCKS:
            return i / rule.size - j / rule.size <= rule.before &&
                   (rule.rest < 0 || j % rule.size >= rule.size - rule.rest || i == j);
        case BLOCK_ENDS: return j % rule.size >= rule.size - rule.rest && i / rule.size != j / rule.size;
        default:
            for (Index k = 0; k < count; ++k)
                if (selected[k] >= 0 && selected[k] == j / rule.size) return true;
            return false;
    }
}

inline bool sees(const RowsCall& c, Index b, Index h, Index i, Index j) {
    if (j < c.first_global || i < c.first_global) return true;
    const RowRule* rules = reinterpret_cast<const RowRule*>(c.rule);
    const int64_t* selected = c.selected_blocks ? c.selected_blocks + (b * c.heads + h) * c.selected : nullptr;
    for (Index r = 0; r < c.rules; ++r)
        if (c.rule_heads[r * c.heads + h] && applies(rules[r], i, j, selected, c.selected)) return true;
    return false;
}

// The rows that see each other by their buckets, newest first; `is_seen` has one entry for each row.
inline void mark_bucket_mates(const RowsCall& c, std::vector<char>& is_seen, Index b, Index h, Index kv_head, Index i) {
    const int64_t* own = c.query_bucket + (b * c.heads + h) * c.rounds;
    bool any = false;
    for (Index r = 0; r < c.rounds; ++r) {
        Index left = c.chunk;
        for (Index row = c.rows - 2; row >= 0 && left; --row) {
            const Index j = *c.number.at<int64_t>(b, kv_head, row);
            if (j < 0 || j >= i || c.bucket.at<int64_t>(b, kv_head, row)[r] != own[r]) continue;
            is_seen[row] = any = true;
            --left;
        }
    }
    if (!c.is_shared || !any) is_seen[c.rows - 1] = true;
}

template <class T>
void find_seen(const RowsCall& c, std::vector<SeenRow<T>>& seen, std::vector<char>& is_seen, Index b, Index h, Index i) {
    const Index kv_head = h / (c.heads / c.kv_heads);
    seen.clear();
    for (Index row = 0; row < c.extra; ++row)
        seen.push_back({c.extra_key.at<T>(0, kv_head, row), c.extra_value.at<T>(0, kv_head, row)});
    for (Index row = 0; row < c.segments; ++row) {
        const Index m = *c.segment.at<int64_t>(b, kv_head, row);
        if (m >= 0 && (m + 1) * c.segment_size <= i)
            seen.push_back({c.segment_key.at<T>(b, kv_head, row), c.segment_value.at<T>(b, kv_head, row)});
    }
    if (c.rounds) {
        is_seen.assign(c.rows, false);
        mark_bucket_mates(c, is_seen, b, h, kv_head, i);
    }
    for (Index row = 0; row < c.rows; ++row) {
        const Index j = *c.number.at<int64_t>(b, kv_head, row);
        if (c.rounds ? is_seen[row] : j >= 0 && j <= i && sees(c, b, h, i, j))
            seen.push_back({c.key.at<T>(b, kv_head, row), c.value.at<T>(b, kv_head, row)});
    }
}

// x . y, for rows that are not padded to whole vectors.
template <class T>
T dot(const T* x, const T* y, Index n) {
    const Index whole = n / LANES<T> * LANES<T>;
    T sum = inner(x, y, whole);
    for (Index j = whole; j < n; ++j) sum += x[j] * y[j];
    return sum;
}

template <class T>
double score(const T* x, const T* y, Index n, double scale) {
    const T found = dot(x, y, n) * T(scale);
    if (std::isfinite(found)) return found;
    double sum = 0;  // in which no product of two float32 numbers overflows
    for (Index j = 0; j < n; ++j) sum += double(x[j]) * double(y[j]);
    return sum * scale;
}

template <class T>
void attend_rows(const RowsCall& c, const std::vector<SeenRow<T>>& seen, std::vector<double>& scores, std::vector<T>& weights,
                 std::vector<T>& sum, Index b, Index h) {
    const Index n = seen.size(), whole = c.value_channels / LANES<T> * LANES<T>;
    scores.resize(n);
    weights.assign(padded<T>(n), T(0));
    sum.assign(padded<T>(c.value_channels), T(0));
    const T* query = c.query.at<T>(b, h, 0);
    double top = -std::numeric_limits<double>::infinity();
    for (Index k = 0; k < n; ++k) {
        scores[k] = score(query, seen[k].key, c.channels, c.scale);
        top = scores[k] > top ? scores[k] : top;
    }
    for (Index k = 0; k < n; ++k) weights[k] = T(scores[k] - top);
    exponentiate(weights.data(), n, T(0));
    T denominator = 0;
    for (Index k = 0; k < n; ++k) {
        const T weight = weights[k], *value = seen[k].value;
        denominator += weight;
        for (Index j = 0; j < whole; j += LANES<T>) vector(sum.data() + j) += weight * vector(value + j);
        for (Index j = whole; j < c.value_channels; ++j) sum[j] += weight * value[j];
    }
    T* out = c.out.at<T>(b, h, 0);
    for (Index j = 0; j < c.value_channels; ++j) out[j] = n ? sum[j] / denominator : T(0);
}

template <class T>
void append_row(const RowsCall& c, Index b, Index kv_head, Index position) {
    const Index row = c.rows - 1;
    std::memcpy(c.key.at<T>(b, kv_head, row), c.new_key.at<T>(b, kv_head, 0), c.channels * sizeof(T));
    std::memcpy(c.value.at<T>(b, kv_head, row), c.new_value.at<T>(b, kv_head, 0), c.value_channels * sizeof(T));
    *c.number.at<int64_t>(b, kv_head, row) = position;
    for (Index r = 0; r < c.rounds; ++r)
        c.bucket.at<int64_t>(b, kv_head, row)[r] = c.key_bucket[(b * c.kv_heads + kv_head) * c.rounds + r];
}

template <class T>
void rows_step(const RowsCall& c) {
    std::vector<int64_t> position(c.count_in, c.count_in + c.batch);
    FirstError error;
#pragma omp parallel num_threads(std::max<Index>(c.threads, 1)) if (c.threads > 1)
    {
        std::vector<SeenRow<T>> seen;
        std::vector<char> is_seen;
        std::vector<double> scores;
        std::vector<T> weights, sum;
#pragma omp for schedule(static)
        for (Index unit = 0; unit < c.batch * c.kv_heads; ++unit)
            error.guard([&] {
                const Index b = unit / c.kv_heads, kv_head = unit % c.kv_heads, groups = c.heads / c.kv_heads;
                append_row<T>(c, b, kv_head, position[b]);
                for (Index h = kv_head * groups; h < (kv_head + 1) * groups; ++h) {
                    find_seen(c, seen, is_seen, b, h, position[b]);
                    attend_rows(c, seen, scores, weights, sum, b, h);
                }
            });
    }
    error.rethrow();
    for (Index b = 0; b < c.batch; ++b) c.count_out[b] = position[b] + 1;
}

}  // namespace subquad

LAYOUT(RowsCall, batch, heads, kv_heads, rows, segments, extra, channels, value_channels, rules, first_global, segment_size,
       selected, rounds, chunk, is_shared, threads, scale, query, new_key, new_value, out, key, value, number, bucket, segment_key,
       segment_value, segment, extra_key, extra_value, rule, rule_heads, selected_blocks, query_bucket, key_bucket, count_in,
       count_out)
EXPORT(rows_step, RowsCall)
