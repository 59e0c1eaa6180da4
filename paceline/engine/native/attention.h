// Attention of a pass's tokens to the cached ones of their sequences, in pages that lie anywhere; norms and rotation of queries
// and keys before it. A query's result depends on no other query, to the last bit.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "crew.h"
#include "lanes.h"
#include "layers.h"

// Score of a key that a query does not see. If all scores of a query are this one, its result is NaN.
constexpr float HIDDEN = -INFINITY;

// As `kernels.py` fills it in.
struct Row {
    int64_t first, count;   // first of the sequence's tokens in the packed row, and how many it has there
    int64_t length;         // cached tokens of the sequence, the new ones included
    int64_t page_count;     // pages that hold the cached tokens
};
// What all layers of a pass share.
struct Rows {
    int64_t row_count;
    int64_t page_tokens, page_slots;  // token i of a page is in slot page * page_slots + i
    Row *rows;
    const int64_t *pages;             // those of the first row, then of the second, and so on
    int64_t *slots;                   // working memory of each thread: as many numbers as the longest sequence has tokens,
    float *scores;                    // rounded up to WIDEST, and QUERIES times that number
    int64_t longest;
};
struct Attend {
    const Rows *rows;
    int64_t head_count, kv_head_count, head_size, slot_count;
    const float *cosines, *signed_sines;  // [positions, D]
    const float *query_norm, *key_norm;   // [D], or null
    void *keys, *values;  // [KV heads, slots, D]
    float *projected;     // [T, H + 2 KV heads, D]: queries, keys, values
    void *attended;       // [T, H, D]
    float epsilon, scaling;
};

INLINE int64_t padded_length(int64_t length) { return (length + WIDEST - 1) / WIDEST * WIDEST; }

// As many queries of a KV head as read a key in common while their sums stay in registers are a block.
constexpr int QUERIES = 4;
INLINE int64_t query_count(const Attend &call, const Row &row) { return row.count * (call.head_count / call.kv_head_count); }

// Keys that the block from query `start` on reads: those that its last query sees.
INLINE int64_t keys_of(const Attend &call, const Row &row, int64_t start) {
    const int64_t group = call.head_count / call.kv_head_count, last = start + QUERIES - 1;
    return row.length - row.count + 1 + (last / group < row.count ? last / group : row.count - 1);
}
INLINE int64_t keys_of(const Attend &call, const Row &row) {
    int64_t keys = 0;
    for (int64_t start = 0; start < query_count(call, row); start += QUERIES) keys += keys_of(call, row, start);
    return keys * call.kv_head_count;
}
static int64_t all_keys(const Attend &call) {
    int64_t keys = 0;
    for (int64_t row = 0; row < call.rows->row_count; row++) keys += keys_of(call, call.rows->rows[row]);
    return keys;
}
static int64_t all_tokens(const Attend &call) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < call.rows->row_count; row++) tokens += call.rows->rows[row].count;
    return tokens;
}

// Keys and values that the queries of one KV head read.
template <class T>
struct Keys {
    const T *keys, *values;  // [slots, D]
    const int64_t *slots;    // as many as the row has tokens, and the last again up to a multiple of WIDEST
};

// Applies norm, rotary position (Su et al., arXiv 2104.09864) and `scale` to one head. `to` may be `from`.
template <class V, int D>
INLINE void turn(const float *from, const float *norm, float epsilon, const float *cosine, const float *sine, float scale, float *to) {
    float head[D];
    const float inverse = norm ? inverse_root<V>(from, D, epsilon) : 1.0f;
    for (int d = 0; d < D; d++) head[d] = norm ? from[d] * inverse * norm[d] : from[d];
    for (int d = 0; d < D; d++) to[d] = (head[d] * cosine[d] + head[(d + D / 2) % D] * sine[d]) * scale;
}

// Fetches what belongs to key `j` and is needed AHEAD keys later: pages lie anywhere, so the processor does not foresee them.
template <int D, class T>
INLINE void fetch_ahead(const T *memory, const int64_t *slots, int64_t j, int64_t length) {
    constexpr int64_t AHEAD = 16, LINE = 64 / sizeof(T);
    const T *next = memory + slots[j + AHEAD < length ? j + AHEAD : length - 1] * D;
    UNROLLED for (int64_t i = 0; i < D; i += LINE) __builtin_prefetch(next + i);
}

