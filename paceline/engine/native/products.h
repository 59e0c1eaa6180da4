// Products of rows with weights, added up in float32; `products.py` calls them. Rows and weights are both bfloat16 or both
// float32, or else rows are either and weights int8 with a scale for each column. Such rows may be rounded to int8 too, each
// with a scale of its own; then whole numbers are added up.
//
// A row's result depends on that row and on the weights alone, to the last bit: each number is one sum over K in a fixed
// order, whatever other rows there are and however many threads share the columns. See docs/numerics.md.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "crew.h"
#include "lanes.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TILED __attribute__((target("avx512f,amx-tile,amx-bf16")))
#define DOTTED __attribute__((target("avx512f,avx512vl,avx512bf16")))
#define COUNTED __attribute__((target("avx512f,avx512vl,avx512vnni")))
#define PAIRED __attribute__((target("arch=x86-64-v3")))
#endif

constexpr int64_t COLUMNS = 16;  // of a block of weights
constexpr int64_t STEP = 32;     // of K in a tile
constexpr int64_t TILE_ROWS = 16;

struct Product;
// Computes columns [begin, end) of a product.
typedef void (*ProductOf)(const Product *, int64_t begin, int64_t end);

// As `kernels.py` fills it in.
struct Product {
    int64_t row_count, size, column_count;  // M; K, in bfloat16 a multiple of STEP, in int8 of 4; N, a multiple of COLUMNS
    ProductOf way;                          // one of `paceline_product_way`
    const void *rows;                       // [M, K]
    const void *weights;                    // [N / COLUMNS, K / 2, COLUMNS, 2]; in float32 1 in place of 2, in int8 4
    const float *scales;                    // [N], by which sums are multiplied, or null
    const float *bias;                      // [N], or null
    float *out;                             // [M, N]
    int64_t is_half;                        // whether the rows are of bfloat16
};

// Makes results of the sums in columns [begin, end).
static void finish(const Product &p, int64_t begin, int64_t end) {
    for (int64_t m = 0; m < p.row_count; m++) {
        float *out = p.out + m * p.column_count;
        if (p.scales)
            for (int64_t n = begin; n < end; n++) out[n] *= p.scales[n];
        if (p.bias)
            for (int64_t n = begin; n < end; n++) out[n] += p.bias[n];
    }
}

// Rows [m, m + row_count) by some blocks of columns, over [begin, end) of K.
struct Part {
    int64_t m, row_count, column, block_count, begin, end;
};
constexpr int64_t AHEAD_BYTES = 2048;  // of the weights that are fetched before they are needed
typedef void (*AddPart)(const Product *, const Part *);
constexpr int64_t MOST_BYTES = 4096;  // of a row: so much of the weights, and of a verify's rows, stays in the second cache

// As many rows by as many blocks as the processor has registers for their sums.
struct Shape {
    int64_t row_count, block_count;
};

static Shape narrow_shape(int64_t row_count) {
    // Few rows take more blocks: one block's sums would wait for each other.
    return {6, row_count == 1 ? 4 : row_count == 2 ? 2 : 1};
}
static Shape largest_shape(int64_t row_count) { return is_wide() ? Shape{8, 2} : narrow_shape(row_count); }

// Columns [begin, end) of the product, part by part. K goes on where it stopped: its sums wait in `out`.
static void add_parts(const Product &p, AddPart add, Shape shape, int64_t number_bytes, int64_t begin, int64_t end) {
    const int64_t most = MOST_BYTES / number_bytes;
    for (int64_t column = begin, blocks; column < end; column += blocks * COLUMNS) {
        blocks = end - column < shape.block_count * COLUMNS ? 1 : shape.block_count;
        for (int64_t k = 0; k < p.size; k += most)
            for (int64_t m = 0; m < p.row_count; m += shape.row_count) {
                const Part part{m, std::min(shape.row_count, p.row_count - m), column, blocks, k, std::min(k + most, p.size)};
                add(&p, &part);
            }
    }
}

