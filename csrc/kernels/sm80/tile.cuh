// Tiles between global and shared memory: rows of any stride in, swizzled chunks of 16 bytes out, zeros where the
// matrix ends. Where pointer and strides allow, 16 bytes at a time by cp.async; else element by element, which also
// serves columns that are not contiguous. Nothing past a row's last element or the last row is read.
//
// Called by every kernel of this folder. Invariant: all threads of a block call a load together; the caller commits and
// waits (cp.async groups), and a __syncthreads makes either kind of copy visible.
#pragma once

#include "core/args.h"
#include "gpu/mma.cuh"
#include "gpu/shared_value.cuh"

namespace flash_ext::sm80 {

// The rows of one (batch, head) in global memory.
template <class T>
struct GlobalRows {
  T* data;
  int64_t row_stride;  // elements
  int64_t col_stride;
  int rows, cols;
  int row_bytes;    // row_stride in bytes, where is_regular
  bool vectors;     // 16-byte accesses are aligned
  bool is_regular;  // and offsets of rows are 32 x 32 bits: load_whole may be used

  __device__ __forceinline__ void advance(int64_t elements) {
    data += no_hoist(elements);  // or the stride in bytes would wait in registers
    vectors = vectors && reinterpret_cast<uint64_t>(data) % kChunkBytes == 0;
    is_regular = is_regular && vectors;
  }

  // Pointer of the first element of a row.
  __device__ __forceinline__ T* row(int i) const { return data + i * row_stride; }
};

template <class T>
__device__ __forceinline__ GlobalRows<T> rows_of(const TensorView& view, int64_t offset, int64_t rows, int64_t cols) {
  GlobalRows<T> result{static_cast<T*>(view.data) + offset,
                       view.row_stride,
                       view.col_stride,
                       static_cast<int>(rows),
                       static_cast<int>(cols),
                       0,
                       false,
                       false};
  const int64_t row_bytes = view.row_stride * static_cast<int64_t>(sizeof(T));
  const uint64_t bits = reinterpret_cast<uint64_t>(result.data) | static_cast<uint64_t>(row_bytes);
  result.row_bytes = static_cast<int>(row_bytes);
  result.vectors = view.col_stride == 1 && bits % kChunkBytes == 0;
  result.is_regular = result.vectors && result.row_bytes == row_bytes;
  return result;
}

// Of a head of a batch element, from row `first` on.
template <class T>
__device__ __forceinline__ GlobalRows<T> head_rows(const Problem& problem, const TensorView& view, int64_t b,
                                                   int64_t head, int64_t first, int64_t rows, int64_t cols) {
  return rows_of<T>(view, batch_offset(problem, view, b) + head * view.head_stride + first * view.row_stride, rows,
                    cols);
}

enum class LoadForm {
  kAlone,   // with a form of its own for whole tiles
  kRare,    // without, because it stands beside load_whole
  kScarce,  // kRare in as few registers as possible
};

// `kChunks` chunks of each of kRows rows, from row `first_row` and column `first_col`, to rows of kPitch bytes,
// of which kPanelRows make panels (SmemTile).
// Rows at or past `rows`, and columns past `cols`, become zeros. `present`: how many of the kRows are wanted at all.
template <int kRows, int kChunks, int kPitch, int kThreads, LoadForm kForm = LoadForm::kAlone, int kPanelRows = 0,
          class T>
__device__ __forceinline__ void load_rows(uint32_t tile, const GlobalRows<T>& shared_from, int first_row, int first_col,
                                          int present = kRows) {
  using Tile = SmemTile<uint8_t, kPitch, kPanelRows>;
  constexpr int kPerChunk = kChunkBytes / static_cast<int>(sizeof(T));
  constexpr int kStep = kThreads / kChunks;  // rows a pass; where the division has a rest, some threads stay idle
  // NOTE: a copy, or each cp.async below would read it again, which is wanted where registers are scarce.
  constexpr bool kScarce = kForm == LoadForm::kScarce;
  const std::conditional_t<kScarce, const GlobalRows<T>&, const GlobalRows<T>> from = shared_from;
  const unsigned thread = no_hoist(threadIdx.x);
  const int rows = from.rows - first_row < present ? from.rows - first_row : present;
  const int cols = from.cols - first_col;
  const T* source = from.data + first_row * from.row_stride + first_col * from.col_stride;
  if (from.vectors) {
    const int row = static_cast<int>(thread / kChunks), chunk = static_cast<int>(thread % kChunks);
    const bool idle = kThreads % kChunks != 0 && row >= kStep;
    const T* address = source + row * from.row_stride + chunk * kPerChunk;
    const int64_t step = kStep * from.row_stride;
    if (kForm == LoadForm::kAlone && rows == kRows && cols >= kChunks * kPerChunk) {
#pragma unroll
      for (int i = 0; i < kRows; i += kStep) {
        if (!idle && (kRows % kStep == 0 || row + i < kRows)) {
          cp_async_16(tile + Tile::offset(row + i, chunk * kChunkBytes), address);
        }
        address += step;
      }
      return;
    }
    int bytes = (cols - chunk * kPerChunk) * static_cast<int>(sizeof(T));
    bytes = bytes < 0 ? 0 : (bytes > kChunkBytes ? kChunkBytes : bytes);
#pragma unroll 1
    for (int i = row; i < present && !idle; i += kStep) {
      const bool inside = i < rows && bytes > 0;
      cp_async_16(tile + Tile::offset(i, chunk * kChunkBytes), inside ? address : from.data, inside ? bytes : 0);
      address += step;
    }
    return;
  }
#pragma unroll 1
  for (int index = threadIdx.x; index < present * kChunks; index += kThreads) {
    const int row = index / kChunks, chunk = index % kChunks;
    const T* address = source + row * from.row_stride + chunk * kPerChunk * from.col_stride;
    const uint32_t to = tile + Tile::offset(row, chunk * kChunkBytes);
    constexpr int kWords = kScarce ? 1 : 4, kElements = kPerChunk / 4 * kWords;  // stored at once
#pragma unroll 1
    for (int first = 0; first < kPerChunk; first += kElements) {
      union {
        T element[kElements];
        uint32_t word[kWords];
      } value;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const bool inside = row < rows && chunk * kPerChunk + first + i < cols;
        value.element[i] = inside ? *address : T(0);
        address += from.col_stride;
      }
      if constexpr (kScarce) {
        store_shared(to + first * static_cast<int>(sizeof(T)), value.word[0]);
      } else {
        store_shared(to, value.word);
      }
    }
  }
}

