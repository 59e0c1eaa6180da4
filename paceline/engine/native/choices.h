// The token that comes next after a row of logits, without filters: the rule of `engine/sampling.py`, by the noise of
// `engine/noise.py`.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "crew.h"
#include "lanes.h"

constexpr int64_t NO_TOKEN = -1;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr double LN2 = 0.6931471805599454;  // a little more than it is, for what must be an upper bound

// SplitMix64's finaliser.
INLINE uint64_t mix64(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
}

// The Gumbel variable of 64 random bits.
INLINE double gumbel(uint64_t bits) {
    const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log(uniform));
}

// At least `gumbel(bits)`: after n leading ones 1 - u >= 2^-(n + 1), and -ln u >= 1 - u.
INLINE double most_noise(uint64_t bits) {
    const uint64_t zeros = ~bits;
    return (zeros ? __builtin_clzll(zeros) + 1 : 64) * LN2;
}

// The lowest token of the highest logit; none where a logit is not a number or plus infinity, or all are minus infinity.
template <class V>
INLINE int64_t likeliest(const float *logits, int64_t size) {
    typename V::Floats largest = V::all(-INFINITY);
    typename V::Ints fine = ~typename V::Ints{};
    int64_t i = 0;
    for (; i + V::LANES <= size; i += V::LANES) {
        const typename V::Floats own = V::load(logits + i);
        largest = V::larger(own, largest);
        fine &= own <= FLT_MAX;
    }
    float top = V::largest_lane(largest);
    bool are_fine = !V::any(~fine);
    for (; i < size; i++) {
        top = logits[i] > top ? logits[i] : top;
        are_fine &= logits[i] <= FLT_MAX;
    }
    if (!are_fine || top < -FLT_MAX) return NO_TOKEN;
    int64_t token = 0;
    while (logits[token] != top) token++;
    return token;
}

// A token and its score, the sum of its logit over the temperature and its noise.
struct Scored {
    int64_t token;
    double score;
};

// Puts the `count` tokens of the highest scores into `best`, of equals the lowest ones, in order; returns how many there are,
// none where there is no choice. Where noise cannot lift a token among them, its logarithms are not computed.
template <class V>
INLINE int64_t rank(const float *logits, int64_t size, float temperature, uint64_t stream, int64_t count, Scored *best) {
    if (likeliest<V>(logits, size) == NO_TOKEN) return 0;
    int64_t found = 0;
    for (int64_t token = 0; token < size; token++) {
        const double least = found == count ? best[count - 1].score : -INFINITY;
        const bool is_block = temperature <= 0 && token % V::LANES == 0 && token + V::LANES <= size;
        if (is_block && !V::any(V::load(logits + token) > static_cast<float>(least))) {
            token += V::LANES - 1;
            continue;
        }
        double score = temperature > 0 ? logits[token] / temperature : logits[token];
        if (temperature > 0 && score > -INFINITY) {
            const uint64_t bits = mix64(stream + token * GOLDEN);
            if (score + most_noise(bits) < least) continue;
            score += gumbel(bits);
        }
        if (!(score > least)) continue;
        int64_t place = found < count ? found++ : count - 1;
        for (; place > 0 && best[place - 1].score < score; place--) best[place] = best[place - 1];
        best[place] = {token, score};
    }
    return found > 0 && std::isfinite(best[0].score) ? found : 0;
}

// The choices after some rows of logits.
struct Choose {
    int64_t token_count, size;   // tokens to choose; the vocabulary's
    const float *const *logits;  // [token_count], where each row of logits is
    const int64_t *seeds;
    int64_t *positions;
    const float *temperatures;   // 0 is greedy
    int64_t *chosen;             // [token_count], NO_TOKEN for none
};

INLINE uint64_t stream_of(const Choose &of, int64_t i) { return mix64(mix64(of.seeds[i]) + of.positions[i] * GOLDEN); }

template <class V, class T>
INLINE void choose(const Choose *of, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const float temperature = of->temperatures[i];
        Scored best{NO_TOKEN, 0};
        if (temperature > 0)
            of->chosen[i] = rank<V>(of->logits[i], of->size, temperature, stream_of(*of, i), 1, &best) ? best.token : NO_TOKEN;
        else
            of->chosen[i] = likeliest<V>(of->logits[i], of->size);
    }
}
BY_WIDTH(choose_some, (const Choose *call, int64_t begin, int64_t end), (call, begin, end), choose, float)

extern "C" void paceline_choose(const void *of, int, int threads) {
    share_tokens<Choose, choose_some, 1 << 17>(static_cast<const Choose *>(of), threads);  // some 20 us
}

// The choices, and what would have come next: `count` tokens for each, whose `chosen` is [token_count, count].
struct Rank {
    Choose choose;
    int64_t count;  // at most MOST_RANKED
    double *shares;  // [token_count, count]: the softmax of their scores
};
constexpr int64_t MOST_RANKED = 64;

template <class V, class T>
INLINE void rank_rows(const Rank *of, int64_t begin, int64_t end) {
    const Choose &own = of->choose;
    for (int64_t i = begin; i < end; i++) {
        Scored best[MOST_RANKED];
        const int64_t found = rank<V>(own.logits[i], own.size, own.temperatures[i], stream_of(own, i), of->count, best);
        double total = 0;
        for (int64_t k = 0; k < found; k++) total += std::exp(best[k].score - best[0].score);
        for (int64_t k = 0; k < of->count; k++) {
            own.chosen[i * of->count + k] = k < found ? best[k].token : NO_TOKEN;
            of->shares[i * of->count + k] = k < found ? std::exp(best[k].score - best[0].score) / total : 0;
        }
    }
}
BY_WIDTH(rank_some, (const Rank *call, int64_t begin, int64_t end), (call, begin, end), rank_rows, float)

inline const Choose &sized(const Rank &of) { return of.choose; }

extern "C" void paceline_rank(const void *of, int, int threads) {
    share_tokens<Rank, rank_some, 1 << 17>(static_cast<const Rank *>(of), threads);
}
