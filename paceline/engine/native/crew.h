// Threads that share a piece of work. Python starts them, and each spends its life in `paceline_work`.
//
// Work is cut into more pieces than there are threads, and each thread takes the next one when it has done one. Which
// thread does a piece changes no result. Between two pieces of work of one pass a thread waits by spinning, for it would
// take longer to wake than to work; then it sleeps.

#pragma once

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

// Does piece `piece` of `pieces` of the work described by `of`, in thread `thread`.
typedef void (*Work)(const void *of, int piece, int pieces, int thread);

namespace crew {

constexpr int SPINS = 4000;  // some 50 us
constexpr int PIECES = 4;    // for each thread

// A thread that had no core for AWAY_NS, when it was called or at work, sits out what is offered in the next REST_NS, a slice
// of the scheduler's: others want its core, and to call it again would only take their time, and the caller's.
constexpr int64_t AWAY_NS = 300'000, REST_NS = 4'000'000;

// Pieces of work that threads may take. `next` is the first that nobody took.
struct Offer {
    uint32_t turn;  // changes with each piece of work
    uint16_t pieces, next;
    bool is_for(int thread) const { return thread * PIECES < pieces; }
};
static_assert(sizeof(Offer) == 8 && offsetof(Offer, turn) == 0, "changes at once, and threads sleep on `turn`");

struct Crew {
    std::atomic<bool> busy{false};
    std::atomic<Offer> offer{Offer{0, 0, 0}};
    std::atomic<int> sleepers{0}, left{0};  // `left`: pieces that are not done
    std::atomic<int64_t> called_ns{0};      // when sleepers were first called since one of them came; 0 if they were not
    int count = 0;                          // threads besides the caller's
    Work work = nullptr;
    const void *of = nullptr;
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
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&us.offer), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    us.sleepers--;
}
inline int64_t now_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}
inline void wake() {
    if (!us.sleepers) return;
    int64_t never = 0;
    us.called_ns.compare_exchange_strong(never, now_ns(CLOCK_MONOTONIC));
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&us.offer), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
inline void yield() { sched_yield(); }
inline void rest() {
    const timespec length{0, REST_NS};
    nanosleep(&length, nullptr);
}
#else
inline void wake() {}
inline void yield() {}
#endif

// Does pieces as long as there are any for this thread.
inline void help(int thread) {
    for (Offer offer = us.offer; offer.next < offer.pieces && offer.is_for(thread);) {
        const Offer after{offer.turn, offer.pieces, static_cast<uint16_t>(offer.next + 1)};
        if (!us.offer.compare_exchange_weak(offer, after)) continue;
        us.work(us.of, offer.next, offer.pieces, thread);  // they stay until this piece is done
        us.left--;
        offer = us.offer;
    }
}

// Does all of the work, in at most `threads` threads. Alone, if the crew is at work for another caller. Nobody waits for
// a thread that has no core and no piece: the others do its pieces.
inline void share(Work work, const void *of, int threads) {
    const bool alone = threads < 2 || us.busy.exchange(true);
    if (alone || !us.count) {
        if (!alone) us.busy = false;
        return work(of, 0, 1, 0);
    }
    const int pieces = PIECES * (threads <= us.count ? threads : us.count + 1);
    us.work = work, us.of = of, us.left = pieces;
    us.offer = Offer{us.offer.load().turn + 1, static_cast<uint16_t>(pieces), 0};
    wake();
    help(0);
    for (int spins = 0; us.left; spins++) spins < SPINS ? pause() : yield();
    us.busy = false;
}

#if defined(__linux__)
// Waits for another offer than the one of turn `seen`. Returns since when there is one.
inline int64_t wait(uint32_t seen, bool spins_first) {
    for (int spins = 0; spins_first && us.offer.load().turn == seen && spins < SPINS; spins++) pause();
    int64_t called_ns = 0;
    while (us.offer.load().turn == seen) {
        const int64_t asleep_ns = now_ns(CLOCK_MONOTONIC);
        sleep_unless(seen);
        called_ns = us.called_ns.exchange(0);
        if (called_ns < asleep_ns) called_ns = 0;  // an older call was for another
    }
    return called_ns ? called_ns : now_ns(CLOCK_MONOTONIC);
}

// Helps with what is on offer since `since_ns`. Returns for how long the thread had no core meanwhile.
inline int64_t help_timed(int thread, int64_t since_ns) {
    const int64_t before_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
    help(thread);
    return now_ns(CLOCK_MONOTONIC) - since_ns - (now_ns(CLOCK_THREAD_CPUTIME_ID) - before_ns);
}
#endif

// Joins the crew, and never returns. Where a thread could not sleep it returns at once, and callers work alone.
inline void serve() {
#if defined(__linux__)
    while (us.busy.exchange(true)) yield();
    uint32_t seen = us.offer.load().turn;
    if ((us.count + 2) * PIECES > UINT16_MAX) {
        us.busy = false;
        return;
    }
    const int number = ++us.count;
    us.busy = false;
    for (bool spins_first = true;;) {
        const int64_t since_ns = wait(seen, spins_first);
        const Offer offer = us.offer;
        seen = offer.turn;
        // One that may not help does not spin: its core may be wanted elsewhere.
        spins_first = offer.is_for(number);
        if (spins_first && help_timed(number, since_ns) > AWAY_NS) {
            rest();
            seen = us.offer.load().turn;
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

// What says how many tokens a call has, and how many numbers each: the call itself, unless it has such a call in it.
template <class Call> inline const Call &sized(const Call &of) { return of; }

// Shares a call's tokens among threads where they have so many numbers that it is worth waking one.
template <class Call, void (*Do)(const Call *, int64_t, int64_t), int64_t WORTH = 1 << 15>
void share_tokens(const Call *call, int threads) {
    crew::share(
        [](const void *of, int piece, int pieces, int) {
            const auto *own = static_cast<const Call *>(of);
            const Share tokens(sized(*own).token_count, 1, piece, pieces);
            Do(own, tokens.begin, tokens.end);
        },
        call, sized(*call).token_count * sized(*call).size < WORTH ? 1 : threads);
}
