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
    std::atomic<uint32_t> turn{0};   // one more for each piece of work
    std::atomic<int> sleepers{0}, left{0};
    int count = 0;                   // threads besides the caller's
    Work work = nullptr;
    const void *of = nullptr;
    int parts = 0;
};
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
    us.work = work, us.of = of, us.parts = parts <= us.count ? parts : us.count + 1;
    us.left = us.count;
    us.turn++;
    wake();
    work(of, 0, us.parts);
    for (int spins = 0; us.left; spins++) spins < SPINS ? pause() : yield();
    us.busy = false;
}

// Joins the crew, and never returns. Where a thread could not sleep it returns at once, and callers work alone.
inline void serve() {
#if defined(__linux__)
    while (us.busy.exchange(true)) yield();
    uint32_t seen = us.turn;
    const int number = ++us.count;
    us.busy = false;
    for (;;) {
        for (int spins = 0; us.turn == seen && spins < SPINS; spins++) pause();
        while (us.turn == seen) sleep_unless(seen);
        seen = us.turn;
        if (number < us.parts) us.work(us.of, number, us.parts);
        us.left--;
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
