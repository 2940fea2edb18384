// k-means of sign codes, for the clustered engine: engines/clustered.py says how it starts and breaks ties.
//
// The computation is bit-sliced: a vector holds one bit of many queries, and their distances from a centroid are counted and
// compared as binary numbers whose digits are such vectors.
//
// B batch, H query heads, N queries, C clusters.

#include <vector>

#include "common/layout.h"
#include "common/view.h"

namespace subquad {

struct AssignCall {
    int64_t batch, heads, queries, bits, clusters, iterations, threads;
    View code;            // (B, H, N, bits), whose signs are taken
    const uint8_t* real;  // (B, N); null: all
    int64_t* assignment;  // (B, H, N)
};

typedef uint32_t Digits __attribute__((vector_size(WIDTH)));
typedef uint32_t StoredDigits __attribute__((vector_size(WIDTH), aligned(4), may_alias));  // anywhere in a std::vector
constexpr Index WORD = 32, GROUP = WIDTH * 8;  // queries per word and per vector
constexpr Index OCTET = 8;                     // bits counted at a time
constexpr int MOST_DIGITS = 32;

int digits_for(Index most) {
    int digits = 1;
    while (most >> digits) ++digits;
    return digits;
}

// A full adder: `low` becomes the low digit of low + x + y; returns the carry.
inline Digits add_digits(Digits& low, Digits x, Digits y) {
    const Digits half = low ^ x, carry = (low & x) | (half & y);
    low = half ^ y;
    return carry;
}

// One head's codes and centroids.
struct Codes {
    Index queries, bits, octets, groups, clusters = 0;
    std::vector<int8_t> sign;          // (N, bits): 1 or -1
    std::vector<uint32_t> plane;       // (groups, 8 octets, words): a bit of all queries of a group, 0 for padding
    std::vector<uint32_t> centroid;    // (C, 8 octets): all ones or all zeros
    std::vector<int32_t> total, near;  // (C, bits): sum of the members' signs; (groups, GROUP): the nearest centroid
    std::vector<int32_t> members;      // (C,)

    explicit Codes(const AssignCall& c)
        : queries(c.queries), bits(c.bits), octets((c.bits + OCTET - 1) / OCTET), groups((c.queries + GROUP - 1) / GROUP),
          sign(queries * bits), plane(groups * octets * OCTET * (GROUP / WORD)), centroid(c.clusters * octets * OCTET),
          total(c.clusters * bits), near(groups * GROUP), members(c.clusters) {}

    template <class T>
    void load(const View& view, Index b, Index h) {
        using Bits = typename Simd<T>::Bits;  // all ones where a comparison holds
        const Index vectors = padded<T>(bits) / LANES<T>;
        Matrix<T> row(1, bits);
        std::vector<Bits> is_positive(vectors), word(vectors);
        for (Index start = 0; start < queries; start += WORD) {
            std::fill(word.begin(), word.end(), Bits{});
            for (Index i = start; i < std::min(start + WORD, queries); ++i) {
                std::memcpy(row[0], view.at<T>(b, h, i), bits * sizeof(T));
                for (Index v = 0; v < vectors; ++v) {
                    is_positive[v] = vector(row[0] + v * LANES<T>) >= T(0);
                    word[v] |= is_positive[v] & int32_t(1u << (i - start));
                }
                int8_t* __restrict to = sign.data() + i * bits;
                const auto* from = reinterpret_cast<const Whole<T>*>(is_positive.data());
                for (Index bit = 0; bit < bits; ++bit) to[bit] = int8_t(-2 * from[bit] - 1);
            }
            uint32_t* to = plane.data() + start / GROUP * octets * OCTET * (GROUP / WORD) + start % GROUP / WORD;
            for (Index bit = 0; bit < bits; ++bit) to[bit * (GROUP / WORD)] = uint32_t(word[bit / LANES<T>][bit % LANES<T>]);
        }
    }

    // The initial centroids: codes of rank floor(c n / C) among the n real ones, C at most n.
    void start(const AssignCall& c, const uint8_t* real) {
        std::vector<Index> who;
        for (Index i = 0; i < queries; ++i)
            if (!real || real[i]) who.push_back(i);
        const Index n = who.size();
        clusters = std::min<Index>(c.clusters, n);
        for (Index cluster = 0; cluster < clusters; ++cluster) {
            const int8_t* from = sign.data() + who[cluster * n / clusters] * bits;
            for (Index bit = 0; bit < bits; ++bit) centroid[cluster * octets * OCTET + bit] = from[bit] > 0 ? ~0u : 0u;
        }
    }

