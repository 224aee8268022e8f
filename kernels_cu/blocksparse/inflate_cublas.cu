// The kernels around cuBLAS's dense product of a block-sparse matrix. All are memory bound.
//
//   role            threads    work of a CTA
//   inflate_blocks  256        16 rows of 32 blocks of a block row: writes their values, or zeros, to a dense matrix
//   finish          256        C = epilogue(acc), element by element; a null acc stands for zeros
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
};

// Writes the dense cells of kRows rows of 32 blocks of a block row. Every warp finds the first of these blocks by
// itself, so no warp waits for another, and each thread has several loads in flight.
extern "C" __global__ void __launch_bounds__(Config::kThreads)
    inflate_blocks(const __grid_constant__ InflateBlocksParams p) {
  using Bits = Config::In::Bits;
  constexpr u32 kVector = 16 / sizeof(Bits), kPerBlock = Config::kBlock / kVector, kPerRow = 32 * kPerBlock;
  constexpr u32 kParts = Config::kBlock / Config::kRows;  // work items of a block row and word
  const u32 lane = threadIdx.x % 32, block_rows = (u32)p.block_rows;
  for (u32 work = blockIdx.x; work < (u32)p.work_items; work += gridDim.x) {
    const u32 part = work % kParts, item = work / kParts, word = item % p.bit_words, line = item / p.bit_words;
    const u32 block_row = line % block_rows, batch = line / block_rows;
    const int* kept = p.kept + (i64)block_row * p.bit_words;
    u32 before = 0;
    for (u32 w = lane; w < word; w += 32) before += __popc(kept[w]);
    const u32 bits = kept[word];
    const i64 first = batch * p.blocks + p.pointers[block_row] + __reduce_add_sync(~0u, before);
    const i64 column0 = (i64)word * 32 * Config::kBlock;
    const u32 row0 = part * Config::kRows, blocks = min(32u, (u32)((p.row_cells - column0) / Config::kBlock));
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

extern "C" __global__ void __launch_bounds__(Config::kThreads) finish(const __grid_constant__ InflateBlocksParams p) {
  const i64 step = (i64)gridDim.x * Config::kThreads;
  for (i64 i = (i64)blockIdx.x * Config::kThreads + threadIdx.x; i < p.out_elements; i += step) {
    float bias = 0.0f;
    if (p.bias) {
      const i64 matrix = i / (p.out_rows * p.out_columns), in = i % (p.out_rows * p.out_columns),
                head = matrix % p.heads;
      bias = bias_at<Config>(
          p.bias, p.bias_per_row ? head * p.out_rows + in / p.out_columns : head * p.out_columns + in % p.out_columns);
    }
    const float acc = p.accumulators ? p.accumulators[i] : 0.0f;
    ((Config::Out::Bits*)p.out)[i] = Config::Out::from_float(epilogue<Config, FastMath>(acc, 1.0f, bias));
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
