#include "copy_tiles.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace reshard {
namespace {

constexpr std::int64_t kVectorBytes = 16;

// One value for each destination of a fan, in the order of its records; those beyond the last are 0.
template <typename Value>
using PerTarget = std::array<Value, kMaxTargets>;

template <typename Value, typename Function>
PerTarget<Value> per_target(std::size_t num_targets, Function function) {
    PerTarget<Value> values{};
    for (std::size_t t = 0; t < num_targets; ++t) values[t] = function(t);
    return values;
}

template <typename Value>
std::uint64_t bits_of(const PerTarget<Value>& values) {
    return std::accumulate(values.begin(), values.end(), std::uint64_t{0},
                           [](std::uint64_t bits, Value value) { return bits | static_cast<std::uint64_t>(value); });
}

struct Dim {
    std::int64_t extent, src_step;
    PerTarget<std::int64_t> dst_steps;

    std::uint64_t dst_bits() const { return bits_of(dst_steps); }
};

// A box of units, outermost dimension first. One unit is `items` elements, or an element is `units_per_item` units.
struct UnitBox {
    std::uint64_t src;
    PerTarget<std::uint64_t> dst;
    std::vector<Dim> dims;
    std::uint64_t first_element;
    std::int64_t items;
    std::int64_t units_per_item;
    VectorOp op;

    std::int64_t num_vectors() const {
        return std::accumulate(dims.begin(), dims.end(), std::int64_t{1},
                               [](std::int64_t product, const Dim& dim) { return product * dim.extent; });
    }
};

std::int64_t largest_power_of_two_in(std::uint64_t bits) {
    return bits == 0 ? kVectorBytes : std::min(kVectorBytes, std::int64_t{1} << std::countr_zero(bits));
}

FastDivisor fast_divisor(std::int64_t divisor) {
    const auto d = static_cast<std::uint32_t>(divisor);
    const int log = std::bit_width(d - 1);  // smallest log with d <= 2^log; d is at least 2
    const std::uint64_t magic = ((std::uint64_t{1} << (31 + log)) + d - 1) / d;
    return {d, static_cast<std::uint32_t>(magic), static_cast<std::uint32_t>(log - 1)};
}

VectorOp bytes_op(std::int64_t bytes) {
    constexpr VectorOp kOps[] = {VectorOp::kBytes1, VectorOp::kBytes2, VectorOp::kBytes4, VectorOp::kBytes8,
                                 VectorOp::kBytes16};
    return kOps[std::countr_zero(static_cast<std::uint64_t>(bytes))];
}

// The cast of `items` elements (1, or as many as a vector has).
VectorOp cast_op(const CopyRecord& record, std::int64_t items) {
    const bool one = items == 1;
    if (record.src_dtype == kFloat32 && record.dst_dtype == kBFloat16)
        return one ? VectorOp::kF32ToBf16x1 : items == 4 ? VectorOp::kF32ToBf16x4 : VectorOp::kF32ToBf16x8;
    if (record.src_dtype == kFloat32)
        return one ? VectorOp::kF32ToF16x1 : items == 4 ? VectorOp::kF32ToF16x4 : VectorOp::kF32ToF16x8;
    if (record.dst_dtype == kFloat32 && record.src_dtype == kBFloat16)
        return one ? VectorOp::kBf16ToF32x1 : VectorOp::kBf16ToF32x4;
    if (record.dst_dtype == kFloat32) return one ? VectorOp::kF16ToF32x1 : VectorOp::kF16ToF32x4;
    if (record.src_dtype == kBFloat16) return one ? VectorOp::kBf16ToF16x1 : VectorOp::kBf16ToF16x8;
    return one ? VectorOp::kF16ToBf16x1 : VectorOp::kF16ToBf16x8;
}

// Elements of one fan of records (mostly one record), all or a part, before they are grouped into vectors.
class FanPlanner {
  public:
    FanPlanner(Table fan, std::uint32_t index, TilePlan& plan)
        : fan_(fan), record_(fan[0]), index_(index), options_(plan.options), out_(plan) {}

    void plan() {
        std::vector<Dim> dims;
        for (int d = 0; d < kNumDims; ++d)
            if (record_.extents[d] > 1)
                dims.push_back({record_.extents[d], record_.src_strides[d],
                                for_targets<std::int64_t>([&](std::size_t t) { return fan_[t].dst_strides[d]; })});
        if (!elements_are_aligned(dims)) return plan_odd_items(std::move(dims));
        if (dims.size() == 1 && is_run(dims[0])) return plan_run(dims[0].extent);
        const std::int64_t items = dims.empty() || !is_run(dims.back()) ? 1 : vector_items(dims);
        emit(record_.src, dst_after(0), std::move(dims), 0, items);
    }

  private:
    template <typename Value, typename Function>
    PerTarget<Value> for_targets(Function function) const {
        return per_target<Value>(fan_.size(), function);
    }

