// Exact softmax over sets of keys that are given as tiles: parts.py says what tiles and parts are.
//
// A panel of queries meets its keys a block at a time. Scores stand transposed, a row a key, so that keys are read where they
// are and a vector holds neighbouring queries, each with its own largest score. Queries that see none of a block are left out.
// Softmax is kept as it grows; the backward pass computes the weights again from its logarithm (Dao et al., 2022,
// arXiv:2205.14135).
//
// Z sequences, S subsequences of each, G queries a group, n queries, m keys, D channels, E value channels; N rows of output.

#include <cmath>
#include <limits>
#include <vector>

#include "common/view.h"

namespace subquad {

constexpr Index PANEL = 96;  // queries
constexpr Index BLOCK = 64;  // keys, at most
constexpr double BARRED = -1e30, NOTHING = BARRED / 10;  // as in parts.py

struct Tile {
    int64_t start, rows, count, first, step, columns, is_causal;
    int64_t mask_sequence, mask_block, mask_key, mask_is_wide;  // strides; whether each query has its own
    int64_t runs, runs_row;                                    // how many to a block of queries; stride
    const void* mask;          // (Z S or 1, count or 1, columns, rows or 1), rows padded to whole vectors; null: none
    const int64_t* run_start;  // (Z G or 1, count, runs): of columns / runs keys each, -1 for none; null: one run
};

struct Part {
    int64_t sequences, subsequences, groups, queries, keys, query_group, d_query_group, bias_sequence, place_row, tiles;
    View query, key, value, d_query, d_key, d_value;  // (Z, S, n or m); the next query of a group is `query_group` further
    const void* bias;      // (Z or 1, S, m): added to all scores of a key; null: none
    const int64_t* place;  // (Z G or 1, S n): rows of the output, N for none; null: as they stand
    const Tile* tile;
};

struct TilesCall {
    int64_t parts, length, channels, value_channels, threads;
    double scale;
    const Part* part;
    void *out, *top, *lse;  // (Z G, N, E), (Z G, N), (Z G, N)
    const void* grad;       // (Z G, N, E)
};

// A run of queries of one block of one tile.
struct Work {
    const Tile* tile;
    Index block, first, n;
};

std::vector<Work> works_of(const Part& part) {
    std::vector<Work> found;
    for (const Tile* tile = part.tile; tile < part.tile + part.tiles; ++tile)
        for (Index block = 0; block < tile->count; ++block)
            for (Index first = 0; first < tile->rows; first += PANEL)
                found.push_back({tile, block, first, std::min<Index>(PANEL, tile->rows - first)});
    return found;
}

// What a thread needs to let a panel of queries meet a block of keys.
template <class T>
struct Panel {
    const TilesCall& call;
    Index D, E, n = 0, m = 0, low = 0, high = 0;  // of the queries, those from `low` to `high` see some of the keys
    Index z = 0, s = 0, g = 0, row = 0;           // `row` of the output, in whole sequences
    const Part* part = nullptr;
    Work work = {};
    Matrix<T> query_copy, query_t, key_copy, value_copy, scores;
    Rows<T> query, key, value;

    explicit Panel(const TilesCall& c)
        : call(c), D(c.channels), E(c.value_channels), query_copy(PANEL, D), query_t(D, PANEL), key_copy(BLOCK, D),
          value_copy(BLOCK, E), scores(BLOCK, PANEL), query(query_copy), key(key_copy), value(value_copy) {}

    void begin(const Part& p, const Work& w, Index sequence, Index subsequence, Index group) {
        part = &p, work = w, z = sequence, s = subsequence, g = group, n = w.n, row = z * p.groups + g;
        query = fetch(query_copy, of_group(p.query, p.query_group), z, s, token(0), n);
        transpose(query_t, query, n, T(call.scale));
    }

    View of_group(View view, Index stride) const {
        view.data = static_cast<T*>(view.data) + g * stride;
        return view;
    }

    // The i-th query, among those of its subsequence.
    Index token(Index i) const { return work.tile->start + work.block * work.tile->rows + work.first + i; }