    // The nearest centroid of each query of a group, the first of equally near ones.
    void find(Index group) {
        const int digits = digits_for(octets * OCTET), names = digits_for(clusters);
        const Digits zero = {};
        const auto* planes = reinterpret_cast<const StoredDigits*>(plane.data() + group * octets * OCTET * (GROUP / WORD));
        Digits least[MOST_DIGITS], name[MOST_DIGITS], sum[MOST_DIGITS];
        for (int p = 0; p < digits; ++p) least[p] = ~zero;
        for (int p = 0; p < names; ++p) name[p] = zero;
        for (Index c = 0; c < clusters; ++c) {
            const uint32_t* own = centroid.data() + c * octets * OCTET;
            Digits ones = zero, twos = zero, fours = zero;
            for (int p = 3; p < digits; ++p) sum[p] = zero;
            for (Index o = 0; o < octets; ++o) {
                const StoredDigits* x = planes + o * OCTET;
                const uint32_t* y = own + o * OCTET;
                const Digits a = add_digits(ones, x[0] ^ y[0], x[1] ^ y[1]), b = add_digits(ones, x[2] ^ y[2], x[3] ^ y[3]);
                const Digits d = add_digits(twos, a, b);
                const Digits e = add_digits(ones, x[4] ^ y[4], x[5] ^ y[5]), f = add_digits(ones, x[6] ^ y[6], x[7] ^ y[7]);
                const Digits g = add_digits(twos, e, f);
                Digits carry = add_digits(fours, d, g);
                for (int p = 3; p < digits; ++p) {
                    const Digits next = sum[p] & carry;
                    sum[p] ^= carry;
                    carry = next;
                }
            }
            sum[0] = ones, sum[1] = twos, sum[2] = fours;
            Digits is_less = zero;
            for (int p = 0; p < digits; ++p) is_less ^= (sum[p] ^ least[p]) & (least[p] ^ is_less);
            for (int p = 0; p < digits; ++p) least[p] ^= (sum[p] ^ least[p]) & is_less;
            for (int p = 0; p < names; ++p) name[p] = c >> p & 1 ? name[p] | is_less : name[p] & ~is_less;
        }
        int32_t* to = near.data() + group * GROUP;
        std::fill(to, to + GROUP, 0);
        for (int p = 0; p < names; ++p)
            for (Index word = 0; word < GROUP / WORD; ++word) {
                const uint32_t all = name[p][word];
                for (Index i = 0; i < WORD; ++i) to[word * WORD + i] |= int32_t((all >> i & 1) << p);
            }
    }

    // Centroids become the signs of their members' sum; returns whether any changed.
    bool move(const uint8_t* real) {
        std::fill(total.begin(), total.end(), 0);
        std::fill(members.begin(), members.end(), 0);
        for (Index i = 0; i < queries; ++i) {
            if (real && !real[i]) continue;
            ++members[near[i]];
            int32_t* to = total.data() + near[i] * bits;
            const int8_t* from = sign.data() + i * bits;
            for (Index bit = 0; bit < bits; ++bit) to[bit] += from[bit];
        }
        uint32_t changed = 0;
        for (Index c = 0; c < clusters; ++c) {
            if (!members[c]) continue;
            uint32_t* to = centroid.data() + c * octets * OCTET;
            for (Index bit = 0; bit < bits; ++bit) {
                const uint32_t now = total[c * bits + bit] >= 0 ? ~0u : 0u;
                changed |= now ^ to[bit];
                to[bit] = now;
            }
        }
        return changed;
    }
};

template <class T>
void clustered_assign(const AssignCall& c) {
    const Index heads = c.batch * c.heads;
    const int threads = std::max<int>(c.threads, 1);
    const bool is_many = heads >= threads;  // threads share heads, or, with few heads, the groups of queries of each
    FirstError error;
#pragma omp parallel for schedule(dynamic) num_threads(is_many ? threads : 1)
    for (Index head = 0; head < heads; ++head)
        error.guard([&] {
            const Index b = head / c.heads;
            const uint8_t* real = c.real ? c.real + b * c.queries : nullptr;
            Codes codes(c);
            codes.load<T>(c.code, b, head % c.heads);
            codes.start(c, real);
            for (Index i = 0; i <= c.iterations; ++i) {
#pragma omp parallel for num_threads(is_many ? 1 : threads)
                for (Index group = 0; group < codes.groups; ++group) codes.find(group);
                if (i == c.iterations || !codes.move(real)) break;
            }
            std::copy_n(codes.near.data(), c.queries, c.assignment + head * c.queries);
        });
    error.rethrow();
}

}  // namespace subquad

LAYOUT(AssignCall, batch, heads, queries, bits, clusters, iterations, threads, code, real, assignment)
EXPORT(clustered_assign, AssignCall)
