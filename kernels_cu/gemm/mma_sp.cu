// Decode: Y[n, m] = epilogue(alpha * sum_k X[n, k] * W[m, k]) for few tokens, W streamed once at memory speed.
//
// W is the sparse A operand of mma.sp m16n8k32, X is B. W comes packed in tiles of 64 rows x 128 columns, each one
// contiguous block that cp.async brings in as it is. X and Y may lie in columns, where the tokens of a column are
// adjacent: X is then staged in lines of tokens, one a column, which ldmatrix transposes; no bit of a result changes.
//
// K is cut into kSlices slices (4 or 8, from M alone). A slice is summed by one warp in increasing k; slices are
// folded from the first to the last, ((0+1)+2)+3. So a row's bits don't depend on n, on its place in the batch, or
// on which of the cuts below computes it.
//
// A block works on four tile streams. kBlockTiles of them lie along M, the rest along K: few tokens take slices of K
// side by side (nothing to fold between blocks), many tokens take rows (X is shared by more of W). Slices of other
// blocks are read through the cluster. Clusters beyond 2 leave multiprocessors idle, since GPCs hold 14 to 18 of
// them, so they pay only where blocks come in many waves.
//
//   role        who                                what
//   Loader      all 8 warps; 2s, 2s + 1: stream s  copy their stream's tiles of W; X with the warps of their slice
//   WarpTile    all 8 warps                        multiply: of a stream, each half of the rows, or of the tokens
//   fold        all 256 threads                    a block's share of the cluster's rows: sums, epilogue, stores
//
//   barriers    a cp.async group a stage; __syncthreads a step: what this slot brought is seen by all, and the slot
//               before it has been read by all. The cluster meets before the fold and after it.
//   registers   accumulators: 4 * kWarpBlocks * kWarpColumns, at most 128 of a thread; no spills.
//
//   step         |    0    |    1    |    2    |  ..            slot = step % kStages
//   cp.async     | tile 3  | tile 4  | tile 5  |                kStages = 4: three tiles ahead
//   ldmatrix     | tile 0  | tile 1  | tile 2  |                in a tile: A one step of k32 ahead, B two fragments
//   mma.sp       |  tile 0 |  tile 1 |  tile 2 |  ..  | sums -> shared | cluster meets | fold, epilogue, store
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/params/mma_sp.cuh"
#include "gemm/split_k.cuh"
#include "ptx/async.cuh"

#define S24_CLUSTER_SIZE (S24_SPLIT_K * S24_WARP_PAIRS_M / 4)
#include "common/cluster.cuh"

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kSlices = S24_SPLIT_K;
  static constexpr int kBlockTiles = S24_WARP_PAIRS_M;  // streams along M
  static constexpr int kColumns = S24_N8_TILES;         // n8 tiles
  static constexpr int kStages = S24_STAGES;
  static constexpr int kBlocksPerSm = S24_CTAS_PER_SM;
  static constexpr bool kColumnsX = S24_X_COLUMN_MAJOR, kColumnsY = S24_Y_COLUMN_MAJOR;  // X, Y lie in columns
  static constexpr int kCluster = S24_CLUSTER_SIZE;  // blocks that share a row block

  using Tile = WeightTile<2>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kStreams = 4, kStreamThreads = kThreads / kStreams;
  static constexpr int kGroups = kStreams / kBlockTiles;  // streams along K
  static_assert(kCluster * kGroups == kSlices, "a cluster sums all of K");
  static constexpr int kTokens = 8 * kColumns;
  // The two warps of a stream share its rows, or, with many tokens, the tokens: then each B fragment that is fetched
  // serves twice as many rows.
  static constexpr bool kSplitTokens = kColumns >= 8 && kBlocksPerSm == 1;
  static constexpr int kWarpBlocks = kSplitTokens ? 4 : 2;  // m16 blocks of a warp
  static constexpr int kWarpColumns = kSplitTokens ? kColumns / 2 : kColumns;
  static constexpr int kSourceRowBytes = Tile::kColumns * 2;
  static constexpr int kSourceBytes = kTokens * kSourceRowBytes;  // X of one stream along K
  static constexpr int kStageBytes = kStreams * Tile::kBytes + kGroups * kSourceBytes;
  static constexpr int kRows = kBlockTiles * Tile::kRows;  // of a block
  static constexpr int kFoldRows = kRows / kCluster;       // that a block folds
};
using Tile = Config::Tile;
using Area = FoldArea<Config::kRows, Config::kTokens, Config::kColumnsY>;

