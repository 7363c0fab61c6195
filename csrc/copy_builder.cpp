#include "copy_builder.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace reshard {
namespace {

// One dimension of a source box and of all its destinations, strides in bytes.
struct Dim {
    std::int64_t extent;
    std::int64_t src;
    std::array<std::int64_t, kMaxTargets> dst;
};

using Members = std::span<const std::size_t>;  // copies of one source box

class Builder {
  public:
    Builder(const CopyColumns& columns, int max_targets) : columns_(columns), max_targets_(max_targets) { check(); }

    BuiltTable build() {
        built_.records.reserve(columns_.num_copies());
        built_.owners.reserve(columns_.num_copies());
        if (max_targets_ > 1) gather();
        std::vector<std::size_t> group;
        for (std::size_t copy = 0; copy < columns_.num_copies(); ++copy) {
            if (is_empty(copy) || (max_targets_ > 1 && !is_first_[copy])) continue;
            group.assign(1, copy);
            while (max_targets_ > 1 && next_[group.back()] != kNone) group.push_back(next_[group.back()]);
            emit_fans(group);
        }
        return std::move(built_);
    }

  private:
    void check() const {
        const std::size_t num = columns_.num_copies();
        const std::size_t num_dims = columns_.extents.size();
        const bool fits = columns_.dst.size() == num && columns_.src_dtypes.size() == num &&
                          columns_.dst_dtypes.size() == num && columns_.first_dims.size() == num + 1 &&
                          columns_.first_dims.front() == 0 &&
                          columns_.first_dims.back() == static_cast<std::int64_t>(num_dims) &&
                          std::is_sorted(columns_.first_dims.begin(), columns_.first_dims.end()) &&
                          columns_.src_strides.size() == num_dims && columns_.dst_strides.size() == num_dims;
        const auto known = [&](std::int64_t code) {
            return code >= 0 && code < static_cast<std::int64_t>(columns_.itemsizes.size());
        };
        if (!fits) throw std::invalid_argument("the columns of a copy table don't belong together");
        if (!std::all_of(columns_.src_dtypes.begin(), columns_.src_dtypes.end(), known) ||
            !std::all_of(columns_.dst_dtypes.begin(), columns_.dst_dtypes.end(), known))
            throw std::invalid_argument("a copy's dtype code has no item size");
        if (max_targets_ < 1 || max_targets_ > kMaxTargets)
            throw std::invalid_argument("max_targets must be between 1 and " + std::to_string(kMaxTargets));
    }

    std::int64_t src_itemsize(std::size_t copy) const { return columns_.itemsizes[columns_.src_dtypes[copy]]; }
    std::int64_t dst_itemsize(std::size_t copy) const { return columns_.itemsizes[columns_.dst_dtypes[copy]]; }

    bool is_empty(std::size_t copy) const {
        const auto extents = columns_.extents.begin();
        return std::find(extents + columns_.first_dims[copy], extents + columns_.first_dims[copy + 1], 0) !=
               extents + columns_.first_dims[copy + 1];
    }

    // Fills is_first_ and next_: the copies that may share a fan are a list, linked in their order.
    void gather() {
        const std::size_t num = columns_.num_copies();
        is_first_.assign(num, true);
        next_.assign(num, kNone);
        std::vector<std::size_t> last_of(num, kNone);  // of the list that a copy is the first of
        std::unordered_multimap<std::uint64_t, std::size_t> first_by_hash;
        first_by_hash.reserve(num);
        std::vector<std::vector<std::int64_t>> keys(num);
        for (std::size_t copy = 0; copy < num; ++copy) {
            if (is_empty(copy)) continue;
            keys[copy] = fan_key(copy);
            const std::uint64_t hash = hash_of(keys[copy]);
            auto [found, end] = first_by_hash.equal_range(hash);
            while (found != end && keys[found->second] != keys[copy]) ++found;
            if (found == end) {
                first_by_hash.emplace(hash, copy);
                last_of[copy] = copy;
                continue;
            }
            is_first_[copy] = false;
            next_[last_of[found->second]] = copy;
            last_of[found->second] = copy;
            keys[copy] = {};
        }
    }

    static std::uint64_t hash_of(const std::vector<std::int64_t>& key) {
        std::uint64_t hash = 0;
        for (const std::int64_t word : key) {
            hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9e3779b97f4a7c15ull;
            hash ^= hash >> 32;
        }
        return hash;
    }

    // Equal for copies that may share a fan: the same source box and cast, destinations whose dimensions have the same
    // order, and addresses and strides that allow accesses of the same width.
    std::vector<std::int64_t> fan_key(std::size_t copy) const {
        const std::vector<Dim> dims = ordered_dims(copy);
        std::vector<std::int64_t> key;
        key.reserve(2 * dims.size() + 6);
        key.insert(key.end(),
                   {columns_.src[copy], columns_.src_dtypes[copy], columns_.dst_dtypes[copy], columns_.dst[copy] % 16});
        std::uint64_t bits = 16;
        bool is_run = false;
        for (const Dim& dim : dims) {
            key.insert(key.end(), {dim.extent, dim.src});
            is_run = &dim == &dims.back() && dim.dst[0] == dst_itemsize(copy);
            if (!is_run) bits |= static_cast<std::uint64_t>(dim.dst[0]);
        }
        key.insert(key.end(), {is_run, std::countr_zero(bits)});
        return key;
    }

