// Y[n, m] = epilogue(alpha * scale_x[n] * scale_w[m] * sum_k X[n, k] * W[m, k] + beta * C[n, m]) for few tokens: W is
// read once, at the speed of memory.
//
// W is the sparse A operand of mma.sp m16n8k32, or of m16n8k64 for fp8; X is B. W comes packed in tiles of 64 rows x
// 256 bytes of columns, each contiguous and loaded unchanged by cp.async. X of 16-bit elements and Y may be
// column-major. A column-major X is staged in lines of tokens, one for each column, and ldmatrix transposes it. The
// orders change no bit of a result.
//
// Split-K: K is cut into kSplitK slices (4 or 8, from M alone). One warp pair sums a slice in increasing k. The slices
// are reduced from the first to the last, ((0+1)+2)+3. So a row's bits depend neither on n, nor on the row's position
// in the batch, nor on the schedule.
//
// A CTA has four warp pairs. kWarpPairsM of them lie along M, the others along K. For few tokens a CTA computes several
// slices of K and needs no reduction between CTAs; for many tokens it computes more rows of W with the same X. Slices
// of other CTAs are read through the cluster. Clusters larger than 2 leave SMs idle, because a GPC has 14 to 18 SMs, so
// they pay only for launches of many waves.
//
//   role         threads                           what it does
//   Loader       all 8 warps; pair s is 2s, 2s + 1 loads the pair's tiles of W; pairs of a slice load its X together
//   WarpTile     all 8 warps                       multiplies; the two warps of a pair halve its rows or its tokens
//   reduce_rows  all 256 threads                   reduces this CTA's part of the cluster's rows and stores the results
//
//   barriers    one cp.async group per stage; one __syncthreads per step, after which all threads see the loaded stage
//               and have read the stage before it. The cluster syncs before and after the reduction.
//   registers   4 * kWarpM16Tiles * kWarpN8Tiles accumulators, at most 128 per thread; no spills.
//
//   step         |    0    |    1    |    2    |  ..            stage = step % kStages
//   cp.async     | tile 3  | tile 4  | tile 5  |                kStages = 4: three tiles ahead
//   ldmatrix     | tile 0  | tile 1  | tile 2  |                within a tile, A is one k32 step ahead, B two fragments
//   mma.sp       |  tile 0 |  tile 1 |  tile 2 |  ..  | sums -> shared | cluster sync | reduce, epilogue, store
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/batches.cuh"
#include "gemm/params/mma_sp.cuh"
#include "gemm/split_k.cuh"
#include "ptx/async.cuh"

#define S24_CLUSTER_SIZE (S24_SPLIT_K * S24_WARP_PAIRS_M / 4)
#include "common/cluster.cuh"

// The compile-time configuration. Only this struct reads the macros.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE, S24_C, S24_RELU_THRESHOLD,
                            S24_RELU_UPPER_BOUND, S24_X_ELEMENT> {
  static constexpr int kSplitK = S24_SPLIT_K;
  static constexpr int kWarpPairsM = S24_WARP_PAIRS_M;  // warp pairs along M
  static constexpr int kN8Tiles = S24_N8_TILES;         // n8 tiles of the CTA tile
  static constexpr int kStages = S24_STAGES;
  static constexpr int kCtasPerSm = S24_CTAS_PER_SM;
  static constexpr bool kXColumnMajor = S24_X_COLUMN_MAJOR, kYColumnMajor = S24_Y_COLUMN_MAJOR;
  static constexpr bool kBatched = S24_BATCHED;          // several products of one size
  static constexpr int kClusterSize = S24_CLUSTER_SIZE;  // CTAs that sum slices of the same rows

  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;  // 0: none, 1: one per tensor, 2: one per row

  using Tile = WeightTile<sizeof(X::Bits)>;
  static constexpr int kChunkColumns = 16 / sizeof(X::Bits);  // columns of X that cp.async loads together
  static_assert(!kXColumnMajor || sizeof(X::Bits) == 2, "ldmatrix transposes 16-bit elements");
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kWarpPairs = 4, kWarpPairThreads = kThreads / kWarpPairs;
  static constexpr int kWarpPairsK = kWarpPairs / kWarpPairsM;  // warp pairs along K
  static_assert(kClusterSize * kWarpPairsK == kSplitK, "a cluster sums all of K");
  static constexpr int kTileN = 8 * kN8Tiles;
  // The two warps of a pair halve its rows. With many tokens they halve the tokens instead, so that each B fragment in
  // registers serves twice as many rows.
  static constexpr bool kPairSplitsN = kN8Tiles >= 8 && kCtasPerSm == 1;
  static constexpr int kWarpM16Tiles = kPairSplitsN ? 4 : 2;  // m16 tiles of a warp
  static constexpr int kWarpN8Tiles = kPairSplitsN ? kN8Tiles / 2 : kN8Tiles;
  static constexpr int kXRowBytes = Tile::kColumns * sizeof(X::Bits);
  static constexpr int kXBytes = kTileN * kXRowBytes;  // X of one slice
  static constexpr int kStageBytes = kWarpPairs * Tile::kBytes + kWarpPairsK * kXBytes;
  static constexpr int kTileM = kWarpPairsM * Tile::kRows;
  static constexpr int kReducedRows = kTileM / kClusterSize;  // rows that one CTA reduces
};
using Tile = Config::Tile;
using WorkBatch = Batch<Config::kBatched>;
using Buffer = ReduceBuffer<Config::kTileM, Config::kTileN, Config::kYColumnMajor>;

