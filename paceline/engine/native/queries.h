// What queries of one KV head make of its keys and values: scores, weights, and sums of values.
//
// Keys are read a vector of them at a time, rearranged once for all queries that read them together. A query's result
// depends on no other query, to the last bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

// Score of a key that a query does not see. If all scores of a query are this one, its result is NaN.
constexpr float HIDDEN = -INFINITY;

// Memory of a sequence's keys has so many places.
INLINE int64_t padded_length(int64_t length) { return (length + WIDEST - 1) / WIDEST * WIDEST; }

// Keys and values that the queries of one KV head read.
template <class T>
struct Keys {
    const T *keys, *values;  // [slots, D]
    const int64_t *slots;    // as many as the row has tokens, and the last again up to a multiple of WIDEST
    int64_t length;          // of the row
};

// Keys and values are fetched so many keys before they are needed: pages lie anywhere, so the processor does not foresee them.
constexpr int64_t AHEAD = 16, LINE = 64;

// Of what belongs to the keys, that of the one AHEAD of key `j`; of the last one where there are no more.
template <int D, class T>
INLINE const T *ahead(const Keys<T> &read, const T *memory, int64_t j) {
    return memory + read.slots[j + AHEAD < read.length ? j + AHEAD : read.length - 1] * D;
}

// Queries that are done with together, at most: their sums stay in registers.
template <class V>
constexpr int most_queries() { return V::LANES == WIDEST ? 8 : 4; }

// Whether numbers are moved two at once, as one of 32 bits. Then of four of a key the even ones come first, and the odd after.
template <class V, int D, class T>
constexpr bool in_pairs() { return sizeof(T) == sizeof(Half) && D >= 2 * V::LANES; }

// Puts LANES keys from key `j` on into `tile` [D / 2, 2, LANES]: two numbers of every other key beside each other.
template <class V, int D, class T>
INLINE void take_keys(const Keys<T> &read, int64_t j, float *tile) {
    constexpr bool PAIRS = in_pairs<V, D, T>();
    constexpr int KEYS = V::LANES / 2, SIZE = (PAIRS ? 2 : 1) * V::LANES;
    for (int m = 0; m < 2; m++) {
        const T *keys[KEYS];
        UNROLLED for (int k = 0; k < KEYS; k++) keys[k] = read.keys + read.slots[j + 2 * k + m] * D;
        for (int d = 0; d < D; d += SIZE) {
            const int from = d < D - SIZE ? d : D - SIZE;
            typename V::Floats rows[KEYS];
            UNROLLED for (int k = 0; k < KEYS; k++) {
                if constexpr (PAIRS) std::memcpy(&rows[k], keys[k] + from, sizeof rows[k]);
                else rows[k] = V::load(keys[k] + from);
            }
            V::transpose_twos(rows);
            float *to = tile + (from + m) * V::LANES;
            UNROLLED for (int i = 0; i < KEYS; i++, to += (PAIRS ? 4 : 2) * V::LANES) {
                const auto words = reinterpret_cast<typename V::Bits>(rows[i]);
                V::store(to, PAIRS ? V::first_halves(words) : rows[i]);
                if constexpr (PAIRS) V::store(to + 2 * V::LANES, V::second_halves(words));
            }
        }
    }
}

// Copies a query [D], its numbers in the order of the keys' in a tile.
template <class V, int D, class T>
INLINE void take_query(const float *from, float *to) {
    for (int d = 0; d < D; d++) to[in_pairs<V, D, T>() ? (d & ~3) + (d & 1) * 2 + (d >> 1 & 1) : d] = from[d];
}

// Puts the products of COUNT queries [COUNT, D] with the keys of a tile into `scores`, [COUNT, stride]. Each is two sums, in
// the same order whatever COUNT is. Fetches LANES keys from `next` on, unless it is null, bit by bit: the processor waits for a
// dozen of lines at a time, so they would hold up what follows them if they were asked for at once.
template <class V, int D, class T, int COUNT>
INLINE void score(const float *queries, const float *tile, float *scores, int64_t stride, const T *next) {
    constexpr int STEP = 2 * V::LANES, OF_LINE = LINE / sizeof(T);
    typename V::Floats sums[COUNT][2] = {};
    for (int d = 0; d < D; d += 2, tile += 2 * V::LANES) {
        typename V::Floats keys[2];
        UNROLLED for (int m = 0; m < 2; m++) keys[m] = V::load(tile + m * V::LANES);
        if (next) UNROLLED for (int i = 0; i < STEP; i += OF_LINE) __builtin_prefetch(next + d * V::LANES + i);
        UNROLLED for (int q = 0; q < COUNT; q++) {
            const typename V::Floats own = V::repeat_two(queries + q * D + d);
            UNROLLED for (int m = 0; m < 2; m++) sums[q][m] += own * keys[m];
        }
    }
    UNROLLED for (int q = 0; q < COUNT; q++) V::store(scores + q * stride, V::sums_of_twos(sums[q][0], sums[q][1]));
}
template <class V, int D, class T, int COUNT = most_queries<V>()>
INLINE void score_all(const float *queries, int64_t count, const float *tile, float *scores, int64_t stride, const T *next) {
    for (; count >= COUNT; count -= COUNT, queries += COUNT * D, scores += COUNT * stride, next = nullptr)
        score<V, D, T, COUNT>(queries, tile, scores, stride, next);
    if constexpr (COUNT > 1) score_all<V, D, T, COUNT / 2>(queries, count, tile, scores, stride, next);
}

