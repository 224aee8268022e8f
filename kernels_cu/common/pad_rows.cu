// Copies rows of 1- or 2-byte elements to rows that begin at multiples of 16 bytes: a pre-pass for kernels that load an
// operand by TMA, which can address no other rows. Memory bound.
//
// role      threads    work
// pad_rows  256        a grid-stride loop over 16 bytes of the padded rows
//
// barriers   none
// registers  16 bytes in flight
//
// thread    | load single elements of a row, zeros past its end | store 16 bytes | next ..
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

extern "C" __global__ void __launch_bounds__(Config::kThreads) pad_rows(const __grid_constant__ PadRowsParams p) {
  // The next kernel may begin once everything before this pre-pass is done. It waits for the copies itself.
  grid_dependency_wait();
  launch_dependent_grids();
  const i64 vectors = p.rows * p.row_vectors, step = (i64)gridDim.x * Config::kThreads;
  for (i64 i = (i64)blockIdx.x * Config::kThreads + threadIdx.x; i < vectors; i += step) {
    const i64 row = i / p.row_vectors, column = i % p.row_vectors * Config::kVector;
    const Cell* const from = (const Cell*)p.matrix + row * p.columns + column;
    const i64 inside = p.columns - column;
    Vector found;
#pragma unroll
    for (int j = 0; j < Config::kVector; ++j) found.cells[j] = j < inside ? from[j] : (Cell)0;
    ((uint4*)p.out)[i] = found.whole;
  }
}
