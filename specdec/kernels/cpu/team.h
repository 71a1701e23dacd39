// Threads that go through a forward together: they share out the units of a phase, then wait for each other.
//
// A parallel region costs tens of microseconds where idle threads sleep, as they must on a machine that does other things as
// well; a forward has hundreds of phases. So a forward is one region, and a phase ends with a short spin. A thread that has
// spun in vain sleeps: its core is then free for whoever holds the others up.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace specdec {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
public:
    Team(int size, int64_t phases) : size_(size), tickets_(phases) {}

    // Ends a phase: returns once all threads have come here.
    void wait() {
        if (size_ == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        constexpr int spins = 2000;
        for (int i = 0; i < spins; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            pause_briefly();
        }
        while (round_.load(std::memory_order_acquire) == round) round_.wait(round, std::memory_order_acquire);
    }

    // Runs f(unit) for this thread's share of [0, count) in phase number `phase`, `chunk` units at a time.
    template <class F>
    void share(int64_t phase, int64_t count, int64_t chunk, F f) {
        std::atomic<int64_t> &ticket = tickets_[phase].next;
        for (int64_t begin; (begin = ticket.fetch_add(chunk, std::memory_order_relaxed)) < count;)
            for (int64_t unit = begin; unit < count && unit < begin + chunk; ++unit) f(unit);
    }

    int size() const { return size_; }

private:
    struct alignas(64) Ticket {
        std::atomic<int64_t> next{0};
    };

    const int size_;
    std::vector<Ticket> tickets_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace specdec