// Where a stage has X in columns: 8 tokens (`chunk`) of a column. Of eight columns, each chunk has banks of its own.
__device__ __forceinline__ u32 line_offset(int column, int chunk) {
  constexpr int kChunks = Config::kColumns, kSwapped = kChunks < 8 ? kChunks : 8;
  return (column * kChunks + (chunk ^ column / (8 / kSwapped) % kSwapped)) * 16;
}

// A thread's part of the loads, one K tile a call. The two warps that multiply a stream also fetch it; all warps
// along M of one slice fetch its X together.
struct Loader {
  static constexpr int kChunks = Tile::kBytes / 16 / Config::kStreamThreads;
  static constexpr int kPeers = Config::kStreamThreads * Config::kBlockTiles;  // threads that share X
  static constexpr int kTokenStep = kPeers / 16, kTokenLoads = Config::kTokens / kTokenStep;

  const u8* weights;
  const u16* source;
  i64 tiles;         // of this thread's slice still to fetch; 0 where its rows lie outside W
  i64 columns;       // of X from this thread's chunk to the end of a row; in columns: from its first column on
  i64 token_stride;  // elements between this thread's tokens; in columns: its columns
  int tokens;        // how many of them lie inside X; in columns: whether its tokens do
  u32 weights_to, source_to, swap;

  __device__ __forceinline__ Loader(const MmaSpParams& p, u32 base, i64 token0, i64 row_tile, i64 k_tile, i64 count) {
    const int stream = threadIdx.x / Config::kStreamThreads, u = threadIdx.x % Config::kStreamThreads;
    const int peer = threadIdx.x % kPeers;
    tiles = count;
    weights = row_tile < p.row_tiles ? p.packed + (row_tile * p.k_tiles + k_tile) * Tile::kBytes + u * 16 : nullptr;
    weights_to = base + stream * Tile::kBytes + u * 16;
    if constexpr (Config::kColumnsX) {
      const int chunk = peer % Config::kColumns, line = peer / Config::kColumns;
      const i64 column = k_tile * Tile::kColumns + line, token = token0 + chunk * 8;
      source = p.x + column * p.x_stride + token;
      columns = p.k - column;
      token_stride = p.x_stride;
      tokens = token < p.n;
      source_to = base + Config::kStreams * Tile::kBytes + stream / Config::kBlockTiles * Config::kSourceBytes +
                  line_offset(line, chunk);
      swap = 0;
      return;
    }
    const int token = peer / 16, chunk = peer % 16;
    const i64 column = k_tile * Tile::kColumns + chunk * 8;
    const i64 rows = p.n - token0 - token;
    source = p.x + (token0 + token) * p.x_stride + column;
    columns = p.k - column;
    token_stride = kTokenStep * p.x_stride;
    tokens = rows <= 0 ? 0 : rows >= Config::kTokens ? kTokenLoads : (int)((rows + kTokenStep - 1) / kTokenStep);
    source_to = base + Config::kStreams * Tile::kBytes + stream / Config::kBlockTiles * Config::kSourceBytes +
                token * Config::kSourceRowBytes + (chunk ^ (token & 7)) * 16;
    swap = ((chunk ^ (token + kTokenStep & 7)) - (chunk ^ (token & 7))) * 16;  // where tokens are 4 apart
  }

  __device__ __forceinline__ void next(int slot) {
    if (tiles-- <= 0) return;
    const u32 offset = slot * Config::kStageBytes;
    if (weights) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int at = i * Config::kStreamThreads * 16;
        cp_async_16(weights_to + offset + at, weights + at, true);
      }
      weights += Tile::kBytes;
    }
    if constexpr (Config::kColumnsX) {
      constexpr int kStep = kPeers / Config::kColumns;
      static_assert(kStep % 8 == 0, "the swizzle of a thread's lines is that of its first");
#pragma unroll
      for (int i = 0; i < kTokenLoads; ++i) {
        const bool keep = tokens && i * kStep < columns;
        cp_async_16(source_to + offset + i * kStep * Config::kTokens * 2,
                    keep ? source + i * kStep * token_stride : source, keep);
      }
      source += Tile::kColumns * token_stride;
      columns -= Tile::kColumns;
      return;
    }
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      const bool keep = i < tokens && columns > 0;
      const u32 odd = kTokenStep % 8 != 0 && i % 2 != 0 ? swap : 0;
      cp_async_16(source_to + offset + i * kTokenStep * Config::kSourceRowBytes + odd,
                  keep ? source + i * token_stride : source, keep);
    }
    source += Tile::kColumns;
    columns -= Tile::kColumns;
  }
};

