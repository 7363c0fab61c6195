#include "copy_host.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "convert.h"
#include "host_rows.h"
#include "host_threads.h"

namespace reshard {
namespace {

constexpr std::int64_t kPieceBytes = 1 << 20;           // read plus written, by one thread at a time
constexpr std::int64_t kStreamingBytes = 16ll << 20;    // tables that write more than this go past the caches
constexpr std::int64_t kPieceAlignmentElements = 1024;  // pieces of one row begin on common cache lines

// Elements [begin, end) of one record, in row-major order.
struct Piece {
    std::size_t record;
    std::int64_t begin, end;
};

// The cut of a table into pieces: piece numbers are dense, so that threads take them from one counter.
class Pieces {
  public:
    explicit Pieces(Table table) : table_(table) {
        first_.reserve(table.size() + 1);
        first_.push_back(0);
        for (const CopyRecord& record : table) {
            const std::int64_t elements = piece_elements(record);
            first_.push_back(first_.back() + (record.num_elements() + elements - 1) / elements);
        }
    }

    std::int64_t count() const { return first_.back(); }

    Piece operator[](std::int64_t number) const {
        const auto after = std::upper_bound(first_.begin(), first_.end(), number);
        const std::size_t record = static_cast<std::size_t>(after - first_.begin()) - 1;
        const std::int64_t elements = piece_elements(table_[record]);
        const std::int64_t begin = (number - first_[record]) * elements;
        return {record, begin, std::min(begin + elements, table_[record].num_elements())};
    }

  private:
    static std::int64_t piece_elements(const CopyRecord& record) {
        const std::int64_t elements = kPieceBytes / (record.src_itemsize + record.dst_itemsize);
        return std::max<std::int64_t>(1, elements / kPieceAlignmentElements) * kPieceAlignmentElements;
    }

    Table table_;
    std::vector<std::int64_t> first_;
};

// Calls row(src, dst, first element, count) for the parts of rows that make up a piece.
template <typename Row>
void for_each_row(const CopyRecord& record, const Piece& piece, Row row) {
    std::int64_t column = piece.begin % record.extents[3];
    std::int64_t rest = piece.begin / record.extents[3];
    std::int64_t index[kNumDims - 1];
    auto* src = reinterpret_cast<const unsigned char*>(record.src);
    auto* dst = reinterpret_cast<unsigned char*>(record.dst);
    for (int dim = kNumDims - 2; dim >= 0; --dim) {
        index[dim] = rest % record.extents[dim];
        rest /= record.extents[dim];
        src += index[dim] * record.src_strides[dim];
        dst += index[dim] * record.dst_strides[dim];
    }
    for (std::int64_t at = piece.begin; at < piece.end;) {
        const std::int64_t count = std::min(record.extents[3] - column, piece.end - at);
        row(src + column * record.src_strides[3], dst + column * record.dst_strides[3], at, count);
        at += count;
        column = 0;
        for (int dim = kNumDims - 2; dim >= 0; --dim) {
            src += record.src_strides[dim];
            dst += record.dst_strides[dim];
            if (++index[dim] < record.extents[dim]) break;
            src -= record.extents[dim] * record.src_strides[dim];
            dst -= record.extents[dim] * record.dst_strides[dim];
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
    for_each_row(record, piece, [&](const unsigned char* src, unsigned char* dst, std::int64_t at, std::int64_t count) {
        const unsigned char* from = cast == nullptr ? dst : src;
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
    });
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
    const Pieces pieces(table);
    const auto work = [&](std::int64_t i) {
        const Piece piece = pieces[i];
        const CopyRecord& record = table[piece.record];
        const RowCopy copy = row_copies[piece.record];
        for_each_row(record, piece,
                     [&](const unsigned char* src, unsigned char* dst, std::int64_t, std::int64_t count) {
                         copy(src, dst, count, record.src_strides[3], record.dst_strides[3], record.src_itemsize);
                     });
    };
    run_on_threads(pieces.count(), num_threads, work, [&] {
        if (streaming) finish_streaming();
    });
}

std::vector<std::uint64_t> checksum_host(Table table, bool of_destination, int num_threads) {
    check_records(table);
    std::vector<std::uint64_t> sums(table.size(), 0);
    const Pieces pieces(table);
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
