// Attention of a pass's tokens to the cached ones of their sequences, in pages that lie anywhere; norms and rotation of queries
// and keys before it. A query's result depends on no other query, to the last bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "crew.h"
#include "lanes.h"
#include "layers.h"
#include "queries.h"

// As `kernels.py` fills it in.
struct Row {
    int64_t first, count;   // first of the sequence's tokens in the packed row, and how many it has there
    int64_t length;         // cached tokens of the sequence, the new ones included
    int64_t page_count;     // pages that hold the cached tokens
    int64_t skipped;        // its first tokens of which nothing is wanted but keys and values, once all layers are done
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
    int64_t is_last;      // whether nothing is read of the results of tokens that are skipped
};

// A block is queries of a KV head that read its keys together, at most QUERIES.
constexpr int QUERIES = 16;
constexpr int FEWEST_QUERIES = 4;  // where threads would have too few blocks
INLINE int64_t group_of(const Attend &call) { return call.head_count / call.kv_head_count; }
INLINE int64_t query_count(const Attend &call, const Row &row) { return row.count * group_of(call); }
INLINE int64_t first_query(const Attend &call, const Row &row) { return call.is_last ? row.skipped * group_of(call) : 0; }

// An attention whose blocks have this many queries.
struct Blocks {
    const Attend &call;
    int64_t size;
};

// Keys that the block from query `start` on reads: those that its last query sees.
INLINE int64_t keys_of(const Blocks &of, const Row &row, int64_t start) {
    const int64_t last = (start + of.size - 1) / group_of(of.call);
    return row.length - row.count + 1 + (last < row.count ? last : row.count - 1);
}
INLINE int64_t keys_of(const Blocks &of, const Row &row) {
    int64_t keys = 0;
    for (int64_t start = first_query(of.call, row); start < query_count(of.call, row); start += of.size) keys += keys_of(of, row, start);
    return keys * of.call.kv_head_count;
}
static int64_t all_keys(const Blocks &of) {
    int64_t keys = 0;
    for (int64_t row = 0; row < of.call.rows->row_count; row++) keys += keys_of(of, of.call.rows->rows[row]);
    return keys;
}
static int64_t all_tokens(const Blocks &of) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < of.call.rows->row_count; row++) tokens += of.call.rows->rows[row].count;
    return tokens;
}

// Applies norm, rotary position (Su et al., arXiv 2104.09864) and `scale` to one head. `to` may be `from`.
template <class V, int D>
INLINE void turn(const float *from, const float *norm, float epsilon, const float *cosine, const float *sine, float scale, float *to) {
    float head[D];
    const float inverse = norm ? inverse_root<V>(from, D, epsilon) : 1.0f;
    for (int d = 0; d < D; d++) head[d] = norm ? from[d] * inverse * norm[d] : from[d];
    for (int d = 0; d < D; d++) to[d] = (head[d] * cosine[d] + head[(d + D / 2) % D] * sine[d]) * scale;
}