    // Cuts a group into fans of at most max_targets_, as even as can be.
    void emit_fans(Members group) {
        const std::size_t num_fans = (group.size() + max_targets_ - 1) / max_targets_;
        for (std::size_t fan = 0, begin = 0; fan < num_fans; ++fan) {
            const std::size_t end = group.size() * (fan + 1) / num_fans;
            emit(group.subspan(begin, end - begin));
            begin = end;
        }
    }

    // The dimensions of more than one element, outermost first as the copy's destination has them.
    std::vector<Dim> ordered_dims(std::size_t copy) const {
        std::vector<Dim> dims;
        for (std::int64_t d = columns_.first_dims[copy]; d < columns_.first_dims[copy + 1]; ++d)
            if (columns_.extents[d] != 1)
                dims.push_back({columns_.extents[d],
                                columns_.src_strides[d] * src_itemsize(copy),
                                {columns_.dst_strides[d] * dst_itemsize(copy)}});
        std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
            return a.dst[0] != b.dst[0] ? a.dst[0] > b.dst[0] : a.src > b.src;
        });
        return dims;
    }

    static bool steps_over(const Dim& outer, const Dim& inner, std::size_t num_targets) {
        if (outer.src != inner.extent * inner.src) return false;
        for (std::size_t t = 0; t < num_targets; ++t)
            if (outer.dst[t] != inner.extent * inner.dst[t]) return false;
        return true;
    }

    std::vector<Dim> merged_dims(Members members) const {
        std::vector<Dim> dims = ordered_dims(members[0]);
        for (std::size_t t = 1; t < members.size(); ++t) {
            const std::vector<Dim> other = ordered_dims(members[t]);
            for (std::size_t d = 0; d < dims.size(); ++d) dims[d].dst[t] = other[d].dst[0];
        }
        std::vector<Dim> merged;
        for (Dim dim : dims) {
            if (!merged.empty() && steps_over(merged.back(), dim, members.size())) {
                dim.extent *= merged.back().extent;
                merged.pop_back();
            }
            merged.push_back(dim);
        }
        return merged;
    }

    void emit(Members members) {
        std::vector<Dim> dims = merged_dims(members);
        const std::vector<Dim> outer = take_smallest(dims, std::max<std::ptrdiff_t>(0, std::ssize(dims) - kNumDims));
        std::vector<std::int64_t> index(outer.size(), 0);
        for (bool more = true; more; more = advance(index, outer)) {
            for (std::size_t t = 0; t < members.size(); ++t) {
                built_.records.push_back(record(members, t, dims, outer, index));
                built_.owners.push_back(static_cast<std::int64_t>(members[t]));
            }
        }
    }

    // Removes the `count` smallest dimensions from `dims` and returns them, the smallest first.
    static std::vector<Dim> take_smallest(std::vector<Dim>& dims, std::ptrdiff_t count) {
        std::vector<std::size_t> order(dims.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t a, std::size_t b) { return dims[a].extent < dims[b].extent; });
        order.resize(static_cast<std::size_t>(count));
        std::vector<Dim> taken;
        for (const std::size_t d : order) taken.push_back(dims[d]);
        std::sort(order.rbegin(), order.rend());
        for (const std::size_t d : order) dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(d));
        return taken;
    }

    static bool advance(std::vector<std::int64_t>& index, const std::vector<Dim>& outer) {
        for (std::size_t d = outer.size(); d-- > 0;) {
            if (++index[d] < outer[d].extent) return true;
            index[d] = 0;
        }
        return false;
    }

    CopyRecord record(Members members, std::size_t target, const std::vector<Dim>& dims, const std::vector<Dim>& outer,
                      const std::vector<std::int64_t>& index) const {
        const std::size_t copy = members[target];
        CopyRecord made{};
        std::int64_t src = columns_.src[copy], dst = columns_.dst[copy];
        for (std::size_t d = 0; d < outer.size(); ++d) {
            src += index[d] * outer[d].src;
            dst += index[d] * outer[d].dst[target];
        }
        made.src = static_cast<std::uint64_t>(src);
        made.dst = static_cast<std::uint64_t>(dst);
        for (int d = 0; d < kNumDims; ++d) {
            const std::ptrdiff_t at = d - (kNumDims - std::ssize(dims));
            const bool is_dim = at >= 0;
            made.extents[d] = is_dim ? dims[at].extent : 1;
            made.src_strides[d] = is_dim ? dims[at].src : src_itemsize(copy);
            made.dst_strides[d] = is_dim ? dims[at].dst[target] : dst_itemsize(copy);
        }
        made.src_dtype = static_cast<std::uint8_t>(columns_.src_dtypes[copy]);
        made.dst_dtype = static_cast<std::uint8_t>(columns_.dst_dtypes[copy]);
        made.src_itemsize = static_cast<std::uint16_t>(src_itemsize(copy));
        made.dst_itemsize = static_cast<std::uint16_t>(dst_itemsize(copy));
        made.num_followers = static_cast<std::uint16_t>(target == 0 ? members.size() - 1 : 0);
        return made;
    }

    static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

    const CopyColumns& columns_;
    int max_targets_;
    std::vector<bool> is_first_;
    std::vector<std::size_t> next_;
    BuiltTable built_;
};

}  // namespace

BuiltTable build_table(const CopyColumns& columns, int max_targets) {
    return Builder(columns, max_targets).build();
}

}  // namespace reshard
