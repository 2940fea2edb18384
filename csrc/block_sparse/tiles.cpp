// Exact softmax attention over tile groups: ops/tiles/group.py defines tiles and tile groups.
//
// A panel of queries attends to its keys one block at a time. Scores are stored transposed, one row per key, so that keys are
// read in place and a vector holds consecutive queries, each with its own largest score. Queries that see no key of a block are
// skipped. Softmax is accumulated online; the backward pass recomputes the weights (Dao et al., 2022, arXiv:2205.14135). It
// does so from the largest score and the sum, not from their log-sum-exp, where the sum is lost if scores are large.
//
// Z sequences, S subsequences of each, G query heads per key-value head, n queries, m keys, D channels, E value channels; N rows
// of output.

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

constexpr Index PANEL = 96;  // queries
constexpr Index BLOCK = 64;  // keys, at most
template <class T>
constexpr T MASKED = -std::numeric_limits<T>::infinity();  // as in ops/tiles/group.py

struct Tile {
    int64_t first_row, rows, blocks, first_column, column_step, columns, is_causal;
    int64_t mask_sequence, mask_block, mask_key, mask_has_rows;  // three strides; whether each query has its own mask
    int64_t runs, runs_row;                                     // number of runs per block of queries; stride
    const void* mask;          // (Z S or 1, blocks or 1, columns, rows or 1), rows padded to whole vectors; null: none
    const int64_t* run_start;  // (Z G or 1, blocks, runs): of columns / runs keys each, -1 for none; null: one run
};

struct TileGroup {
    int64_t sequences, subsequences, query_heads, queries, keys;
    int64_t query_head, d_query_head, bias_sequence, output_row_stride, tiles;  // four strides; how many tiles
    View query, key, value, d_query, d_key, d_value;  // (Z, S, n or m); `query_head` is the stride between the G query heads
    const void* bias;           // (Z or 1, S, m): added to all scores of a key; null: none
    const int64_t* output_row;  // (Z G or 1, S n): the row of the output of each query, N for none; null: row i for query i
    const int64_t *query_span, *key_span;  // (Z, S, 2): first and number; null: all
    const Tile* tile;
};

// The tokens of a subsequence that are there. Tiles, masks and biases count from the first of them; the others are never read.
struct Span {
    Index first, count;
    Span(const int64_t* spans, const TileGroup& group, Index z, Index s, Index all)
        : first(spans ? spans[2 * (z * group.subsequences + s)] : 0),
          count(spans ? spans[2 * (z * group.subsequences + s) + 1] : all) {}
};

struct TilesCall {
    int64_t groups, length, channels, value_channels, threads;
    double scale;
    const TileGroup* group;
    void *out, *top, *sum;  // (Z G, N, E), (Z G, N), (Z G, N): the largest score, and sum e^(score - top); 0 and 0 if empty
    const void* grad;       // (Z G, N, E)
};

// Up to PANEL consecutive queries of one block of one tile.
struct PanelRange {
    const Tile* tile;
    Index block, first, n;
};

std::vector<PanelRange> panel_ranges(const TileGroup& group) {
    std::vector<PanelRange> found;
    for (const Tile* tile = group.tile; tile < group.tile + group.tiles; ++tile)
        for (Index block = 0; block < tile->blocks; ++block)
            for (Index first = 0; first < tile->rows; first += PANEL)
                found.push_back({tile, block, first, std::min<Index>(PANEL, tile->rows - first)});
    return found;
}

// A panel of queries, and the scores of a block of keys.
template <class T>
struct Panel {
    const TilesCall& call;
    Index D, E, n = 0, m = 0, low = 0, high = 0;  // only the queries from `low` to `high` see any of the keys
    Index z = 0, s = 0, g = 0, sequence = 0;      // `sequence` of the output, one of Z G
    Index first_query = 0, first_key = 0, keys = 0;  // of the spans
    const TileGroup* group = nullptr;
    PanelRange range = {};
    Matrix<T> query_copy, query_t, key_copy, value_copy, scores;
    Rows<T> query, key, value;
    const Vector<T> NONE = Vector<T>{} + MASKED<T>;

