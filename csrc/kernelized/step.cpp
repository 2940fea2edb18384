// One token per sequence with a state: the sums over all keys so far are read once, updated, and written, in place if the caller
// passes the same memory twice.
//
//     S <- e^(from - to) S + phi(k) v^T,    o = phi(q) S / (phi(q) . z),    z the last column of S
//
// `from` and `to` are the levels before and after the key (see kernelized.cpp). What does not change from one token to the next,
// such as the transposed weights of the feature map, is prepared once.
//
// B batch, H query heads, K key-value heads, G = H / K, D channels, E value channels, F features.

#include <optional>

#include "kernelized/sums.h"

namespace subquad {

template <class T>
struct SumsStep {
    const Call call;  // without the tensors of a token
    const Problem<T> problem;
    explicit SumsStep(const Call& given) : call(given), problem(call) {}
};

// The tensors of one token; what is not there is null.
struct StepToken {
    const void *query, *key, *value;
    void* out;
    const void *sums_in, *level_in, *count_in;
    void *sums_out, *level_out, *count_out;
};

inline View at(View view, const void* data) {
    view.data = const_cast<void*>(data);
    return view;
}

// The scratch memory of one thread.
template <class T>
struct StepScratch {
    Matrix<T> x, value, key_phi, phi, out;
    std::vector<T> decays, denominators;
    explicit StepScratch(const Problem<T>& p)
        : x(1, p.D), value(1, p.E), key_phi(1, p.F), phi(p.groups, p.F), out(p.groups, p.E), decays(p.levels()),
          denominators(p.groups) {}
};

// The features of the key relative to the new level; writes that level, and by how much the sums decay.
template <class T>
void map_key(const Problem<T>& p, StepScratch<T>& s, const StepToken& t, Index b, Index h) {
    T exponent = 0;
    const Rows<T> x = fetch(s.x, at(p.call.key, t.key), b, h, 0, 1);
    map_features<T>(p, s.key_phi, x, 1, h, false, &exponent);
    const Index levels = p.levels(), unit = b * p.call.kv_heads + h;
    for (Index l = 0; l < levels; ++l) {
        const T from = static_cast<const T*>(t.level_in)[unit * levels + l], own = levels == 1 ? exponent : s.key_phi[0][l];
        const T to = own > from ? own : from;
        static_cast<T*>(t.level_out)[unit * levels + l] = to;
        s.decays[l] = from == to ? T(1) : std::exp(from - to);
        if (levels > 1) s.key_phi[0][l] = std::exp(own - base_of(to));
        else scale(s.key_phi[0], T(std::exp(own - base_of(to))), p.F);
    }
}

// The sums of one key-value head, and what its query heads read of them.
template <class T>
void update_and_read(const Problem<T>& p, StepScratch<T>& s, const T* value, const T* from, T* to) {
    const Index width = p.E + p.has_ones(), whole = p.E / LANES<T> * LANES<T>;
    for (Index f = 0; f < p.F; ++f, from += width, to += width) {
        const T weight = s.key_phi[0][f], factor = s.decays.empty() ? T(1) : s.decays[s.decays.size() == 1 ? 0 : f];
        Index j = 0;
        for (; j < whole; j += LANES<T>) vector(to + j) = factor * vector(from + j) + weight * vector(value + j);
        for (; j < p.E; ++j) to[j] = factor * from[j] + weight * value[j];
        if (p.has_ones()) to[j] = factor * from[j] + weight;
        for (Index g = 0; g < p.groups; ++g) {
            T phi = s.phi[g][f];
            if (p.has_sum()) s.denominators[g] += phi * to[p.E];
            if (p.normalizer == CHANNEL) phi /= nonzero(to[p.E]);
            T* out = s.out[g];
            for (j = 0; j < whole; j += LANES<T>) vector(out + j) += phi * vector(to + j);
            for (; j < p.E; ++j) out[j] += phi * to[j];
        }
    }
}

template <class T>
void step_head(const Problem<T>& p, StepScratch<T>& s, const StepToken& t, Index b, Index h, T count) {
    map_key(p, s, t, b, h);
    for (Index g = 0; g < p.groups; ++g) {
        const Rows<T> x = fetch(s.x, at(p.call.query, t.query), b, h * p.groups + g, 0, 1);
        map_features<T>(p, {s.phi[g], p.F, s.phi.stride}, x, 1, h, true, nullptr);
    }
    std::fill(s.denominators.begin(), s.denominators.end(), T(0));
    s.out.clear();
    const Rows<T> value = fetch(s.value, at(p.call.value, t.value), b, h, 0, 1);
    const Index offset = (b * p.call.kv_heads + h) * p.F * (p.E + p.has_ones());
    update_and_read(p, s, value[0], static_cast<const T*>(t.sums_in) + offset, static_cast<T*>(t.sums_out) + offset);
    for (Index g = 0; g < p.groups; ++g) {
        T denominator = p.has_sum() ? s.denominators[g] : p.normalizer == MEAN ? count : T(1);
        const T floor = p.call.floor;
        if (p.normalizer == SIGNED && std::abs(denominator) < floor) denominator = std::copysign(floor, denominator);
        divide(s.out[g], nonzero(denominator), p.E);
        store<T>(at(p.call.out, t.out), {s.out[g], p.E, s.out.stride}, b, h * p.groups + g, 0, 1);
    }
}

template <class T>
void step(const SumsStep<T>& prepared, const StepToken& t) {
    const Problem<T>& p = prepared.problem;
    const Index batch = p.call.batch, heads = p.call.kv_heads;
    std::vector<T> counts(t.count_in ? batch : 0);
    for (Index b = 0; b < Index(counts.size()); ++b) counts[b] = static_cast<const T*>(t.count_in)[b] + 1;
    FirstError error;
#pragma omp parallel num_threads(std::max<Index>(p.call.threads, 1)) if (p.call.threads > 1)
    {
        std::optional<StepScratch<T>> scratch;
        error.guard([&] { scratch.emplace(p); });
#pragma omp for schedule(static)
        for (Index unit = 0; unit < batch * heads; ++unit)
            error.guard([&] {
                const Index b = unit / heads;
                step_head(p, *scratch, t, b, unit % heads, counts.empty() ? T(0) : counts[b]);
            });
    }
    error.rethrow();
    for (Index b = 0; b < Index(counts.size()); ++b) static_cast<T*>(t.count_out)[b] = counts[b];
}

template <class T>
void* prepare_step(const Call* call) noexcept {
    try {
        return new SumsStep<T>(*call);
    } catch (...) {
        return nullptr;  // too little memory
    }
}

}  // namespace subquad

#define EXPORT_STEP(dtype, T) \
    extern "C" void* subquad_prepare_step_##dtype(const subquad::Call* call) { return subquad::prepare_step<T>(call); } \
    extern "C" void subquad_release_step_##dtype(void* step) { delete static_cast<subquad::SumsStep<T>*>(step); } \
    extern "C" int32_t subquad_step_##dtype(const void* step, const void* query, const void* key, const void* value, void* out, \
                                            const void* sums_in, const void* level_in, const void* count_in, void* sums_out, \
                                            void* level_out, void* count_out) { \
        const subquad::StepToken token{query, key, value, out, sums_in, level_in, count_in, sums_out, level_out, count_out}; \
        return subquad::result_of([&] { subquad::step(*static_cast<const subquad::SumsStep<T>*>(step), token); }); \
    }

EXPORT_STEP(float32, float)
EXPORT_STEP(float64, double)
