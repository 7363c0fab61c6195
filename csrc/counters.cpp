// Counters in shared memory: how ranks of one host tell each other that memory may be written, or has been.
//
// A counter is a 4-byte unsigned word that only grows. Storing releases what the storing thread wrote before; seeing a
// value acquires it. Waiting spins briefly, then sleeps on the word (a process-shared futex), and always ends by its
// time limit.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"

namespace py = pybind11;

namespace reshard {
namespace {

using Counter = std::atomic<uint32_t>;
using Clock = std::chrono::steady_clock;
static_assert(sizeof(Counter) == 4 && Counter::is_always_lock_free);

constexpr int kSpins = 2000;

Counter& counter_at(uint64_t address) {
    if (address == 0 || address % alignof(Counter) != 0) {
        throw std::invalid_argument("a counter lives at a non-null address that is a multiple of 4");
    }
    return *reinterpret_cast<Counter*>(address);
}

long futex(Counter& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

uint32_t load(uint64_t address) {
    return counter_at(address).load(std::memory_order_acquire);
}

void store(uint64_t address, uint32_t value) {
    Counter& counter = counter_at(address);
    counter.store(value, std::memory_order_release);
    futex(counter, FUTEX_WAKE, INT_MAX, nullptr);
}

// Sleeps until the counter reaches `target` or the clock `deadline`; returns whether it was reached.
bool wait_one(Counter& counter, uint32_t target, Clock::time_point deadline) {
    for (int i = 0; i < kSpins; ++i) {
        if (counter.load(std::memory_order_acquire) >= target) return true;
    }
    for (;;) {
        const uint32_t seen = counter.load(std::memory_order_acquire);
        if (seen >= target) return true;
        const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now()).count();
        if (left <= 0) return false;
        const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
        futex(counter, FUTEX_WAIT, seen, &timeout);
    }
}

int64_t wait_all(const std::vector<uint64_t>& addresses, uint32_t target, double seconds) {
    std::vector<Counter*> counters(addresses.size());
    std::transform(addresses.begin(), addresses.end(), counters.begin(), [](uint64_t a) { return &counter_at(a); });
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    py::gil_scoped_release release;
    for (size_t i = 0; i < counters.size(); ++i) {
        if (!wait_one(*counters[i], target, deadline)) return static_cast<int64_t>(i);
    }
    return -1;
}

}  // namespace

void bind_counters(py::module_& module) {
    module.def("counter_load", &load, py::arg("address"));
    module.def("counter_store", &store, py::arg("address"), py::arg("value"));
    module.def("counters_wait", &wait_all, py::arg("addresses"), py::arg("target"), py::arg("seconds"));
}

}  // namespace reshard
