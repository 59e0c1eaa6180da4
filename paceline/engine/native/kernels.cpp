// The compiled operations of a decoder on a CPU, and what `kernels.py` asks of them as a whole.
//
// On one machine the order of a sum depends on sizes alone. Numbers are float32, but for the cache and what goes into a
// product: these are of type T, float32 or bfloat16 (`Half`).

#include <cstdint>
#include <cstring>

#include "attention.h"
#include "choices.h"
#include "crew.h"
#include "lanes.h"
#include "layers.h"
#include "products.h"

// How many numbers a vector has, which decides the order of sums; 0 where the processor cannot run the kernels.
extern "C" int paceline_lanes() { return is_wide() ? WIDEST : can_run() ? NARROW : 0; }

// Where a thread of `crew.h` lives.
extern "C" void paceline_work() { crew::serve(); }

// Identifies the source of this library; `kernels.py` refuses one from another source.
extern "C" uint32_t paceline_source() { return PACELINE_SOURCE; }

// A call of one of the functions, to be made again and again.
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

// Passes of one program that follow each other. Each chooses a token after each of its rows, and these are the rows of the
// next pass.
struct Steps {
    const Recorded *calls;
    int64_t call_count;
    int64_t token_count, step_count;  // tokens of the first pass; passes
    const int64_t *row_counts;        // [step_count], never more than in the pass before
    Rank rank;                        // of the first pass; `chosen` and `shares` are [step_count, N, count]. Without
                                      // `shares` choices alone are wanted, one a place
    Rows *rows;                       // as the program reads them, and so the next two: [N] each at least. Those behind
                                      // the first N are computed in the first pass, and nothing is chosen after them
    int64_t *token_ids, *wanted;
};

// Makes the tokens that were chosen after the first `count` rows the tokens of these rows.
static void go_on(const Steps &of, const int64_t *chosen, int64_t count) {
    of.rows->row_count = count;
    for (int64_t i = 0; i < count; i++) {
        Row &row = of.rows->rows[i];
        row = {i, 1, row.length + 1, row.page_count, 0};
        const int64_t token = chosen[i * of.rank.count];
        // A row without a choice has failed, so any token will do for it.
        of.token_ids[i] = token == NO_TOKEN ? 0 : token;
        of.wanted[i] = i;
        of.rank.choose.positions[i]++;
    }
}

extern "C" void paceline_steps(const void *of, int, int threads) {
    const Steps &all = *static_cast<const Steps *>(of);
    const int64_t step_size = all.rank.choose.token_count * all.rank.count;
    for (int64_t step = 0; step < all.step_count; step++) {
        Rank rank = all.rank;
        rank.choose.chosen += step * step_size;
        const int64_t count = all.row_counts[step], counts[] = {step ? count : all.token_count, count};
        if (step) go_on(all, rank.choose.chosen - step_size, count);
        rank.choose.token_count = count;
        paceline_replay(all.calls, all.call_count, counts, threads);
        if (!all.rank.shares) {
            paceline_choose(&rank.choose, 0, threads);
            continue;
        }
        rank.shares += step * step_size;
        paceline_rank(&rank, 0, threads);
    }
}

// How many bytes the structure of this name has; -1 for a name that is none of them. `structures.py` describes them again.
extern "C" int64_t paceline_structure_bytes(const char *name) {
#define BYTES_OF(TYPE) if (!std::strcmp(name, #TYPE)) return sizeof(TYPE)
    BYTES_OF(Norm); BYTES_OF(Gate); BYTES_OF(Take);
    BYTES_OF(Row); BYTES_OF(Rows); BYTES_OF(Attend);
    BYTES_OF(Product);
    BYTES_OF(Choose); BYTES_OF(Rank);
    BYTES_OF(Recorded); BYTES_OF(Steps);
    return -1;
}