// Puts the products of `count` queries with the first `length` keys into `scores`. What is beyond `length` up to the next
// multiple of LANES is of no use. Keys are fetched as if those that are read together followed each other.
template <class V, int D, class T>
INLINE void score_keys(const float *queries, int64_t count, const Keys<T> &read, int64_t length, float *scores, int64_t stride) {
    alignas(64) float tile[D * V::LANES];
    for (int64_t j = 0; j < length; j += V::LANES) {
        take_keys<V, D>(read, j, tile);
        score_all<V, D, T>(queries, count, tile, scores + j, stride, ahead<D>(read, read.keys, j));
    }
}

// The largest of some vectors of numbers. Several comparisons are under way at a time.
template <class V>
INLINE float largest_of(const float *numbers, int64_t count) {
    constexpr int APART = 4;
    typename V::Floats largest[APART];
    UNROLLED for (int i = 0; i < APART; i++) largest[i] = V::load(numbers);
    int64_t j = 0;
    for (; j + APART * V::LANES <= count; j += APART * V::LANES)
        UNROLLED for (int i = 0; i < APART; i++) largest[i] = V::larger(largest[i], V::load(numbers + j + i * V::LANES));
    for (; j < count; j += V::LANES) largest[0] = V::larger(largest[0], V::load(numbers + j));
    return V::largest_lane(V::larger(V::larger(largest[0], largest[1]), V::larger(largest[2], largest[3])));
}

// Makes weights of the scores of the `seen` keys of a query; returns what their sum has to be multiplied by.
template <class V>
INLINE float weigh(float *scores, int64_t seen) {
    const int64_t end = (seen + V::LANES - 1) / V::LANES * V::LANES;
    for (int64_t j = seen; j < end; j++) scores[j] = HIDDEN;
    const float top = largest_of<V>(scores, end);
    typename V::Floats total{};
    for (int64_t j = 0; j < end; j += V::LANES) {
        const typename V::Floats weights = V::exp_of(V::load(scores + j) - top);
        total += weights;
        V::store(scores + j, weights);
    }
    return 1.0f / V::sum(total);
}

// The most vectors of a value, a divisor of all of them, whose sums stay in registers for COUNT queries.
template <class V, int D, int COUNT>
constexpr int value_size() {
    constexpr int all = D / V::LANES, most = (V::LANES == WIDEST ? 24 : 12) / COUNT;
    int size = all < most ? all : most;
    while (all % size) size--;
    return size;
}

// Adds values [begin, end), by the weights of COUNT queries [COUNT, stride], to `sums` [COUNT, D]. They are fetched if they
// are the first to need them.
template <class V, int D, class T, int COUNT>
INLINE void add_values(const Keys<T> &read, int64_t begin, int64_t end, const float *weights, int64_t stride, float *sums, bool fetches) {
    constexpr int SIZE = value_size<V, D, COUNT>();
    for (int start = 0; start < D; start += SIZE * V::LANES) {
        typename V::Floats own_sums[COUNT][SIZE];
        UNROLLED for (int q = 0; q < COUNT; q++)
            UNROLLED for (int d = 0; d < SIZE; d++) own_sums[q][d] = V::load(sums + q * D + start + d * V::LANES);
        for (int64_t j = begin; j < end; j++) {
            const T *value = read.values + read.slots[j] * D + start;
            if (fetches && start == 0) {
                const T *next = ahead<D>(read, read.values, j);
                UNROLLED for (size_t i = 0; i < D; i += LINE / sizeof(T)) __builtin_prefetch(next + i);
            }
            typename V::Floats own[SIZE];
            UNROLLED for (int d = 0; d < SIZE; d++) own[d] = V::load(value + d * V::LANES);
            UNROLLED for (int q = 0; q < COUNT; q++)
                UNROLLED for (int d = 0; d < SIZE; d++) own_sums[q][d] += weights[q * stride + j] * own[d];
        }
        UNROLLED for (int q = 0; q < COUNT; q++)
            UNROLLED for (int d = 0; d < SIZE; d++) V::store(sums + q * D + start + d * V::LANES, own_sums[q][d]);
    }
}
template <class V, int D, class T, int COUNT = most_queries<V>()>
INLINE void add_values_of_all(const Keys<T> &read, int64_t begin, int64_t end, int64_t count, const float *weights, int64_t stride, float *sums, bool fetches = true) {
    for (; count >= COUNT; count -= COUNT, weights += COUNT * stride, sums += COUNT * D, fetches = false)
        add_values<V, D, T, COUNT>(read, begin, end, weights, stride, sums, fetches);
    if constexpr (COUNT > 1) add_values_of_all<V, D, T, COUNT / 2>(read, begin, end, count, weights, stride, sums, fetches);
}

// So many values stay in the nearest cache for all queries that read them together.
constexpr int64_t VALUES = 32;

// Adds up the values of each of `count` queries by its weights: query q sees `seen[q]`, each at least as many as the one before.
template <class V, int D, class T>
INLINE void add_up(const Keys<T> &read, const int64_t *seen, int64_t count, const float *weights, int64_t stride, float *sums) {
    std::memset(sums, 0, sizeof(float) * count * D);
    for (int64_t j = 0; j < seen[0]; j += VALUES)
        add_values_of_all<V, D, T>(read, j, std::min(j + VALUES, seen[0]), count, weights, stride, sums);
    // A weight of 0 would not hide an infinite value, because their product is NaN.
    for (int64_t q = 1; q < count; q++) add_values<V, D, T, 1>(read, seen[0], seen[q], weights + q * stride, stride, sums + q * D, false);
}
