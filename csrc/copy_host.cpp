#include "copy_host.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "convert.h"
#include "host_rows.h"
#include "host_threads.h"

namespace reshard {
namespace {

constexpr std::int64_t kPieceBytes = 1 << 20;           // read plus written, by one thread at a time
constexpr std::int64_t kStreamingBytes = 16ll << 20;    // tables that write more than this go past the caches
constexpr std::int64_t kPieceAlignmentElements = 1024;  // pieces of one row begin on common cache lines
constexpr std::int64_t kFanBlockElements = 4096;        // read once and still in the nearest cache for all targets

// Elements [begin, end), in row-major order, of the records from `record` on that are taken together.
struct Piece {
    std::size_t record;
    std::int64_t begin, end;
};

// The cut of a table into pieces: piece numbers are dense, so that threads take them from one counter. `records` are
// those to cut: the heads of fans, or all.
class Pieces {
  public:
    Pieces(Table table, std::vector<std::uint32_t> records) : table_(table), records_(std::move(records)) {
        first_.reserve(records_.size() + 1);
        first_.push_back(0);
        for (const std::uint32_t i : records_) {
            const std::int64_t elements = piece_elements(table_[i]);
            first_.push_back(first_.back() + (table_[i].num_elements() + elements - 1) / elements);
        }
    }

    std::int64_t count() const { return first_.back(); }

    Piece operator[](std::int64_t number) const {
        const auto after = std::upper_bound(first_.begin(), first_.end(), number);
        const auto position = static_cast<std::size_t>(after - first_.begin()) - 1;
        const CopyRecord& record = table_[records_[position]];
        const std::int64_t elements = piece_elements(record);
        const std::int64_t begin = (number - first_[position]) * elements;
        return {records_[position], begin, std::min(begin + elements, record.num_elements())};
    }

  private:
    static std::int64_t piece_elements(const CopyRecord& record) {
        const std::int64_t elements = kPieceBytes / (record.src_itemsize + record.num_targets() * record.dst_itemsize);
        return std::max<std::int64_t>(1, elements / kPieceAlignmentElements) * kPieceAlignmentElements;
    }

