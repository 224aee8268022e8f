// Copies the rows of X that an index names to the places of groups of tokens, and the rows' scales with them: a
// pre-pass for products of groups. Memory bound.
//
//   role         threads    what it does
//   gather_rows  256        finds the places that offsets can reach, then copies 16 bytes of a row per step
//
//   barriers     one __syncthreads for offsets, none for counts
//   registers    few
//
//   thread   | least and largest offset | load 16 bytes, or near an end single elements | store | next ..
#include "gemm/params/gather_rows.cuh"
#include "gemm/placed_tokens.cuh"
#include "gemm/token_groups.cuh"
#include "ptx/async.cuh"

template <int kBytes> struct Unsigned {
  using Type = u8;
};
template <> struct Unsigned<2> {
  using Type = u16;
};
template <> struct Unsigned<4> {
  using Type = u32;
};

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr int kBytes = S24_BYTES;  // bytes of an element
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kVector = 16 / kBytes;
};
using Cell = Unsigned<Config::kBytes>::Type;

union Vector {
  uint4 whole;
  Cell cells[Config::kVector];
};

// The places from the least offset to below the largest one: every group lies there, whatever the offsets are.
__device__ __forceinline__ TokenRange reached(const GatherRowsParams& p) {
  __shared__ int least[Config::kWarps], most[Config::kWarps];
  int low = 0x7fffffff, high = 0;
  for (u32 g = threadIdx.x; g <= p.groups; g += Config::kThreads) {
    low = min(low, p.group_tokens[g]);
    high = max(high, p.group_tokens[g]);
  }
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (threadIdx.x % 32 == 0) least[threadIdx.x / 32] = low, most[threadIdx.x / 32] = high;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Config::kWarps; ++warp) low = min(low, least[warp]), high = max(high, most[warp]);
  return {max(low, 0), min((i64)high, p.n)};
}

// Copies a thread's vectors. Index is the type of their numbers: dividing 64-bit integers takes longer than copying.
template <class Index> __device__ __forceinline__ void copy(const GatherRowsParams& p, TokenRange range) {
  const Index row_vectors = p.row_vectors, end = range.end * row_vectors, step = gridDim.x * Config::kThreads;
  const bool aligned = (((u64)p.x | (u64)p.x_stride * Config::kBytes) & 15) == 0;
  for (Index i = range.begin * row_vectors + (Index)blockIdx.x * Config::kThreads + threadIdx.x; i < end; i += step) {
    const Index place = i / row_vectors;
    if (is_counted(p.group_tokens, p.group_places, (u32)place)) {
      const i64 named = p.index[place], row = named < 0 ? 0 : min(named, p.x_rows - 1);
      const i64 column = (i64)(i - place * row_vectors) * Config::kVector, inside = p.columns - column;
      const Cell* const from = (const Cell*)p.x + row * p.x_stride + column;
      Vector found;
      if (aligned && inside >= Config::kVector) {
        found.whole = *(const uint4*)from;
      } else {
#pragma unroll
        for (int j = 0; j < Config::kVector; ++j) found.cells[j] = j < inside ? from[j] : (Cell)0;
      }
      ((uint4*)p.out)[i] = found.whole;
      if (p.scale_x && column == 0) p.scales_out[place] = p.scale_x[row];
    }
    if (end - i <= step) break;  // i + step may exceed the type
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) gather_rows(const __grid_constant__ GatherRowsParams p) {
  // The product may begin once everything before this pre-pass is done. It waits for the rows itself.
  grid_dependency_wait();
  launch_dependent_grids();
  const TokenRange range = p.group_places ? TokenRange{0, p.n} : reached(p);
  if (range.begin >= range.end) return;
  if (range.end * p.row_vectors + gridDim.x * Config::kThreads >> 32) copy<i64>(p, range);
  else copy<u32>(p, range);
}