// The same where all rows and columns exist and from.is_regular: what a tile's usual copies are, without a question.
// `thread`: threadIdx.x, hidden once for all copies of a tile.
// NOTE: with load_rows, which asks each matrix what it is, starting the copies of a tile was 17 to 25 % of the samples
// of these kernels: waiting for the answers from shared memory, and for instructions from behind the rare cases.
template <int kRows, int kChunks, int kPitch, int kThreads, int kPanelRows = 0, class T>
__device__ __forceinline__ void load_whole(uint32_t tile, const GlobalRows<T>& from, int first_row, int first_col,
                                           unsigned thread) {
  using Tile = SmemTile<uint8_t, kPitch, kPanelRows>;
  constexpr int kStep = kThreads / kChunks;
  const unsigned row = thread / kChunks, in_row = thread % kChunks * kChunkBytes;
  const char* const base = reinterpret_cast<const char*>(from.data) + first_col * static_cast<int>(sizeof(T)) + in_row;
  const int row_bytes = from.row_bytes;
  const uint32_t to = tile + Tile::offset(static_cast<int>(row), static_cast<int>(in_row));
  const bool idle = kThreads % kChunks != 0 && row >= kStep;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    if (idle || (kRows % kStep != 0 && static_cast<int>(row) + i >= kRows)) continue;
    // The swizzle repeats after eight rows.
    const uint32_t at = kStep % 8 == 0 ? to + i * Tile::kRowBytes
                                       : tile + Tile::offset(static_cast<int>(row) + i, static_cast<int>(in_row));
    cp_async_16(at, base + int64_t{first_row + static_cast<int>(row) + i} * row_bytes);
  }
}

template <int kRows, int kThreads, class T, int kCols, int kPanelRows>
__device__ __forceinline__ void load_whole(SmemTile<T, kCols, kPanelRows> tile, const GlobalRows<T>& from,
                                           int first_row, unsigned thread) {
  constexpr int kPitch = SmemTile<T, kCols>::kPitch;
  load_whole<kRows, kPitch / kChunkBytes, kPitch, kThreads, kPanelRows>(tile.base, from, first_row, 0, thread);
}