    explicit Panel(const TilesCall& c)
        : call(c), D(c.channels), E(c.value_channels), query_copy(PANEL, D), query_t(D, PANEL), key_copy(BLOCK, D),
          value_copy(BLOCK, E), scores(BLOCK, PANEL), query(query_copy), key(key_copy), value(value_copy) {}

    // Whether there is any query in the range.
    bool begin(const TileGroup& tile_group, const PanelRange& panel_range, Index key_sequence, Index subsequence, Index head) {
        group = &tile_group, range = panel_range;
        z = key_sequence, s = subsequence, g = head, sequence = z * group->query_heads + g;
        const Span queries(group->query_span, *group, z, s, group->queries), seen(group->key_span, *group, z, s, group->keys);
        first_query = queries.first, first_key = seen.first, keys = seen.count;
        n = std::min(range.n, queries.first + queries.count - token(0));
        if (n <= 0) return false;
        query = fetch(query_copy, of_head(group->query, group->query_head), z, s, token(0), n);
        transpose(query_t, query, n, T(call.scale));
        return true;
    }

    View of_head(View view, Index stride) const {
        view.data = static_cast<T*>(view.data) + g * stride;
        return view;
    }

    // The place of query i in its subsequence.
    Index token(Index i) const { return first_query + range.tile->first_row + range.block * range.tile->rows + range.first + i; }

    // The row of the output of query i, N for none.
    Index output_row(Index i) const {
        const Index at = s * group->queries + token(i);
        return group->output_row ? group->output_row[sequence * group->output_row_stride + at] : at;
    }

    // Calls `use(first key)` for every block of keys that any query sees, with their scores in `scores`.
    template <class Use>
    void for_each_key_block(Use use) {
        const Tile& tile = *range.tile;
        const Index size = tile.run_start ? tile.columns / tile.runs : tile.columns;
        for (Index run = 0; run < (tile.run_start ? tile.runs : 1); ++run) {
            const Index start = tile.run_start ? tile.run_start[sequence * tile.runs_row + range.block * tile.runs + run]
                                               : tile.first_column + range.block * tile.column_step;
            if (start < 0) continue;
            const Index end = std::min<Index>(start + size, keys);
            const Index blocks = (end - start + BLOCK - 1) / BLOCK;
            for (Index b = 0, j = start; b < blocks; ++b, j += m) {
                m = (end - j + blocks - b - 1) / (blocks - b);
                if (score(j, run * size + j - start)) use(j);
            }
        }
    }

   private:
    bool score(Index first, Index column) {
        const Tile& tile = *range.tile;
        const T* mask = nullptr;
        low = tile.is_causal ? std::max<Index>(column - range.first, 0) / LANES<T> * LANES<T> : 0, high = padded<T>(n);
        if (tile.mask) {
            mask = static_cast<const T*>(tile.mask) + (z * group->subsequences + s) * tile.mask_sequence +
                   range.block * tile.mask_block + column * tile.mask_key + (tile.mask_has_rows ? range.first : 0);
            if (tile.mask_has_rows) {
                while (low < high && is_masked(mask + low)) low += LANES<T>;
                while (low < high && is_masked(mask + high - LANES<T>)) high -= LANES<T>;
            }
        }
        if (low >= high) return false;
        const T* bias = static_cast<const T*>(group->bias);
        if (bias) bias += z * group->bias_sequence + s * group->keys + first;
        key = fetch(key_copy, group->key, z, s, first_key + first, m);
        value = fetch(value_copy, group->value, z, s, first_key + first, m);
        product(scores[0] + low, scores.stride, key[0], key.stride, Index(1), query_t[0] + low, query_t.stride, m, D, high - low,
                false);
        for (Index j = 0; j < m; ++j) {
            T* to = scores[j];
            const T* from = mask ? mask + j * tile.mask_key : nullptr;
            if ((bias && bias[j] < 0) || (from && !tile.mask_has_rows && *from < 0)) {
                std::fill(to + low, to + high, MASKED<T>);
                continue;
            }
            // Replaced, not added to: a score that has overflowed, or is NaN, must not reach a query that does not see the key.
            if (from && tile.mask_has_rows)
                for (Index i = low; i < high; i += LANES<T>) vector(to + i) = vector(from + i) < T(0) ? NONE : vector(to + i);
            const Index later = tile.is_causal ? std::min(column + j - range.first, high) : 0;  // queries before the key
            if (later > low) std::fill(to + low, to + later, MASKED<T>);
        }
        return true;
    }

