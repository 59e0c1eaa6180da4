// Threads that share a piece of work. Python starts them, and each spends its life in `paceline_work`.
//
// Between two pieces of one pass a thread waits by spinning, for it would take longer to wake than to work; then it sleeps.

#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Does part `part` of `parts` of the work described by `of`.
typedef void (*Work)(const void *of, int part, int parts);

namespace crew {

constexpr int SPINS = 4000;  // some 50 us

struct Crew {
    std::atomic<bool> busy{false};
    std::atomic<uint32_t> turn{0};   // parts of the latest piece of work, and above them a number that changes with each
    std::atomic<int> sleepers{0}, left{0};
    int count = 0;                   // threads besides the caller's
    Work work = nullptr;
    const void *of = nullptr;
};
constexpr uint32_t PART_BITS = 8;
inline int parts_of(uint32_t turn) { return turn & ((1u << PART_BITS) - 1); }
inline Crew us;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#if defined(__linux__)
inline void sleep_unless(uint32_t seen) {
    us.sleepers++;
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&us.turn), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    us.sleepers--;
}
inline void wake() {
    if (us.sleepers) syscall(SYS_futex, reinterpret_cast<uint32_t *>(&us.turn), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
inline void yield() { sched_yield(); }
#else
inline void wake() {}
inline void yield() {}
#endif

// Does all parts of the work, at most `parts` at a time. Alone, if the crew is at work for another caller.
inline void share(Work work, const void *of, int parts) {
    const bool alone = parts < 2 || us.busy.exchange(true);
    if (alone || !us.count) {
        if (!alone) us.busy = false;
        return work(of, 0, 1);
    }
    us.work = work, us.of = of;
    parts = parts <= us.count ? parts : us.count + 1;
    us.left = parts - 1;
    us.turn = (((us.turn >> PART_BITS) + 1) << PART_BITS) | parts;
    wake();
    work(of, 0, parts);
    for (int spins = 0; us.left; spins++) spins < SPINS ? pause() : yield();
    us.busy = false;
}

// Joins the crew, and never returns. Where a thread could not sleep it returns at once, and callers work alone.
inline void serve() {
#if defined(__linux__)
    while (us.busy.exchange(true)) yield();
    uint32_t seen = us.turn;
    if ((us.count + 2) >> PART_BITS) {
        us.busy = false;
        return;
    }
    const int number = ++us.count;
    us.busy = false;
    for (bool spins_first = true;;) {
        for (int spins = 0; spins_first && us.turn == seen && spins < SPINS; spins++) pause();
        while (us.turn == seen) sleep_unless(seen);
        seen = us.turn;
        // The caller waits for those with a part alone. The others' cores may be wanted elsewhere.
        spins_first = number < parts_of(seen);
        if (spins_first) {
            us.work(us.of, number, parts_of(seen));
            us.left--;
        }
    }
#endif
}

}  // namespace crew

// The part's share of `count` things, in units of `unit`: [begin, end).
struct Share {
    int64_t begin, end;
    Share(int64_t count, int64_t unit, int part, int parts) {
        const int64_t units = (count + unit - 1) / unit;
        begin = units * part / parts * unit, end = units * (part + 1) / parts * unit;
        if (end > count) end = count;
        if (begin > count) begin = count;
    }
};
