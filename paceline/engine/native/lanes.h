// Operations on several numbers at a time in GCC's and Clang's vector extension, as many as a register of the processor has.
// Numbers are computed with in float32, and stored in float32 or bfloat16 (`Half`).

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
// Kernels are compiled for two generations of x86: for processors with AVX2, and for those with AVX-512 besides. For older
// ones they would take as long to compile again, and be no faster than torch.
#if !defined(__x86_64__)
#define KERNEL extern "C"
constexpr int NARROW = 4;
#elif !defined(__clang__) && __GNUC__ >= 12
#define KERNEL extern "C" __attribute__((target("arch=x86-64-v3")))
#define WIDE extern "C" __attribute__((target("arch=x86-64-v4")))
constexpr int NARROW = 8;  // numbers in a register of a processor without AVX-512
#else
#error "GCC 12 or newer is needed: others know no generations of processors by name"
#endif
constexpr int WIDEST = 16;

static bool is_wide() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("x86-64-v4");
#else
    return false;
#endif
}

static bool can_run() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("x86-64-v3");
#else
    return true;
#endif
}

// Defines NAME, which calls DO<Vectors<...>, T> with vectors as wide as the processor's registers.
#if defined(__x86_64__)
#define BY_WIDTH(NAME, PARAMETERS, ARGUMENTS, DO, T) \
    KERNEL void NAME##_narrow PARAMETERS { DO<Vectors<NARROW>, T> ARGUMENTS; } \
    WIDE void NAME##_wide PARAMETERS { DO<Vectors<WIDEST>, T> ARGUMENTS; } \
    static void NAME PARAMETERS { (is_wide() ? NAME##_wide : NAME##_narrow) ARGUMENTS; }
#else
#define BY_WIDTH(NAME, PARAMETERS, ARGUMENTS, DO, T) \
    static void NAME PARAMETERS { DO<Vectors<NARROW>, T> ARGUMENTS; }
#endif

// Compilers keep arrays in registers only if loops over them are unrolled.
#define UNROLLED _Pragma("GCC unroll 16")

typedef uint16_t Half;

INLINE float widened(Half value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}
INLINE float widened(float value) { return value; }

// Types of vectors of WIDTH numbers. GCC takes no width from a template's parameter.
template <int WIDTH>
struct Types;
#define TYPES(WIDTH) \
    template <> \
    struct Types<WIDTH> { \
        typedef float Floats __attribute__((vector_size(4 * WIDTH))); \
        typedef double Doubles __attribute__((vector_size(4 * WIDTH))); \
        typedef int32_t Ints __attribute__((vector_size(4 * WIDTH))); \
        typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH))); \
        typedef Half Halves __attribute__((vector_size(2 * WIDTH))); \
        typedef int8_t Bytes __attribute__((vector_size(WIDTH))); \
    };
TYPES(NARROW)
TYPES(WIDEST)

// Vectors of as many numbers as a register has; of longer ones compilers make something slow.
template <int WIDTH>
struct Vectors {
    static constexpr int LANES = WIDTH;
    typedef typename Types<WIDTH>::Floats Floats;
    typedef typename Types<WIDTH>::Doubles Doubles;  // half as many, to move two numbers at once
    typedef typename Types<WIDTH>::Ints Ints;
    typedef typename Types<WIDTH>::Bits Bits;
    typedef typename Types<WIDTH>::Halves Halves;
    typedef typename Types<WIDTH>::Bytes Bytes;

    INLINE Floats all(float value) { return Floats{} + value; }
    INLINE Floats load(const float *from) {
        Floats values;
        std::memcpy(&values, from, sizeof values);
        return values;
    }
    INLINE void store(float *to, Floats values) { std::memcpy(to, &values, sizeof values); }
    INLINE Floats load(const Half *from) {
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        return reinterpret_cast<Floats>(widened_halves(halves) << 16);
    }
    INLINE Bits widened_halves(Halves halves) {
#if defined(__x86_64__)
        // GCC 12 would widen eight at a time, and put them together.
        if constexpr (LANES == WIDEST) return reinterpret_cast<Bits>(__builtin_ia32_pmovzxwd512_mask(reinterpret_cast<__v16hi>(halves), __v16si{}, -1));
#endif
        return __builtin_convertvector(halves, Bits);
    }
    // Of words of two halves or of four bytes with a sign, those of one place, widened.
    INLINE Floats first_halves(Bits words) { return reinterpret_cast<Floats>(words << 16); }
    INLINE Floats second_halves(Bits words) { return reinterpret_cast<Floats>(words & 0xffff0000); }
    INLINE Floats bytes_of(Bits words, int place) {
        return __builtin_convertvector(reinterpret_cast<Ints>(words << (24 - 8 * place)) >> 24, Floats);
    }
    // Of each four, the second after the third.
    INLINE Halves seconds_last(Halves halves) { return swapped(halves, std::make_integer_sequence<int, LANES>()); }
    template <int... LANE>
    INLINE Halves swapped(Halves halves, std::integer_sequence<int, LANE...>) {
        return __builtin_shufflevector(halves, halves, ((LANE & ~3) + LANE % 2 * 2 + LANE / 2 % 2)...);
    }
    // Rounds to the nearest, ties to even; NaN stays NaN.
    INLINE void store(Half *to, Floats values) {
        const Bits bits = reinterpret_cast<Bits>(values), rounded = bits + 0x7fff + ((bits >> 16) & 1);
        const Bits kept = values == values ? rounded : bits | 0x400000;
        const Halves halves = __builtin_convertvector(kept >> 16, Halves);
        std::memcpy(to, &halves, sizeof halves);
    }
    template <class T>
    INLINE void store_one(T *to, float value) {
        T values[LANES];
        store(values, all(value));
        *to = values[0];
    }
    INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

