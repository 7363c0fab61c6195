#include "copy_table.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

namespace reshard {
namespace {

// Bytes {address + sum(i_k * stride_k) + [0, run)}: one side of a record.
struct Box {
    std::uint64_t address;
    const std::int64_t* extents;
    const std::int64_t* strides;
    std::int64_t run;

    std::uint64_t end() const {
        std::uint64_t end = address + static_cast<std::uint64_t>(run);
        for (int dim = 0; dim < kNumDims; ++dim) end += static_cast<std::uint64_t>((extents[dim] - 1) * strides[dim]);
        return end;
    }
};

Box source_box(const CopyRecord& record) {
    return {record.src, record.extents, record.src_strides, record.src_itemsize};
}

Box destination_box(const CopyRecord& record) {
    return {record.dst, record.extents, record.dst_strides, record.dst_itemsize};
}

// Looks for integers x_k in [low_k, high_k] and r in the open interval (-run_b, run_a) with
// sum(x_k * stride_k) + r == target: a byte that two boxes share. Strides fall, so that what the remaining terms can
// reach leaves few candidates for each x_k.
class SharedByteSearch {
  public:
    SharedByteSearch(const Box& a, const Box& b) {
        add_dims(a, +1);
        add_dims(b, -1);
        run_low_ = 1 - b.run;
        run_high_ = a.run - 1;
        reach_low_[num_terms_] = run_low_;
        reach_high_[num_terms_] = run_high_;
        for (int k = num_terms_ - 1; k >= 0; --k) {
            reach_low_[k] = reach_low_[k + 1] + terms_[k].low * terms_[k].stride;
            reach_high_[k] = reach_high_[k + 1] + terms_[k].high * terms_[k].stride;
        }
    }

    bool found(std::int64_t target) { return search(0, target); }

  private:
    struct Term {
        std::int64_t stride, low, high;
    };

    void add_dims(const Box& box, int sign) {
        for (int dim = 0; dim < kNumDims; ++dim) {
            const std::int64_t last = box.extents[dim] - 1;
            if (last == 0 || box.strides[dim] == 0) continue;
            Term* same = &terms_[slot_of(box.strides[dim])];
            (sign > 0 ? same->high : same->low) += sign * last;
        }
    }

    // The place of `stride` among the terms, which are kept in falling order of strides.
    int slot_of(std::int64_t stride) {
        int slot = 0;
        while (slot < num_terms_ && terms_[slot].stride > stride) ++slot;
        if (slot < num_terms_ && terms_[slot].stride == stride) return slot;
        for (int k = num_terms_++; k > slot; --k) terms_[k] = terms_[k - 1];
        terms_[slot] = {stride, 0, 0};
        return slot;
    }

    static std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - ((a % b != 0) && (a < 0)); }

    bool search(int k, std::int64_t target) {
        if (target < reach_low_[k] || target > reach_high_[k]) return false;
        if (k == num_terms_) return true;
        if (--budget_ < 0) return true;
        const Term& term = terms_[k];
        const std::int64_t low = std::max(term.low, -floor_div(reach_high_[k + 1] - target, term.stride));
        const std::int64_t high = std::min(term.high, floor_div(target - reach_low_[k + 1], term.stride));
        for (std::int64_t x = low; x <= high; ++x)
            if (search(k + 1, target - x * term.stride)) return true;
        return false;
    }