    // Its row of the output, N for none.
    Index place(Index i) const {
        const Index at = s * part->queries + token(i);
        return part->place ? part->place[row * part->place_row + at] : at;
    }

    // `take(first key)` for every block of keys that some query sees, whose scores are then in `scores`.
    template <class Take>
    void meet(Take take) {
        const Tile& tile = *work.tile;
        const Index size = tile.run_start ? tile.columns / tile.runs : tile.columns;
        for (Index run = 0; run < (tile.run_start ? tile.runs : 1); ++run) {
            const Index start = tile.run_start ? tile.run_start[row * tile.runs_row + work.block * tile.runs + run]
                                               : tile.first + work.block * tile.step;
            if (start < 0) continue;
            const Index end = std::min<Index>(start + size, part->keys);
            const Index blocks = (end - start + BLOCK - 1) / BLOCK;
            for (Index b = 0, j = start; b < blocks; ++b, j += m) {
                m = (end - j + blocks - b - 1) / (blocks - b);
                if (score(j, run * size + j - start)) take(j);
            }
        }
    }

   private:
    bool score(Index first, Index column) {
        const Tile& tile = *work.tile;
        const T* mask = nullptr;
        low = tile.is_causal ? std::max<Index>(column - work.first, 0) / LANES<T> * LANES<T> : 0, high = padded<T>(n);
        if (tile.mask) {
            mask = static_cast<const T*>(tile.mask) + (z * part->subsequences + s) * tile.mask_sequence +
                   work.block * tile.mask_block + column * tile.mask_key + (tile.mask_is_wide ? work.first : 0);
            if (tile.mask_is_wide) {
                while (low < high && is_barred(mask + low)) low += LANES<T>;
                while (low < high && is_barred(mask + high - LANES<T>)) high -= LANES<T>;
            }
        }
        if (low >= high) return false;
        const T* bias = part->bias ? static_cast<const T*>(part->bias) + z * part->bias_sequence + s * part->keys + first : nullptr;
        key = fetch(key_copy, part->key, z, s, first, m), value = fetch(value_copy, part->value, z, s, first, m);
        product(scores[0] + low, scores.stride, key[0], key.stride, Index(1), query_t[0] + low, query_t.stride, m, D, high - low,
                false);
        for (Index j = 0; j < m; ++j) {
            T* to = scores[j];
            T more = bias ? bias[j] : T(0);
            if (mask && tile.mask_is_wide) {
                const T* from = mask + j * tile.mask_key;
                for (Index i = low; i < high; i += LANES<T>) vector(to + i) += vector(from + i) + more;
            } else {
                if (mask) more += mask[j * tile.mask_key];
                if (more)
                    for (Index i = low; i < high; i += LANES<T>) vector(to + i) += more;
            }
            const Index later = tile.is_causal ? std::min(column + j - work.first, high) : 0;  // queries that come before the key
            if (later > low) std::fill(to + low, to + later, T(BARRED));
        }
        return true;
    }

    // Whether a vector of queries sees none of the m keys.
    bool is_barred(const T* mask) const {
        Vector<T> most = vector(mask);
        for (Index j = 1; j < m; ++j) {
            const Vector<T>& next = vector(mask + j * work.tile->mask_key);
            most = next > most ? next : most;
        }
        return largest(reinterpret_cast<const T*>(&most), LANES<T>) < T(NOTHING);
    }
};

// ---- forward ----

template <class T>
struct TileSoftmax {
    Panel<T> panel;
    Matrix<T> out;      // (n x E), not divided yet
    Matrix<T> top, sum;  // (1 x n): the largest score so far, and sum e^(score - top)

    explicit TileSoftmax(const TilesCall& c) : panel(c), out(PANEL, c.value_channels), top(1, PANEL), sum(1, PANEL) {}

    void run(bool is_first, bool is_last) {
        is_first ? clear() : load();
        panel.meet([this](Index) { take(); });
        for (Index i = 0; i < panel.n; ++i) {
            const Index at = panel.place(i);
            if (at == panel.call.length) continue;
            if (is_last) finish(at, out[i], i);
            else store(at, i);
        }
    }