    // The destinations' addresses, so many contiguous elements on.
    PerTarget<std::uint64_t> dst_after(std::int64_t elements) const {
        const auto bytes = static_cast<std::uint64_t>(elements * record_.dst_itemsize);
        return for_targets<std::uint64_t>([&](std::size_t t) { return fan_[t].dst + bytes; });
    }

    PerTarget<std::int64_t> dst_steps_of(std::int64_t bytes) const {
        return for_targets<std::int64_t>([&](std::size_t) { return bytes; });
    }

    bool is_run(const Dim& dim) const {
        return dim.src_step == record_.src_itemsize && dim.dst_steps == dst_steps_of(record_.dst_itemsize);
    }

    bool elements_are_aligned(const std::vector<Dim>& dims) const {
        std::uint64_t src = record_.src, dst = bits_of(dst_after(0));
        for (const Dim& dim : dims) {
            src |= static_cast<std::uint64_t>(dim.src_step);
            dst |= dim.dst_bits();
        }
        const auto fits = [](std::uint64_t bits, std::uint64_t size) {
            return std::has_single_bit(size) && size <= kVectorBytes && bits % size == 0;
        };
        return fits(src, record_.src_itemsize) && fits(dst, record_.dst_itemsize);
    }

    // How many elements a vector may have, the most first: plain copies may halve, casts are whole vectors or one.
    std::vector<std::int64_t> candidate_items() const {
        const bool narrows = record_.is_cast() && record_.src_dtype == kFloat32;
        if (narrows && options_.wide_casts) return {8};
        std::int64_t items = kVectorBytes / std::max(record_.src_itemsize, record_.dst_itemsize);
        if (record_.is_cast()) return {items};
        std::vector<std::int64_t> candidates;
        for (; items > 1; items /= 2) candidates.push_back(items);
        return candidates;
    }

    // Whether addresses or strides that make up `src` and `dst` are aligned for vectors of so many elements.
    bool is_aligned(std::uint64_t src, std::uint64_t dst, std::int64_t items) const {
        const std::int64_t load_bytes = std::min(kVectorBytes, items * record_.src_itemsize);
        return src % static_cast<std::uint64_t>(load_bytes) == 0 &&
               dst % static_cast<std::uint64_t>(items * record_.dst_itemsize) == 0;
    }

    // The vectors of a box whose innermost dimension is a run.
    std::int64_t vector_items(const std::vector<Dim>& dims) const {
        std::uint64_t src = record_.src, dst = bits_of(dst_after(0));
        for (std::size_t d = 0; d + 1 < dims.size(); ++d) {
            src |= static_cast<std::uint64_t>(dims[d].src_step);
            dst |= dims[d].dst_bits();
        }
        for (const std::int64_t items : candidate_items())
            if (dims.back().extent % items == 0 && is_aligned(src, dst, items)) return items;
        return 1;
    }

    // One contiguous run: elements before the first boundary that all sides share, whole vectors, and the rest.
    void plan_run(std::int64_t count) {
        const auto [head, items] = run_vectors(count);
        const std::int64_t body = (count - head) / items * items;
        emit_run(0, head, 1);
        emit_run(head, body, items);
        emit_run(head + body, count - head - body, 1);
    }

    std::pair<std::int64_t, std::int64_t> run_vectors(std::int64_t count) const {
        for (const std::int64_t items : candidate_items())
            for (std::int64_t head = 0; head < std::min(items, count); ++head)
                if (is_aligned(record_.src + static_cast<std::uint64_t>(head * record_.src_itemsize),
                               bits_of(dst_after(head)), items))
                    return {head, items};
        return {0, 1};
    }

    void emit_run(std::int64_t first, std::int64_t count, std::int64_t items) {
        const std::int64_t limit = options_.max_vectors * items;
        for (; count > 0; first += limit, count -= limit)
            emit(record_.src + static_cast<std::uint64_t>(first * record_.src_itemsize), dst_after(first),
                 {{std::min(count, limit), record_.src_itemsize, dst_steps_of(record_.dst_itemsize)}},
                 static_cast<std::uint64_t>(first), items);
    }

    void emit(std::uint64_t src, const PerTarget<std::uint64_t>& dst, std::vector<Dim> dims,
              std::uint64_t first_element, std::int64_t items) {
        if (items > 1)
            dims.back() = {dims.back().extent / items, items * record_.src_itemsize,
                           dst_steps_of(items * record_.dst_itemsize)};
        const VectorOp op = record_.is_cast() ? cast_op(record_, items) : bytes_op(items * record_.dst_itemsize);
        emit_box({src, dst, std::move(dims), first_element, items, 1, op});
    }

    // Elements of a size that is no power of two, or at addresses that their size doesn't divide: each element is a
    // run of equal units, the largest that fit everywhere.
    void plan_odd_items(std::vector<Dim> dims) {
        if (record_.is_cast())
            throw std::invalid_argument("copy table record " + std::to_string(index_) +
                                        ": a device can't cast elements that are not aligned to their own size");
        std::uint64_t bits = record_.src | bits_of(dst_after(0)) | record_.dst_itemsize;
        for (const Dim& dim : dims) bits |= static_cast<std::uint64_t>(dim.src_step) | dim.dst_bits();
        const std::int64_t unit = largest_power_of_two_in(bits);
        const std::int64_t units = record_.dst_itemsize / unit;
        dims.push_back({units, unit, dst_steps_of(unit)});
        emit_box({record_.src, dst_after(0), std::move(dims), 0, 1, units, bytes_op(unit)});
    }