static void add_parts(const Product &p, AddPart add, int64_t number_bytes, int64_t begin, int64_t end) {
    add_parts(p, add, largest_shape(p.row_count), number_bytes, begin, end);
}

// Runs DO<T, rows, blocks>(product, part) for a part of any shape.
#define WITH(DO, T, ROWS, BLOCKS) \
    if (part->row_count == ROWS && part->block_count == BLOCKS) return DO<T, ROWS, BLOCKS>(*call, *part)
#define WITH_ROWS(DO, T, ROWS) WITH(DO, T, ROWS, 2); WITH(DO, T, ROWS, 1)
#define WITH_WIDE_SHAPE(DO, T) \
    WITH_ROWS(DO, T, 1); WITH_ROWS(DO, T, 2); WITH_ROWS(DO, T, 3); WITH_ROWS(DO, T, 4); \
    WITH_ROWS(DO, T, 5); WITH_ROWS(DO, T, 6); WITH_ROWS(DO, T, 7); WITH_ROWS(DO, T, 8)
#define WITH_NARROW_SHAPE(DO, T) \
    WITH(DO, T, 1, 4); WITH(DO, T, 1, 1); WITH(DO, T, 2, 2); WITH(DO, T, 2, 1); \
    WITH(DO, T, 3, 1); WITH(DO, T, 4, 1); WITH(DO, T, 5, 1); WITH(DO, T, 6, 1)

// `add_step` adds the products of ROWS rows, `stride` numbers apart, with the weights in COUNT vectors of words. There is
// one for each type of weights. A column's weights in a word follow each other in K.
template <class V, int ROWS, int COUNT>
INLINE void add_step(const float *rows, int64_t stride, const float *, const typename V::Bits (&words)[COUNT],
                     typename V::Floats (&sums)[ROWS][COUNT]) {
    for (int r = 0; r < ROWS; r++)
        UNROLLED for (int i = 0; i < COUNT; i++) sums[r][i] += rows[r * stride] * reinterpret_cast<typename V::Floats>(words[i]);
}
template <class V, int ROWS, int COUNT>
INLINE void add_step(const float *rows, int64_t stride, const Half *, const typename V::Bits (&words)[COUNT],
                     typename V::Floats (&sums)[ROWS][COUNT]) {
    typename V::Floats first[COUNT], second[COUNT];
    UNROLLED for (int i = 0; i < COUNT; i++) first[i] = V::first_halves(words[i]);
    for (int r = 0; r < ROWS; r++)
        UNROLLED for (int i = 0; i < COUNT; i++) sums[r][i] += rows[r * stride] * first[i];
    UNROLLED for (int i = 0; i < COUNT; i++) second[i] = V::second_halves(words[i]);
    for (int r = 0; r < ROWS; r++)
        UNROLLED for (int i = 0; i < COUNT; i++) sums[r][i] += rows[r * stride + 1] * second[i];
}
template <class V, int ROWS, int COUNT>
INLINE void add_step(const float *rows, int64_t stride, const int8_t *, const typename V::Bits (&words)[COUNT],
                     typename V::Floats (&sums)[ROWS][COUNT]) {
    for (int k = 0; k < 4; k++)
        UNROLLED for (int i = 0; i < COUNT; i++) {
            const typename V::Floats widened = V::bytes_of(words[i], k);
            for (int r = 0; r < ROWS; r++) sums[r][i] += rows[r * stride + k] * widened;
        }
}