    // Whether a vector of queries sees none of the m keys.
    bool is_masked(const T* mask) const {
        Vector<T> most = vector(mask);
        for (Index j = 1; j < m; ++j) {
            const Vector<T>& next = vector(mask + j * range.tile->mask_key);
            most = next > most ? next : most;
        }
        return largest(reinterpret_cast<const T*>(&most), LANES<T>) < T(0);
    }
};

// The factor that makes weights sum to 1; 0 if there are none.
template <class T>
T inverse_sum(T sum) {
    return sum == 0 ? T(0) : 1 / sum;
}

// ---- forward ----

template <class T>
struct TileSoftmax {
    Panel<T> panel;
    Matrix<T> out;      // (n x E), not normalized yet
    Matrix<T> top, sum;  // (1 x n): the largest score so far, and sum e^(score - top)

    explicit TileSoftmax(const TilesCall& c) : panel(c), out(PANEL, c.value_channels), top(1, PANEL), sum(1, PANEL) {}

    void run(bool is_first, bool is_last) {
        is_first ? clear() : load();
        panel.for_each_key_block([this](Index) { add_keys(); });
        for (Index i = 0; i < panel.n; ++i) {
            const Index at = panel.output_row(i);
            if (at == panel.call.length) continue;
            top_of(at) = top[0][i], sum_of(at) = sum[0][i];
            if (is_last) normalize(panel.call, out_of(at), out[i], top_of(at), sum_of(at));
            else std::memcpy(out_of(at), out[i], panel.E * sizeof(T));
        }
    }

    static void finish(const TilesCall& c, Index at) {
        T* out = static_cast<T*>(c.out) + at * c.value_channels;
        normalize(c, out, out, static_cast<T*>(c.top)[at], static_cast<T*>(c.sum)[at]);
    }

   private:
    T* out_of(Index at) { return static_cast<T*>(panel.call.out) + (panel.sequence * panel.call.length + at) * panel.E; }
    T& top_of(Index at) { return static_cast<T*>(panel.call.top)[panel.sequence * panel.call.length + at]; }
    T& sum_of(Index at) { return static_cast<T*>(panel.call.sum)[panel.sequence * panel.call.length + at]; }

    void clear() {
        std::fill(top[0], top[0] + padded<T>(panel.n), MASKED<T>);
        std::fill(sum[0], sum[0] + padded<T>(panel.n), T(0));
        std::memset(out[0], 0, panel.n * out.stride * sizeof(T));
    }
    void load() {
        clear();
        for (Index i = 0; i < panel.n; ++i) {
            const Index at = panel.output_row(i);
            if (at == panel.call.length) continue;
            top[0][i] = top_of(at), sum[0][i] = sum_of(at);
            std::memcpy(out[i], out_of(at), panel.E * sizeof(T));
        }
    }

    // The row of the output from its sums. A row that saw nothing, not even a NaN, has the sum 0.
    static void normalize(const TilesCall& c, T* to, const T* from, T& top, T sum) {
        const T factor = inverse_sum(sum);
        for (Index e = 0; e < c.value_channels; ++e) to[e] = sum == 0 ? T(0) : from[e] * factor;
        if (sum == 0) top = 0;
    }

    // Adds a block of keys to the sums.
    void add_keys() {
        for (Index i = panel.low; i < panel.high; i += LANES<T>) {
            T* column = panel.scores[0] + i;
            const Index stride = panel.scores.stride;
            Vector<T> most = vector(top[0] + i);
            for (Index j = 0; j < panel.m; ++j) {
                const Vector<T>& score = vector(column + j * stride);
                most = score > most ? score : most;
            }
            const Vector<T> level = most == panel.NONE ? Vector<T>{} : most;  // nothing seen yet: no infinity less infinity
            const Vector<T> decay = exponential<T>(vector(top[0] + i) - level);
            Vector<T> total = vector(sum[0] + i) * decay;
            for (Index j = 0; j < panel.m; ++j) {
                Vector<T>& score = vector(column + j * stride);
                score = exponential<T>(score - level);
                total += score;
            }
            vector(top[0] + i) = most, vector(sum[0] + i) = total;
            for (Index lane = 0; lane < LANES<T>; ++lane)
                if (decay[lane] != T(1)) scale(out[i + lane], decay[lane], panel.E);
        }
        product(out[panel.low], out.stride, panel.scores[0] + panel.low, Index(1), panel.scores.stride, panel.value[0],
                panel.value.stride, std::min(panel.high, panel.n) - panel.low, panel.m, panel.E, true);
    }
};

