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
