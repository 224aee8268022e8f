// C = epilogue(alpha * op(S) @ X) for a block-sparse S in a defined order, without tensor cores. Each result has one
// accumulator that starts at +0. It gets one fma (for s8 an exact integer sum) for each product of its block row's kept
// blocks in increasing k; subnormals are preserved. The order is defined, so no choice of tiles changes a bit. dds is
// computed as C^T = op(S)^T @ op(A)^T. For sdd the sums run over all of k, and a tile's tokens are columns of
// neighbouring kept blocks.
//
// role       threads             work
// Mainloop   all threads         loads the next step's cells of S and X into registers, stores them to shared memory as
//            of a CTA            the type that is multiplied; kThreadRows x kThreadTokens fmas
//
// barriers   __syncthreads once a step; two stages of shared memory
// registers  the accumulators (at most 64), a step's loads, one column of S and X
//
// load     | step 1       | step 2       | ..        global -> registers, under the fmas
// fma      | step 0       | step 1       | ..        from one stage
// store    |        step 1|        step 2| ..        registers -> the other stage; then __syncthreads
#include "blocksparse/params/blocks_strict.cuh"
#include "common/epilogue.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK, kTileN = S24_TILE_N;  // tokens of a tile
  static constexpr bool kSampled = S24_SAMPLED;                  // sdd
  // Whether k is contiguous in op(S) (for sdd op(A)), and in X (for sdd op(B)); otherwise rows or tokens are.
  static constexpr bool kLeftAlongK = S24_LEFT_ALONG_K, kRightAlongK = S24_RIGHT_ALONG_K;
  static constexpr bool kRaw = S24_RAW;  // results are the integer sums themselves

  static constexpr bool kInteger = kElement == ElementKind::S8;
  static constexpr int kTileM = kBlock < 64 ? kBlock : 64, kRowTiles = kBlock / kTileM, kDepth = 16;
  static constexpr int kThreadRows = kTileM < 64 ? 4 : 8, kThreadTokens = kTileN / 16;
  static constexpr int kThreads = kTileM / kThreadRows * 16;
  static constexpr int kResident = kSampled ? 256 : 384;  // threads of an SM that have registers
};
using Out = Config::Out;
constexpr int kThreadRows = Config::kThreadRows, kThreadTokens = Config::kThreadTokens;

// The storage type of an element, and the type in which it is multiplied; the conversion is exact.
template <ElementKind kKind> struct Source : Element<kKind> {
  using Sum = float;
  static __device__ __forceinline__ float value(typename Element<kKind>::Bits b) { return Element<kKind>::to_float(b); }
};
template <> struct Source<ElementKind::S8> {
  using Bits = u8;
  using Sum = int;
  static __device__ __forceinline__ int value(u8 b) { return (signed char)b; }
};
template <> struct Source<ElementKind::FP8_E4M3> {
  using Bits = u8;
  using Sum = float;
  // The exponent and mantissa bits are those of a float16 that is 256 times smaller, except for NaN.
  static __device__ __forceinline__ float value(u8 b) {
    if ((b & 0x7f) == 0x7f) return __uint_as_float(0x7fffffff);
    return 256.0f * Element<ElementKind::F16>::to_float((u16)((b & 0x80) << 8 | (b & 0x7f) << 7));
  }
};
using In = Source<Config::kElement>;
using Sum = In::Sum;

// Four neighbouring cells: along k of one row or token, or four rows or tokens at one k.
struct alignas(4 * sizeof(In::Bits)) Four {
  In::Bits v[4];
};

// The work tile of a CTA.
struct WorkTile {
  u32 block_row, head, batch, row;  // block_row: among all heads; row: the tile's first, in the block row
  i64 token;                        // first token; for sdd in the group
  int first, count;                 // entries of the block row; for sdd of the tile
  int steps;

  __device__ __forceinline__ explicit WorkTile(const BlocksStrictParams& p) {
    u32 at = blockIdx.x;
    row = at % Config::kRowTiles * Config::kTileM, at /= Config::kRowTiles;
    block_row = at % p.work_rows, at /= p.work_rows;
    token = (i64)(at % p.n_tiles) * Config::kTileN, batch = at / p.n_tiles;
    if constexpr (Config::kSampled) {
      first = p.group_firsts[block_row] + (int)(token / Config::kBlock);
      const int of = p.group_rows[block_row];
      block_row = of < 0 ? 0 : of;
      count = of < 0 ? 0 : max(0, min(Config::kTileN / Config::kBlock, p.pointers[block_row + 1] - first));
      steps = (int)((p.depth + Config::kDepth - 1) / Config::kDepth);
    } else {
      first = p.pointers[block_row], count = p.pointers[block_row + 1] - first;
      steps = count * (Config::kBlock / Config::kDepth);
    }
    head = block_row / p.head_block_rows;
  }
  __device__ __forceinline__ i64 matrix(const BlocksStrictParams& p) const { return (i64)batch * p.heads + head; }
  // First row of the tile, in its head.
  __device__ __forceinline__ i64 first_row(const BlocksStrictParams& p) const {
    return (i64)(block_row % p.head_block_rows) * Config::kBlock + row;
  }
};