// Sets what lies outside the span of its queries to 0: n rows of `width` numbers, `stride` apart.
template <class T>
void clear_outside(const Span& span, T* rows, Index n, Index stride, Index width) {
    for (Index i = 0; i < span.first; ++i) std::fill_n(rows + i * stride, width, T(0));
    for (Index i = span.first + span.count; i < n; ++i) std::fill_n(rows + i * stride, width, T(0));
}

template <class T>
void tiles_forward(const TilesCall& c) {
    const Index rows = c.group[0].sequences * c.group[0].query_heads * c.length;
    std::vector<std::vector<PanelRange>> ranges;
    for (Index g = 0; g < c.groups; ++g) ranges.push_back(panel_ranges(c.group[g]));
    // A group without `output_row` visits every row once: the first one can start it, the last one finish it.
    const bool starts_rows = !c.group[0].output_row, finishes_rows = !c.group[c.groups - 1].output_row;
    if (!starts_rows) {
        std::fill_n(static_cast<T*>(c.out), rows * c.value_channels, T(0));
        std::fill_n(static_cast<T*>(c.sum), rows, T(0));
        std::fill_n(static_cast<T*>(c.top), rows, MASKED<T>);
    }
    FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        std::optional<TileSoftmax<T>> softmax;
        error.guard([&] { softmax.emplace(c); });
        if (starts_rows && c.group[0].query_span) {
#pragma omp for
            for (Index u = 0; u < rows / std::max<Index>(c.length, 1); ++u) {
                const Span span(c.group[0].query_span, c.group[0], u / c.group[0].query_heads, 0, c.length);
                clear_outside(span, static_cast<T*>(c.out) + u * c.length * c.value_channels, c.length, c.value_channels,
                              c.value_channels);
                clear_outside(span, static_cast<T*>(c.top) + u * c.length, c.length, Index(1), Index(1));
                clear_outside(span, static_cast<T*>(c.sum) + u * c.length, c.length, Index(1), Index(1));
            }
        }
        for (Index g = 0; g < c.groups; ++g) {
            const TileGroup& group = c.group[g];
            const Index count = ranges[g].size(), sub = group.subsequences;
            const bool is_first = g == 0 && starts_rows, is_last = g == c.groups - 1 && finishes_rows;
            // With `output_row`, queries may share a row: one thread takes all of a sequence.
            const Index units = group.output_row ? 1 : count * sub;
#pragma omp for schedule(dynamic)
            for (Index u = 0; u < group.sequences * group.query_heads * units; ++u)
                error.guard([&] {
                    for (Index r = u % units; r < count * sub; r += units) {
                        const Index sequence = u / units;
                        if (softmax->panel.begin(group, ranges[g][r % count], sequence / group.query_heads, r / count,
                                                 sequence % group.query_heads))
                            softmax->run(is_first, is_last);
                    }
                });
        }
        if (!finishes_rows) {
#pragma omp for
            for (Index at = 0; at < rows; ++at) TileSoftmax<T>::finish(c, at);
        }
    }
    error.rethrow();
}

// ---- backward ----

template <class T>
struct TileGradients {
    Panel<T> panel;
    View d_key = {}, d_value = {};
    Index first_key = 0;  // the key that stands first in these views
    Matrix<T> grad_copy, grad_t, d_scores, d_query, key_rows, value_rows;
    Rows<T> grad;
    Matrix<T> top, factor, along;  // (1 x n): a weight is e^(score - top) times the factor; the product of output and gradient