    INLINE bool any(Ints values) {
        int32_t all = 0;
        for (int lane = 0; lane < LANES; lane++) all |= values[lane];
        return all;
    }

    // By halves: one comparison after the other would take as long as many vectors.
    template <int STEP = LANES / 2, class Of>
    INLINE auto largest_lane(Of values) {
        if constexpr (STEP == 0) {
            return values[0];
        } else {
            const Of others = rotated<STEP>(values, std::make_integer_sequence<int, LANES>());
            return largest_lane<STEP / 2>(values > others ? values : others);
        }
    }
    template <int STEP, class Of, int... LANE>
    INLINE Of rotated(Of values, std::integer_sequence<int, LANE...>) {
        return __builtin_shufflevector(values, values, ((LANE + STEP) % LANES)...);
    }
    INLINE float float_of(int32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    template <class Of>
    INLINE auto sum(Of values) {
        decltype(+values[0]) total = 0;
        for (int lane = 0; lane < LANES; lane++) total += values[lane];
        return total;
    }

    INLINE Floats repeat_two(const float *from) {
        double both;
        std::memcpy(&both, from, sizeof both);
        return reinterpret_cast<Floats>(repeated(both, std::make_integer_sequence<int, LANES / 2>()));
    }
    template <int... LANE>
    INLINE Doubles repeated(double number, std::integer_sequence<int, LANE...>) {
        return Doubles{(static_cast<void>(LANE), number)...};
    }

    // Makes columns of rows, whose elements are two numbers.
    template <int STEP = 2>
    INLINE void transpose_twos(Floats (&rows)[LANES / 2]) {
        if constexpr (STEP < LANES) {
            UNROLLED for (int i = 0; i < LANES / 2; i++) {
                if (i & STEP / 2) continue;
                const Floats a = rows[i], b = rows[i + STEP / 2];
                rows[i] = crossed<STEP, 0>(a, b, std::make_integer_sequence<int, LANES>());
                rows[i + STEP / 2] = crossed<STEP, STEP>(a, b, std::make_integer_sequence<int, LANES>());
            }
            transpose_twos<2 * STEP>(rows);
        }
    }
    // Of each 2 * STEP lanes, the STEP from lane FROM on: of `a`, and then of `b`.
    template <int STEP, int FROM, int... LANE>
    INLINE Floats crossed(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
        return __builtin_shufflevector(a, b, ((LANE & STEP ? LANES : 0) + (LANE & ~STEP) + FROM)...);
    }

    // Returns the sums of each two lanes, those of `a` in the even lanes.
    INLINE Floats sums_of_twos(Floats a, Floats b) { return folded(a, b, std::make_integer_sequence<int, LANES>()); }
    template <int... LANE>
    INLINE Floats folded(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
        return __builtin_shufflevector(a, b, (LANE % 2 * LANES + LANE / 2 * 2)...) +
               __builtin_shufflevector(a, b, (LANE % 2 * LANES + LANE / 2 * 2 + 1)...);
    }

    // e to the x, for x <= 0: 2^k e^r with |r| <= ln(2) / 2, the second factor by Cephes' polynomial; relative error 2e-7.
    // The result is 0 where it is below float32's least, and NaN stays NaN.
    INLINE Floats exp_of(Floats x) {
        const Floats least = all(-87), near = x < least ? least : x;
        constexpr float BIAS = (3 << 22) + 127;  // added to a small number, it leaves k + 127 in the last bits
        const Floats biased = near * 1.44269504f + BIAS, whole = biased - BIAS;
        const Floats r = near - whole * 0.693359375f + whole * 2.12194440e-4f;
        Floats series = r * 1.9875691500e-4f + 1.3981999507e-3f;
        series = series * r + 8.3334519073e-3f;
        series = series * r + 4.1665795894e-2f;
        series = series * r + 1.6666665459e-1f;
        series = series * r + 5.0000001201e-1f;
        series = (series * r + 1.0f) * r + 1.0f;
        const Floats power = series * reinterpret_cast<Floats>(reinterpret_cast<Ints>(biased) << 23);
        return x < least ? all(0) : power;
    }
};
