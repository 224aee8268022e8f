// The epilogue of a consumer warpgroup: results are staged in shared memory and stored by TMA.
#pragma once
#include "common/epilogue.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma_cache_hint.cuh"
#include "ptx/wgmma.cuh"

// The sums of a thread from `first` on: accumulators, or those that a functor loads for a step of the epilogue.
template <class Sum, int kCount> __device__ __forceinline__ const Sum* sums_from(const Sum (&sums)[kCount], int first) {
  return sums + first;
}
template <class Load> __device__ __forceinline__ auto sums_from(const Load& load, int first) -> decltype(load(first)) {
  return load(first);
}

// Stores 64 rows x kWarpgroupN results of one warpgroup, kStepColumns at a time, through one of kBuffers buffers.
// EpilogueStore derives from it and has `store(buffer, work, row, column)`, which stores a buffer whose results start
// at (row, column) of the work tile.
//
// A buffer holds one or more TMA boxes, one behind the other, each with some rows of kStagedColumns cells. kStageByRow:
// staged rows are rows of the result; otherwise they are columns. kThreadsStore: all threads store; otherwise one
// thread requests TMA stores.
template <class EpilogueStore, class Config, class Params, bool kStageByRow, bool kThreadsStore> struct TileEpilogue {
  using Out = typename Config::Out;

  const Params& p;
  u32 staging;
  int barrier;
  u32 next_buffer = 0;

  static constexpr int kOutBytes = Config::kOutBytes, kStep = Config::kStepColumns;
  static constexpr int kStagedColumns = kOutBytes == 1 ? 64 : 128 / kOutBytes, kPitchBytes = kStagedColumns * kOutBytes;
  static constexpr int kStagedRows = kStageByRow ? 64 : kStep, kBoxes = kStageByRow ? 1 : 64 / kStagedColumns;

  // Shared-memory address of a result relative to its buffer, under TMA's swizzle.
  static __device__ __forceinline__ u32 staged_at(int row, int column) {
    const int staged_row = kStageByRow ? row : column, across = kStageByRow ? column : row;
    const int in = across % kStagedColumns * kOutBytes;
    const int swizzled = kPitchBytes == 128 ? staged_row % 8 : staged_row / 2 % 4;
    return (across / kStagedColumns * kStagedRows + staged_row) * kPitchBytes + (in / 16 ^ swizzled) * 16 + in % 16;
  }
  static __device__ __forceinline__ bool is_storing_thread() { return threadIdx.x % 128 == 0; }

  // Writes the results at row0 and on if row0 < rows: the last row panel may be half full. bias_row is the index of
  // row0 in the bias. Columns go from `first` to `end`.
  template <class Sums, class WorkTile, class Row>
  __device__ __forceinline__ void write_tile(const Sums& sums, const WorkTile& work, u32 row0, u32 rows, Row bias_row,
                                             u32 first, u32 end) {
    if (row0 >= rows) return;
    float bias[2] = {0.0f, 0.0f};
    if (p.bias) {
      const i64 row = bias_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      bias[0] = bias_at<Config>(p.bias, row), bias[1] = bias_at<Config>(p.bias, row + 8);
    }
#pragma unroll
    for (int step = 0; step < Config::kWarpgroupN / kStep; ++step) {
      const u32 column = first + step * kStep;
      if (column >= end) break;
      const auto* const mine = sums_from(sums, step * kStep / 2);
      const u32 buffer = staging + next_buffer * Config::kBufferBytes;
      if (++next_buffer == Config::kBuffers) next_buffer = 0;
      if (!kThreadsStore && is_storing_thread())
        tma_store_wait_read<Config::kBuffers - 1>();  // the previous store from this buffer has been read
      named_barrier_sync(barrier, 128);
      static_cast<const EpilogueStore&>(*this).fill(buffer, mine, bias);
      if constexpr (!kThreadsStore) async_proxy_fence();
      named_barrier_sync(barrier, 128);
      if (kThreadsStore || is_storing_thread())
        static_cast<const EpilogueStore&>(*this).store(buffer, work, row0, column);
    }
  }

  template <class Sum> __device__ __forceinline__ float result(Sum sum, float bias) const {
    return activated<Config, FastMath>((float)sum, p.alpha, bias);
  }

  // Rounds the float sums of one step. An EpilogueStore with other sums has its own.
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
      } else if constexpr (kStageByRow) {
        stmatrix_x2(buffer + staged_at(row + lane % 16, 8 * j), Out::pair(v[0], v[1]), Out::pair(v[2], v[3]));
      } else {
        stmatrix_transposed_x2(buffer + staged_at(row + lane / 8 % 2 * 8, 8 * j + lane % 8), Out::pair(v[0], v[1]),
                               Out::pair(v[2], v[3]));
      }
    }
  }

  // Requests TMA stores of a buffer's boxes to (row, column) of a matrix. TMA clips what lies outside of the matrix.
  __device__ __forceinline__ void store_boxes(u32 buffer, u32 row, u32 column, u32 matrix) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const u32 from = buffer + box * kStagedRows * kPitchBytes;
      if constexpr (kStageByRow) tma_store(&p.out_map, column, row, matrix, from, Config::kOutPolicy);
      else tma_store(&p.out_map, row + box * kStagedColumns, column, matrix, from, Config::kOutPolicy);
    }
    tma_store_commit();
  }

  // Stores a buffer's results at (row, column) and on of C [matrices, rows, columns] one by one, by all threads of the
  // warpgroup: neighbours of a row by neighbouring threads.
  __device__ __forceinline__ void store_elements(u32 buffer, u32 row, u32 column, u32 matrix, u32 rows,
                                                 u32 columns) const {
    static_assert(kStageByRow && kThreadsStore, "rows of C are contiguous");
    using Bits = typename Out::Bits;
    Bits* const to = (Bits*)p.out + ((i64)matrix * rows + row) * columns + column;
    for (int at = threadIdx.x % 128; at < 64 * kStep; at += 128) {
      const int down = at / kStep, across = at % kStep;
      if (row + down < rows && column + across < columns)
        to[(i64)down * columns + across] = load_shared_as<Bits>(buffer + staged_at(down, across));
    }
  }
};
