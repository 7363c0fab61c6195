// Numbered pieces of host work, spread over threads.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace reshard {

// Cores that this process may use.
inline int available_threads() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Calls work(i) for every i below count, on up to num_threads threads (0: as many as this process may use), this one
// among them, and after_thread() on each when it is through. Returns when all is done. work must not throw.
template <typename Work, typename AfterThread>
void run_on_threads(std::int64_t count, int num_threads, Work work, AfterThread after_thread) {
    if (num_threads < 0) throw std::invalid_argument("num_threads must be 0 (all) or more, not negative");
    std::atomic<std::int64_t> next{0};
    const auto loop = [&] {
        for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        after_thread();
    };
    const int wanted = num_threads == 0 ? available_threads() : num_threads;
    const std::int64_t helpers = std::min<std::int64_t>(wanted, count) - 1;
    std::vector<std::jthread> threads;
    try {
        for (std::int64_t i = 0; i < helpers; ++i) threads.emplace_back(loop);
    } catch (const std::system_error&) {
        // The system has no more threads: those that started, and this one, do the work.
    }
    loop();
}

template <typename Work>
void run_on_threads(std::int64_t count, int num_threads, Work work) {
    run_on_threads(count, num_threads, work, [] {});
}

}  // namespace reshard
