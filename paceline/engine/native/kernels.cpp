// The operations of a float32 decoder between its products, on one thread of a CPU; `kernels.py` calls them.
//
// Every function is one pass over memory with its sums in registers; torch takes longer to begin such work than to do.
// On one machine the order of a sum depends on sizes alone.

#include <cmath>
#include <cstring>

#include "lanes.h"

// Score of a key that a query does not see. If all scores of a query are this one, its result is NaN.
constexpr float HIDDEN = -INFINITY;

INLINE float square_sum(const float *values, int64_t size) {
    Floats squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(values + i) * load(values + i);
    float total = sum(squares);
    for (; i < size; i++) total += values[i] * values[i];
    return total;
}

INLINE float inverse_root(const float *values, int64_t size, float epsilon) {
    return 1.0f / std::sqrt(square_sum(values, size) / size + epsilon);
}

// Adds `added`, unless null, to `hidden`, and puts its root mean square norm into `normed`; all [tokens, size].
KERNEL void paceline_add_and_norm(
    float *hidden, const float *added, const float *weight, float epsilon, int64_t tokens, int64_t size, float *normed) {
    for (int64_t token = 0; token < tokens; token++) {
        float *own = hidden + token * size;
        if (added)
            for (int64_t i = 0; i < size; i++) own[i] += added[token * size + i];
        const float scale = inverse_root(own, size, epsilon);
        for (int64_t i = 0; i < size; i++) normed[token * size + i] = own[i] * scale * weight[i];
    }
}

// silu(gate) * up; `gate_and_up` is [tokens, 2, size], `gated` [tokens, size].
KERNEL void paceline_gate(const float *gate_and_up, int64_t tokens, int64_t size, float *gated) {
    for (int64_t token = 0; token < tokens; token++) {
        const float *gate = gate_and_up + token * 2 * size, *up = gate + size;
        float *out = gated + token * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            const Floats x = load(gate + i), small = exp_of(x < 0 ? x : -x);
            store(out + i, x * (x < 0 ? small : all(1)) / (1 + small) * load(up + i));
        }
        for (; i < size; i++) out[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    }
}

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
    float *keys, *values;  // [KV heads, slots, D]
    float *projected;      // [T, H + 2 KV heads, D]: queries, keys, values
    float *attended;       // [T, H, D]
};
static_assert(sizeof(Attend) == 128, "no padding but where ctypes has it");

// Keys and values that the queries of one KV head read.
struct Keys {
    const float *keys, *values;  // [slots, D]
    const int64_t *slots;
    int64_t length;  // number of keys that the last query sees
};

// Applies norm, rotary position (Su et al., arXiv 2104.09864) and `scale` to one head. `to` may be `from`.
template <int D>
INLINE void turn(const float *from, const float *norm, float epsilon, const float *cosine, const float *sine, float scale, float *to) {
    float head[D];
    const float inverse = norm ? inverse_root(from, D, epsilon) : 1.0f;
    for (int d = 0; d < D; d++) head[d] = norm ? from[d] * inverse * norm[d] : from[d];
    for (int d = 0; d < D; d++) to[d] = (head[d] * cosine[d] + head[(d + D / 2) % D] * sine[d]) * scale;
}

// Attends for one query: `query` and `out` are [D]; `scores` has room for `length` rounded up to LANES.
template <int D>
INLINE void attend_one(const float *query, const Keys &read, int64_t seen, float *scores, float *out) {
    const int64_t end = (seen + LANES - 1) / LANES * LANES;
    for (int64_t j = 0; j < seen; j++) {
        Floats product{};
        for (int d = 0; d < D; d += LANES) product += load(query + d) * load(read.keys + read.slots[j] * D + d);
        scores[j] = sum(product);
    }
    for (int64_t j = seen; j < end; j++) scores[j] = HIDDEN;
    Floats largest = load(scores), total{}, outputs[D / LANES] = {};
    for (int64_t j = LANES; j < end; j += LANES) largest = larger(largest, load(scores + j));
    float top = largest[0];
    for (int lane = 1; lane < LANES; lane++) top = largest[lane] > top ? largest[lane] : top;
    for (int64_t j = 0; j < end; j += LANES) {
        const Floats weights = exp_of(load(scores + j) - top);
        total += weights;
        store(scores + j, weights);
    }
    for (int64_t j = 0; j < seen; j++)
        for (int d = 0; d < D / LANES; d++) outputs[d] += scores[j] * load(read.values + read.slots[j] * D + d * LANES);
    const float share = 1.0f / sum(total);
    for (int d = 0; d < D / LANES; d++) store(out + d * LANES, outputs[d] * share);
}

