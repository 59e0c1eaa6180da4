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
