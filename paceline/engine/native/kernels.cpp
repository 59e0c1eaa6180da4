// The operations of a decoder between its products, on a CPU; `kernels.py` calls them.
//
// Every function is one pass over memory with its sums in registers; torch takes longer to begin such work than to do.
// On one machine the order of a sum depends on sizes alone. Numbers are float32, but for the cache and what goes into a
// product: these are of type T, float32 or bfloat16 (`Half`).

#include <cmath>
#include <cstring>
#include <type_traits>

#include "choices.h"
#include "crew.h"
#include "lanes.h"
#include "products.h"

// Score of a key that a query does not see. If all scores of a query are this one, its result is NaN.
constexpr float HIDDEN = -INFINITY;

template <class V>
INLINE float square_sum(const float *values, int64_t size) {
    typename V::Floats squares{};
    int64_t i = 0;
    for (; i + V::LANES <= size; i += V::LANES) squares += V::load(values + i) * V::load(values + i);
    float total = V::sum(squares);
    for (; i < size; i++) total += values[i] * values[i];
    return total;
}

template <class V>
INLINE float inverse_root(const float *values, int64_t size, float epsilon) {
    return 1.0f / std::sqrt(square_sum<V>(values, size) / size + epsilon);
}

struct Norm {
    int64_t token_count, size;
    float *hidden;        // [tokens, size]
    const float *added;   // [tokens, size], or null
    const float *weight;  // [size]
    void *normed;         // [tokens, size]
    float epsilon;
};

template <class V, class T>
INLINE void add_and_norm(const Norm *of, int64_t begin, int64_t end) {
    const Norm &call = *of;
    const int64_t size = call.size;
    for (int64_t token = begin; token < end; token++) {
        float *own = call.hidden + token * size;
        T *normed = static_cast<T *>(call.normed) + token * size;
        if (call.added)
            for (int64_t i = 0; i < size; i++) own[i] += call.added[token * size + i];
        const float scale = inverse_root<V>(own, size, call.epsilon);
        int64_t i = 0;
        for (; i + V::LANES <= size; i += V::LANES) V::store(normed + i, V::load(own + i) * scale * V::load(call.weight + i));
        for (; i < size; i++) V::store_one(normed + i, own[i] * scale * call.weight[i]);
    }
}
BY_WIDTH(add_and_norm_float, (const Norm *call, int64_t begin, int64_t end), (call, begin, end), add_and_norm, float)
BY_WIDTH(add_and_norm_half, (const Norm *call, int64_t begin, int64_t end), (call, begin, end), add_and_norm, Half)

struct Gate {
    int64_t token_count, size;
    const float *gate_and_up;  // [tokens, 2, size]
    void *gated;               // [tokens, size]
};

template <class V, class T>
INLINE void gate(const Gate *of, int64_t begin, int64_t end) {
    const Gate &call = *of;
    for (int64_t token = begin; token < end; token++) {
        const float *gate = call.gate_and_up + token * 2 * call.size, *up = gate + call.size;
        T *out = static_cast<T *>(call.gated) + token * call.size;
        int64_t i = 0;
        for (; i + V::LANES <= call.size; i += V::LANES) {
            const typename V::Floats x = V::load(gate + i), small = V::exp_of(x < 0 ? x : -x);
            V::store(out + i, x * (x < 0 ? small : V::all(1)) / (1 + small) * V::load(up + i));
        }
        for (; i < call.size; i++) V::store_one(out + i, gate[i] / (1 + std::exp(-gate[i])) * up[i]);
    }
}
BY_WIDTH(gate_float, (const Gate *call, int64_t begin, int64_t end), (call, begin, end), gate, float)
BY_WIDTH(gate_half, (const Gate *call, int64_t begin, int64_t end), (call, begin, end), gate, Half)

// Shares a call's tokens among threads where they have so many numbers that it is worth waking one.
template <class Call, void (*Do)(const Call *, int64_t, int64_t), int64_t WORTH = 1 << 15>
void share_tokens(const Call *call, int threads) {
    crew::share(
        [](const void *of, int piece, int pieces, int) {
            const auto *own = static_cast<const Call *>(of);
            const Share tokens(own->token_count, 1, piece, pieces);
            Do(own, tokens.begin, tokens.end);
        },
        call, call->token_count * call->size < WORTH ? 1 : threads);
}