// Attends for LANES queries at once, one a lane: `queries` and `out` are [D, LANES], `scores` is [length rounded up to
// 4, LANES]. Each query sees `seen` keys, at least `seen_by_all`.
template <int D>
INLINE void attend_many(const float *queries, const Keys &read, Ints seen, int64_t seen_by_all, float *scores, float *out) {
    constexpr int KEYS = 4, SIZES = 8;  // as many sums as stay in registers
    Floats largest = all(HIDDEN), total{};
    for (int64_t j = 0; j < read.length; j += KEYS) {
        const float *key[KEYS];
        Floats product[KEYS] = {};
        for (int k = 0; k < KEYS; k++) key[k] = read.keys + read.slots[j + k < read.length ? j + k : j] * D;
        for (int d = 0; d < D; d++)
            for (int k = 0; k < KEYS; k++) product[k] += load(queries + d * LANES) * key[k][d];
        for (int k = 0; k < KEYS; k++) {
            const Floats score = seen > (int32_t)(j + k) ? product[k] : all(HIDDEN);
            largest = larger(largest, score);
            store(scores + (j + k) * LANES, score);
        }
    }
    for (int64_t j = 0; j < read.length; j++) {
        const Floats weight = exp_of(load(scores + j * LANES) - largest);
        const Floats visible = seen > (int32_t)j ? weight : all(0);
        total += visible;
        store(scores + j * LANES, visible);
    }
    for (int start = 0; start < D; start += SIZES) {
        Floats outputs[SIZES] = {};
        for (int64_t j = 0; j < seen_by_all; j++) {
            const float *value = read.values + read.slots[j] * D + start;
            for (int d = 0; d < SIZES; d++) outputs[d] += load(scores + j * LANES) * value[d];
        }
        // A weight of 0 does not hide an infinite value, because their product is NaN.
        for (int64_t j = seen_by_all; j < read.length; j++) {
            const float *value = read.values + read.slots[j] * D + start;
            const Ints visible = seen > (int32_t)j;
            for (int d = 0; d < SIZES; d++) outputs[d] += load(scores + j * LANES) * (visible ? all(value[d]) : all(0));
        }
        for (int d = 0; d < SIZES; d++) store(out + (start + d) * LANES, outputs[d] / total);
    }
}

// Most queries that are faster one by one than as lanes of which most are empty.
constexpr int FEW = 4;

// Attends for the queries of one row that share a KV head: `group` heads for each of the row's tokens.
template <int D>
INLINE void attend_group(const Attend &call, const Row &row, int64_t head, int64_t group, Keys read, float *scores) {
    const int64_t width = (call.head_count + 2 * call.kv_head_count) * D, count = group * row.count;
    float queries[D * LANES], out[D * LANES];
    for (int64_t start = 0; start < count; start += LANES) {
        const int lanes = count - start < LANES ? count - start : LANES;
        Ints seen{};
        const float *from[LANES];
        float *to[LANES];
        for (int lane = 0; lane < lanes; lane++) {
            // Lanes go token by token, so that they see about equally many keys, and each no fewer than the one before.
            const int64_t token = (start + lane) / group, own = head * group + (start + lane) % group;
            seen[lane] = row.length - row.count + token + 1;
            from[lane] = call.projected + (row.first + token) * width + own * D;
            to[lane] = call.attended + ((row.first + token) * call.head_count + own) * D;
        }
        read.length = seen[lanes - 1];
        for (int lane = lanes; lane < LANES; lane++) seen[lane] = read.length;  // an empty lane hides nothing
        if (lanes <= FEW) {
            for (int lane = 0; lane < lanes; lane++) attend_one<D>(from[lane], read, seen[lane], scores, to[lane]);
            continue;
        }
        for (int d = 0; d < D; d++)
            for (int lane = 0; lane < LANES; lane++) queries[d * LANES + lane] = lane < lanes ? from[lane][d] : 0;
        attend_many<D>(queries, read, seen, seen[0], scores, out);
        for (int lane = 0; lane < lanes; lane++)
            for (int d = 0; d < D; d++) to[lane][d] = out[d * LANES + lane];
    }
}

// Norms and turns the row's queries and keys, and stores its keys and values.
template <int D>
INLINE void place(const Attend &call, const Row &row, const int64_t *slots) {
    const int64_t width = (call.head_count + 2 * call.kv_head_count) * D;
    for (int64_t token = 0; token < row.count; token++) {
        const int64_t position = row.length - row.count + token, slot = slots[position];
        const float *cosine = call.cosines + position * D, *sine = call.signed_sines + position * D;
        float *own = call.projected + (row.first + token) * width, *key = own + call.head_count * D;
        for (int64_t head = 0; head < call.head_count; head++)
            turn<D>(own + head * D, call.query_norm, call.epsilon, cosine, sine, call.scaling, own + head * D);
        for (int64_t head = 0; head < call.kv_head_count; head++) {
            const int64_t at = (head * call.slot_count + slot) * D;
            turn<D>(key + head * D, call.key_norm, call.epsilon, cosine, sine, 1.0f, call.keys + at);
            std::memcpy(call.values + at, key + (call.kv_head_count + head) * D, D * sizeof(float));
        }
    }
}

template <int D>
INLINE void attend(const Attend &call, int64_t *slots, float *scores) {
    const Segment *segment = call.segments;
    for (const Row *row = call.rows; row < call.rows + call.row_count; row++) {
        int64_t length = 0;
        for (const Segment *end = segment + row->segment_count; segment < end; segment++)
            for (int64_t slot = segment->start; slot < segment->stop; slot++) slots[length++] = slot;
        place<D>(call, *row, slots);
        const int64_t group = call.head_count / call.kv_head_count;
        for (int64_t head = 0; head < call.kv_head_count; head++) {
            const int64_t at = head * call.slot_count * D;
            attend_group<D>(call, *row, head, group, {call.keys + at, call.values + at, slots, length}, scores);
        }
    }
}

// Does everything of one layer between its first projection and its output projection: norms, rotation, attention.
// `slots` has room for the longest sequence, `scores` for LANES times its length rounded up to 4.
KERNEL void paceline_attend(const Attend *call, int64_t *slots, float *scores) {
    switch (call->head_size) {
        case 16: return attend<16>(*call, slots, scores);
        case 32: return attend<32>(*call, slots, scores);
        case 48: return attend<48>(*call, slots, scores);
        case 64: return attend<64>(*call, slots, scores);
        case 80: return attend<80>(*call, slots, scores);
        case 96: return attend<96>(*call, slots, scores);
        case 128: return attend<128>(*call, slots, scores);
    }
}