// The offset of 8 tokens (`chunk`) of a column in a stage of column-major X. The chunks of eight columns lie in
// different banks.
__device__ __forceinline__ constexpr u32 line_offset(int column, int chunk) {
  constexpr int kChunks = Config::kN8Tiles, kSwapped = kChunks < 8 ? kChunks : 8;
  return (column * kChunks + (chunk ^ column / (8 / kSwapped) % kSwapped)) * 16;
}

// A thread's part of the loads, one K tile per call. Each warp pair loads the tiles of W that it multiplies. All pairs
// along M of one slice load its X together.
struct Loader {
  static constexpr int kChunks = Tile::kBytes / 16 / Config::kWarpPairThreads;
  static constexpr int kPeers = Config::kWarpPairThreads * Config::kWarpPairsM;  // threads that share X
  static constexpr int kTokenStep = kPeers / 16, kTokenLoads = Config::kTileN / kTokenStep;

  using XBits = Config::X::Bits;

  const u8* weights;
  const XBits* x;
  i64 tiles;         // K tiles of this thread's slice still to load; 0 where its rows lie outside W
  i64 columns;       // columns of X from this thread's chunk, or its first column, to the end
  i64 token_stride;  // elements from one of this thread's tokens, or columns, to the next
  int tokens;        // the number of its tokens inside X; for a column-major X whether its chunk is inside
  u32 weights_to, x_to, swap;

  __device__ __forceinline__ Loader(const MmaSpParams& p, u32 base, WorkBatch batch, i64 token0, i64 row_tile,
                                    i64 k_tile, i64 count) {
    const XBits* const x0 = (const XBits*)p.x + batch.offset(p.batches.x);
    const i64 weight_tile = batch.offset(p.batches.weight_rows) / Tile::kRows + row_tile;
    const int pair = threadIdx.x / Config::kWarpPairThreads, u = threadIdx.x % Config::kWarpPairThreads;
    const int peer = threadIdx.x % kPeers;
    tiles = count;
    weights = row_tile < p.row_tiles ? p.packed + (weight_tile * p.k_tiles + k_tile) * Tile::kBytes + u * 16 : nullptr;
    weights_to = base + pair * Tile::kBytes + u * 16;
    if constexpr (Config::kXColumnMajor) {
      const int chunk = peer % Config::kN8Tiles, line = peer / Config::kN8Tiles;
      const i64 column = k_tile * Tile::kColumns + line, token = token0 + chunk * 8;
      x = x0 + column * p.x_stride + token;
      columns = p.k - column;
      token_stride = p.x_stride;
      tokens = token < p.n;
      x_to = base + Config::kWarpPairs * Tile::kBytes + pair / Config::kWarpPairsM * Config::kXBytes +
             line_offset(line, chunk);
      swap = 0;
      return;
    }
    const int token = peer / 16, chunk = peer % 16;
    const i64 column = k_tile * Tile::kColumns + chunk * Config::kChunkColumns;
    const i64 rows = p.n - token0 - token;
    x = x0 + (token0 + token) * p.x_stride + column;
    columns = p.k - column;
    token_stride = kTokenStep * p.x_stride;
    tokens = rows <= 0 ? 0 : rows >= Config::kTileN ? kTokenLoads : (int)((rows + kTokenStep - 1) / kTokenStep);
    x_to = base + Config::kWarpPairs * Tile::kBytes + pair / Config::kWarpPairsM * Config::kXBytes +
           token * Config::kXRowBytes + (chunk ^ (token & 7)) * 16;
    swap = ((chunk ^ (token + kTokenStep & 7)) - (chunk ^ (token & 7))) * 16;  // to the chunk of a token 4 further
  }