template <class T, int WIDTH, int ROWS, int BLOCKS>
INLINE void vectors(const Product &p, const Part &part) {
    typedef Vectors<WIDTH> V;
    constexpr int STEP_SIZE = sizeof(float) / sizeof(T), OF_BLOCK = COLUMNS / WIDTH, COUNT = BLOCKS * OF_BLOCK;
    const T *weights = static_cast<const T *>(p.weights) + part.column * p.size;
    const float *rows = static_cast<const float *>(p.rows) + part.m * p.size;
    float *out = p.out + part.m * p.column_count + part.column;
    typename V::Floats sums[ROWS][COUNT] = {};
    if (part.begin)
        for (int r = 0; r < ROWS; r++)
            UNROLLED for (int i = 0; i < COUNT; i++) sums[r][i] = V::load(out + r * p.column_count + i * WIDTH);
    for (int64_t k = part.begin; k < part.end; k += STEP_SIZE) {
        typename V::Bits words[COUNT];
        UNROLLED for (int i = 0; i < COUNT; i++) {
            const T *block = weights + (i / OF_BLOCK * p.size + k) * COLUMNS;
            std::memcpy(&words[i], block + i % OF_BLOCK * WIDTH * STEP_SIZE, sizeof words[i]);
            // One row waits for memory alone, and its four blocks are as many streams as the processor foresees.
            if (ROWS > 1 && i % OF_BLOCK == 0) __builtin_prefetch(block + AHEAD_BYTES / sizeof(T));
        }
        add_step<V, ROWS, COUNT>(rows + k, p.size, weights, words, sums);
    }
    for (int r = 0; r < ROWS; r++)
        UNROLLED for (int i = 0; i < COUNT; i++) V::store(out + r * p.column_count + i * WIDTH, sums[r][i]);
}

template <class T, int ROWS, int BLOCKS>
INLINE void narrow(const Product &p, const Part &part) {
    vectors<T, NARROW, ROWS, BLOCKS>(p, part);
}

// By the operations that every processor has.
KERNEL void add_narrow_half(const Product *call, const Part *part) { WITH_NARROW_SHAPE(narrow, Half); }
KERNEL void add_narrow_float(const Product *call, const Part *part) { WITH_NARROW_SHAPE(narrow, float); }
KERNEL void add_narrow_int8(const Product *call, const Part *part) { WITH_NARROW_SHAPE(narrow, int8_t); }
#if defined(__x86_64__)
template <class T, int ROWS, int BLOCKS>
INLINE void wide(const Product &p, const Part &part) {
    vectors<T, COLUMNS, ROWS, BLOCKS>(p, part);
}
WIDE void add_wide_half(const Product *call, const Part *part) { WITH_WIDE_SHAPE(wide, Half); }
WIDE void add_wide_float(const Product *call, const Part *part) { WITH_WIDE_SHAPE(wide, float); }
WIDE void add_wide_int8(const Product *call, const Part *part) { WITH_WIDE_SHAPE(wide, int8_t); }
#define ADD(T) (is_wide() ? add_wide_##T : add_narrow_##T)
#else
#define ADD(T) add_narrow_##T
#endif
static void float_product(const Product *call, int64_t begin, int64_t end) {
    add_parts(*call, ADD(float), sizeof(float), begin, end);
    finish(*call, begin, end);
}

// Widens `count` words of weights in the order of floats: those of a word belong to rows of COLUMNS that follow each other.
template <class V, class T>
INLINE void widen(const T *weights, int64_t count, float *to) {
    constexpr int64_t OF_WORD = sizeof(float) / sizeof(T);
    for (int64_t i = 0; i < count; i += V::LANES) {
        float *first = to + i / COLUMNS * OF_WORD * COLUMNS + i % COLUMNS;
        typename V::Bits words;
        std::memcpy(&words, weights + i * OF_WORD, sizeof words);
        if constexpr (OF_WORD == 2) {
            V::store(first, V::first_halves(words));
            V::store(first + COLUMNS, V::second_halves(words));
        } else {
            UNROLLED for (int64_t k = 0; k < OF_WORD; k++) V::store(first + k * COLUMNS, V::bytes_of(words, k));
        }
    }
}
BY_WIDTH(widen_half, (const Half *weights, int64_t count, float *to), (weights, count, to), widen, Half)
BY_WIDTH(widen_int8, (const int8_t *weights, int64_t count, float *to), (weights, count, to), widen, int8_t)