struct Mainloop {
  static constexpr int kDepth = Config::kDepth;
  // Units of four cells in a step, and loads of a thread.
  static constexpr int kLeftUnits = Config::kTileM * kDepth / 4, kRightUnits = Config::kTileN * kDepth / 4;
  static constexpr int kLeftLoads = (kLeftUnits + Config::kThreads - 1) / Config::kThreads;
  static constexpr int kRightLoads = (kRightUnits + Config::kThreads - 1) / Config::kThreads;

  const BlocksStrictParams& p;
  const WorkTile& work;
  Sum* left_cells;   // [2][kDepth][kRows]
  Sum* right_cells;  // [2][kDepth][kTileN]
  Four left[kLeftLoads], right[kRightLoads];

  // Position of unit u of a step: its first row or token, and k.
  template <bool kAlongK, int kExtent> static __device__ __forceinline__ void unit_at(int u, int& at, int& k) {
    if constexpr (kAlongK) at = u % kExtent, k = u / kExtent * 4;
    else at = u % (kExtent / 4) * 4, k = u / (kExtent / 4);
  }

  // Loads four cells from `from` on that are `step` elements apart. Only the first `inside` exist; the others become
  // zeros.
  static __device__ __forceinline__ Four load_four(const In::Bits* from, i64 step, i64 inside) {
    if (inside >= 4 && step == 1 && (u64)from % sizeof(Four) == 0) return *(const Four*)from;
    Four found;
#pragma unroll
    for (int i = 0; i < 4; ++i) found.v[i] = i < inside ? from[i * step] : (In::Bits)0;
    return found;
  }

  __device__ __forceinline__ void load(int step) {
    const In::Bits* a = (const In::Bits*)p.left;
    const In::Bits* x = (const In::Bits*)p.right + work.matrix(p) * p.right_matrix;
    i64 k0 = (i64)step * kDepth;  // k in X
    if constexpr (Config::kSampled) {
      a += work.matrix(p) * p.left_matrix + work.first_row(p) * p.left_row + k0 * p.left_k;
    } else {
      constexpr int kSteps = Config::kBlock / kDepth;
      const int entry = work.first + step / kSteps, in = step % kSteps * kDepth;
      const i64 place = (i64)work.batch * p.blocks + (p.value_index ? p.value_index[entry] : entry);
      a += place * Config::kBlock * Config::kBlock + work.row * p.left_row + in * p.left_k;
      k0 = (i64)p.columns[entry] * Config::kBlock + in;
    }
    const i64 depth = Config::kSampled ? p.depth - k0 : kDepth;  // remaining k
#pragma unroll
    for (int i = 0; i < kLeftLoads; ++i) {
      const int u = threadIdx.x + i * Config::kThreads;
      int row, k;
      unit_at<Config::kLeftAlongK, Config::kTileM>(u, row, k);
      if (u < kLeftUnits)
        left[i] = load_four(a + row * p.left_row + k * p.left_k, Config::kLeftAlongK ? p.left_k : p.left_row,
                            Config::kLeftAlongK ? depth - k
                            : k < depth         ? 4
                                                : 0);
    }
#pragma unroll
    for (int i = 0; i < kRightLoads; ++i) {
      const int u = threadIdx.x + i * Config::kThreads;
      int token, k;
      unit_at<Config::kRightAlongK, Config::kTileN>(u, token, k);
      i64 at = work.token + token, inside = p.tokens - at;
      if constexpr (Config::kSampled) {  // four neighbours are of one block
        const int block = token / Config::kBlock;
        inside = block < work.count ? 4 : 0;
        at = inside ? (i64)p.columns[work.first + block] * Config::kBlock + token % Config::kBlock : 0;
      }
      const i64 along = Config::kRightAlongK ? (inside > 0 ? depth - k : 0) : (k < depth ? inside : 0);
      if (u < kRightUnits)
        right[i] = load_four(x + at * p.right_token + (k0 + k) * p.right_k,
                             Config::kRightAlongK ? p.right_k : p.right_token, along);
    }
  }