template <int kRows, int kThreads, LoadForm kForm = LoadForm::kAlone, class T, int kCols, int kPanelRows>
__device__ __forceinline__ void load_tile(SmemTile<T, kCols, kPanelRows> tile, const GlobalRows<T>& from,
                                          int first_row) {
  constexpr int kPitch = SmemTile<T, kCols>::kPitch;
  load_rows<kRows, kPitch / kChunkBytes, kPitch, kThreads, kForm, kPanelRows>(tile.base, from, first_row, 0);
}

// Float with few columns: products of numbers split as x = hi + lo + rest lack lo lo, hi rest and rest hi, up to 2^-21
// of a product, which eager rounds to 2^-24; in a sum of many columns that is lost. Up to kExactColumns the padding of
// the tiles, which is zeros, has room for these as more columns, of no cost to the product:
//
//   Q, dO   x x rest x         K, V   hi lo x rest         kExactColumns each
//
// dQ, which sums over rows of K, then has dS hi and dS lo side by side, whose sum lacks less than dS x would. What
// products along rows make of the other columns is never stored. The caller puts a __syncthreads before and after; to
// do it again changes nothing.
constexpr int kExactColumns = 8;

template <class Frag, int kHeadDim>
constexpr bool kMayBeExact = kHeadDim <= 128 && Frag::kSplit;  // wider values, which few have, would spill
template <class Frag, int kHeadDim>
constexpr bool kMayHaveExactDp = kHeadDim <= 64 && Frag::kSplit;  // as would these on 8.0

__device__ __forceinline__ bool has_exact_scores(const Problem& problem) { return problem.head_dim <= kExactColumns; }
__device__ __forceinline__ bool has_exact_dp(const Problem& problem) { return problem.head_dim_v <= kExactColumns; }

template <class Frag, bool kQueries, int kRows, int kThreads, int kCols>
__device__ __forceinline__ void add_exact_columns(SmemTile<float, kCols> tile) {
  static_assert(kCols >= 4 * kExactColumns);
#pragma unroll 1
  for (int i = no_hoist(threadIdx.x); i < kRows * kExactColumns; i += kThreads) {
    const int row = i / kExactColumns, col = i % kExactColumns;
    const auto place = [&](int part) {
      return tile.base + tile.offset(row, (part * kExactColumns + col) * static_cast<int>(sizeof(float)));
    };
    uint32_t x = load_shared(place(0));
    if (!kQueries) {  // hi, where it has been done
      const uint32_t kept = load_shared(place(2));
      x = kept != 0 ? kept : x;
    }
    typename Frag::template Words<1> words;
    words.set(0, x);
    const uint32_t lo = words.lo[0] & ~0x1FFFu;  // what the tensor core reads of it
    const uint32_t rest = __float_as_uint(__uint_as_float(words.lo[0]) - __uint_as_float(lo));
    if (!kQueries) store_shared(place(0), words.hi[0]);
    store_shared(place(1), kQueries ? x : lo);
    store_shared(place(2), kQueries ? rest : x);
    store_shared(place(3), kQueries ? x : rest);
  }
}

// Of one product, in kernels where it `may` be exact; with the __syncthreads after.
template <bool kMay, class Frag, int kBlockM, int kBlockN, int kThreads, class Tile>
__device__ __forceinline__ void make_product_exact(bool is_exact, Tile queries, Tile keys) {
  if constexpr (kMay) {
    if (!is_exact) return;
    add_exact_columns<Frag, true, kBlockM, kThreads>(queries);
    add_exact_columns<Frag, false, kBlockN, kThreads>(keys);
    __syncthreads();
  }
}

// Q and K, dO and V of a backward, as far as they have few columns; with the __syncthreads after.
template <class Frag, int kHeadDim, int kBlockM, int kBlockN, int kThreads, class Tile>
__device__ __forceinline__ void make_products_exact(const Problem& problem, Tile q, Tile k, Tile d_out, Tile v) {
  if constexpr (kMayBeExact<Frag, kHeadDim>) {
    const bool exact_dp = kMayHaveExactDp<Frag, kHeadDim> && has_exact_dp(problem);
    if (!has_exact_scores(problem) && !exact_dp) return;
    if (has_exact_scores(problem)) {
      add_exact_columns<Frag, true, kBlockM, kThreads>(q);
      add_exact_columns<Frag, false, kBlockN, kThreads>(k);
    }
    if (exact_dp) {
      add_exact_columns<Frag, true, kBlockM, kThreads>(d_out);
      add_exact_columns<Frag, false, kBlockN, kThreads>(v);
    }
    __syncthreads();
  }
}