    explicit TileGradients(const TilesCall& c)
        : panel(c), grad_copy(PANEL, c.value_channels), grad_t(c.value_channels, PANEL), d_scores(BLOCK, PANEL),
          d_query(PANEL, c.channels), key_rows(BLOCK, c.channels), value_rows(BLOCK, c.value_channels), grad(grad_copy),
          top(1, PANEL), factor(1, PANEL), along(1, PANEL) {}

    void run() {
        const TilesCall& c = panel.call;
        const TileGroup& group = *panel.group;
        T* const all = static_cast<T*>(const_cast<void*>(c.grad)) + panel.sequence * c.length * panel.E;
        grad = grad_copy;
        if (!group.output_row) grad = fetch(grad_copy, {all, 0, 0, panel.E}, 0, 0, panel.output_row(0), panel.n);
        for (Matrix<T>* x : {&top, &factor, &along}) x->clear();
        for (Index i = 0; i < panel.n; ++i) {
            const Index row = panel.output_row(i), at = panel.sequence * c.length + row;
            if (group.output_row) std::memset(grad[i], 0, panel.E * sizeof(T));
            if (row == c.length) continue;
            if (group.output_row) std::memcpy(grad[i], all + row * panel.E, panel.E * sizeof(T));
            const T* out = static_cast<const T*>(c.out) + at * panel.E;
            top[0][i] = static_cast<const T*>(c.top)[at], factor[0][i] = inverse_sum(static_cast<const T*>(c.sum)[at]);
            for (Index e = 0; e < panel.E; ++e) along[0][i] += grad[i][e] * out[e];
        }
        transpose(grad_t, grad, panel.n, T(1));
        std::memset(d_query[0], 0, panel.n * d_query.stride * sizeof(T));
        panel.for_each_key_block([this](Index first) { add_gradients(first); });
        store(panel.of_head(group.d_query, group.d_query_head), d_query, panel.z, panel.s, panel.token(0), panel.n);
    }

   private:
    // Adds the gradients of a block of keys, and its share of the gradients of the queries.
    void add_gradients(Index first) {
        const Index low = panel.low, width = panel.high - low, n = std::min(panel.high, panel.n) - low, m = panel.m;
        const Index stride = panel.scores.stride;
        T *weights = panel.scores[0] + low, *found = d_scores[0] + low;
        product(found, stride, panel.value[0], panel.value.stride, Index(1), grad_t[0] + low, grad_t.stride, m, panel.E, width,
                false);
        for (Index j = 0; j < m; ++j)
            for (Index i = 0; i < width; i += LANES<T>) {
                Vector<T>&weight = vector(weights + j * stride + i), &score = vector(found + j * stride + i);
                weight = exponential<T>(weight - vector(top[0] + low + i)) * vector(factor[0] + low + i);
                score = weight * (score - vector(along[0] + low + i)) * T(panel.call.scale);
            }
        add_keys(d_value, value_rows, weights, grad, first, n);
        add_keys(d_key, key_rows, found, panel.query, first, n);
        product(d_query[low], d_query.stride, found, Index(1), stride, panel.key[0], panel.key.stride, n, m, panel.D, true);
    }

    // Keys from `first` on += left (m x n) right (n x columns)
    void add_keys(const View& view, const Matrix<T>& scratch, const T* left, const Rows<T>& right, Index first, Index n) {
        first -= first_key;
        const Rows<T> to = fetch(scratch, view, panel.z, panel.s, first, panel.m);
        product(to[0], to.stride, left, panel.scores.stride, Index(1), right[panel.low], right.stride, panel.m, n, to.columns, true);
        write_back(scratch, to, view, panel.z, panel.s, first, panel.m);
    }
};

// One thread's gradients of the keys `from` to `to`, to be added to those of other threads.
template <class T>
struct PartialGradients {
    Index from, to;
    Matrix<T> d_key, d_value;
    PartialGradients(const TilesCall& c, Index from, Index to)
        : from(from), to(to), d_key(to - from, c.channels), d_value(to - from, c.value_channels) {}
    static View view(const Matrix<T>& x) { return {x[0], 0, 0, x.stride}; }
    void add_to(const View& view, const Matrix<T>& x, Index z, Index s, const Span& keys) const {
        for (Index j = from; j < std::min(to, keys.count); ++j)
            for (Index d = 0; d < x.columns; ++d) view.at<T>(z, s, keys.first + j)[d] += x[j - from][d];
    }
};