// Columns [begin, end) of a product with shorter weights. For many rows some are made float32 at a time, once for all rows;
// the sums are the same.
template <class T, void (*Widen)(const T *, int64_t, float *)>
void short_product(const Product *call, int64_t begin, int64_t end, AddPart add) {
    constexpr int64_t MANY = 48, MOST = 2 * COLUMNS;
    static thread_local std::vector<float> floats;
    if (call->row_count < MANY) {
        add_parts(*call, add, sizeof(float), begin, end);
        return finish(*call, begin, end);
    }
    floats.resize(MOST * call->size);
    Product own = *call;
    own.weights = floats.data();
    for (int64_t column = begin; column < end; column += MOST) {
        const int64_t columns = std::min(MOST, end - column);
        Widen(static_cast<const T *>(call->weights) + column * call->size, columns * call->size * sizeof(T) / sizeof(float), floats.data());
        own.out = call->out + column;
        add_parts(own, ADD(float), sizeof(float), 0, columns);
    }
    finish(*call, begin, end);
}
static void widened_product(const Product *call, int64_t begin, int64_t end) {
    short_product<Half, widen_half>(call, begin, end, ADD(half));
}
static void int8_product(const Product *call, int64_t begin, int64_t end) {
    short_product<int8_t, widen_int8>(call, begin, end, ADD(int8));
}

// What comes before the K numbers of a row that was rounded to int8: bytes, or sixteen bits each.
struct RoundedRow {
    float scale;     // by which the numbers are multiplied; NaN if the row has any that are infinite or none
    int32_t offset;  // of the row's sums, because each weight is read 128 larger than it is: bytes without a sign
};
INLINE int64_t rounded_bytes(int64_t size, int64_t number_bytes) { return sizeof(RoundedRow) + size * number_bytes; }
template <class Number>
INLINE const RoundedRow *rounded_row(const Product &p, int64_t m) {
    return reinterpret_cast<const RoundedRow *>(static_cast<const char *>(p.rows) + m * rounded_bytes(p.size, sizeof(Number)));
}

// Rounds a row [size], a multiple of WIDEST, to the nearest of 255 numbers that reach to its largest.
template <class V, class T, class Number>
INLINE void round_row(const T *values, int64_t size, void *to) {
    typedef typename V::Ints Ints;
    typedef typename V::Bits Bits;
    constexpr float LARGEST = 127, LEAST = 1e-30f, WHOLE = 3 << 22;  // added to a small number, this leaves no fraction
    auto *numbers = reinterpret_cast<Number *>(static_cast<char *>(to) + sizeof(RoundedRow));
    // Without their signs numbers are in the order of their bits, and what is no finite number is above all others.
    Ints largest{};
    for (int64_t i = 0; i < size; i += V::LANES) {
        const Ints own = reinterpret_cast<Ints>(V::load(values + i)) & 0x7fffffff;
        largest = own > largest ? own : largest;
    }
    const float top = V::float_of(V::largest_lane(largest)), inverse = top > LEAST ? LARGEST / top : 0;
    Bits total{};
    for (int64_t i = 0; i < size; i += V::LANES) {
        const Bits shifted = reinterpret_cast<Bits>(V::load(values + i) * inverse + WHOLE);
        total += shifted - reinterpret_cast<Bits>(V::all(WHOLE));
        // The last bytes are the number. A step to a quarter of the size would be made lane by lane.
        const auto halves = __builtin_convertvector(shifted, typename V::Halves);
        if constexpr (sizeof(Number) == 2) {
            const auto pairs = V::seconds_last(halves);
            std::memcpy(numbers + i, &pairs, sizeof pairs);
        } else {
            const auto bytes = __builtin_convertvector(halves, typename V::Bytes);
            std::memcpy(numbers + i, &bytes, sizeof bytes);
        }
    }
    const RoundedRow row{std::isfinite(top) ? top / LARGEST : NAN, static_cast<int32_t>(-128u * V::sum(total))};
    std::memcpy(to, &row, sizeof row);
}
template <class V, class T>
INLINE void round_to_bytes(const T *values, int64_t size, void *to) {
    round_row<V, T, int8_t>(values, size, to);
}
template <class V, class T>
INLINE void round_to_pairs(const T *values, int64_t size, void *to) {
    round_row<V, T, int16_t>(values, size, to);
}
BY_WIDTH(bytes_of_floats, (const float *values, int64_t size, void *to), (values, size, to), round_to_bytes, float)
BY_WIDTH(bytes_of_halves, (const Half *values, int64_t size, void *to), (values, size, to), round_to_bytes, Half)
BY_WIDTH(pairs_of_floats, (const float *values, int64_t size, void *to), (values, size, to), round_to_pairs, float)
BY_WIDTH(pairs_of_halves, (const Half *values, int64_t size, void *to), (values, size, to), round_to_pairs, Half)

