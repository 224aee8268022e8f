// What surrounds a dense library's product of a block-sparse matrix. All are memory bound.
//
//   role            who                what
//   inflate_blocks  256 threads        32 blocks of a line: their values, or zeros, as part of a dense matrix
//   finish          256 threads        C = epilogue(acc), element by element; a null acc stands for zeros
//   gather_blocks   256 threads        4 KB of the kept blocks of a dense C
//
//   no barriers; a few words of shared memory; few registers
//
//   thread   | load 16 bytes | store 16 bytes | next ..
#include "common/epilogue.cuh"

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kThreads = 256;
};

struct InflateBlocksParams {
  const int* kept;      // [lines][words]: bit c % 32 of word c / 32: whether the line keeps column c
  const int* pointers;  // [lines + 1]: where a line's blocks begin among the values
  const int* rows;      // [blocks]: line of each block
  const int* columns;   // [blocks]: its column
  const void* values;   // [Z, blocks, b, b]; of gather_blocks written
  void* dense;          // [Z, H, rows, columns of cells]; of gather_blocks read
  const float* acc;     // [Z, H, M, N], or null
  const void* bias;     // [H, M] or [H, N], or null
  void* out;            // like acc
  i64 lines, blocks;
  i64 line_cells;                           // of the dense matrix: cells of a row
  i64 items;                                // of inflate_blocks: Z * lines * words; of gather_blocks: Z * blocks
  i64 heads, rows_out, columns_out, total;  // H, M, N, and elements of all of C
  u32 words;
  u32 bias_of_rows;
};
static_assert(matches_host<InflateBlocksParams>(), "the host has another InflateBlocksParams");

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    inflate_blocks(const __grid_constant__ InflateBlocksParams p) {
  using Bits = Config::In::Bits;
  constexpr int kVector = 16 / sizeof(Bits), kPerBlock = Config::kBlock / kVector, kPerRow = 32 * kPerBlock;
  __shared__ int before;
  for (i64 item = blockIdx.x; item < p.items; item += gridDim.x) {
    const u32 word = item % p.words;
    const i64 line = item / p.words % p.lines, batch = item / p.words / p.lines;
    const int* kept = p.kept + line * p.words;
    if (threadIdx.x == 0) before = p.pointers[line];
    __syncthreads();
    for (u32 w = threadIdx.x; w < word; w += Config::kThreads)
      if (kept[w]) atomicAdd(&before, __popc(kept[w]));  // of integers: in any order
    __syncthreads();
    const u32 bits = kept[word];
    const i64 first = batch * p.blocks + before, column0 = (i64)word * 32 * Config::kBlock;
    const Bits* values = (const Bits*)p.values;
    Bits* dense = (Bits*)p.dense + ((batch * p.lines + line) * Config::kBlock) * p.line_cells + column0;
    for (int i = threadIdx.x; i < Config::kBlock * kPerRow; i += Config::kThreads) {
      const int row = i / kPerRow, block = i % kPerRow / kPerBlock, at = i % kPerBlock * kVector;
      if (column0 + block * Config::kBlock >= p.line_cells) continue;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (bits >> block & 1) {
        const i64 place = first + __popc(bits & ((1u << block) - 1));
        v = *(const uint4*)(values + (place * Config::kBlock + row) * Config::kBlock + at);
      }
      *(uint4*)(dense + row * p.line_cells + block * Config::kBlock + at) = v;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) finish(const __grid_constant__ InflateBlocksParams p) {
  const i64 step = (i64)gridDim.x * Config::kThreads;
  for (i64 i = (i64)blockIdx.x * Config::kThreads + threadIdx.x; i < p.total; i += step) {
    float bias = 0.0f;
    if (p.bias) {
      const i64 matrix = i / (p.rows_out * p.columns_out), in = i % (p.rows_out * p.columns_out),
                head = matrix % p.heads;
      bias = bias_at<Config>(
          p.bias, p.bias_of_rows ? head * p.rows_out + in / p.columns_out : head * p.columns_out + in % p.columns_out);
    }
    const float acc = p.acc ? p.acc[i] : 0.0f;
    ((Config::Out::Bits*)p.out)[i] = Config::Out::from_float(epilogue<Config, FastMath>(acc, 1.0f, bias));
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    gather_blocks(const __grid_constant__ InflateBlocksParams p) {
  using Bits = Config::Out::Bits;
  constexpr int kVector = 16 / sizeof(Bits), kPerRow = Config::kBlock / kVector, kVectors = Config::kBlock * kPerRow;
  const i64 step = (i64)gridDim.x * Config::kThreads;
  for (i64 i = (i64)blockIdx.x * Config::kThreads + threadIdx.x; i < p.items * kVectors; i += step) {
    const i64 item = i / kVectors, place = item % p.blocks, batch = item / p.blocks;
    const int row = i % kVectors / kPerRow, at = i % kPerRow * kVector;
    const i64 from = ((batch * p.lines + p.rows[place]) * Config::kBlock + row) * p.line_cells +
                     (i64)p.columns[place] * Config::kBlock + at;
    ((uint4*)p.values)[i] = *(const uint4*)((const Bits*)p.dense + from);
  }
}
