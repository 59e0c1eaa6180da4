// The operations of a decoder between its products, on a CPU; `kernels.py` calls them.
//
// Every function is one pass over memory with its sums in registers; torch takes longer to begin such work than to do.
// On one machine the order of a sum depends on sizes alone. Numbers are float32, but for the cache and what goes into a
// product: these are of type T, float32 or bfloat16 (`Half`).

#include <cmath>
#include <cstring>
#include <type_traits>

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
    float *hidden;       // [tokens, size]
    const float *added;  // [tokens, size], or null
    const float *weight;  // [size]
    float epsilon;
    int64_t token_count, size;
    void *normed;  // [tokens, size]
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
    const float *gate_and_up;  // [tokens, 2, size]
    int64_t token_count, size;
    void *gated;  // [tokens, size]
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

// Shares a call's tokens among threads where they are worth waking one for.
template <class Call, void (*Do)(const Call *, int64_t, int64_t)>
void share_tokens(const Call *call, int threads) {
    constexpr int64_t WORTH = 1 << 15;  // numbers
    crew::share(
        [](const void *of, int part, int parts) {
            const auto *own = static_cast<const Call *>(of);
            const Share tokens(own->token_count, 1, part, parts);
            Do(own, tokens.begin, tokens.end);
        },
        call, call->token_count * call->size < WORTH ? 1 : threads);
}

// Adds `added`, unless null, to `hidden`, and puts its root mean square norm into `normed`.
extern "C" void paceline_add_and_norm(const Norm *call, int is_half, int threads) {
    (is_half ? share_tokens<Norm, add_and_norm_half> : share_tokens<Norm, add_and_norm_float>)(call, threads);
}

// silu(gate) * up.
extern "C" void paceline_gate(const Gate *call, int is_half, int threads) {
    (is_half ? share_tokens<Gate, gate_half> : share_tokens<Gate, gate_float>)(call, threads);
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
    int64_t segment_count;  // runs of slots that hold the cached tokens
};
struct Segment {
    int64_t start, stop;
};
struct Attend {
    int64_t row_count, head_count, kv_head_count, head_size, slot_count;
    const Row *rows;
    const Segment *segments;             // those of the first row, then of the second, and so on
    const float *cosines, *signed_sines;  // [positions, D]
    const float *query_norm, *key_norm;   // [D], or null
    float epsilon, scaling;
    void *keys, *values;  // [KV heads, slots, D]
    float *projected;     // [T, H + 2 KV heads, D]: queries, keys, values
    void *attended;       // [T, H, D]
    int64_t *slots;       // working memory of each thread: as many numbers as the longest sequence has tokens,
    float *scores;        // and WIDEST times that number rounded up to 4
    int64_t longest;
};
static_assert(sizeof(Attend) == 152, "no padding but where ctypes has it");

// Keys and values that the queries of one KV head read.
template <class T>
struct Keys {
    const T *keys, *values;  // [slots, D]
    const int64_t *slots;
    int64_t length;  // number of keys that the last query sees
};

// Applies norm, rotary position (Su et al., arXiv 2104.09864) and `scale` to one head. `to` may be `from`.
template <class V, int D>
INLINE void turn(const float *from, const float *norm, float epsilon, const float *cosine, const float *sine, float scale, float *to) {
    float head[D];
    const float inverse = norm ? inverse_root<V>(from, D, epsilon) : 1.0f;
    for (int d = 0; d < D; d++) head[d] = norm ? from[d] * inverse * norm[d] : from[d];
    for (int d = 0; d < D; d++) to[d] = (head[d] * cosine[d] + head[(d + D / 2) % D] * sine[d]) * scale;
}

// Returns D numbers as float32; they may be put into `memory`.
template <class V, int D>
INLINE const float *widen(const float *from, float *memory) {
    return from;
}
template <class V, int D>
INLINE const float *widen(const Half *from, float *memory) {
    for (int d = 0; d < D; d += V::LANES) V::store(memory + d, V::load(from + d));
    return memory;
}