// A warp's share of a tile: all four k32 steps. Fragments are fetched ahead of the mma that takes them: B by
// kAhead, A by one step.
struct WarpTile {
  static constexpr int kBlocks = Config::kWarpBlocks, kColumns = Config::kWarpColumns;
  static constexpr int kSteps = 4, kAhead = 2, kBuffers = kAhead + 1, kUses = kSteps * kColumns;

  u32 tile, source;  // shared memory
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
    if constexpr (Config::kColumnsX) {
      const int column = use / kColumns * 32 + threadIdx.x % 32, tile_of_tokens = token0 / 8 + use % kColumns;
      ldmatrix_transposed_x4(b, source + line_offset(column, tile_of_tokens));
      return;
    }
    const int lane = threadIdx.x % 32, chunk = use / kColumns * 4 + lane / 8;
    const int token = token0 + use % kColumns * 8 + lane % 8;
    ldmatrix_x4(b, source + token * Config::kSourceRowBytes + (chunk ^ (token & 7)) * 16);
  }

  __device__ __forceinline__ void multiply(float (&acc)[kBlocks][kColumns][4]) const {
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
      const int step = use / kColumns, column = use % kColumns;
      if (use + kAhead < kUses) load_b(b[(use + kAhead) % kBuffers], use + kAhead);
      if (column == 0 && step + 1 < kSteps) load_a(a[(step + 1) % 2], step + 1);
      const u32(&b_now)[4] = b[use % kBuffers];
#pragma unroll
      for (int h = 0; h < kBlocks; ++h) {  // the selector is an immediate
        const u32(&a_now)[4] = a[step % 2][h];
        if (step % 2 == 0) mma_sp_m16n8k32<Config::kElement, 0>(acc[h][column], a_now, b_now, metadata[h][step / 2]);
        else mma_sp_m16n8k32<Config::kElement, 1>(acc[h][column], a_now, b_now, metadata[h][step / 2]);
      }
    }
  }
};

// Where the block that summed `slice` keeps its sums, one area a stream along K.
__device__ __forceinline__ u32 slice_address(u32 base, int slice) {
  const u32 at = base + (slice % Config::kGroups) * Area::kBytes;
  return Config::kCluster > 1 ? cluster_address(at, slice / Config::kGroups) : at;
}

__device__ __forceinline__ float slice_sum(u32 address, int token, int row) {
  const u32 at = address + Area::offset(token, row);
  return Config::kCluster > 1 ? load_cluster(at) : load_shared(at);
}

