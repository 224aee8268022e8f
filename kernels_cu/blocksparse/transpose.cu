// Transposes matrices [count][rows][columns] of 1- or 2-byte elements, one behind the other, for a kernel that reads
// them the other way.
//
//   role     who             what
//   turn     256 threads     a tile of 128 bytes of rows x 64 columns: 16 bytes of a row at a time in, their cells into
//                            shared memory where they belong, 16 bytes of a column at a time out
//
//   no barriers but __syncthreads; one tile of shared memory; few registers
//
//   thread   | load rows | store their cells | meet | load columns | store them
#include "blocksparse/params/transpose.cuh"
#include "common/types.cuh"

template <int kBytes> struct Unsigned {
  using Type = u8;
};
template <> struct Unsigned<2> {
  using Type = u16;
};

// Everything that is compiled in.
struct Config {
  static constexpr int kBytes = S24_BYTES;  // of an element
  static constexpr int kThreads = 256, kCells = 16 / kBytes;
  static constexpr int kRows = 128 / kBytes, kColumns = 64;
};
using Cell = Unsigned<Config::kBytes>::Type;

union Cells {
  uint4 whole;
  Cell cells[Config::kCells];
};

// Where column c of the tile has its cells from row r on, a multiple of kCells: 16 bytes that no neighbour's conflict
// with.
__device__ __forceinline__ int place_of(int c, int r) {
  return c * Config::kRows + (r / Config::kCells ^ c / Config::kCells) % 8 * Config::kCells;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) turn(const __grid_constant__ TransposeParams p) {
  __shared__ __align__(16) Cell tile[Config::kColumns * Config::kRows];
  constexpr int kCells = Config::kCells, kAcross = Config::kColumns / kCells, kDown = Config::kRows / kCells;
  const u32 tiles = p.row_tiles * p.column_tiles, matrix = blockIdx.x / tiles, in = blockIdx.x % tiles;
  const i64 row0 = (i64)(in / p.column_tiles) * Config::kRows, column0 = (i64)(in % p.column_tiles) * Config::kColumns;
  const Cell* const from = (const Cell*)p.matrices + matrix * (p.rows * p.columns);
  Cell* const to = (Cell*)p.out + matrix * (p.rows * p.columns);
  Cells read[Config::kRows * kAcross / Config::kThreads];
#pragma unroll
  for (int i = 0; i < Config::kRows * kAcross / Config::kThreads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / kAcross, column = u % kAcross * kCells;
    const i64 inside = row0 + row < p.rows ? p.columns - column0 - column : 0;
    const Cell* const at = from + (row0 + row) * p.columns + column0 + column;
    if (p.rows_aligned && inside >= kCells) {
      read[i].whole = *(const uint4*)at;
    } else {
#pragma unroll
      for (int j = 0; j < kCells; ++j) read[i].cells[j] = j < inside ? at[j] : (Cell)0;
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kRows * kAcross / Config::kThreads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, row = u / kAcross, column = u % kAcross * kCells;
#pragma unroll
    for (int j = 0; j < kCells; ++j) tile[place_of(column + j, row) + row % kCells] = read[i].cells[j];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Config::kColumns * kDown / Config::kThreads; ++i) {
    const int u = threadIdx.x + i * Config::kThreads, column = u / kDown, row = u % kDown * kCells;
    const i64 inside = column0 + column < p.columns ? p.rows - row0 - row : 0;
    Cell* const at = to + (column0 + column) * p.rows + row0 + row;
    Cells found;
    found.whole = *(const uint4*)(tile + place_of(column, row));
    if (p.columns_aligned && inside >= kCells) {
      *(uint4*)at = found.whole;
    } else {
#pragma unroll
      for (int j = 0; j < kCells; ++j)
        if (j < inside) at[j] = found.cells[j];
    }
  }
}
