// Transposes matrices [batch][rows][columns] of 1- or 2-byte elements: a pre-pass for kernels that need an operand in
// its other major order. Memory bound.
//
// role       threads    work
// transpose  256        a tile of 128 bytes of rows x 64 columns: rows in, through shared memory, columns out
//
// barriers   one __syncthreads, between in and out
// registers  what a thread loads before it stores: 8 words
//
// thread     | load 16 bytes of a row, or single elements | store to shared memory | sync | load 16 bytes of a column |
//            | store |
#include "common/params/transpose.cuh"
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
  static constexpr int kThreads = 256, kVector = 16 / kBytes, kWord = 4 / kBytes;
  static constexpr int kRows = 128 / kBytes, kColumns = 64;
};
using Cell = Unsigned<Config::kBytes>::Type;

union Vector {
  uint4 whole;
  Cell cells[Config::kVector];
};

// Position in shared memory of rows `row` to row + kVector - 1 of a tile's column; `row` is a multiple of kVector. The
// swizzle spreads both the columns of one row and the vectors of one column over the banks.
__device__ __forceinline__ int vector_at(int column, int row) {
  return column * Config::kRows + (row / Config::kVector ^ column / Config::kVector ^ column) % 8 * Config::kVector;
}

// The tile of a CTA.
struct Tile {
  i64 row0, column0;
  const Cell* from;
  Cell* to;

  __device__ __forceinline__ explicit Tile(const TransposeParams& p) {
    const u32 tiles = p.row_tiles * p.column_tiles, matrix = blockIdx.x / tiles, in = blockIdx.x % tiles;
    row0 = (i64)(in / p.column_tiles) * Config::kRows, column0 = (i64)(in % p.column_tiles) * Config::kColumns;
    from = (const Cell*)p.matrices + matrix * (p.rows * p.row_stride);
    to = (Cell*)p.out + matrix * (p.rows * p.columns);
  }
};

// Loads 16 bytes of a row at a time, for rows that begin at multiples of 16 bytes.
__device__ __forceinline__ void load_vectors(const TransposeParams& p, const Tile& t, Cell* shared) {
  constexpr int kVector = Config::kVector, kAcross = Config::kColumns / kVector;
  constexpr int kLoads = Config::kRows * kAcross / Config::kThreads;
  Vector read[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / kAcross, column = u % kAcross * kVector;
    const i64 inside = t.row0 + row < p.rows ? p.columns - t.column0 - column : 0;
    const Cell* const at = t.from + (t.row0 + row) * p.row_stride + t.column0 + column;
    if (inside >= kVector) {
      read[i].whole = *(const uint4*)at;
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) read[i].cells[j] = j < inside ? at[j] : (Cell)0;
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / kAcross, column = u % kAcross * kVector;
#pragma unroll
    for (int j = 0; j < kVector; ++j) shared[vector_at(column + j, row) + row % kVector] = read[i].cells[j];
  }
}

// Loads single elements, for rows that begin anywhere: a warp reads neighbours of one row, and a thread gathers a
// 32-bit word of a column.
__device__ __forceinline__ void load_elements(const TransposeParams& p, const Tile& t, Cell* shared) {
  constexpr int kWord = Config::kWord, kWords = Config::kRows / kWord * Config::kColumns / Config::kThreads;
  u32 words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / Config::kColumns * kWord, column = u % Config::kColumns;
    const Cell* const at = t.from + (t.row0 + row) * p.row_stride + t.column0 + column;
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < kWord; ++j)
      if (t.column0 + column < p.columns && t.row0 + row + j < p.rows)
        words[i] |= (u32)at[j * p.row_stride] << 8 * Config::kBytes * j;
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / Config::kColumns * kWord, column = u % Config::kColumns;
    *(u32*)(shared + vector_at(column, row) + row % Config::kVector) = words[i];
  }
}

__device__ __forceinline__ void store_columns(const TransposeParams& p, const Tile& t, const Cell* shared) {
  constexpr int kVector = Config::kVector, kDown = Config::kRows / kVector;
#pragma unroll
  for (int i = 0; i < Config::kColumns * kDown / Config::kThreads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, column = u / kDown, row = u % kDown * kVector;
    const i64 inside = t.column0 + column < p.columns ? p.rows - t.row0 - row : 0;
    Cell* const at = t.to + (t.column0 + column) * p.rows + t.row0 + row;
    Vector found;
    found.whole = *(const uint4*)(shared + vector_at(column, row));
    if (p.columns_aligned && inside >= kVector) {
      *(uint4*)at = found.whole;
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (j < inside) at[j] = found.cells[j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) transpose(const __grid_constant__ TransposeParams p) {
  __shared__ __align__(16) Cell shared[Config::kColumns * Config::kRows];
  // The next kernel may begin once everything before this pre-pass is done. It waits for the transposes itself, and may
  // read its other operands before that.
  grid_dependency_wait();
  launch_dependent_grids();
  const Tile tile(p);
  if (p.rows_aligned) load_vectors(p, tile, shared);
  else load_elements(p, tile, shared);
  __syncthreads();
  store_columns(p, tile, shared);
}