#if defined(__x86_64__)
// Sums of whole numbers, before and after some of K.
template <class V, int ROWS, int COUNT>
INLINE void begin_sums(const Product &p, const Part &part, typename V::Ints (&sums)[ROWS][COUNT]) {
    const float *out = p.out + part.m * p.column_count + part.column;
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int i = 0; i < COUNT; i++) {
            sums[r][i] = typename V::Ints{};
            if (part.begin) std::memcpy(&sums[r][i], out + r * p.column_count + i * V::LANES, sizeof sums[r][i]);
        }
}
template <class V, class Number, int ROWS, int COUNT>
INLINE void end_sums(const Product &p, const Part &part, const typename V::Ints (&sums)[ROWS][COUNT]) {
    UNROLLED for (int r = 0; r < ROWS; r++) {
        const RoundedRow row = *rounded_row<Number>(p, part.m + r);
        UNROLLED for (int i = 0; i < COUNT; i++) {
            const int64_t column = part.column + i * V::LANES;
            float *to = p.out + (part.m + r) * p.column_count + column;
            if (part.end < p.size) {
                std::memcpy(to, &sums[r][i], sizeof sums[r][i]);  // the rest of K is added later
                continue;
            }
            const auto sum = __builtin_convertvector(sums[r][i] + row.offset, typename V::Floats);
            const auto bias = p.bias ? V::load(p.bias + column) : V::all(0);
            V::store(to, sum * (row.scale * V::load(p.scales + column)) + bias);
        }
    }
}

template <class T, int ROWS, int BLOCKS>
COUNTED INLINE void counted(const Product &p, const Part &part) {
    typedef Vectors<WIDEST> V;
    const T *weights = static_cast<const T *>(p.weights) + part.column * p.size;
    const int64_t stride = rounded_bytes(p.size, sizeof(int8_t));
    const auto *rows = reinterpret_cast<const int8_t *>(rounded_row<int8_t>(p, part.m) + 1);
    V::Ints sums[ROWS][BLOCKS];
    begin_sums<V>(p, part, sums);
    for (int64_t k = part.begin; k < part.end; k += 4) {
        __m512i own[BLOCKS];
        UNROLLED for (int b = 0; b < BLOCKS; b++) {
            const T *block = weights + (b * p.size + k) * COLUMNS;
            own[b] = _mm512_loadu_si512(block);
            if (ROWS > 1) __builtin_prefetch(block + AHEAD_BYTES);
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, rows + r * stride + k, sizeof four);
            const __m512i all = _mm512_set1_epi32(four);
            UNROLLED for (int b = 0; b < BLOCKS; b++) sums[r][b] = (V::Ints)_mm512_dpbusd_epi32((__m512i)sums[r][b], own[b], all);
        }
    }
    end_sums<V, int8_t>(p, part, sums);
}