template <class T>
std::unique_ptr<PartialGradients<T>> partial_gradients(const TilesCall& c, const TileGroup& group, const PanelRange* first,
                                                       const PanelRange* last) {
    Index from = group.keys, to = 0;
    for (const PanelRange* range = first; range < last; ++range) {
        const Tile& tile = *range->tile;
        const Index start = tile.run_start ? 0 : tile.first_column + range->block * tile.column_step;
        from = std::min(from, start), to = std::max<Index>(to, tile.run_start ? group.keys : start + tile.columns);
    }
    return std::make_unique<PartialGradients<T>>(c, std::min(from, to), to);
}

template <class T>
void tiles_backward(const TilesCall& c) {
    for (Index number = 0; number < c.groups; ++number) {
        const TileGroup& group = c.group[number];
        const std::vector<PanelRange> ranges = panel_ranges(group);
        const Index sequences = group.sequences * group.subsequences, count = ranges.size();
        // Blocks of queries share keys, so one thread takes a whole sequence. With more threads than sequences, several threads
        // share a sequence, each with partial gradients of its own.
        const Index each =
            std::clamp<Index>((c.threads + sequences - 1) / std::max<Index>(sequences, 1), 1, std::max<Index>(count, 1));
        std::vector<std::unique_ptr<PartialGradients<T>>> partial(each > 1 ? sequences * each : 0);
        FirstError error;
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
        {
            std::optional<TileGradients<T>> gradients;
            error.guard([&] { gradients.emplace(c); });
#pragma omp for schedule(dynamic)
            for (Index u = 0; u < sequences * each; ++u)
                error.guard([&] {
                    const PanelRange *first = ranges.data() + count * (u % each) / each,
                                     *last = ranges.data() + count * (u % each + 1) / each;
                    const Index sequence = u / each, z = sequence / group.subsequences, s = sequence % group.subsequences;
                    const Span queries(group.query_span, group, z, s, group.queries);
                    gradients->d_key = group.d_key, gradients->d_value = group.d_value;
                    gradients->first_key = -Span(group.key_span, group, z, s, group.keys).first;
                    if (each > 1) {
                        partial[u] = partial_gradients<T>(c, group, first, last);
                        gradients->d_key = partial[u]->view(partial[u]->d_key), gradients->first_key = partial[u]->from;
                        gradients->d_value = partial[u]->view(partial[u]->d_value);
                    }
                    for (Index g = 0; g < group.query_heads; ++g) {
                        if (group.query_span && u % each == 0)
                            clear_outside(queries, group.d_query.at<T>(z, s, 0) + g * group.d_query_head, group.queries,
                                          Index(group.d_query.token), c.channels);
                        for (const PanelRange* range = first; range < last; ++range)
                            if (gradients->panel.begin(group, *range, z, s, g)) gradients->run();
                    }
                });
#pragma omp for
            for (Index sequence = 0; sequence < (each > 1 ? sequences : 0); ++sequence)
                error.guard([&] {
                    for (Index i = sequence * each; i < (sequence + 1) * each; ++i) {
                        const Index z = sequence / group.subsequences, s = sequence % group.subsequences;
                        const Span keys(group.key_span, group, z, s, group.keys);
                        partial[i]->add_to(group.d_key, partial[i]->d_key, z, s, keys);
                        partial[i]->add_to(group.d_value, partial[i]->d_value, z, s, keys);
                    }
                });
        }
        error.rethrow();
    }
}

}  // namespace subquad

LAYOUT(Tile, first_row, rows, blocks, first_column, column_step, columns, is_causal, mask_sequence, mask_block, mask_key,
       mask_has_rows, runs, runs_row, mask, run_start)
LAYOUT(TileGroup, sequences, subsequences, query_heads, queries, keys, query_head, d_query_head, bias_sequence, output_row_stride,
       tiles, query, key, value, d_query, d_key, d_value, bias, output_row, query_span, key_span, tile)
LAYOUT(TilesCall, groups, length, channels, value_channels, threads, scale, group, out, top, sum, grad)
EXPORT(tiles_forward, TilesCall)
EXPORT(tiles_backward, TilesCall)
