// Operations on sixteen numbers at a time in GCC's and Clang's vector extension, compiled for what the processor has.
// Numbers are computed with in float32, and stored in float32 or bfloat16 (`Half`).

#pragma once

#include <cfloat>
#include <cstdint>

#define INLINE static inline __attribute__((always_inline))
#if !defined(__x86_64__)
#define KERNEL extern "C"
#elif defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
// One version is compiled for each generation of processors; the loader chooses among them on the machine.
#define KERNEL extern "C" __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#error "GCC 12 or newer and glibc are needed; for x86's least common processor alone these would be no faster than torch"
#endif

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef uint16_t Half;
typedef Half Halves __attribute__((vector_size(2 * LANES)));
typedef Half UnalignedHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE Floats all(float value) { return Floats{} + value; }
INLINE Floats load(const float *from) { return *reinterpret_cast<const Unaligned *>(from); }
INLINE void store(float *to, Floats values) { *reinterpret_cast<Unaligned *>(to) = values; }
INLINE Floats load(const Half *from) {
    const Halves halves = *reinterpret_cast<const UnalignedHalves *>(from);
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Bits) << 16);
}
// Rounds to the nearest, ties to even; NaN stays NaN.
INLINE void store(Half *to, Floats values) {
    const Bits bits = reinterpret_cast<Bits>(values), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Bits kept = values == values ? rounded : bits | 0x400000;
    *reinterpret_cast<UnalignedHalves *>(to) = __builtin_convertvector(kept >> 16, Halves);
}
template <class T>
INLINE void store_one(T *to, float value) {
    T values[LANES];
    store(values, all(value));
    *to = values[0];
}
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

INLINE float sum(Floats values) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += values[lane];
    return total;
}

// e to the x, for x <= 0: 2^k e^r with |r| <= ln(2) / 2, the second factor by Cephes' polynomial; relative error 2e-7.
// The result is 0 where it is below float32's least, and NaN stays NaN.
INLINE Floats exp_of(Floats x) {
    const Floats least = all(-87), near = x < least ? least : x;
    const Ints k = __builtin_convertvector(near * 1.44269504f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(k, Floats);
    const Floats r = near - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats series = r * 1.9875691500e-4f + 1.3981999507e-3f;
    series = series * r + 8.3334519073e-3f;
    series = series * r + 4.1665795894e-2f;
    series = series * r + 1.6666665459e-1f;
    series = series * r + 5.0000001201e-1f;
    series = series * r * r + r + 1.0f;
    const Floats power = series * reinterpret_cast<Floats>((k + 127) << 23);
    return x < least ? all(0) : power;
}