// 16 * kM rows of accumulators, columns from `col`, as rows of T in global memory, through the warp's own part of
// `stage` (shared memory that no other warp reads any more), so that the stores are whole chunks.
template <class Frag, int kCols, int kM, int kN, class T = typename Frag::Storage>
__device__ __forceinline__ void store_accumulators(const float (&c)[kM][kN][4], SmemTile<T, kCols> stage, int stage_row,
                                                   int col, const GlobalRows<T>& to, int first_row) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      Frag::store_pair(stage, stage_row + m * 16, col + n * 8, lane, c[m][n][0], c[m][n][1]);
      Frag::store_pair(stage, stage_row + m * 16 + 8, col + n * 8, lane, c[m][n][2], c[m][n][3]);
    }
  }
  __syncwarp();
  constexpr int kPerChunk = kChunkBytes / static_cast<int>(sizeof(T));
  constexpr int kChunks = kN * 8 / kPerChunk, kPasses = 16 * kM * kChunks / 32;
  const bool vectors = to.vectors;
  // NOTE: a pass at a time, as below, it was 4,700 clocks at head dimension 256, as long as 50 keys.
  if (vectors && first_row + 16 * kM <= to.rows && col + kN * 8 <= to.cols) {
    constexpr int kBatch = kPasses % 4 == 0 ? 4 : 2;
    static_assert(kPasses % kBatch == 0);
    T* const target = to.row(first_row) + col;
    const int64_t row_stride = to.row_stride;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass += kBatch) {
      uint32_t words[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = (pass + i) * 32 + lane;
        load_shared(words[i], stage.base + swizzled<stage.kPitch>(stage_row + index / kChunks,
                                                                  (col + index % kChunks * kPerChunk) * sizeof(T)));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = (pass + i) * 32 + lane;
        *reinterpret_cast<uint4*>(target + index / kChunks * row_stride + index % kChunks * kPerChunk) = {
            words[i][0], words[i][1], words[i][2], words[i][3]};
      }
    }
    return;
  }
#pragma unroll 2
  for (int index = lane; index < 16 * kM * kChunks; index += 32) {
    const int row = index / kChunks, first_col = col + index % kChunks * kPerChunk;
    if (first_row + row >= to.rows) break;
    const uint32_t source = stage.base + swizzled<stage.kPitch>(stage_row + row, first_col * sizeof(T));
    if (vectors && first_col + kPerChunk <= to.cols) {
      uint32_t words[4];
      load_shared(words, source);
      *reinterpret_cast<uint4*>(to.row(first_row + row) + first_col) = {words[0], words[1], words[2], words[3]};
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kPerChunk && first_col + i < to.cols; ++i) {
      T* const target = to.row(first_row + row) + (first_col + i) * to.col_stride;
      if constexpr (sizeof(T) == 4) {
        *target = __uint_as_float(load_shared(source + 4 * i));
      } else {
        const uint16_t bits = static_cast<uint16_t>(load_shared(source + (i & ~1) * 2) >> i % 2 * 16);
        *target = reinterpret_cast<const T&>(bits);
      }
    }
  }
}

// The same straight from registers, for float where T is not: rare, and a pair a store.
template <int kM, int kN>
__device__ __forceinline__ void store_float(const float (&c)[kM][kN][4], int col, const GlobalRows<float>& to,
                                            int first_row) {
  const int first_col = col + 2 * lane_column();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + lane_row() + half * 8;
      if (row >= to.rows) continue;
      float* target = to.row(row) + first_col * to.col_stride;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (first_col + n * 8 < to.cols) target[0] = c[m][n][2 * half];
        if (first_col + n * 8 + 1 < to.cols) target[to.col_stride] = c[m][n][2 * half + 1];
        target += 8 * to.col_stride;
      }
    }
  }
}

// A gradient in float where T is not: its data and strides are of floats, whatever their type says.
template <class T>
__device__ __forceinline__ GlobalRows<float> in_floats(const GlobalRows<T>& rows) {
  return {reinterpret_cast<float*>(rows.data), rows.row_stride, rows.col_stride, rows.rows, rows.cols, 0, false, false};
}

}  // namespace flash_ext::sm80