    // Halves boxes of too many vectors along their outermost dimension, then appends the record.
    void emit_box(UnitBox box) {
        std::erase_if(box.dims, [](const Dim& dim) { return dim.extent == 1; });
        const std::int64_t vectors = box.num_vectors();
        if (vectors <= options_.max_vectors) return append(box, vectors);
        const Dim outer = box.dims[0];
        const std::int64_t half = outer.extent / 2;
        UnitBox rest = box;
        box.dims[0].extent = half;
        rest.dims[0].extent = outer.extent - half;
        rest.src += static_cast<std::uint64_t>(half * outer.src_step);
        rest.dst = for_targets<std::uint64_t>(
            [&](std::size_t t) { return box.dst[t] + static_cast<std::uint64_t>(half * outer.dst_steps[t]); });
        const std::int64_t half_vectors = vectors / outer.extent * half;
        rest.first_element += static_cast<std::uint64_t>(half_vectors * box.items / box.units_per_item);
        emit_box(std::move(box));
        emit_box(std::move(rest));
    }

    bool has_wide_rows(const UnitBox& box) const {
        if (box.dims.empty() || box.dims.size() > 2 || !is_wide(box.op)) return false;
        const Dim& inner = box.dims.back();
        return inner.src_step == box.items * record_.src_itemsize &&
               inner.dst_steps == dst_steps_of(box.items * record_.dst_itemsize);
    }

    TileTarget target_of(const UnitBox& box, std::size_t t) const {
        TileTarget target{box.dst[t], {}};
        for (std::size_t d = 0; d < box.dims.size(); ++d)
            target.dst_steps[d] = box.dims[box.dims.size() - 1 - d].dst_steps[t];
        return target;
    }

    void append(const UnitBox& box, std::int64_t vectors) {
        TileRecord tile{};
        tile.src = box.src;
        tile.target = target_of(box, 0);
        tile.num_dims = static_cast<std::uint32_t>(box.dims.size());
        for (std::uint32_t d = 0; d < tile.num_dims; ++d) {
            const Dim& dim = box.dims[tile.num_dims - 1 - d];
            tile.src_steps[d] = dim.src_step;
            if (d + 1 < tile.num_dims) tile.divisors[d] = fast_divisor(dim.extent);
        }
        tile.num_vectors = static_cast<std::uint32_t>(vectors);
        tile.table_record = index_;
        tile.first_more = static_cast<std::uint32_t>(out_.more_targets.size());
        tile.num_more = record_.num_followers;
        for (std::size_t t = 1; t < fan_.size(); ++t) out_.more_targets.push_back(target_of(box, t));
        tile.first_element = box.first_element;
        tile.items_per_vector = static_cast<std::uint16_t>(box.items);
        tile.vectors_per_item = static_cast<std::uint16_t>(box.units_per_item);
        tile.dst_itemsize = record_.dst_itemsize;
        tile.op = box.op;
        tile.wide_rows = has_wide_rows(box);
        out_.records.push_back(tile);
    }

    Table fan_;
    const CopyRecord& record_;
    std::uint32_t index_;
    const TileOptions& options_;
    TilePlan& out_;
};

}  // namespace

void add_tiles(TilePlan& plan, Table table, std::span<const std::uint32_t> heads) {
    const std::uint32_t tile_vectors = plan.options.tile_vectors;
    if (tile_vectors == 0 || tile_vectors > (1u << 20))
        throw std::invalid_argument("tile_vectors must be between 1 and 2^20");
    if (plan.options.max_vectors == 0 || plan.options.max_vectors > (1u << 30))
        throw std::invalid_argument("max_vectors must be between 1 and 2^30");
    std::size_t next = plan.records.size();
    for (const std::uint32_t i : heads)
        FanPlanner(table.subspan(i, static_cast<std::size_t>(table[i].num_targets())), i, plan).plan();
    std::stable_partition(plan.records.begin() + static_cast<std::ptrdiff_t>(next), plan.records.end(),
                          [](const TileRecord& record) { return record.wide_rows; });
    for (; next < plan.records.size(); ++next) {
        TileRecord& record = plan.records[next];
        const std::size_t tiles = (record.num_vectors + tile_vectors - 1) / tile_vectors;
        if (plan.tile_records.size() + tiles > std::numeric_limits<std::uint32_t>::max())
            throw std::invalid_argument("the copy table has too many tiles: make several tables of it");
        record.first_tile = static_cast<std::uint32_t>(plan.tile_records.size());
        plan.tile_records.insert(plan.tile_records.end(), tiles, static_cast<std::uint32_t>(next));
    }
}

}  // namespace reshard