// By AVX512-VNNI's products of four whole numbers.
extern "C" COUNTED void add_counted(const Product *call, const Part *part) { WITH_WIDE_SHAPE(counted, uint8_t); }
static void counted_product(const Product *call, int64_t begin, int64_t end) {
    add_parts(*call, add_counted, sizeof(uint8_t), begin, end);
}

template <class T, int ROWS, int BLOCKS>
PAIRED INLINE void paired(const Product &p, const Part &part) {
    typedef Vectors<NARROW> V;
    constexpr int COUNT = BLOCKS * COLUMNS / V::LANES;
    const T *weights = static_cast<const T *>(p.weights) + part.column * p.size;
    const int64_t stride = rounded_bytes(p.size, sizeof(int16_t));
    const auto *rows = reinterpret_cast<const char *>(rounded_row<int16_t>(p, part.m) + 1);
    V::Ints sums[ROWS][COUNT];
    begin_sums<V>(p, part, sums);
    for (int64_t k = part.begin; k < part.end; k += 4)
        UNROLLED for (int second = 0; second < 2; second++) {
            __m256i own[COUNT];
            UNROLLED for (int i = 0; i < COUNT; i++) {
                const T *block = weights + (i * V::LANES / COLUMNS * p.size + k) * COLUMNS + i * V::LANES % COLUMNS * 4;
                const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(block));
                own[i] = second ? _mm256_srli_epi16(words, 8) : _mm256_and_si256(words, _mm256_set1_epi16(0xff));
                if (ROWS > 1 && !second) __builtin_prefetch(block + AHEAD_BYTES);
            }
            UNROLLED for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                std::memcpy(&pair, rows + r * stride + 2 * k + second * sizeof pair, sizeof pair);
                const __m256i all = _mm256_set1_epi32(pair);
                UNROLLED for (int i = 0; i < COUNT; i++) {
                    sums[r][i] += (V::Ints)_mm256_madd_epi16(own[i], all);
                    asm volatile("" : "+x"(sums[r][i]));  // GCC would multiply for all rows first, and lack registers
                }
            }
        }
    end_sums<V, int16_t>(p, part, sums);
}

// By AVX2's products of two whole numbers of sixteen bits: a word's first and third weight, then its second and fourth.
extern "C" PAIRED void add_paired(const Product *call, const Part *part) { WITH_NARROW_SHAPE(paired, uint8_t); }
static void paired_product(const Product *call, int64_t begin, int64_t end) {
    add_parts(*call, add_paired, narrow_shape(call->row_count), sizeof(uint8_t), begin, end);
}

template <class T, int ROWS, int BLOCKS>
DOTTED INLINE void dotted(const Product &p, const Part &part) {
    const T *weights = static_cast<const T *>(p.weights) + part.column * p.size;
    const T *rows = static_cast<const T *>(p.rows) + part.m * p.size;
    float *out = p.out + part.m * p.column_count + part.column;
    __m512 sums[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++)
            sums[r][b] = part.begin ? _mm512_loadu_ps(out + r * p.column_count + b * COLUMNS) : _mm512_setzero_ps();
    for (int64_t k = part.begin; k < part.end; k += 2) {
        __m512bh own[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) own[b] = (__m512bh)_mm512_loadu_si512(weights + (b * p.size + k) * COLUMNS);
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, rows + r * p.size + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int b = 0; b < BLOCKS; b++) sums[r][b] = _mm512_dpbf16_ps(sums[r][b], both, own[b]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++) _mm512_storeu_ps(out + r * p.column_count + b * COLUMNS, sums[r][b]);
}

