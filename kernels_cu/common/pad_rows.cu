// Copies rows of 1- or 2-byte elements to rows that begin at multiples of 16 bytes: a pre-pass for kernels that load an
// operand by TMA, which can address no other rows. Memory bound.
//
// role      threads    work
// pad_rows  256        a grid-stride loop over 16 bytes of the padded rows
//
// barriers   none
// registers  32 bytes in flight
//
// thread    | load the aligned 32 bytes round its elements, or near the end single ones | store 16 bytes | next ..
#include "common/params/pad_rows.cuh"
#include "ptx/async.cuh"

template <int kBytes> struct Unsigned {
  using Type = u8;
};
template <> struct Unsigned<2> {
  using Type = u16;
};

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr int kBytes = S24_BYTES;  // bytes of an element
  static constexpr int kThreads = 256, kVector = 16 / kBytes;
};
using Cell = Unsigned<Config::kBytes>::Type;

union Vector {
  uint4 whole;
  Cell cells[Config::kVector];
};

// Returns the 16 bytes that begin at byte `skew` of 32, which is less than 16.
__device__ __forceinline__ uint4 bytes_from(const uint4& first, const uint4& second, u32 skew) {
  u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int shift = 2; shift; shift /= 2)
#pragma unroll
    for (int i = 0; i < 8 - shift; ++i) words[i] = skew & 4 * shift ? words[i + shift] : words[i];
  const u32 bits = skew % 4 * 8;
  return make_uint4(__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                    __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
}

// Returns the first `count` of 16 bytes, and zeros behind them.
__device__ __forceinline__ uint4 first_bytes(const uint4& bytes, u32 count) {
  const auto first = [count](u32 word, u32 at) {
    return count >= at + 4 ? word : count <= at ? 0 : word & ((1u << 8 * (count - at)) - 1);
  };
  return make_uint4(first(bytes.x, 0), first(bytes.y, 4), first(bytes.z, 8), first(bytes.w, 12));
}

// Returns how many bytes of the 16 that begin at a column lie in their row: none if it ends before them.
__device__ __forceinline__ constexpr u32 bytes_inside(i64 columns, i64 column) {
  return column >= columns ? 0 : columns - column < Config::kVector ? (u32)(columns - column) * Config::kBytes : 16;
}

// Copies a thread's vectors. Index is the type of their numbers: dividing 64-bit integers takes longer than copying.
template <class Index> __device__ __forceinline__ void copy(const PadRowsParams& p) {
  const Index vectors = p.rows * p.row_vectors, row_vectors = p.row_vectors, step = gridDim.x * Config::kThreads;
  const i64 cells = p.rows * p.columns;
  const Cell* const matrix = (const Cell*)p.matrix;  // begins at a multiple of 16 bytes
  for (Index i = (Index)blockIdx.x * Config::kThreads + threadIdx.x; i < vectors; i += step) {
    const Index row = i / row_vectors;
    const i64 column = (i64)(i - row * row_vectors) * Config::kVector;
    const u32 inside = bytes_inside(p.columns, column);
    const i64 at = (i64)row * p.columns + column, aligned = at / Config::kVector * Config::kVector;
    Vector found;
    if (aligned + 2 * Config::kVector <= cells) {
      const uint4* const from = (const uint4*)(matrix + aligned);
      found.whole = bytes_from(from[0], from[1], (u32)(at - aligned) * Config::kBytes);
      if (inside < 16) found.whole = first_bytes(found.whole, inside);
    } else {
#pragma unroll
      for (int j = 0; j < Config::kVector; ++j) found.cells[j] = j * Config::kBytes < inside ? matrix[at + j] : (Cell)0;
    }
    ((uint4*)p.out)[i] = found.whole;
    if (vectors - i <= step) break;  // i + step may exceed the type
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) pad_rows(const __grid_constant__ PadRowsParams p) {
  // The next kernel may begin once everything before this pre-pass is done. It waits for the copies itself.
  grid_dependency_wait();
  launch_dependent_grids();
  if (p.rows * p.row_vectors >> 32) copy<i64>(p);
  else copy<u32>(p);
}