  __device__ __forceinline__ void next(int stage) {
    if (tiles-- <= 0) return;
    const u32 offset = stage * Config::kStageBytes;
    if (weights) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int at = i * Config::kWarpPairThreads * 16;
        cp_async_16(weights_to + offset + at, weights + at, true);
      }
      weights += Tile::kBytes;
    }
    if constexpr (Config::kXColumnMajor) {
      constexpr int kStep = kPeers / Config::kN8Tiles;
      static_assert(kStep % 8 == 0, "all lines of a thread have the swizzle of its first");
#pragma unroll
      for (int i = 0; i < kTokenLoads; ++i) {
        const bool keep = tokens && i * kStep < columns;
        cp_async_16(x_to + offset + i * kStep * Config::kTileN * 2, keep ? x + i * kStep * token_stride : x, keep);
      }
      x += Tile::kColumns * token_stride;
    } else {
#pragma unroll
      for (int i = 0; i < kTokenLoads; ++i) {
        const bool keep = i < tokens && columns > 0;
        const u32 odd = kTokenStep % 8 != 0 && i % 2 != 0 ? swap : 0;
        cp_async_16(x_to + offset + i * kTokenStep * Config::kXRowBytes + odd, keep ? x + i * token_stride : x, keep);
      }
      x += Tile::kColumns;
    }
    columns -= Tile::kColumns;
  }
};

// A warp's part of a tile: four steps of mma.sp. Fragments are loaded ahead of the mma that reads them: B by kAhead
// fragments, A by one step.
struct WarpTile {
  static constexpr int kBlocks = Config::kWarpM16Tiles, kN8Tiles = Config::kWarpN8Tiles;
  static constexpr int kSteps = 4, kAhead = 2, kBuffers = kAhead + 1, kUses = kSteps * kN8Tiles;

  u32 tile, x;  // shared memory addresses
  int row0, token0;

  __device__ __forceinline__ void load_a(u32 (&a)[kBlocks][4], int step) const {
    const int lane = threadIdx.x % 32, chunk = 2 * step + lane / 16;
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      const int row = row0 + 16 * h + lane % 16;
      ldmatrix_x4(a[h], tile + row * Tile::kRowBytes + (chunk ^ (row & 7)) * 16);
    }
  }

  __device__ __forceinline__ void load_b(u32 (&b)[4], int use) const {
    if constexpr (Config::kXColumnMajor) {
      const int column = use / kN8Tiles * 32 + threadIdx.x % 32, tile_of_tokens = token0 / 8 + use % kN8Tiles;
      ldmatrix_transposed_x4(b, x + line_offset(column, tile_of_tokens));
      return;
    }
    const int lane = threadIdx.x % 32, chunk = use / kN8Tiles * 4 + lane / 8;
    const int token = token0 + use % kN8Tiles * 8 + lane % 8;
    ldmatrix_x4(b, x + token * Config::kXRowBytes + (chunk ^ (token & 7)) * 16);
  }

  __device__ __forceinline__ void multiply(float (&acc)[kBlocks][kN8Tiles][4]) const {
    u32 metadata[kBlocks][Tile::kWords], a[2][kBlocks][4], b[kBuffers][4];
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      const int fragment = (row0 / 16 + h) * 32 + threadIdx.x % 32;
      load_shared_words(metadata[h], tile + Tile::kValueBytes + fragment * Tile::kWords * 4);
    }
    load_a(a[0], 0);
#pragma unroll
    for (int use = 0; use < kAhead; ++use) load_b(b[use], use);