// By AVX512-BF16's products of pairs.
extern "C" DOTTED void add_dotted(const Product *call, const Part *part) { WITH_WIDE_SHAPE(dotted, Half); }
static void dotted_product(const Product *call, int64_t begin, int64_t end) {
    add_parts(*call, add_dotted, sizeof(Half), begin, end);
    finish(*call, begin, end);
}

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Rows from `m` on and, unless there is one block of rows, from `below` on, by one or two blocks of columns. Tiles 0 to 3
// are the sums, 4 and 5 rows, 6 and 7 weights.
template <int ROW_BLOCKS, int COLUMN_BLOCKS>
TILED INLINE void tiled(const Product &p, int64_t m, int64_t below, int64_t column) {
    const int64_t stride = p.size * sizeof(Half), block = p.size * COLUMNS, out_stride = p.column_count * sizeof(float);
    const Half *weights = static_cast<const Half *>(p.weights) + column * p.size;
    const Half *rows = static_cast<const Half *>(p.rows) + m * p.size;
    const Half *rows_below = static_cast<const Half *>(p.rows) + below * p.size;
    constexpr bool two_rows = ROW_BLOCKS > 1, two_columns = COLUMN_BLOCKS > 1;
    _tile_zero(0);
    if (two_columns) _tile_zero(1);
    if (two_rows) _tile_zero(2);
    if (two_rows && two_columns) _tile_zero(3);
    for (int64_t k = 0; k < p.size; k += STEP) {
        _tile_loadd(4, rows + k, stride);
        _tile_loadd(6, weights + k * COLUMNS, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_rows) _tile_loadd(5, rows_below + k, stride);
        if (two_rows) _tile_dpbf16ps(2, 5, 6);
        if (two_columns) _tile_loadd(7, weights + block + k * COLUMNS, 64);
        if (two_columns) _tile_dpbf16ps(1, 4, 7);
        if (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
    }
    float *out = p.out + m * p.column_count + column, *out_below = p.out + below * p.column_count + column;
    _tile_stored(0, out, out_stride);
    if (two_columns) _tile_stored(1, out + COLUMNS, out_stride);
    if (two_rows) _tile_stored(2, out_below, out_stride);
    if (two_rows && two_columns) _tile_stored(3, out_below + COLUMNS, out_stride);
}

template <int COLUMN_BLOCKS>
TILED INLINE void tiled_columns(const Product &p, int64_t column) {
    // The weights of these columns come from memory once, and stay in the processor's cache for all rows. The last block
    // has rows of the one before it again, if there are not enough: they come out the same.
    const int64_t last = std::max<int64_t>(p.row_count - TILE_ROWS, 0);
    int64_t m = 0;
    for (; m < last; m += 2 * TILE_ROWS) tiled<2, COLUMN_BLOCKS>(p, m, std::min(m + TILE_ROWS, last), column);
    if (m < p.row_count) tiled<1, COLUMN_BLOCKS>(p, std::min(m, last), 0, column);
}

// By AMX's products of tiles.
TILED static void tiled_product(const Product *call, int64_t begin, int64_t end) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = tile < 6 && call->row_count < TILE_ROWS ? call->row_count : TILE_ROWS;
    }
    _tile_loadconfig(&shapes);
    int64_t column = begin;
    for (; column + 2 * COLUMNS <= end; column += 2 * COLUMNS) tiled_columns<2>(*call, column);
    if (column < end) tiled_columns<1>(*call, column);
    _tile_release();
    finish(*call, begin, end);
}
#endif

// Returns the way of this name; null where the processor or the system lacks it.
extern "C" ProductOf paceline_product_way(const char *name) {
    if (!std::strcmp(name, "float32")) return float_product;
    if (!std::strcmp(name, "widened")) return widened_product;
    if (!std::strcmp(name, "int8")) return int8_product;
#if defined(__x86_64__) && defined(__linux__)
    __builtin_cpu_init();
    if (!std::strcmp(name, "dotted") && is_wide() && __builtin_cpu_supports("avx512bf16")) return dotted_product;
    if (!std::strcmp(name, "counted") && is_wide() && __builtin_cpu_supports("avx512vnni")) return counted_product;
    if (!std::strcmp(name, "paired") && can_run()) return paired_product;
    // Linux gives a process the tiles' registers when it asks: ARCH_REQ_XCOMP_PERM, feature 18.
    if (!std::strcmp(name, "tiled") && __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, 0x1023, 18))
        return tiled_product;