// Attends for one query: `query` and `out` are [D]; `scores` has room for `length` rounded up to LANES.
template <class V, int D>
INLINE void attend_one(const float *query, const Keys<float> &read, int64_t seen, float *scores, float *out) {
    const int64_t end = (seen + V::LANES - 1) / V::LANES * V::LANES;
    for (int64_t j = 0; j < seen; j++) {
        typename V::Floats product{};
        for (int d = 0; d < D; d += V::LANES) product += V::load(query + d) * V::load(read.keys + read.slots[j] * D + d);
        scores[j] = V::sum(product);
    }
    for (int64_t j = seen; j < end; j++) scores[j] = HIDDEN;
    typename V::Floats largest = V::load(scores), total{}, outputs[D / V::LANES] = {};
    for (int64_t j = V::LANES; j < end; j += V::LANES) largest = V::larger(largest, V::load(scores + j));
    float top = largest[0];
    for (int lane = 1; lane < V::LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
    for (int64_t j = 0; j < end; j += V::LANES) {
        const typename V::Floats weights = V::exp_of(V::load(scores + j) - top);
        total += weights;
        V::store(scores + j, weights);
    }
    for (int64_t j = 0; j < seen; j++)
        UNROLLED for (int d = 0; d < D / V::LANES; d++) outputs[d] += scores[j] * V::load(read.values + read.slots[j] * D + d * V::LANES);
    const float share = 1.0f / V::sum(total);
    UNROLLED for (int d = 0; d < D / V::LANES; d++) V::store(out + d * V::LANES, outputs[d] * share);
}

// Attends for LANES queries at once, one a lane: `queries` and `out` are [D, LANES], `scores` is [length rounded up to
// 4, LANES]. Each query sees `seen` keys, at least `seen_by_all`. No lane's result depends on another lane.
template <class V, int D, class T>
INLINE void attend_many(const float *queries, const Keys<T> &read, typename V::Ints seen, int64_t seen_by_all, float *scores, float *out) {
    constexpr int KEYS = 4, SIZES = 8, BLOCK = 32;  // as many sums as stay in registers, as many values as in the first cache
    typename V::Floats largest = V::all(HIDDEN), total{};
    for (int64_t j = 0; j < read.length; j += KEYS) {
        float memory[KEYS][D];
        const float *key[KEYS];
        typename V::Floats product[KEYS] = {};
        UNROLLED for (int k = 0; k < KEYS; k++) key[k] = widen<V, D>(read.keys + read.slots[j + k < read.length ? j + k : j] * D, memory[k]);
        for (int d = 0; d < D; d++)
            UNROLLED for (int k = 0; k < KEYS; k++) product[k] += V::load(queries + d * V::LANES) * key[k][d];
        UNROLLED for (int k = 0; k < KEYS; k++) {
            const typename V::Floats score = seen > (int32_t)(j + k) ? product[k] : V::all(HIDDEN);
            largest = V::larger(largest, score);
            V::store(scores + (j + k) * V::LANES, score);
        }
    }
    for (int64_t j = 0; j < read.length; j++) {
        const typename V::Floats weight = V::exp_of(V::load(scores + j * V::LANES) - largest);
        const typename V::Floats visible = seen > (int32_t)j ? weight : V::all(0);
        total += visible;
        V::store(scores + j * V::LANES, visible);
    }
    for (int d = 0; d < D; d++) V::store(out + d * V::LANES, V::all(0));
    for (int64_t first = 0; first < read.length; first += BLOCK) {
        const int64_t last = first + BLOCK < read.length ? first + BLOCK : read.length;
        float memory[BLOCK][D];
        const float *values[BLOCK];
        for (int64_t j = first; j < last; j++) values[j - first] = widen<V, D>(read.values + read.slots[j] * D, memory[j - first]);
        const int64_t open = last < seen_by_all ? last : seen_by_all > first ? seen_by_all : first;
        for (int start = 0; start < D; start += SIZES) {
            typename V::Floats outputs[SIZES];
            UNROLLED for (int d = 0; d < SIZES; d++) outputs[d] = V::load(out + (start + d) * V::LANES);
            for (int64_t j = first; j < open; j++)
                UNROLLED for (int d = 0; d < SIZES; d++) outputs[d] += V::load(scores + j * V::LANES) * values[j - first][start + d];
            // A weight of 0 does not hide an infinite value, because their product is NaN.
            for (int64_t j = open; j < last; j++) {
                const typename V::Ints visible = seen > (int32_t)j;
                UNROLLED for (int d = 0; d < SIZES; d++)
                    outputs[d] += V::load(scores + j * V::LANES) * (visible ? V::all(values[j - first][start + d]) : V::all(0));
            }
            UNROLLED for (int d = 0; d < SIZES; d++) V::store(out + (start + d) * V::LANES, outputs[d]);
        }
    }
    for (int d = 0; d < D; d++) V::store(out + d * V::LANES, V::load(out + d * V::LANES) / total);
}

// Most queries that are faster one by one than as lanes of which most are empty. In bfloat16 there are none: a query would
// be rounded otherwise than as a lane, so that its result would depend on how many others its row has.
template <class T>
constexpr int FEW = std::is_same_v<T, float> ? 4 : 0;

// Attends for the queries of one row that share a KV head: `group` heads for each of the row's tokens.
template <class V, int D, class T>
INLINE void attend_group(const Attend &call, const Row &row, int64_t head, int64_t group, Keys<T> read, float *scores) {
    const int64_t width = (call.head_count + 2 * call.kv_head_count) * D, count = group * row.count;
    float queries[D * V::LANES], out[D * V::LANES];
    for (int64_t start = 0; start < count; start += V::LANES) {
        const int lanes = count - start < V::LANES ? count - start : V::LANES;
        typename V::Ints seen{};
        const float *from[V::LANES];
        T *to[V::LANES];
        for (int lane = 0; lane < lanes; lane++) {
            // Lanes go token by token, so that they see about equally many keys, and each no fewer than the one before.
            const int64_t token = (start + lane) / group, own = head * group + (start + lane) % group;
            seen[lane] = row.length - row.count + token + 1;
            from[lane] = call.projected + (row.first + token) * width + own * D;
            to[lane] = static_cast<T *>(call.attended) + ((row.first + token) * call.head_count + own) * D;
        }
        read.length = seen[lanes - 1];
        for (int lane = lanes; lane < V::LANES; lane++) seen[lane] = read.length;  // an empty lane hides nothing
        if constexpr (FEW<T> > 0) {
            if (lanes <= FEW<T>) {
                for (int lane = 0; lane < lanes; lane++) attend_one<V, D>(from[lane], read, seen[lane], scores, to[lane]);
                continue;
            }
        }
        for (int d = 0; d < D; d++)
            for (int lane = 0; lane < V::LANES; lane++) queries[d * V::LANES + lane] = lane < lanes ? from[lane][d] : 0;
        attend_many<V, D>(queries, read, seen, seen[0], scores, out);
        for (int lane = 0; lane < lanes; lane++) {
            float own[D];
            for (int d = 0; d < D; d++) own[d] = out[d * V::LANES + lane];
            for (int d = 0; d < D; d += V::LANES) V::store(to[lane] + d, V::load(own + d));
        }
    }
}

// Norms and turns the row's queries and keys of KV heads [begin, end), and stores their keys and values.
template <class V, int D, class T>
INLINE void place(const Attend &call, const Row &row, const int64_t *slots, int64_t begin, int64_t end) {
    const int64_t width = (call.head_count + 2 * call.kv_head_count) * D, group = call.head_count / call.kv_head_count;
    for (int64_t token = 0; token < row.count; token++) {
        const int64_t position = row.length - row.count + token, slot = slots[position];
        const float *cosine = call.cosines + position * D, *sine = call.signed_sines + position * D;
        float *own = call.projected + (row.first + token) * width, *key = own + call.head_count * D;
        for (int64_t head = begin * group; head < end * group; head++)
            turn<V, D>(own + head * D, call.query_norm, call.epsilon, cosine, sine, call.scaling, own + head * D);
        for (int64_t head = begin; head < end; head++) {
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

template <class V, int D, class T>
INLINE void attend(const Attend &call, int64_t begin, int64_t end, int64_t *slots, float *scores) {
    const Segment *segment = call.segments;
    for (const Row *row = call.rows; row < call.rows + call.row_count; row++) {
        int64_t length = 0;
        for (const Segment *last = segment + row->segment_count; segment < last; segment++)
            for (int64_t slot = segment->start; slot < segment->stop; slot++) slots[length++] = slot;
        place<V, D, T>(call, *row, slots, begin, end);
        const int64_t group = call.head_count / call.kv_head_count;
        for (int64_t head = begin; head < end; head++) {
            const int64_t at = head * call.slot_count * D;
            const T *keys = static_cast<T *>(call.keys) + at, *values = static_cast<T *>(call.values) + at;
            attend_group<V, D, T>(call, *row, head, group, {keys, values, slots, length}, scores);
        }
    }
}

template <class V, class T>
INLINE void attend_heads(const Attend *of, int64_t begin, int64_t end, int64_t *slots, float *scores) {
    const Attend &call = *of;
    switch (call.head_size) {
        case 16: return attend<V, 16, T>(call, begin, end, slots, scores);
        case 32: return attend<V, 32, T>(call, begin, end, slots, scores);
        case 48: return attend<V, 48, T>(call, begin, end, slots, scores);
        case 64: return attend<V, 64, T>(call, begin, end, slots, scores);
        case 80: return attend<V, 80, T>(call, begin, end, slots, scores);
        case 96: return attend<V, 96, T>(call, begin, end, slots, scores);
        case 128: return attend<V, 128, T>(call, begin, end, slots, scores);
    }
}
BY_WIDTH(attend_heads_float, (const Attend *call, int64_t begin, int64_t end, int64_t *slots, float *scores),
         (call, begin, end, slots, scores), attend_heads, float)
BY_WIDTH(attend_heads_half, (const Attend *call, int64_t begin, int64_t end, int64_t *slots, float *scores),
         (call, begin, end, slots, scores), attend_heads, Half)

template <void (*Do)(const Attend *, int64_t, int64_t, int64_t *, float *)>
void share_heads(const Attend *call, int threads) {
    crew::share(
        [](const void *of, int part, int parts) {
            const auto *own = static_cast<const Attend *>(of);
            const Share heads(own->kv_head_count, 1, part, parts);
            Do(own, heads.begin, heads.end, own->slots + part * own->longest, own->scores + part * (own->longest + 3) * WIDEST);
        },
        call, threads);
}

// Does everything of one layer between its first projection and its output projection: norms, rotation, attention.
extern "C" void paceline_attend(const Attend *call, int is_half, int threads) {
    (is_half ? share_heads<attend_heads_half> : share_heads<attend_heads_float>)(call, threads);
}