// Attends for `count` queries of a row from query `start` of KV head `head` on: some heads for each of the row's tokens.
template <class V, int D, class T>
INLINE void attend_block(const Attend &call, const Row &row, int64_t head, int64_t start, int64_t count, const Keys<T> &read, float *scores) {
    const int64_t group = group_of(call), width = call.head_count + 2 * call.kv_head_count, stride = padded_length(call.rows->longest);
    alignas(64) float queries[QUERIES * D], sums[QUERIES * D];
    int64_t seen[QUERIES];
    T *out[QUERIES];
    for (int64_t q = 0; q < count; q++) {
        // Token by token, so that each sees no fewer keys than the one before.
        const int64_t token = (start + q) / group, own = head * group + (start + q) % group;
        seen[q] = row.length - row.count + token + 1;
        take_query<V, D, T>(call.projected + ((row.first + token) * width + own) * D, queries + q * D);
        out[q] = static_cast<T *>(call.attended) + ((row.first + token) * call.head_count + own) * D;
    }
    score_keys<V, D>(queries, count, read, seen[count - 1], scores, stride);
    float shares[QUERIES];
    for (int64_t q = 0; q < count; q++) shares[q] = weigh<V>(scores + q * stride, seen[q]);
    add_up<V, D>(read, seen, count, scores, stride, sums);
    for (int64_t q = 0; q < count; q++)
        for (int d = 0; d < D; d += V::LANES) V::store(out[q] + d, V::load(sums + q * D + d) * shares[q]);
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
INLINE void place_tokens(const Blocks &of, int64_t begin, int64_t end, int64_t *slots, float *) {
    const Rows &all = *of.call.rows;
    const int64_t *page = all.pages;
    for (const Row *row = all.rows; row < all.rows + all.row_count && end > 0; page += row->page_count, row++) {
        if (begin < row->count) {
            find_slots(all, *row, page, slots);
            place<V, D, T>(of.call, *row, slots, begin > 0 ? begin : 0, end < row->count ? end : row->count);
        }
        begin -= row->count, end -= row->count;
    }
}

// Attends for the blocks whose keys begin in [begin, end): all blocks follow each other, row by row and head by head.
template <class V, int D, class T>
INLINE void attend_blocks(const Blocks &of, int64_t begin, int64_t end, int64_t *slots, float *scores) {
    const Attend &call = of.call;
    const Rows &all = *call.rows;
    const int64_t *page = all.pages;
    int64_t done = 0;
    for (const Row *row = all.rows; row < all.rows + all.row_count && done < end; page += row->page_count, row++) {
        const int64_t count = query_count(call, *row), keys = keys_of(of, *row);
        if (done + keys <= begin) {
            done += keys;
            continue;
        }
        find_slots(all, *row, page, slots);
        for (int64_t head = 0; head < call.kv_head_count; head++) {
            const int64_t at = head * call.slot_count * D;
            const Keys<T> read{static_cast<T *>(call.keys) + at, static_cast<T *>(call.values) + at, slots, row->length};
            for (int64_t start = first_query(call, *row); start < count; start += of.size) {
                const int64_t from = done;
                done += keys_of(of, *row, start);
                if (from < begin || from >= end) continue;
                attend_block<V, D, T>(call, *row, head, start, std::min(of.size, count - start), read, scores);
            }
        }
    }
}

#define BY_SIZE(NAME, DO) \
    template <class V, class T> \
    INLINE void NAME(const Blocks *of, int64_t begin, int64_t end, int64_t *slots, float *scores) { \
        switch (of->call.head_size) { \
            case 16: return DO<V, 16, T>(*of, begin, end, slots, scores); \
            case 32: return DO<V, 32, T>(*of, begin, end, slots, scores); \
            case 48: return DO<V, 48, T>(*of, begin, end, slots, scores); \
            case 64: return DO<V, 64, T>(*of, begin, end, slots, scores); \
            case 80: return DO<V, 80, T>(*of, begin, end, slots, scores); \
            case 96: return DO<V, 96, T>(*of, begin, end, slots, scores); \
            case 128: return DO<V, 128, T>(*of, begin, end, slots, scores); \
        } \
    } \
    BY_WIDTH(NAME##_float, (const Blocks *of, int64_t begin, int64_t end, int64_t *slots, float *scores), \
             (of, begin, end, slots, scores), NAME, float) \
    BY_WIDTH(NAME##_half, (const Blocks *of, int64_t begin, int64_t end, int64_t *slots, float *scores), \
             (of, begin, end, slots, scores), NAME, Half)
BY_SIZE(place_any, place_tokens)
BY_SIZE(attend_any, attend_blocks)

// Shares [0, count) among threads.
template <void (*Do)(const Blocks *, int64_t, int64_t, int64_t *, float *), int64_t (*Count)(const Blocks &)>
void share_attending(const Blocks *blocks, int threads) {
    crew::share(
        [](const void *of, int piece, int pieces, int thread) {
            const auto *own = static_cast<const Blocks *>(of);
            const Share some(Count(*own), 1, piece, pieces);
            const Rows &rows = *own->call.rows;
            const int64_t memory = thread * padded_length(rows.longest);
            if (some.begin < some.end) Do(own, some.begin, some.end, rows.slots + memory, rows.scores + QUERIES * memory);
        },
        blocks, threads);
}

// Blocks of as many queries as leave each thread some of them.
static Blocks blocks_of(const Attend &call, int threads) {
    Blocks blocks{call, QUERIES};
    int64_t queries = 0;
    for (int64_t row = 0; row < call.rows->row_count; row++) queries += query_count(call, call.rows->rows[row]) - first_query(call, call.rows->rows[row]);
    queries *= call.kv_head_count;
    while (threads > 1 && blocks.size > FEWEST_QUERIES && queries < threads * crew::PIECES * blocks.size) blocks.size /= 2;
    return blocks;
}

template <void (*Place)(const Blocks *, int64_t, int64_t, int64_t *, float *), void (*Do)(const Blocks *, int64_t, int64_t, int64_t *, float *)>
void attend_with(const Attend *call, int threads) {
    constexpr int64_t WORTH = 1 << 12;  // keys that are read for a block of few queries: some 50 us
    if (all_keys({*call, FEWEST_QUERIES}) < WORTH) threads = 1;
    const Blocks blocks = blocks_of(*call, threads);
    share_attending<Place, all_tokens>(&blocks, threads);
    share_attending<Do, all_keys>(&blocks, threads);
}

// Does everything of one layer between its first projection and its output projection: norms, rotation, attention.
extern "C" void paceline_attend(const void *of, int is_half, int threads) {
    (is_half ? attend_with<place_any_half, attend_any_half> : attend_with<place_any_float, attend_any_float>)(static_cast<const Attend *>(of), threads);
}
