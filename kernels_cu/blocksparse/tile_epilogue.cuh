// The epilogue of a consumer warpgroup: results are staged in shared memory and stored by TMA, or by threads.
#pragma once
#include "blocksparse/unaligned_rows.cuh"
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

// Whether the sums are accumulators.
template <class Sums> constexpr bool kAreHeld = false;
template <class Sum, int kCount> constexpr bool kAreHeld<Sum[kCount]> = true;

// The index of the bias that a thread loads for a row, if biases of the matrix end at `end`. Tiles have 64 rows, so
// those of small blocks may have rows past the end, and behind the last bias there may be no memory.
template <int kBlock> __device__ __forceinline__ constexpr i64 bias_index(i64 row, i64 end) {
  return kBlock >= 64 || row < end ? row : end - 1;
}

// Who stores staged results: one thread that requests TMA stores, all threads of the warpgroup together, or each warp
// its own rows, which begin anywhere.
enum class StoredBy { Tma, Threads, Warps };

// Stores 64 rows x kWarpgroupN results of one warpgroup, kStepColumns at a time, through one of kBuffers buffers.
// EpilogueStore derives from it and has `store(buffer, work, row, column)`, which stores a buffer whose results start
// at (row, column) of the work tile. With StoredBy::Warps it needs none.
//
// A buffer holds one or more TMA boxes, one behind the other, each with some rows of kStagedColumns cells. kStageByRow:
// staged rows are rows of the result; otherwise they are columns.
template <class EpilogueStore, class Config, class Params, bool kStageByRow, StoredBy kStoredBy> struct TileEpilogue {
  using Out = typename Config::Out;

  const Params& p;
  u32 staging;
  int barrier;
  u32 next_buffer = 0;

  static constexpr int kOutBytes = Config::kOutBytes, kStep = Config::kStepColumns;
  static constexpr int kStagedColumns = kOutBytes == 1 ? 64 : 128 / kOutBytes, kPitchBytes = kStagedColumns * kOutBytes;
  static constexpr int kStagedRows = kStageByRow ? 64 : kStep, kBoxes = kStageByRow ? 1 : 64 / kStagedColumns;
  static constexpr bool kWarpsStore = kStoredBy == StoredBy::Warps;
  using Rows = UnalignedRows<kOutBytes, kStep * kOutBytes>;
  // Whether the epilogue needs few registers.
  static constexpr bool kIsShort = Config::kEpilogue == EpilogueKind::IDENTITY ||
                                   Config::kEpilogue == EpilogueKind::BIAS ||
                                   Config::kEpilogue == EpilogueKind::BIAS_RELU;
  static_assert(!kWarpsStore || (kStageByRow && 4 * Rows::kWarpBytes <= Config::kBuffers * Config::kBufferBytes),
                "rows of C are contiguous, and the warps' parts take the place of the buffers");

  // Shared-memory address of a result relative to its buffer, under TMA's swizzle.
  static __device__ __forceinline__ u32 staged_at(int row, int column) {
    if constexpr (kWarpsStore) return Rows::staged_at(row, column);
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
    if (row0 + (kWarpsStore ? warp_row() : 0) >= rows) return;
    float bias[2] = {0.0f, 0.0f};
    if (p.bias) {
      const i64 row = bias_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      const i64 bias_end = (i64)bias_row + rows - row0;
      bias[0] = bias_at<Config>(p.bias, bias_index<Config::kBlock>(row, bias_end));
      bias[1] = bias_at<Config>(p.bias, bias_index<Config::kBlock>(row + 8, bias_end));
    }
    if constexpr (kWarpsStore) {
      write_rows(sums, work, bias, row0, rows, first, end);
    } else {
#pragma unroll
      for (int step = 0; step < Config::kWarpgroupN / kStep; ++step) {
        const u32 column = first + step * kStep;
        if (column >= end) break;
        const auto* const mine = sums_from(sums, step * kStep / 2);
        const u32 buffer = staging + next_buffer * Config::kBufferBytes;
        if (++next_buffer == Config::kBuffers) next_buffer = 0;
        if (kStoredBy == StoredBy::Tma && is_storing_thread())
          tma_store_wait_read<Config::kBuffers - 1>();  // the previous store from this buffer has been read
        named_barrier_sync(barrier, 128);
        static_cast<const EpilogueStore&>(*this).fill(buffer, mine, bias);
        if constexpr (kStoredBy == StoredBy::Tma) async_proxy_fence();
        named_barrier_sync(barrier, 128);
        if (kStoredBy != StoredBy::Tma || is_storing_thread())
          static_cast<const EpilogueStore&>(*this).store(buffer, work, row0, column);
      }
    }
  }

  // First row of this warp among those of its warpgroup.
  static __device__ __forceinline__ u32 warp_row() { return threadIdx.x % 128 / 32 * Rows::kWarpRows; }

  // Writes this warp's rows of C [matrices, rows, columns], from column `first` on.
  template <class Sums, class WorkTile>
  __device__ __forceinline__ void write_rows(const Sums& sums, const WorkTile& work, const float (&bias)[2], u32 row0,
                                             u32 rows, u32 first, u32 columns) const {
    if (first >= columns) return;
    const i64 row = (i64)work.matrix(p) * rows + row0 + warp_row(), pitch = (i64)columns * kOutBytes;
    u8* to = (u8*)p.out + row * pitch + (i64)first * kOutBytes;
#pragma unroll
    for (int step = 0; step < Config::kWarpgroupN / kStep; ++step) {
      const int left = (int)(columns - first) - step * kStep;
      if (left <= 0) break;
      const bool last = step + 1 == Config::kWarpgroupN / kStep || left <= kStep;
      // The compiler keeps the places of pieces for all steps if registers are left, and otherwise recomputes them.
      if constexpr (!kIsShort || !kAreHeld<Sums>) asm volatile("" : "+l"(to));
      const Rows mine(to, pitch, staging + warp_row() * Rows::kPitch);
      u32 rest[4];
      if (step > 0) mine.load_rest(rest);
      __syncwarp();  // all lanes have read the step before
      if (step > 0) mine.store_rest(rest);
      static_cast<const EpilogueStore&>(*this).fill(staging, sums_from(sums, step * kStep / 2), bias);
      __syncwarp();
      mine.template store<typename Out::Bits>(step * kStep * kOutBytes, last, min(left, kStep) * kOutBytes);
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
};
