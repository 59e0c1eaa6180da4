// What a decoder does between its products, but for attention: norms, gates, and rows that are taken out of others.
//
// Every function is one pass over memory with its sums in registers; torch takes longer to begin such work than to do.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "crew.h"
#include "lanes.h"

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

// Adds `added`, unless null, to `hidden`, and puts its root mean square norm into `normed`.
extern "C" void paceline_add_and_norm(const void *of, int is_half, int threads) {
    (is_half ? share_tokens<Norm, add_and_norm_half> : share_tokens<Norm, add_and_norm_float>)(static_cast<const Norm *>(of), threads);
}

// silu(gate) * up.
extern "C" void paceline_gate(const void *of, int is_half, int threads) {
    (is_half ? share_tokens<Gate, gate_half> : share_tokens<Gate, gate_float>)(static_cast<const Gate *>(of), threads);
}

struct Take {
    int64_t count, size, stride;  // taken rows are `stride` numbers apart
    const int64_t *places;        // [count], or null for the first ones
    const void *values;           // [any, size]
    void *taken;                  // [count, size]
    int64_t from_half, to_half;
};

template <class V, class From, class To>
INLINE void take_rows(const Take &call) {
    for (int64_t row = 0; row < call.count; row++) {
        const From *from = static_cast<const From *>(call.values) + (call.places ? call.places[row] : row) * call.size;
        To *to = static_cast<To *>(call.taken) + row * call.stride;
        int64_t i = 0;
        for (; i + V::LANES <= call.size; i += V::LANES) V::store(to + i, V::load(from + i));
        for (; i < call.size; i++) V::store_one(to + i, widened(from[i]));
    }
}
template <class V, class From>
INLINE void take_of(const Take *of) {
    if (of->to_half) take_rows<V, From, Half>(*of);
    else take_rows<V, From, float>(*of);
}
BY_WIDTH(take_float, (const Take *of), (of), take_of, float)
BY_WIDTH(take_half, (const Take *of), (of), take_of, Half)

// Copies rows of `values`; widens or rounds them where the types differ.
extern "C" void paceline_take(const void *of, int, int) {
    const Take *call = static_cast<const Take *>(of);
    (call->from_half ? take_half : take_float)(call);
}