// Adds `added`, unless null, to `hidden`, and puts its root mean square norm into `normed`.
extern "C" void paceline_add_and_norm(const void *of, int is_half, int threads) {
    (is_half ? share_tokens<Norm, add_and_norm_half> : share_tokens<Norm, add_and_norm_float>)(static_cast<const Norm *>(of), threads);
}

// silu(gate) * up.
extern "C" void paceline_gate(const void *of, int is_half, int threads) {
    (is_half ? share_tokens<Gate, gate_half> : share_tokens<Gate, gate_float>)(static_cast<const Gate *>(of), threads);
}

struct Take {
    int64_t count, size;
    const int64_t *places;  // [count]
    const void *values;     // [any, size]
    void *taken;            // [count, size], of the values' type, or float32
    int64_t from_half, to_half;
};

// Copies the rows of `values` at `places`; widens them where the types differ.
extern "C" void paceline_take(const void *of, int, int) {
    const Take &call = *static_cast<const Take *>(of);
    for (int64_t row = 0; row < call.count; row++) {
        const int64_t from = call.places[row] * call.size, to = row * call.size;
        if (call.from_half == call.to_half) {
            const int64_t bytes = call.from_half ? sizeof(Half) : sizeof(float);
            std::memcpy(static_cast<char *>(call.taken) + to * bytes, static_cast<const char *>(call.values) + from * bytes, call.size * bytes);
        } else {
            const Half *halves = static_cast<const Half *>(call.values) + from;
            for (int64_t i = 0; i < call.size; i++) static_cast<float *>(call.taken)[to + i] = widened(halves[i]);
        }
    }
}

// How many numbers a vector has, which decides the order of sums; 0 where the processor cannot run the kernels.
extern "C" int paceline_lanes() { return is_wide() ? WIDEST : can_run() ? NARROW : 0; }

// Where a thread of `crew.h` lives.
extern "C" void paceline_work() { crew::serve(); }

// Identifies the source of this library; `kernels.py` refuses one from another source.
extern "C" uint32_t paceline_source() { return PACELINE_SOURCE; }

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

// The choices after some rows of logits.
struct Choose {
    int64_t token_count, size;   // tokens to choose; the vocabulary's
    const float *const *logits;  // [token_count], where each row of logits is
    const int64_t *seeds, *positions;
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

extern "C" void paceline_rank(const void *of, int, int) {
    const Rank &call = *static_cast<const Rank *>(of);
    rank_some(&call, 0, call.choose.token_count);
}

// Choices that are the tokens of the next step.
struct Step {
    Choose choose;
    Row *rows;           // of the step before, and then of the next one
    int64_t *token_ids;  // [token_count], of the next step
    int64_t *positions;  // those of `choose`
};

extern "C" void paceline_step(const void *of, int, int threads) {
    const Step &call = *static_cast<const Step *>(of);
    paceline_choose(&call.choose, 0, threads);
    for (int64_t i = 0; i < call.choose.token_count; i++) {
        const int64_t token = call.choose.chosen[i];
        // A row without a choice has failed, so any token will do for it.
        call.token_ids[i] = token == NO_TOKEN ? 0 : token;
        call.rows[i] = {i, 1, call.rows[i].length + 1, call.rows[i].page_count};
        call.positions[i]++;
    }
}

// A call of one of the functions above, to be made again and again.
struct Recorded {
    void (*function)(const void *call, int is_half, int threads);
    int64_t *call;     // begins with the number of its rows, unless `which` is negative
    int64_t is_half, which;
};

// Makes the calls in their order, each with as many rows as `counts[which]` says.
extern "C" void paceline_replay(const Recorded *calls, int64_t call_count, const int64_t *counts, int threads) {
    for (const Recorded *one = calls; one < calls + call_count; one++) {
        if (one->which >= 0) *one->call = counts[one->which];
        one->function(one->call, one->is_half, threads);
    }
}

// How many bytes the structure of this name has; -1 for a name that is none of them. `structures.py` describes them again.
extern "C" int64_t paceline_structure_bytes(const char *name) {
#define BYTES_OF(TYPE) if (!std::strcmp(name, #TYPE)) return sizeof(TYPE)
    BYTES_OF(Norm); BYTES_OF(Gate); BYTES_OF(Take);
    BYTES_OF(Row); BYTES_OF(Rows); BYTES_OF(Attend);
    BYTES_OF(Product);
    BYTES_OF(Choose); BYTES_OF(Rank); BYTES_OF(Step);
    BYTES_OF(Recorded);
    return -1;
}