#pragma unroll
    for (int use = 0; use < kUses; ++use) {
      const int step = use / kN8Tiles, column = use % kN8Tiles;
      if (use + kAhead < kUses) load_b(b[(use + kAhead) % kBuffers], use + kAhead);
      if (column == 0 && step + 1 < kSteps) load_a(a[(step + 1) % 2], step + 1);
      const u32(&b_now)[4] = b[use % kBuffers];
#pragma unroll
      for (int h = 0; h < kBlocks; ++h) {  // the selector is an immediate
        const u32(&a_now)[4] = a[step % 2][h];
        if constexpr (is_fp8(Config::kElement))
          mma_sp_m16n8k64<Config::kElement, Config::kXElement>(acc[h][column], a_now, b_now, metadata[h][step]);
        else if (step % 2 == 0)
          mma_sp_m16n8k32<Config::kElement, 0>(acc[h][column], a_now, b_now, metadata[h][step / 2]);
        else mma_sp_m16n8k32<Config::kElement, 1>(acc[h][column], a_now, b_now, metadata[h][step / 2]);
      }
    }
  }
};

// The address of a slice's reduction buffer, in the CTA that summed the slice.
__device__ __forceinline__ u32 slice_address(u32 base, int slice) {
  const u32 at = base + (slice % Config::kWarpPairsK) * Buffer::kBytes;
  return Config::kClusterSize > 1 ? cluster_address(at, slice / Config::kWarpPairsK) : at;
}

__device__ __forceinline__ float slice_sum(u32 address, int token, int row) {
  const u32 at = address + Buffer::offset(token, row);
  return Config::kClusterSize > 1 ? load_cluster(at) : load_shared(at);
}