    static void finish(const TilesCall& c, Index at) {
        T *out = static_cast<T*>(c.out) + at * c.value_channels, *top = static_cast<T*>(c.top) + at;
        T* lse = static_cast<T*>(c.lse) + at;
        divide(c, out, out, *top, *lse, lse);
    }

   private:
    T* out_of(Index at) { return static_cast<T*>(panel.call.out) + (panel.row * panel.call.length + at) * panel.E; }
    T& top_of(Index at) { return static_cast<T*>(panel.call.top)[panel.row * panel.call.length + at]; }
    T& lse_of(Index at) { return static_cast<T*>(panel.call.lse)[panel.row * panel.call.length + at]; }

    void clear() {
        std::fill(top[0], top[0] + padded<T>(panel.n), T(BARRED));
        std::fill(sum[0], sum[0] + padded<T>(panel.n), T(0));
        std::memset(out[0], 0, panel.n * out.stride * sizeof(T));
    }
    void load() {
        clear();
        for (Index i = 0; i < panel.n; ++i) {
            const Index at = panel.place(i);
            if (at == panel.call.length) continue;
            top[0][i] = top_of(at), sum[0][i] = lse_of(at);
            std::memcpy(out[i], out_of(at), panel.E * sizeof(T));
        }
    }
    void store(Index at, Index i) {
        top_of(at) = top[0][i], lse_of(at) = sum[0][i];
        std::memcpy(out_of(at), out[i], panel.E * sizeof(T));
    }
    void finish(Index at, T* from, Index i) { divide(panel.call, out_of(at), from, top[0][i], sum[0][i], &lse_of(at)); }

    // The output's row from its sums; where nothing was seen it is 0, and so that it weighs nothing, lse is infinite.
    static void divide(const TilesCall& c, T* to, const T* from, T top, T sum, T* lse) {
        const bool is_nothing = sum == 0 || (top < T(NOTHING) && sum == sum);
        const T factor = is_nothing ? T(0) : 1 / sum;
        for (Index e = 0; e < c.value_channels; ++e) to[e] = is_nothing ? T(0) : from[e] * factor;
        *lse = is_nothing ? std::numeric_limits<T>::infinity() : top + std::log(sum);
    }

