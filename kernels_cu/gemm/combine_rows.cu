// Adds up the results of groups of tokens to rows of Y: each row is the sum of the places that an index names, times
// the router's weights, in the index's order. Memory bound.
//
//   role          threads    what it does
//   combine_rows  256        a grid-stride loop over 16 bytes of Y, with four places in flight
//
//   no barriers, no shared memory
//   registers     four vectors and their weights, the sums in float32
//
//   thread   | load up to 4 places | multiply, add in order | .. for the next 4 | round, store 16 bytes | next ..
#include "common/element.cuh"
#include "gemm/params/combine_rows.cuh"
#include "gemm/placed_tokens.cuh"
#include "ptx/async.cuh"

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr ElementKind kOut = (ElementKind)S24_OUT;
  static constexpr int kThreads = 256, kInFlight = 4;
  static constexpr int kVector = 16 / (int)sizeof(Element<kOut>::Bits);
};
using Out = Element<Config::kOut>;

union Vector {
  uint4 whole;
  Out::Bits cells[Config::kVector];
};

// The sums of one vector of a row of Y. Every product and every sum is rounded to float32.
__device__ __forceinline__ void add_places(const CombineRowsParams& p, i64 row, i64 column,
                                           float (&sums)[Config::kVector]) {
  const i64 first = row * p.top_k;
  for (u32 j = 0; j < p.top_k; j += Config::kInFlight) {
    Vector found[Config::kInFlight];
    bool placed[Config::kInFlight];
#pragma unroll
    for (int i = 0; i < Config::kInFlight; ++i) {
      const i64 place = j + i < p.top_k ? p.index[first + j + i] : -1;
      placed[i] = is_placed(p.group_tokens, p.groups, p.group_places, p.n, place);
      if (placed[i]) found[i].whole = *(const uint4*)((const Out::Bits*)p.results + place * p.result_stride + column);
    }
#pragma unroll
    for (int i = 0; i < Config::kInFlight; ++i) {
      if (!placed[i]) continue;
#pragma unroll
      for (int v = 0; v < Config::kVector; ++v) {
        const float value = Out::to_float(found[i].cells[v]);
        sums[v] = __fadd_rn(sums[v], p.weights ? __fmul_rn(p.weights[first + j + i], value) : value);
      }
    }
  }
}

// Writes a thread's vectors. Index is the type of their numbers, as in gather_rows.cu.
template <class Index> __device__ __forceinline__ void combine(const CombineRowsParams& p) {
  const Index vectors = p.y_rows * p.row_vectors, row_vectors = p.row_vectors, step = gridDim.x * Config::kThreads;
  const bool aligned = (((u64)p.y | (u64)p.y_stride * sizeof(Out::Bits)) & 15) == 0;
  for (Index i = (Index)blockIdx.x * Config::kThreads + threadIdx.x; i < vectors; i += step) {
    const Index row = i / row_vectors;
    const i64 column = (i64)(i - row * row_vectors) * Config::kVector, inside = p.columns - column;
    float sums[Config::kVector] = {};
    add_places(p, row, column, sums);
    Vector rounded;
#pragma unroll
    for (int v = 0; v < Config::kVector; ++v) rounded.cells[v] = Out::from_float(canonical_nan(sums[v]));
    Out::Bits* const to = (Out::Bits*)p.y + row * p.y_stride + column;
    if (aligned && inside >= Config::kVector) {
      *(uint4*)to = rounded.whole;
    } else {
#pragma unroll
      for (int v = 0; v < Config::kVector; ++v)
        if (v < inside) to[v] = rounded.cells[v];
    }
    if (vectors - i <= step) break;  // i + step may exceed the type
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    combine_rows(const __grid_constant__ CombineRowsParams p) {
  grid_dependency_wait();
  launch_dependent_grids();
  if (p.y_rows * p.row_vectors >> 32) combine<i64>(p);
  else combine<u32>(p);
}
