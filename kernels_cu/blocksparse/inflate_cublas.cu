// The kernels around cuBLAS's dense product of a block-sparse matrix. All are memory bound.
//
//   role            threads    work of a CTA
//   inflate_blocks  256        16 rows of 32 blocks of a block row: writes their values, or zeros, to a dense matrix
//   finish          256        C = epilogue(product), 4 KB of C; its rows need not be those of the product
//   gather_blocks   256        copies 4 KB of the kept blocks out of a dense C
//
//   barriers   none
//   registers  few
//
//   thread   | load 16 bytes | store 16 bytes | next ..
#include "blocksparse/params/inflate_cublas.cuh"
#include "common/epilogue.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kThreads = 256;
  static constexpr int kRows = 16;  // rows of a block that a work item of inflate_blocks has
  // The product that finish reads. Without an epilogue the library has rounded it.
  using Product = Element<kEpilogue == EpilogueKind::IDENTITY ? kOut : ElementKind::F32>;
};

union Results {
  uint4 whole;
  Config::Out::Bits cells[16 / sizeof(Config::Out::Bits)];
};

// Writes the dense cells of kRows rows of 32 blocks of a block row. Every warp finds the first of these blocks by
// itself, so no warp waits for another, and each thread has several loads in flight.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    inflate_blocks(const __grid_constant__ InflateBlocksParams p) {
  using Bits = Config::In::Bits;
  constexpr u32 kVector = 16 / sizeof(Bits), kPerBlock = Config::kBlock / kVector, kPerRow = 32 * kPerBlock;
  constexpr u32 kRowGroups = Config::kBlock / Config::kRows;  // work items of a block row and word
  const u32 lane = threadIdx.x % 32, block_rows = (u32)p.block_rows;
  for (u32 work = blockIdx.x; work < (u32)p.work_items; work += gridDim.x) {
    const u32 row_group = work % kRowGroups, item = work / kRowGroups, word = item % p.bit_words,
              line = item / p.bit_words;
    const u32 block_row = line % block_rows, batch = line / block_rows;
    const int* kept = p.kept + (i64)block_row * p.bit_words;
    u32 before = 0;
    for (u32 w = lane; w < word; w += 32) before += __popc(kept[w]);
    const u32 bits = kept[word];
    const i64 first = batch * p.blocks + p.pointers[block_row] + __reduce_add_sync(~0u, before);
    const i64 column0 = (i64)word * 32 * Config::kBlock;
    const u32 row0 = row_group * Config::kRows, blocks = min(32u, (u32)((p.row_cells - column0) / Config::kBlock));
    const Bits* values = (const Bits*)p.values + row0 * Config::kBlock;
    Bits* dense = (Bits*)p.dense + ((i64)line * Config::kBlock + row0) * p.row_cells + column0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < Config::kRows * kPerRow; i += Config::kThreads) {
      const u32 row = i / kPerRow, block = i % kPerRow / kPerBlock, at = i % kPerBlock * kVector;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (bits >> block & 1) {
        const i64 place = first + __popc(bits & ((1u << block) - 1));
        v = *(const uint4*)(values + (place * Config::kBlock + row) * Config::kBlock + at);
      }
      if (block < blocks) *(uint4*)(dense + row * p.row_cells + block * Config::kBlock + at) = v;
    }
  }
}

// A thread stores 16 neighbouring bytes of C, wherever its rows begin, and finds their first row by one division.
extern "C" __global__ void __launch_bounds__(Config::kThreads) finish(const __grid_constant__ InflateBlocksParams p) {
  constexpr int kVector = 16 / sizeof(Config::Out::Bits);
  const i64 step = (i64)gridDim.x * Config::kThreads * kVector, bias_rows = p.heads * p.out_rows;
  const bool has_bias = Config::kEpilogue != EpilogueKind::IDENTITY && p.bias;
  for (i64 first = ((i64)blockIdx.x * Config::kThreads + threadIdx.x) * kVector; first < p.out_elements;
       first += step) {
    const i64 row = first / p.out_columns;
    const int inside = (int)min((i64)kVector, p.out_elements - first);
    u32 column = (u32)(first - row * p.out_columns);
    i64 at = row * p.product_columns + column, bias_row = row % bias_rows;
    // Only rows that share a bias end within 16 bytes: where each column has one, they are whole blocks.
    const i64 bias0 = p.bias_per_row ? 0 : bias_row / p.out_rows * p.out_columns;
    float sums[kVector] = {}, biases[kVector] = {};
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j < inside) {
        if (p.product) sums[j] = Config::Product::to_float(((const Config::Product::Bits*)p.product)[at]);
        if (has_bias) biases[j] = bias_at<Config>(p.bias, p.bias_per_row ? bias_row : bias0 + column);
      }
      ++column, ++at;
      if (column == (u32)p.out_columns) {
        column = 0, at += p.product_columns - p.out_columns;
        bias_row = bias_row + 1 == bias_rows ? 0 : bias_row + 1;
      }
    }
    Results found;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      found.cells[j] = Config::Out::from_float(epilogue<Config, FastMath>(sums[j], 1.0f, biases[j]));
    Config::Out::Bits* const out = (Config::Out::Bits*)p.out + first;
    if (inside == kVector) {
      *(uint4*)out = found.whole;
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (j < inside) out[j] = found.cells[j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    gather_blocks(const __grid_constant__ InflateBlocksParams p) {
  using Bits = Config::Out::Bits;
  constexpr int kVector = 16 / sizeof(Bits), kPerRow = Config::kBlock / kVector, kVectors = Config::kBlock * kPerRow;
  const i64 step = (i64)gridDim.x * Config::kThreads;
  for (i64 i = (i64)blockIdx.x * Config::kThreads + threadIdx.x; i < p.work_items * kVectors; i += step) {
    const i64 work = i / kVectors, place = work % p.blocks, batch = work / p.blocks;
    const int row = i % kVectors / kPerRow, at = i % kPerRow * kVector;
    const i64 from = ((batch * p.block_rows + p.rows[place]) * Config::kBlock + row) * p.row_cells +
                     (i64)p.columns[place] * Config::kBlock + at;
    ((uint4*)p.values)[i] = *(const uint4*)((const Bits*)p.dense + from);
  }
}