// Puts the products of COUNT queries [COUNT, D] with `length` keys into `scores`, [COUNT, stride]. What is beyond `length`
// up to the next multiple of LANES is of no use.
template <class V, int D, class T, int COUNT>
INLINE void score(const float *queries, const Keys<T> &read, int64_t length, float *scores, int64_t stride) {
    constexpr int KEYS = V::LANES / COUNT;
    for (int64_t j = 0; j < length; j += KEYS) {
        const T *keys[KEYS];
        typename V::Floats products[V::LANES] = {};
        UNROLLED for (int k = 0; k < KEYS; k++) {
            keys[k] = read.keys + read.slots[j + k] * D;
            fetch_ahead<D>(read.keys, read.slots, j + k, length);
        }
        for (int d = 0; d < D; d += V::LANES) {
            typename V::Floats own[KEYS];
            UNROLLED for (int k = 0; k < KEYS; k++) own[k] = V::load(keys[k] + d);
            UNROLLED for (int q = 0; q < COUNT; q++)
                UNROLLED for (int k = 0; k < KEYS; k++) products[q * KEYS + k] += V::load(queries + q * D + d) * own[k];
        }
        float sums[V::LANES];
        V::store(sums, V::sums(products));
        UNROLLED for (int q = 0; q < COUNT; q++) std::memcpy(scores + q * stride + j, sums + q * KEYS, sizeof(float) * KEYS);
    }
}