    Table table_;
    std::vector<std::uint32_t> records_;
    std::vector<std::int64_t> first_;
};

// Calls row(src, dst, first element, count) for the parts of rows that make up a piece of the records `fan`, which
// read the same box; dst[t] is the row of record t.
template <typename Row>
void for_each_row(Table fan, const Piece& piece, Row row) {
    const CopyRecord& head = fan[0];
    std::int64_t column = piece.begin % head.extents[3];
    std::int64_t rest = piece.begin / head.extents[3];
    std::int64_t index[kNumDims - 1];
    auto* src = reinterpret_cast<const unsigned char*>(head.src);
    unsigned char* dst[kMaxTargets];
    unsigned char* at_column[kMaxTargets];
    for (std::size_t t = 0; t < fan.size(); ++t) dst[t] = reinterpret_cast<unsigned char*>(fan[t].dst);
    const auto step = [&](int dim, std::int64_t steps) {
        src += steps * head.src_strides[dim];
        for (std::size_t t = 0; t < fan.size(); ++t) dst[t] += steps * fan[t].dst_strides[dim];
    };
    for (int dim = kNumDims - 2; dim >= 0; --dim) {
        index[dim] = rest % head.extents[dim];
        rest /= head.extents[dim];
        step(dim, index[dim]);
    }
    for (std::int64_t at = piece.begin; at < piece.end;) {
        const std::int64_t count = std::min(head.extents[3] - column, piece.end - at);
        for (std::size_t t = 0; t < fan.size(); ++t) at_column[t] = dst[t] + column * fan[t].dst_strides[3];
        row(src + column * head.src_strides[3], at_column, at, count);
        at += count;
        column = 0;
        for (int dim = kNumDims - 2; dim >= 0; --dim) {
            step(dim, 1);
            if (++index[dim] < head.extents[dim]) break;
            step(dim, -head.extents[dim]);
            index[dim] = 0;
        }
    }
}

std::uint64_t mix_element(const unsigned char* address, std::int64_t itemsize, std::int64_t element) {
    const std::int64_t words = (itemsize + 7) / 8;
    std::uint64_t sum = 0;
    for (std::int64_t w = 0; w < words; ++w) {
        std::uint64_t word = 0;
        std::memcpy(&word, address + 8 * w, static_cast<std::size_t>(std::min<std::int64_t>(8, itemsize - 8 * w)));
        sum += mix_word(word, static_cast<std::uint64_t>(element * words + w));
    }
    return sum;
}

// The checksum of one piece; `cast` turns source elements into contiguous destination elements, or is null.
std::uint64_t checksum_piece(const CopyRecord& record, const Piece& piece, RowCopy cast) {
    constexpr std::int64_t kBlock = 256;
    unsigned char block[kBlock * 4];
    std::uint64_t sum = 0;
    const auto row = [&](const unsigned char* src, unsigned char* const* dst, std::int64_t at, std::int64_t count) {
        const unsigned char* from = cast == nullptr ? dst[0] : src;
        const std::int64_t stride = cast == nullptr ? record.dst_strides[3] : record.src_strides[3];
        if (!record.is_cast() || cast == nullptr) {
            for (std::int64_t i = 0; i < count; ++i) sum += mix_element(from + i * stride, record.dst_itemsize, at + i);
            return;
        }
        for (std::int64_t done = 0; done < count; done += kBlock) {
            const std::int64_t n = std::min(kBlock, count - done);
            cast(from + done * stride, block, n, stride, record.dst_itemsize, record.dst_itemsize);
            for (std::int64_t i = 0; i < n; ++i)
                sum += mix_element(block + i * record.dst_itemsize, record.dst_itemsize, at + done + i);
        }
    };
    for_each_row(Table(&record, 1), piece, row);
    return sum;
}

RowCopy choose_cast_to_contiguous(CopyRecord record) {
    record.dst_strides[3] = record.dst_itemsize;
    return choose_row_copy(record, false);
}

}  // namespace

void copy_host(Table table, int num_threads) {
    check_records(table);
    std::int64_t written_bytes = 0;
    for (const CopyRecord& record : table) written_bytes += record.num_elements() * record.dst_itemsize;
    const bool streaming = written_bytes > kStreamingBytes;
    std::vector<RowCopy> row_copies;
    row_copies.reserve(table.size());
    for (const CopyRecord& record : table) row_copies.push_back(choose_row_copy(record, streaming));
    const Pieces pieces(table, fan_heads(table));
    const auto work = [&](std::int64_t i) {
        const Piece piece = pieces[i];
        const Table fan = table.subspan(piece.record, static_cast<std::size_t>(table[piece.record].num_targets()));
        const CopyRecord& head = fan[0];
        const RowCopy* copies = &row_copies[piece.record];
        const auto row = [&](const unsigned char* src, unsigned char* const* dst, std::int64_t, std::int64_t count) {
            const std::int64_t block = fan.size() == 1 ? count : kFanBlockElements;
            for (std::int64_t done = 0; done < count; done += block)
                for (std::size_t t = 0; t < fan.size(); ++t)
                    copies[t](src + done * head.src_strides[3], dst[t] + done * fan[t].dst_strides[3],
                              std::min(block, count - done), head.src_strides[3], fan[t].dst_strides[3],
                              head.src_itemsize);
        };
        for_each_row(fan, piece, row);
    };
    run_on_threads(pieces.count(), num_threads, work, [&] {
        if (streaming) finish_streaming();
    });
}

std::vector<std::uint64_t> checksum_host(Table table, bool of_destination, int num_threads) {
    check_records(table);
    std::vector<std::uint64_t> sums(table.size(), 0);
    std::vector<std::uint32_t> every_record(table.size());
    std::iota(every_record.begin(), every_record.end(), 0u);
    const Pieces pieces(table, std::move(every_record));
    const auto work = [&](std::int64_t i) {
        const Piece piece = pieces[i];
        const CopyRecord& record = table[piece.record];
        const RowCopy cast = of_destination ? nullptr : choose_cast_to_contiguous(record);
        std::atomic_ref<std::uint64_t>(sums[piece.record]).fetch_add(checksum_piece(record, piece, cast));
    };
    run_on_threads(pieces.count(), num_threads, work);
    return sums;
}

}  // namespace reshard
