// How many threads a forward should have on a machine that does other things as well.
//
// A forward waits for its slowest thread hundreds of times. Where another program holds a core, the thread on it comes late every
// time, and two threads can take ten times as long as one. So threads tell how much of a forward they ran; where that is too little,
// the next forwards do with one thread fewer, and the full number is tried again now and then. Results do not depend on it.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace specdec {

class Crowding {
public:
    // Threads for the next forward, of `asked`.
    int threads(int asked) const { return asked > 1 && fewer_for_ > 0 ? asked - 1 : asked; }

    // Books a forward of so many threads of `asked`, during which they ran `ran_s` seconds in all.
    void book(int threads, int asked, double ran_s, double wall_s) {
        if (threads < asked) {
            --fewer_for_;
        } else if (threads > 1 && ran_s < kLeastShare * wall_s * threads) {
            fewer_for_ = pause_;
            pause_ = std::min(2 * pause_, kLongestPause);
        } else {
            pause_ = kShortestPause;
        }
    }

private:
    static constexpr double kLeastShare = 0.7;  // below this a thread fewer gets as much done
    static constexpr int64_t kShortestPause = 8, kLongestPause = 128;  // forwards
    int64_t fewer_for_ = 0, pause_ = kShortestPause;
};

inline double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that this thread has run; the wall clock where the system does not tell.
inline double thread_seconds() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
    timespec now;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0) return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
#endif
    return wall_seconds();
}

}  // namespace specdec