#endif
    return nullptr;
}

// Rounds a row's `values` as a way reads them.
template <class T>
using Round = void (*)(const T *values, int64_t size, void *to);

// How a way has rows rounded to int8; of no number where it does not.
struct Rounding {
    int64_t number_bytes;
    Round<float> floats;
    Round<Half> halves;
};
static Rounding rounding_of(const Product &call) {
#if defined(__x86_64__)
    if (call.way == counted_product) return {sizeof(int8_t), bytes_of_floats, bytes_of_halves};
    if (call.way == paired_product) return {sizeof(int16_t), pairs_of_floats, pairs_of_halves};
#endif
    return {};
}

// The call with its rows as its way reads them: widened to float32 or rounded to int8, once for all columns, in memory that
// this thread keeps.
static Product with_read_rows(const Product &call) {
    static thread_local std::vector<float> floats;
    static thread_local std::vector<char> bytes;
    Product own = call;
    const auto *halves = static_cast<const Half *>(call.rows);
    const auto *full = static_cast<const float *>(call.rows);
    if (const Rounding rounding = rounding_of(call); rounding.number_bytes) {
        const int64_t stride = rounded_bytes(call.size, rounding.number_bytes);
        bytes.resize(call.row_count * stride);
        for (int64_t m = 0; m < call.row_count; m++) {
            char *to = bytes.data() + m * stride;
            call.is_half ? rounding.halves(halves + m * call.size, call.size, to) : rounding.floats(full + m * call.size, call.size, to);
        }
        own.rows = bytes.data();
    } else if (call.is_half && (call.way == widened_product || call.way == int8_product)) {
        floats.resize(call.row_count * call.size);
        for (int64_t i = 0; i < call.row_count * call.size; i++) floats[i] = widened(halves[i]);
        own.rows = floats.data();
    }
    return own;
}

// Rows [begin, end) of a product.
static Product rows_between(const Product &call, int64_t begin, int64_t end) {
    Product own = call;
    own.rows = static_cast<const char *>(call.rows) + begin * call.size * (call.is_half ? sizeof(Half) : sizeof(float));
    own.out = call.out + begin * call.column_count;
    own.row_count = end - begin;
    return own;
}

// Computes the product with at most `threads` threads.
extern "C" void paceline_product(const void *of, int, int threads) {
    constexpr int64_t WORTH = 1 << 20, READING_ROWS = 6;  // multiply-adds: some 10 us; rows that take as long as the weights
    constexpr int64_t TOGETHER = 8;                       // rows that read weights together
    const Product &asked = *static_cast<const Product *>(of);
    if (!asked.row_count) return;  // passes without wanted tokens have such; a tile of no rows would be a fault
    const int64_t rows = std::max(asked.row_count, READING_ROWS);
    if (rows * asked.size * asked.column_count < WORTH) threads = 1;
    if (rounding_of(asked).number_bytes && asked.row_count >= threads * crew::PIECES * TOGETHER) {
        // Each thread rounds its own: to round takes up to a third of a product's time.
        return crew::share(
            [](const void *of, int piece, int pieces, int) {
                const auto *all = static_cast<const Product *>(of);
                const Share own(all->row_count, TOGETHER, piece, pieces);
                const Product some = with_read_rows(rows_between(*all, own.begin, own.end));
                some.way(&some, 0, some.column_count);
            },
            &asked, threads);
    }
    const Product call = with_read_rows(asked);
    crew::share(
        [](const void *of, int piece, int pieces, int) {
            const auto *own = static_cast<const Product *>(of);
            const Share columns(own->column_count, 2 * COLUMNS, piece, pieces);
            if (columns.begin < columns.end) own->way(own, columns.begin, columns.end);
        },
        &call, threads);
}
