// The role that writes results: through shared memory, where the copy engine takes them from.
#pragma once
#include "common/epilogue.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma_cache_hint.cuh"
#include "ptx/wgmma.cuh"

// 64 rows x kColumns results of one warpgroup, kStepColumns at a time, in one of kBuffers buffers. Writer derives from
// it and has `store(buffer, item, row, column)`: a buffer's are those of the item from (row, column) on.
//
// Of a buffer, boxes of the map of results lie one behind the other, each some lines of kWide cells. kRowLines: lines
// are rows, of a step's columns; else columns, of kWide rows. kByThreads: all threads store; else the copier, by the
// copy engine.
template <class Writer, class Config, class Params, bool kRowLines, bool kByThreads> struct TileWriter {
  using Out = typename Config::Out;

  const Params& p;
  u32 staging;
  int barrier;
  u32 turn = 0;  // the buffer of the next step

  static constexpr int kOutBytes = Config::kOutBytes, kStep = Config::kStepColumns;
  static constexpr int kWide = kOutBytes == 1 ? 64 : 128 / kOutBytes, kLineBytes = kWide * kOutBytes;
  static constexpr int kLines = kRowLines ? 64 : kStep, kBoxes = kRowLines ? 1 : 64 / kWide;

  // Where a buffer has a result, under the swizzle.
  static __device__ __forceinline__ u32 staged_at(int row, int column) {
    const int line = kRowLines ? row : column, across = kRowLines ? column : row;
    const int in = across % kWide * kOutBytes;
    const int turned = kLineBytes == 128 ? line % 8 : line / 2 % 4;
    return (across / kWide * kLines + line) * kLineBytes + (in / 16 ^ turned) * 16 + in % 16;
  }
  static __device__ __forceinline__ bool is_copier() { return threadIdx.x % 128 == 0; }

  // Rows from row0 on, if it is below `rows`: the last strip may be half of one. bias_row: row0's, of the bias. Columns
  // from `first` up to `end`.
  template <class Sums, class Item, class Row>
  __device__ __forceinline__ void write_tile(const Sums& sums, const Item& item, u32 row0, u32 rows, Row bias_row,
                                             u32 first, u32 end) {
    if (row0 >= rows) return;
    float bias[2] = {0.0f, 0.0f};
    if (p.bias) {
      const i64 row = bias_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      bias[0] = bias_at<Config>(p.bias, row), bias[1] = bias_at<Config>(p.bias, row + 8);
    }
#pragma unroll
    for (int step = 0; step < Config::kColumns / kStep; ++step) {
      const u32 column = first + step * kStep;
      if (column >= end) break;
      const u32 buffer = staging + turn * Config::kBufferBytes;
      if (++turn == Config::kBuffers) turn = 0;
      if (!kByThreads && is_copier()) tma_store_wait_read<Config::kBuffers - 1>();  // what this buffer held
      named_barrier_sync(barrier, 128);
      static_cast<const Writer&>(*this).fill(buffer, sums + step * kStep / 2, bias);
      if constexpr (!kByThreads) async_proxy_fence();
      named_barrier_sync(barrier, 128);
      if (kByThreads || is_copier()) static_cast<const Writer&>(*this).store(buffer, item, row0, column);
    }
  }

  template <class Sum> __device__ __forceinline__ float result(Sum sum, float bias) const {
    return activated<Config, FastMath>((float)sum, p.alpha, bias);
  }

  // A step's float sums, rounded. A Writer of others has its own.
  template <class Sum> __device__ __forceinline__ void fill(u32 buffer, const Sum* sums, const float (&bias)[2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = result(sums[4 * j + i], bias[i / 2]);
      if constexpr (kOutBytes != 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 to = buffer + staged_at(row + g + i / 2 * 8, 8 * j + 2 * t + i % 2);
          store_shared(to, Out::from_float(canonical_nan(v[i])));
        }
      } else if constexpr (kRowLines) {
        stmatrix_x2(buffer + staged_at(row + lane % 16, 8 * j), Out::pair(v[0], v[1]), Out::pair(v[2], v[3]));
      } else {
        stmatrix_transposed_x2(buffer + staged_at(row + lane / 8 % 2 * 8, 8 * j + lane % 8), Out::pair(v[0], v[1]),
                               Out::pair(v[2], v[3]));
      }
    }
  }

  // By the copier: a buffer's boxes to results from (row, column) of a matrix on. What lies outside isn't copied.
  __device__ __forceinline__ void copy_out(u32 buffer, u32 row, u32 column, u32 matrix) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const u32 from = buffer + box * kLines * kLineBytes;
      if constexpr (kRowLines) tma_store(&p.out_map, column, row, matrix, from, Config::kOutPolicy);
      else tma_store(&p.out_map, row + box * kWide, column, matrix, from, Config::kOutPolicy);
    }
    tma_store_commit();
  }
};