// Makes weights of the scores of the `seen` keys of a query; returns what their sum has to be multiplied by.
template <class V>
INLINE float weigh(float *scores, int64_t seen) {
    const int64_t end = (seen + V::LANES - 1) / V::LANES * V::LANES;
    for (int64_t j = seen; j < end; j++) scores[j] = HIDDEN;
    typename V::Floats largest = V::load(scores), total{};
    for (int64_t j = V::LANES; j < end; j += V::LANES) largest = V::larger(largest, V::load(scores + j));
    float top = largest[0];
    for (int lane = 1; lane < V::LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
    for (int64_t j = 0; j < end; j += V::LANES) {
        const typename V::Floats weights = V::exp_of(V::load(scores + j) - top);
        total += weights;
        V::store(scores + j, weights);
    }
    return 1.0f / V::sum(total);
}

// Adds up SIZE vectors of each value from number `start` on, by the weights of COUNT queries: query q sees `seen[q]`, each
// at least as many as the one before.
template <class V, int D, class T, int COUNT, int SIZE>
INLINE void add_values(const Keys<T> &read, const int64_t *seen, const float *weights, int64_t stride, const float *shares, int start, T *const *out) {
    typename V::Floats sums[COUNT][SIZE] = {};
    int64_t j = 0;
    for (; j < seen[0]; j++) {
        const T *value = read.values + read.slots[j] * D + start;
        if (start == 0) fetch_ahead<D>(read.values, read.slots, j, seen[0]);
        UNROLLED for (int d = 0; d < SIZE; d++) {
            const typename V::Floats own = V::load(value + d * V::LANES);
            UNROLLED for (int q = 0; q < COUNT; q++) sums[q][d] += weights[q * stride + j] * own;
        }
    }
    // A weight of 0 would not hide an infinite value, because their product is NaN.
    for (; j < seen[COUNT - 1]; j++) {
        const T *value = read.values + read.slots[j] * D + start;
        UNROLLED for (int q = 0; q < COUNT; q++)
            if (j < seen[q])
                UNROLLED for (int d = 0; d < SIZE; d++) sums[q][d] += weights[q * stride + j] * V::load(value + d * V::LANES);
    }
    UNROLLED for (int q = 0; q < COUNT; q++)
        UNROLLED for (int d = 0; d < SIZE; d++) V::store(out[q] + start + d * V::LANES, sums[q][d] * shares[q]);
}

// The most vectors of a value, a divisor of all of them, whose sums stay in registers for COUNT queries.
template <class V, int D, int COUNT>
constexpr int value_size() {
    constexpr int all = D / V::LANES, most = (V::LANES == WIDEST ? 24 : 12) / COUNT;
    int size = all < most ? all : most;
    while (all % size) size--;
    return size;
}

// Attends for COUNT queries of one KV head, [COUNT, D]; query q sees `seen[q]` keys, each at least as many as the one
// before. A query's result depends on no other query, to the last bit.
template <class V, int D, class T, int COUNT>
INLINE void attend_some(const float *queries, const Keys<T> &read, const int64_t *seen, float *scores, int64_t stride, T *const *out) {
    score<V, D, T, COUNT>(queries, read, seen[COUNT - 1], scores, stride);
    float shares[COUNT];
    for (int q = 0; q < COUNT; q++) shares[q] = weigh<V>(scores + q * stride, seen[q]);
    constexpr int SIZE = value_size<V, D, COUNT>();
    for (int start = 0; start < D; start += SIZE * V::LANES)
        add_values<V, D, T, COUNT, SIZE>(read, seen, scores, stride, shares, start, out);
}

// Attends for queries [start, start + COUNT) of a row that share a KV head: `group` heads for each of the row's tokens.
template <class V, int D, class T, int COUNT>
INLINE void attend_group(const Attend &call, const Row &row, int64_t head, int64_t start, const Keys<T> &read, float *scores) {
    const int64_t group = call.head_count / call.kv_head_count, width = (call.head_count + 2 * call.kv_head_count) * D;
    float queries[COUNT * D];
    int64_t seen[COUNT];
    T *out[COUNT];
    for (int q = 0; q < COUNT; q++) {
        // Token by token, so that each sees no fewer keys than the one before.
        const int64_t token = (start + q) / group, own = head * group + (start + q) % group;
        seen[q] = row.length - row.count + token + 1;
        std::memcpy(queries + q * D, call.projected + (row.first + token) * width + own * D, sizeof(float) * D);
        out[q] = static_cast<T *>(call.attended) + ((row.first + token) * call.head_count + own) * D;
    }
    attend_some<V, D, T, COUNT>(queries, read, seen, scores, padded_length(call.rows->longest), out);
}

// Norms and turns queries and keys of the row's tokens [begin, end), and stores their keys and values.
template <class V, int D, class T>
INLINE void place(const Attend &call, const Row &row, const int64_t *slots, int64_t begin, int64_t end) {
    const int64_t width = (call.head_count + 2 * call.kv_head_count) * D;
    for (int64_t token = begin; token < end; token++) {
        const int64_t position = row.length - row.count + token, slot = slots[position];
        const float *cosine = call.cosines + position * D, *sine = call.signed_sines + position * D;
        float *own = call.projected + (row.first + token) * width, *key = own + call.head_count * D;
        for (int64_t head = 0; head < call.head_count; head++)
            turn<V, D>(own + head * D, call.query_norm, call.epsilon, cosine, sine, call.scaling, own + head * D);
        for (int64_t head = 0; head < call.kv_head_count; head++) {
            const int64_t at = (head * call.slot_count + slot) * D;
            float *turned = key + head * D;
            const float *value = key + (call.kv_head_count + head) * D;
            turn<V, D>(turned, call.key_norm, call.epsilon, cosine, sine, 1.0f, turned);
            for (int d = 0; d < D; d += V::LANES) {
                V::store(static_cast<T *>(call.keys) + at + d, V::load(turned + d));
                V::store(static_cast<T *>(call.values) + at + d, V::load(value + d));
            }
        }
    }
}

// Puts the slots of the row's cached tokens into `slots`, as `Keys` has them.
INLINE void find_slots(const Rows &rows, const Row &row, const int64_t *page, int64_t *slots) {
    int64_t length = 0;
    for (; length < row.length; page++)
        for (int64_t i = 0; i < rows.page_tokens && length < row.length; i++) slots[length++] = *page * rows.page_slots + i;
    for (int64_t padded = padded_length(length); length < padded; length++) slots[length] = slots[length - 1];
}

// Places new tokens [begin, end) of all rows, which follow each other.
template <class V, int D, class T>
INLINE void place_tokens(const Attend &call, int64_t begin, int64_t end, int64_t *slots, float *) {
    const Rows &all = *call.rows;
    const int64_t *page = all.pages;
    for (const Row *row = all.rows; row < all.rows + all.row_count && end > 0; page += row->page_count, row++) {
        if (begin < row->count) {
            find_slots(*call.rows, *row, page, slots);
            place<V, D, T>(call, *row, slots, begin > 0 ? begin : 0, end < row->count ? end : row->count);
        }
        begin -= row->count, end -= row->count;
    }
}

// Attends for the blocks whose keys begin in [begin, end): all blocks follow each other, row by row and head by head.
template <class V, int D, class T>
INLINE void attend_blocks(const Attend &call, int64_t begin, int64_t end, int64_t *slots, float *scores) {
    const Rows &all = *call.rows;
    const int64_t *page = all.pages;
    int64_t done = 0;
    for (const Row *row = all.rows; row < all.rows + all.row_count && done < end; page += row->page_count, row++) {
        const int64_t count = query_count(call, *row), keys = keys_of(call, *row);
        if (done + keys <= begin) {
            done += keys;
            continue;
        }
        find_slots(*call.rows, *row, page, slots);
        for (int64_t head = 0; head < call.kv_head_count; head++) {
            const int64_t at = head * call.slot_count * D;
            const Keys<T> read{static_cast<T *>(call.keys) + at, static_cast<T *>(call.values) + at, slots};
            for (int64_t start = 0; start < count; start += QUERIES) {
                const int64_t from = done;
                done += keys_of(call, *row, start);
                if (from < begin || from >= end) continue;
                int64_t left = count - start < QUERIES ? count - start : QUERIES, first = start;
                if (left == 4) attend_group<V, D, T, 4>(call, *row, head, first, read, scores), left = 0;
                if (left >= 2) attend_group<V, D, T, 2>(call, *row, head, first, read, scores), left -= 2, first += 2;
                if (left) attend_group<V, D, T, 1>(call, *row, head, first, read, scores);
            }
        }
    }
}

#define BY_SIZE(NAME, DO) \
    template <class V, class T> \
    INLINE void NAME(const Attend *of, int64_t begin, int64_t end, int64_t *slots, float *scores) { \
        switch (of->head_size) { \
            case 16: return DO<V, 16, T>(*of, begin, end, slots, scores); \
            case 32: return DO<V, 32, T>(*of, begin, end, slots, scores); \
            case 48: return DO<V, 48, T>(*of, begin, end, slots, scores); \
            case 64: return DO<V, 64, T>(*of, begin, end, slots, scores); \
            case 80: return DO<V, 80, T>(*of, begin, end, slots, scores); \
            case 96: return DO<V, 96, T>(*of, begin, end, slots, scores); \
            case 128: return DO<V, 128, T>(*of, begin, end, slots, scores); \
        } \
    } \
    BY_WIDTH(NAME##_float, (const Attend *call, int64_t begin, int64_t end, int64_t *slots, float *scores), \
             (call, begin, end, slots, scores), NAME, float) \
    BY_WIDTH(NAME##_half, (const Attend *call, int64_t begin, int64_t end, int64_t *slots, float *scores), \
             (call, begin, end, slots, scores), NAME, Half)
BY_SIZE(place_any, place_tokens)
BY_SIZE(attend_any, attend_blocks)

// Shares [0, count) among threads.
template <void (*Do)(const Attend *, int64_t, int64_t, int64_t *, float *), int64_t (*Count)(const Attend &)>
void share_attending(const Attend *call, int threads) {
    crew::share(
        [](const void *of, int piece, int pieces, int thread) {
            const auto *own = static_cast<const Attend *>(of);
            const Share some(Count(*own), 1, piece, pieces);
            const Rows &rows = *own->rows;
            const int64_t memory = thread * padded_length(rows.longest);
            if (some.begin < some.end) Do(own, some.begin, some.end, rows.slots + memory, rows.scores + QUERIES * memory);
        },
        call, threads);
}

template <void (*Place)(const Attend *, int64_t, int64_t, int64_t *, float *), void (*Do)(const Attend *, int64_t, int64_t, int64_t *, float *)>
void attend_with(const Attend *call, int threads) {
    constexpr int64_t WORTH = 1 << 12;  // keys that are read for a block of queries: some 50 us
    if (all_keys(*call) < WORTH) threads = 1;
    share_attending<Place, all_tokens>(call, threads);
    share_attending<Do, all_keys>(call, threads);
}

// Does everything of one layer between its first projection and its output projection: norms, rotation, attention.
extern "C" void paceline_attend(const void *of, int is_half, int threads) {
    (is_half ? attend_with<place_any_half, attend_any_half> : attend_with<place_any_float, attend_any_float>)(static_cast<const Attend *>(of), threads);
}