// A block's share of the cluster's rows, from row0 on: sums of one row a result, of a gated epilogue of two.
__device__ __forceinline__ void fold_rows(const MmaSpParams& p, const u32 (&areas)[Config::kSlices], int row0,
                                          i64 block_row, i64 first_token) {
  constexpr int kRowsPerOutput = Config::kRowsPerOutput, kOutputs = Config::kFoldRows / kRowsPerOutput,
                kUnrolled = 4 / kRowsPerOutput;
  static_assert(Config::kFoldRows % (2 * Config::kGateRows) == 0, "a block folds both rows of a result");
#pragma unroll kUnrolled
  for (int i = threadIdx.x; i < kOutputs * Config::kTokens; i += Config::kThreads) {
    const int token = Config::kColumnsY ? i % Config::kTokens : i / kOutputs;
    const int row = row0 + row_of_output<Config>(Config::kColumnsY ? i / Config::kTokens : i % kOutputs);
    float v[kRowsPerOutput][Config::kSlices];
#pragma unroll
    for (int s = 0; s < Config::kSlices; ++s)
#pragma unroll
      for (int h = 0; h < kRowsPerOutput; ++h) v[h][s] = slice_sum(areas[s], token, row + h * Config::kGateRows);
#pragma unroll
    for (int h = 0; h < kRowsPerOutput; ++h) fold(v[h]);
    const i64 m = block_row + row, n = first_token + token, output = output_of_row<Config>(m);
    if (n >= p.n || m >= p.m) continue;
    float bias[kRowsPerOutput], result;
#pragma unroll
    for (int h = 0; h < kRowsPerOutput; ++h)
      bias[h] = p.bias ? bias_at<Config>(p.bias, m + h * Config::kGateRows) : 0.0f;
    if constexpr (Config::kGated)
      result = gated_epilogue(activated<Config, FastMath>(v[0][0], p.alpha, bias[0]),
                              activated<Config, NoMath>(v[1][0], p.alpha, bias[1]));
    else result = epilogue<Config, FastMath>(v[0][0], p.alpha, bias[0]);
    const i64 at = Config::kColumnsY ? output * p.y_stride + n : n * p.y_stride + output;
    ((Config::Out::Bits*)p.y)[at] = Config::Out::from_float(result);
  }
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    gemm_mma_sp(const __grid_constant__ MmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int kWarpBlocks = Config::kWarpBlocks, kWarpColumns = Config::kWarpColumns;
  const int rank = blockIdx.x % Config::kCluster;
  const u32 base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stream = warp / 2;
  const int row0 = Config::kSplitTokens ? 0 : warp % 2 * 32;
  const int token0 = Config::kSplitTokens ? warp % 2 * kWarpColumns * 8 : 0;
  const u32 item = blockIdx.x / Config::kCluster;  // token blocks of the same rows follow each other: W stays in L2
  const i64 first_token = (i64)(item % p.n_tiles) * Config::kTokens;
  const i64 block_tile = (i64)(item / p.n_tiles) * Config::kBlockTiles,
            row_tile = block_tile + stream % Config::kBlockTiles;
  const int slice = rank * Config::kGroups + stream / Config::kBlockTiles;
  const i64 k_tile = slice_begin<Config::kSlices>((u32)p.k_tiles, slice);
  const i64 count = slice_begin<Config::kSlices>((u32)p.k_tiles, slice + 1) - k_tile;
  const i64 steps = (p.k_tiles + Config::kSlices - 1) / Config::kSlices;  // of the longest slice
  Loader loader(p, base, first_token, row_tile, k_tile, count);

  float acc[kWarpBlocks][kWarpColumns][4];
#pragma unroll
  for (int h = 0; h < kWarpBlocks; ++h)
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[h][c][i] = 0.0f;

  launch_dependents_and_wait();
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    loader.next(s);
    cp_async_commit();
  }
  int slot = 0;
  for (i64 step = 0; step < steps; ++step) {
    cp_async_wait<Config::kStages - 2>();
    __syncthreads();
    loader.next(slot == 0 ? Config::kStages - 1 : slot - 1);
    cp_async_commit();
    if (step < count && row_tile < p.row_tiles) {
      const u32 at = base + slot * Config::kStageBytes;
      const u32 source = at + Config::kStreams * Tile::kBytes + stream / Config::kBlockTiles * Config::kSourceBytes;
      WarpTile{at + stream * Tile::kBytes, source, row0, token0}.multiply(acc);
    }
    slot = slot + 1 == Config::kStages ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncthreads();  // the stages are free: the sums take their place

  constexpr int kTokenPitch = Config::kColumnsY ? 1 : Area::kPitch, kRowPitch = Config::kColumnsY ? Area::kPitch : 1;
  float* const sums = (float*)shared + stream / Config::kBlockTiles * (Area::kBytes / 4) +
                      (stream % Config::kBlockTiles * Tile::kRows + row0) * kRowPitch;
#pragma unroll
  for (int h = 0; h < kWarpBlocks; ++h)
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(token0 + 8 * c + lane % 4 * 2 + i % 2) * kTokenPitch + (16 * h + lane / 4 + i / 2 * 8) * kRowPitch] =
            acc[h][c][i];
  if constexpr (Config::kCluster > 1) cluster_sync();
  else __syncthreads();

  u32 areas[Config::kSlices];
#pragma unroll
  for (int i = 0; i < Config::kSlices; ++i) areas[i] = slice_address(base, i);
  fold_rows(p, areas, rank * Config::kFoldRows, block_tile * Tile::kRows, first_token);
  if constexpr (Config::kCluster > 1) cluster_sync();  // nobody leaves while its sums are still read
}