    std::array<Term, 2 * kNumDims> terms_{};
    std::array<std::int64_t, 2 * kNumDims + 1> reach_low_{}, reach_high_{};
    int num_terms_ = 0;
    std::int64_t run_low_ = 0, run_high_ = 0;
    std::int64_t budget_ = 1 << 20;
};

bool boxes_overlap(const Box& a, const Box& b) {
    if (a.end() <= b.address || b.end() <= a.address) return false;
    return SharedByteSearch(a, b).found(static_cast<std::int64_t>(b.address - a.address));
}

// Whether two index tuples of the box may name one byte: some stride does not step over all that the smaller ones span.
bool names_a_byte_twice(const Box& box) {
    std::array<int, kNumDims> order{0, 1, 2, 3};
    std::sort(order.begin(), order.end(), [&](int a, int b) { return box.strides[a] < box.strides[b]; });
    std::int64_t span = box.run;
    for (int dim : order) {
        if (box.extents[dim] == 1) continue;
        if (box.strides[dim] < span) return true;
        span += (box.extents[dim] - 1) * box.strides[dim];
    }
    return false;
}

std::string describe_problem(const CopyRecord& record) {
    for (int dim = 0; dim < kNumDims; ++dim) {
        if (record.extents[dim] < 1) return "extent " + std::to_string(record.extents[dim]) + " is below 1";
        if (record.src_strides[dim] < 0 || record.dst_strides[dim] < 0) return "a stride is negative";
    }
    if (record.src == 0 || record.dst == 0) return "an address is null";
    const bool castable = record.src_dtype <= kFloat16 && record.dst_dtype <= kFloat16;
    if (record.is_cast() && !castable)
        return "there is no cast from dtype code " + std::to_string(record.src_dtype) + " to code " +
               std::to_string(record.dst_dtype);
    const auto wrong_size = [](int dtype, int itemsize) {
        return itemsize == 0 || (dtype <= kFloat16 && itemsize != (dtype == kFloat32 ? 4 : 2));
    };
    if (wrong_size(record.src_dtype, record.src_itemsize) || wrong_size(record.dst_dtype, record.dst_itemsize) ||
        (!record.is_cast() && record.src_itemsize != record.dst_itemsize))
        return "item sizes " + std::to_string(record.src_itemsize) + " and " + std::to_string(record.dst_itemsize) +
               " don't fit dtype codes " + std::to_string(record.src_dtype) + " and " +
               std::to_string(record.dst_dtype);
    if (record.reserved != 0) return "a reserved field is not zero";
    if (boxes_overlap(source_box(record), destination_box(record))) return "its source and destination overlap";
    return {};
}

bool reads_the_same(const CopyRecord& a, const CopyRecord& b) {
    return a.src == b.src && a.src_dtype == b.src_dtype && a.dst_dtype == b.dst_dtype &&
           a.src_itemsize == b.src_itemsize && a.dst_itemsize == b.dst_itemsize &&
           std::equal(std::begin(a.extents), std::end(a.extents), std::begin(b.extents)) &&
           std::equal(std::begin(a.src_strides), std::end(a.src_strides), std::begin(b.src_strides));
}

std::string describe_fan_problem(Table table, std::size_t head) {
    const std::size_t num_followers = table[head].num_followers;
    const std::string claim = "it has " + std::to_string(num_followers) + " followers, but ";
    if (num_followers >= kMaxTargets) return claim + "at most " + std::to_string(kMaxTargets - 1) + " are allowed";
    if (num_followers >= table.size() - head) return claim + "the table ends before them";
    for (std::size_t i = head + 1; i <= head + num_followers; ++i) {
        if (table[i].num_followers != 0) return claim + "record " + std::to_string(i) + " has some of its own";
        if (!reads_the_same(table[head], table[i])) return claim + "record " + std::to_string(i) + " reads another box";
    }
    return {};
}

struct Interval {
    std::uint64_t begin, end;
    std::size_t record;
    bool is_source;
};

std::vector<Interval> intervals_by_address(Table table) {
    std::vector<Interval> intervals;
    intervals.reserve(2 * table.size());
    for (std::size_t i = 0; i < table.size(); ++i) {
        intervals.push_back({table[i].src, source_box(table[i]).end(), i, true});
        intervals.push_back({table[i].dst, destination_box(table[i]).end(), i, false});
    }
    std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.record < b.record;
    });
    return intervals;
}

bool intervals_overlap(Table table, const Interval& a, const Interval& b) {
    if (a.is_source && b.is_source) return false;
    const auto box = [&](const Interval& x) {
        return x.is_source ? source_box(table[x.record]) : destination_box(table[x.record]);
    };
    return boxes_overlap(box(a), box(b));
}

}  // namespace

void check_records(Table table) {
    const auto refuse = [](std::size_t i, const std::string& problem) {
        if (!problem.empty()) throw std::invalid_argument("copy table record " + std::to_string(i) + ": " + problem);
    };
    for (std::size_t i = 0; i < table.size(); ++i) refuse(i, describe_problem(table[i]));
    for (std::size_t i = 0; i < table.size(); ++i)
        if (table[i].num_followers != 0) refuse(i, describe_fan_problem(table, i));
}

std::vector<std::uint32_t> fan_heads(Table table) {
    std::vector<std::uint32_t> heads;
    for (std::size_t i = 0; i < table.size(); i += static_cast<std::size_t>(table[i].num_targets()))
        heads.push_back(static_cast<std::uint32_t>(i));
    return heads;
}

std::optional<Overlap> find_overlap(Table table) {
    for (std::size_t i = 0; i < table.size(); ++i)
        if (names_a_byte_twice(destination_box(table[i]))) return Overlap{i, i, false};
    std::vector<Interval> open;
    for (const Interval& next : intervals_by_address(table)) {
        std::erase_if(open, [&](const Interval& earlier) { return earlier.end <= next.begin; });
        for (const Interval& earlier : open) {
            if (!intervals_overlap(table, earlier, next)) continue;
            if (earlier.is_source) return Overlap{earlier.record, next.record, true};
            if (next.is_source) return Overlap{next.record, earlier.record, true};
            const auto [low, high] = std::minmax(earlier.record, next.record);
            return Overlap{low, high, false};
        }
        open.push_back(next);
    }
    return std::nullopt;
}

}  // namespace reshard