    void take() {
        for (Index i = panel.low; i < panel.high; i += LANES<T>) {
            T* column = panel.scores[0] + i;
            const Index stride = panel.scores.stride;
            Vector<T> most = vector(top[0] + i);
            for (Index j = 0; j < panel.m; ++j) {
                const Vector<T>& score = vector(column + j * stride);
                most = score > most ? score : most;
            }
            const Vector<T> decay = exponential<T>(vector(top[0] + i) - most);
            Vector<T> total = vector(sum[0] + i) * decay;
            for (Index j = 0; j < panel.m; ++j) {
                Vector<T>& score = vector(column + j * stride);
                score = exponential<T>(score - most);
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

template <class T>
void tiles_forward(const TilesCall& c) {
    const Index rows = c.part[0].sequences * c.part[0].groups * c.length;
    std::vector<std::vector<Work>> works;
    for (Index p = 0; p < c.parts; ++p) works.push_back(works_of(c.part[p]));
    const bool is_first_whole = !c.part[0].place, is_last_whole = !c.part[c.parts - 1].place;
    if (!is_first_whole) {
        std::fill_n(static_cast<T*>(c.out), rows * c.value_channels, T(0));
        std::fill_n(static_cast<T*>(c.lse), rows, T(0));
        std::fill_n(static_cast<T*>(c.top), rows, T(BARRED));
    }
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
    {
        TileSoftmax<T> softmax(c);
        for (Index p = 0; p < c.parts; ++p) {
            const Part& part = c.part[p];
            const Index count = works[p].size(), sub = part.subsequences;
            const bool is_first = p == 0 && is_first_whole, is_last = p == c.parts - 1 && is_last_whole;
            // Where queries are placed, two of them may share a row: those of a sequence keep to one thread.
            const Index units = part.place ? 1 : count * sub;
#pragma omp for schedule(dynamic)
            for (Index u = 0; u < part.sequences * part.groups * units; ++u)
                for (Index w = u % units; w < count * sub; w += units) {
                    const Index row = u / units;
                    softmax.panel.begin(part, works[p][w % count], row / part.groups, w / count, row % part.groups);
                    softmax.run(is_first, is_last);
                }
        }
        if (!is_last_whole) {
#pragma omp for
            for (Index at = 0; at < rows; ++at) TileSoftmax<T>::finish(c, at);
        }
    }
}

// ---- backward ----

template <class T>
struct TileGradients {
    Panel<T> panel;
    View d_key = {}, d_value = {};
    Matrix<T> grad_copy, grad_t, d_scores, d_query, key_rows, value_rows;
    Rows<T> grad;
    Matrix<T> lse, along;  // (1 x n): log-sum-exp, and the output's gradient times the output

    explicit TileGradients(const TilesCall& c)
        : panel(c), grad_copy(PANEL, c.value_channels), grad_t(c.value_channels, PANEL), d_scores(BLOCK, PANEL),
          d_query(PANEL, c.channels), key_rows(BLOCK, c.channels), value_rows(BLOCK, c.value_channels), grad(grad_copy),
          lse(1, PANEL), along(1, PANEL) {}

    void run() {
        const TilesCall& c = panel.call;
        const Part& part = *panel.part;
        T* const all = static_cast<T*>(const_cast<void*>(c.grad)) + panel.row * c.length * panel.E;
        grad = part.place ? Rows<T>(grad_copy) : fetch(grad_copy, {all, 0, 0, panel.E}, 0, 0, panel.place(0), panel.n);
        std::fill(lse[0], lse[0] + PANEL, std::numeric_limits<T>::infinity());
        std::fill(along[0], along[0] + PANEL, T(0));
        for (Index i = 0; i < panel.n; ++i) {
            const Index place = panel.place(i), at = panel.row * c.length + place;
            if (part.place) std::memset(grad[i], 0, panel.E * sizeof(T));
            if (place == c.length) continue;
            if (part.place) std::memcpy(grad[i], all + place * panel.E, panel.E * sizeof(T));
            const T* out = static_cast<const T*>(c.out) + at * panel.E;
            lse[0][i] = static_cast<const T*>(c.lse)[at];
            for (Index e = 0; e < panel.E; ++e) along[0][i] += grad[i][e] * out[e];
        }
        transpose(grad_t, grad, panel.n, T(1));
        std::memset(d_query[0], 0, panel.n * d_query.stride * sizeof(T));
        panel.meet([this](Index first) { take(first); });
        store(panel.of_group(part.d_query, part.d_query_group), d_query, panel.z, panel.s, panel.token(0), panel.n);
    }

   private:
    void take(Index first) {
        const Index low = panel.low, width = panel.high - low, n = std::min(panel.high, panel.n) - low, m = panel.m;
        const Index stride = panel.scores.stride;
        T *weights = panel.scores[0] + low, *found = d_scores[0] + low;
        product(found, stride, panel.value[0], panel.value.stride, Index(1), grad_t[0] + low, grad_t.stride, m, panel.E, width,
                false);
        for (Index j = 0; j < m; ++j)
            for (Index i = 0; i < width; i += LANES<T>) {
                Vector<T>&weight = vector(weights + j * stride + i), &score = vector(found + j * stride + i);
                weight = exponential<T>(weight - vector(lse[0] + low + i));
                score = weight * (score - vector(along[0] + low + i)) * T(panel.call.scale);
            }
        add_keys(d_value, value_rows, weights, grad, first, n);
        add_keys(d_key, key_rows, found, panel.query, first, n);
        product(d_query[low], d_query.stride, found, Index(1), stride, panel.key[0], panel.key.stride, n, m, panel.D, true);
    }

    // Keys from `first` on += left (m x n) right (n x columns)
    void add_keys(const View& view, const Matrix<T>& scratch, const T* left, const Rows<T>& right, Index first, Index n) {
        const Rows<T> to = fetch(scratch, view, panel.z, panel.s, first, panel.m);
        product(to[0], to.stride, left, panel.scores.stride, Index(1), right[panel.low], right.stride, panel.m, n, to.columns, true);
        write_back(scratch, to, view, panel.z, panel.s, first, panel.m);
    }
};

// The gradients of the keys `from` to `to`, apart from those of other threads.
template <class T>
struct Share {
    Index from, to;
    Matrix<T> d_key, d_value;
    Share(const TilesCall& c, Index from, Index to)
        : from(from), to(to), d_key(to - from, c.channels), d_value(to - from, c.value_channels) {}
    View view(const Matrix<T>& x) const { return {x[0] - from * x.stride, 0, 0, x.stride}; }
    void add_to(const View& view, const Matrix<T>& x, Index z, Index s) const {
        for (Index j = from; j < to; ++j)
            for (Index d = 0; d < x.columns; ++d) view.at<T>(z, s, j)[d] += x[j - from][d];
    }
};

template <class T>
std::unique_ptr<Share<T>> share_of(const TilesCall& c, const Part& part, const Work* first, const Work* last) {
    Index from = part.keys, to = 0;
    for (const Work* work = first; work < last; ++work) {
        const Tile& tile = *work->tile;
        const Index start = tile.run_start ? 0 : tile.first + work->block * tile.step;
        from = std::min(from, start), to = std::max<Index>(to, tile.run_start ? part.keys : start + tile.columns);
    }
    return std::make_unique<Share<T>>(c, std::min(from, to), to);
}

template <class T>
void tiles_backward(const TilesCall& c) {
    for (Index p = 0; p < c.parts; ++p) {
        const Part& part = c.part[p];
        const std::vector<Work> works = works_of(part);
        const Index keys = part.sequences * part.subsequences, count = works.size();
        // Blocks of queries share keys: a sequence's are for one thread, or, where there are more threads, shared out.
        const Index each = std::clamp<Index>((c.threads + keys - 1) / std::max<Index>(keys, 1), 1, std::max<Index>(count, 1));
        std::vector<std::unique_ptr<Share<T>>> shares(each > 1 ? keys * each : 0);
#pragma omp parallel num_threads(std::max<int>(c.threads, 1))
        {
            TileGradients<T> gradients(c);
#pragma omp for schedule(dynamic)
            for (Index u = 0; u < keys * each; ++u) {
                const Work *first = works.data() + count * (u % each) / each, *last = works.data() + count * (u % each + 1) / each;
                gradients.d_key = part.d_key, gradients.d_value = part.d_value;
                if (each > 1) {
                    shares[u] = share_of<T>(c, part, first, last);
                    gradients.d_key = shares[u]->view(shares[u]->d_key), gradients.d_value = shares[u]->view(shares[u]->d_value);
                }
                const Index sequence = u / each;
                for (Index g = 0; g < part.groups; ++g)
                    for (const Work* work = first; work < last; ++work) {
                        gradients.panel.begin(part, *work, sequence / part.subsequences, sequence % part.subsequences, g);
                        gradients.run();
                    }
            }
#pragma omp for
            for (Index sequence = 0; sequence < (each > 1 ? keys : 0); ++sequence)
                for (Index i = sequence * each; i < (sequence + 1) * each; ++i) {
                    const Index z = sequence / part.subsequences, s = sequence % part.subsequences;
                    shares[i]->add_to(part.d_key, shares[i]->d_key, z, s);
                    shares[i]->add_to(part.d_value, shares[i]->d_value, z, s);
                }
        }
    }
}

}  // namespace subquad

extern "C" {
void subquad_tiles_forward_float32(const subquad::TilesCall* call) { subquad::tiles_forward<float>(*call); }
void subquad_tiles_forward_float64(const subquad::TilesCall* call) { subquad::tiles_forward<double>(*call); }
void subquad_tiles_backward_float32(const subquad::TilesCall* call) { subquad::tiles_backward<float>(*call); }
void subquad_tiles_backward_float64(const subquad::TilesCall* call) { subquad::tiles_backward<double>(*call); }
}