  template <bool kAlongK, int kExtent, int kUnits, int kLoads>
  static __device__ __forceinline__ void store_units(Sum* to, const Four (&from)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int u = threadIdx.x + i * Config::kThreads;
      int at, k;
      unit_at<kAlongK, kExtent>(u, at, k);
      if (u >= kUnits) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) to[kAlongK ? (k + j) * kExtent + at : k * kExtent + at + j] = In::value(from[i].v[j]);
    }
  }
  __device__ __forceinline__ void store(int stage) const {
    store_units<Config::kLeftAlongK, Config::kTileM, kLeftUnits>(left_cells + stage * kDepth * Config::kTileM, left);
    store_units<Config::kRightAlongK, Config::kTileN, kRightUnits>(right_cells + stage * kDepth * Config::kTileN,
                                                                   right);
  }
};

// Token i of a thread: runs of up to four neighbours; the next run is 64 tokens further.
__device__ __forceinline__ int token_of(int lane, int i) {
  constexpr int kRun = kThreadTokens < 4 ? kThreadTokens : 4;
  return i / kRun * (16 * kRun) + lane * kRun + i % kRun;
}

__device__ __forceinline__ Sum added(Sum acc, Sum w, Sum x) {
  if constexpr (Config::kInteger) return acc + w * x;
  else return __fmaf_rn(w, x, acc);
}

// Adds the products of one k, from shared memory.
__device__ __forceinline__ void multiply(Sum (&acc)[kThreadRows][kThreadTokens], const Sum* left, const Sum* right,
                                         int lane_row, int lane_token) {
  Sum w[kThreadRows], x[kThreadTokens];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) w[r] = left[lane_row * kThreadRows + r];
#pragma unroll
  for (int t = 0; t < kThreadTokens; ++t) x[t] = right[token_of(lane_token, t)];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int t = 0; t < kThreadTokens; ++t) acc[r][t] = added(acc[r][t], w[r], x[t]);
}

__device__ __forceinline__ void write(const BlocksStrictParams& p, const WorkTile& work,
                                      const Sum (&acc)[kThreadRows][kThreadTokens], int lane_row, int lane_token) {
  const i64 rows = (i64)p.head_block_rows * Config::kBlock;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const i64 row = work.first_row(p) + lane_row * kThreadRows + r;
    const float bias = p.bias ? bias_at<Config>(p.bias, work.head * rows + row) : 0.0f;
#pragma unroll
    for (int t = 0; t < kThreadTokens; ++t) {
      const int in_tile = token_of(lane_token, t);
      i64 at = work.matrix(p) * p.out_matrix + row * p.out_row + (work.token + in_tile) * p.out_token;
      bool exists = work.token + in_tile < p.tokens;
      if constexpr (Config::kSampled) {
        const int block = in_tile / Config::kBlock;
        exists = block < work.count;
        const i64 place = (i64)work.batch * p.blocks + work.first + block;
        at = (place * Config::kBlock + work.row + lane_row * kThreadRows + r) * Config::kBlock +
             in_tile % Config::kBlock;
      }
      if (!exists) continue;
      if constexpr (Config::kRaw) ((int*)p.out)[at] = acc[r][t];
      else ((Out::Bits*)p.out)[at] = Out::from_float(epilogue<Config, StrictMath>((float)acc[r][t], p.alpha, bias));
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kResident / Config::kThreads)
    blocks_strict(const __grid_constant__ BlocksStrictParams p) {
  constexpr int kDepth = Config::kDepth;
  __shared__ __align__(16) Sum left[2 * kDepth * Config::kTileM];
  __shared__ __align__(16) Sum right[2 * kDepth * Config::kTileN];
  const WorkTile work(p);
  if (Config::kSampled && work.count == 0) return;  // there is no such group
  const int lane_token = threadIdx.x % 16, lane_row = threadIdx.x / 16;
  Sum acc[kThreadRows][kThreadTokens];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int t = 0; t < kThreadTokens; ++t) acc[r][t] = 0;

  Mainloop loop{p, work, left, right};
  if (work.steps > 0) {
    loop.load(0);
    loop.store(0);
  }
  __syncthreads();
  int stage = 0;
  for (int step = 0; step < work.steps; ++step) {
    const bool more = step + 1 < work.steps;
    if (more) loop.load(step + 1);
    const Sum* const l = left + stage * kDepth * Config::kTileM;
    const Sum* const r = right + stage * kDepth * Config::kTileN;
    if (Config::kSampled && !more) {  // cells beyond k must be skipped: an fma with 0 would turn -0 into +0
      for (int k = 0; k < p.depth - (i64)step * kDepth; ++k)
        multiply(acc, l + k * Config::kTileM, r + k * Config::kTileN, lane_row, lane_token);
    } else {
#pragma unroll
      for (int k = 0; k < kDepth; ++k)
        multiply(acc, l + k * Config::kTileM, r + k * Config::kTileN, lane_row, lane_token);
    }
    stage ^= 1;
    if (more) loop.store(stage);
    __syncthreads();
  }
  write(p, work, acc, lane_row, lane_token);
}