// Reduces this CTA's part of the cluster's rows, from row0 on. A result needs the sums of one row of W, for a gated
// epilogue of two.
__device__ __forceinline__ void reduce_rows(const MmaSpParams& p, const u32 (&buffers)[Config::kSplitK], int row0,
                                            WorkBatch batch, i64 cta_row, i64 first_token) {
  constexpr int kRowsPerOutput = Config::kRowsPerOutput, kOutputs = Config::kReducedRows / kRowsPerOutput,
                kUnrolled = 4 / kRowsPerOutput;
  static_assert(Config::kReducedRows % (2 * Config::kGateRows) == 0, "a CTA reduces both rows of a gated result");
  ResultScale<Config> fp8;
  fp8.begin_scale(p.scale_y);
#pragma unroll kUnrolled
  for (int i = threadIdx.x; i < kOutputs * Config::kTileN; i += Config::kThreads) {
    const int token = Config::kYColumnMajor ? i % Config::kTileN : i / kOutputs;
    const int row = row0 + row_of_output<Config>(Config::kYColumnMajor ? i / Config::kTileN : i % kOutputs);
    float addend = 0.0f;
    if constexpr (Config::kHasC) {
      const i64 m = cta_row + row, n = first_token + token;
      const i64 at = Config::kYColumnMajor ? m * p.c_stride + n : n * p.c_stride + m;
      if (n < p.n && m < p.m) addend = __fmul_rn(p.beta, c_at<Config>(p.c, at + batch.offset(p.batches.c)));
    }
    float v[kRowsPerOutput][Config::kSplitK];
#pragma unroll
    for (int s = 0; s < Config::kSplitK; ++s)
#pragma unroll
      for (int h = 0; h < kRowsPerOutput; ++h) v[h][s] = slice_sum(buffers[s], token, row + h * Config::kGateRows);
#pragma unroll
    for (int h = 0; h < kRowsPerOutput; ++h) reduce_in_order(v[h]);
    const i64 m = cta_row + row, n = first_token + token, output = output_of_row<Config>(m);
    if (n >= p.n || m >= p.m) continue;
    float bias[kRowsPerOutput], result;
#pragma unroll
    for (int h = 0; h < kRowsPerOutput; ++h) {
      const i64 row_of_w = m + h * Config::kGateRows;
      bias[h] = p.bias ? bias_at<Config>(p.bias, batch.offset(p.batches.bias) + row_of_w) : 0.0f;
      if constexpr (Config::kScaleX > 0)
        v[h][0] = __fmul_rn(v[h][0], scale_at<Config::kScaleX>(p.scale_x + batch.offset(p.batches.scale_x), n));
      if constexpr (Config::kScaleW > 0)
        v[h][0] = __fmul_rn(v[h][0], scale_at<Config::kScaleW>(p.scale_w + batch.offset(p.batches.scale_w), row_of_w));
    }
    if constexpr (Config::kGated)
      result = gated_epilogue(activated<Config, FastMath>(v[0][0], p.alpha, bias[0]),
                              activated<Config, NoMath>(v[1][0], p.alpha, bias[1]));
    else result = epilogue<Config, FastMath>(v[0][0], p.alpha, bias[0], addend);
    const i64 at = Config::kYColumnMajor ? output * p.y_stride + n : n * p.y_stride + output;
    ((Config::Out::Bits*)p.y)[at + batch.offset(p.batches.y)] = Config::Out::from_float(fp8.scaled(result, true));
  }
  fp8.raise(p.amax);
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    gemm_mma_sp(const __grid_constant__ MmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int kWarpM16Tiles = Config::kWarpM16Tiles, kWarpN8Tiles = Config::kWarpN8Tiles;
  const int rank = blockIdx.x % Config::kClusterSize;
  const u32 base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2;
  const int row0 = Config::kPairSplitsN ? 0 : warp % 2 * 32;
  const int token0 = Config::kPairSplitsN ? warp % 2 * kWarpN8Tiles * 8 : 0;
  // CTAs with the same rows follow each other, so that W stays in L2.
  u32 work_tile = blockIdx.x / Config::kClusterSize, n_tiles = p.n_tiles;
  WorkBatch batch;
  batch.take(p.batches, work_tile, n_tiles);
  u32 token_tile = work_tile % n_tiles;
  batch.take_token_tile(token_tile, p.n_tiles);
  const i64 first_token = (i64)token_tile * Config::kTileN;
  const i64 first_row_tile = (i64)(work_tile / n_tiles) * Config::kWarpPairsM,
            row_tile = first_row_tile + pair % Config::kWarpPairsM;
  const int slice = rank * Config::kWarpPairsK + pair / Config::kWarpPairsM;
  const i64 k_tile = slice_begin<Config::kSplitK>((u32)p.k_tiles, slice);
  const i64 count = slice_begin<Config::kSplitK>((u32)p.k_tiles, slice + 1) - k_tile;
  const i64 steps = (p.k_tiles + Config::kSplitK - 1) / Config::kSplitK;  // K tiles of the longest slice
  Loader loader(p, base, batch, first_token, row_tile, k_tile, count);

  float acc[kWarpM16Tiles][kWarpN8Tiles][4];
#pragma unroll
  for (int h = 0; h < kWarpM16Tiles; ++h)
#pragma unroll
    for (int c = 0; c < kWarpN8Tiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[h][c][i] = 0.0f;

  launch_dependents_and_wait();
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    loader.next(s);
    cp_async_commit();
  }
  int stage = 0;
  for (i64 step = 0; step < steps; ++step) {
    cp_async_wait<Config::kStages - 2>();
    __syncthreads();
    loader.next(stage == 0 ? Config::kStages - 1 : stage - 1);
    cp_async_commit();
    if (step < count && row_tile < p.row_tiles) {
      const u32 at = base + stage * Config::kStageBytes;
      const u32 x = at + Config::kWarpPairs * Tile::kBytes + pair / Config::kWarpPairsM * Config::kXBytes;
      WarpTile{at + pair * Tile::kBytes, x, row0, token0}.multiply(acc);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();  // all stages have been read: the sums may overwrite them

  constexpr int kTokenPitch = Config::kYColumnMajor ? 1 : Buffer::kPitch,
                kRowPitch = Config::kYColumnMajor ? Buffer::kPitch : 1;
  float* const sums = (float*)shared + pair / Config::kWarpPairsM * (Buffer::kBytes / 4) +
                      (pair % Config::kWarpPairsM * Tile::kRows + row0) * kRowPitch;
#pragma unroll
  for (int h = 0; h < kWarpM16Tiles; ++h)
#pragma unroll
    for (int c = 0; c < kWarpN8Tiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(token0 + 8 * c + lane % 4 * 2 + i % 2) * kTokenPitch + (16 * h + lane / 4 + i / 2 * 8) * kRowPitch] =
            acc[h][c][i];
  if constexpr (Config::kClusterSize > 1) cluster_sync();
  else __syncthreads();

  u32 buffers[Config::kSplitK];
#pragma unroll
  for (int i = 0; i < Config::kSplitK; ++i) buffers[i] = slice_address(base, i);
  reduce_rows(p, buffers, rank * Config::kReducedRows, batch, first_row_tile * Tile::kRows, first_token);
  if constexpr (Config::kClusterSize > 1) cluster_sync();  // no CTA exits while another reads its shared memory
}
