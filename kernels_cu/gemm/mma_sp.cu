// Decode: Y[n, m] = epilogue(alpha * sum_k X[n, k] * W[m, k]) for few tokens, W streamed once at memory speed.
//
// W is the sparse A operand of mma.sp m16n8k32, X is B. W comes packed in tiles of 64 rows x 128 columns
// (sparse24_plans/packing.py): 8192 bytes of swizzled values and 1024 bytes of metadata in fragment order, one
// contiguous block that cp.async brings in as it is.
//
// K is cut into S24_SLICES slices (4 or 8, from M alone). A slice is summed by one warp in increasing k; slices
// are folded from the first to the last, ((0+1)+2)+3. So a row's bits don't depend on n, on its place in
// the batch, or on which of the cuts below computes it.
//
// Eight warps work on four tile streams, two warps a stream. S24_BLOCK_TILES of the streams lie along M, the
// rest along K: few tokens take slices of K side by side (nothing to fold between blocks), many tokens take rows
// (X is shared by more of W). Slices of other blocks are read through the cluster. Clusters beyond 2 leave
// multiprocessors idle, since GPCs hold 14 to 18 of them, so they pay only where blocks come in many waves.
#include "common/common.cuh"
#include "ptx/async.cuh"

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileM = 64, kTileK = 128, kTileBytes = 9216, kValueBytes = 8192;
constexpr int kStreams = 4;
constexpr int kBlockTiles = S24_BLOCK_TILES;         // streams along M
constexpr int kGroups = kStreams / kBlockTiles;      // streams along K
constexpr int kSlices = S24_SLICES;
constexpr int kCluster = kSlices / kGroups;          // blocks that share a row block
constexpr int kColumns = S24_TOKEN_TILES;            // n8 tiles
constexpr int kTokens = 8 * kColumns;
constexpr int kStages = S24_STAGES;
// The two warps of a stream share its rows, or, with many tokens, the tokens: then each B fragment that is
// fetched serves twice as many rows.
constexpr bool kSplitTokens = kColumns >= 8 && S24_BLOCKS_PER_SM == 1;
constexpr int kWarpBlocks = kSplitTokens ? 4 : 2;    // m16 blocks of a warp
constexpr int kWarpColumns = kSplitTokens ? kColumns / 2 : kColumns;
constexpr int kSourceBytes = kTokens * kTileK * 2;   // X of one stream along K
constexpr int kStageBytes = kStreams * kTileBytes + kGroups * kSourceBytes;
constexpr int kRows = kBlockTiles * kTileM;          // of a block
constexpr int kFoldPitch = kRows + 4;                // floats; 4 keeps the fragment stores off each other's banks

struct MmaSpParams {
  const u8* packed;     // [row tiles][K tiles][9216]
  const u16* x;         // [n, k], row stride x_stride, 16-byte aligned rows
  const void* bias;     // [m], or null
  void* y;              // [n, m], row stride y_stride
  i64 n, m, k, x_stride, y_stride, row_tiles, k_tiles;
  float alpha;
  u32 token_blocks;     // blocks of kTokens that cover n
};

typedef Element<S24_OUT> Out;
typedef Element<S24_BIAS> Bias;

// A thread's part of the loads, one K tile a call. The two warps that multiply a stream also fetch it; all warps
// along M of one slice fetch its X together.
struct Loader {
  static constexpr int kChunks = kTileBytes / 16 / 64;  // 64 threads a tile
  static constexpr int kPeers = 64 * kBlockTiles;       // threads that share X
  static constexpr int kTokenStep = kPeers / 16, kTokenLoads = kTokens / kTokenStep;

  const u8* weights;
  const u16* source;
  i64 tiles;         // of this thread's slice still to fetch; 0 where its rows lie outside W
  i64 columns;       // of X from this thread's chunk to the end of a row
  i64 token_stride;  // elements between this thread's tokens
  int tokens;        // how many of them lie inside X
  u32 weights_to, source_to, swap;

  __device__ __forceinline__ Loader(const MmaSpParams& p, u32 base, i64 token0, i64 row_tile, i64 k_tile, i64 count) {
    const int stream = threadIdx.x / 64, u = threadIdx.x % 64, peer = threadIdx.x % kPeers;
    tiles = count;
    weights = row_tile < p.row_tiles ? p.packed + (row_tile * p.k_tiles + k_tile) * kTileBytes + u * 16 : nullptr;
    weights_to = base + stream * kTileBytes + u * 16;
    const int token = peer / 16, chunk = peer % 16;
    const i64 column = k_tile * kTileK + chunk * 8;
    const i64 rows = p.n - token0 - token;
    source = p.x + (token0 + token) * p.x_stride + column;
    columns = p.k - column;
    token_stride = kTokenStep * p.x_stride;
    tokens = rows <= 0 ? 0 : rows >= kTokens ? kTokenLoads : (int)((rows + kTokenStep - 1) / kTokenStep);
    source_to = base + kStreams * kTileBytes + stream / kBlockTiles * kSourceBytes + token * 256 + (chunk ^ (token & 7)) * 16;
    swap = ((chunk ^ (token + kTokenStep & 7)) - (chunk ^ (token & 7))) * 16;  // where tokens are 4 apart
  }

  __device__ __forceinline__ void next(int slot) {
    if (tiles-- <= 0) return;
    const u32 offset = slot * kStageBytes;
    if (weights) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) copy_async_16(weights_to + offset + i * 1024, weights + i * 1024, true);
      weights += kTileBytes;
    }
#pragma unroll
    for (int i = 0; i < kTokenLoads; ++i) {
      const bool keep = i < tokens && columns > 0;
      const u32 odd = kTokenStep % 8 != 0 && i % 2 != 0 ? swap : 0;
      copy_async_16(source_to + offset + i * kTokenStep * 256 + odd, keep ? source + i * token_stride : source, keep);
    }
    source += kTileK;
    columns -= kTileK;
  }
};

__device__ __forceinline__ i64 slice_begin(i64 k_tiles, int slice) { return k_tiles * slice / kSlices; }

// A warp's share of a tile: all four k32 steps. Fragments are fetched ahead of the mma that takes them: B by
// kAhead, A by one step.
struct WarpTile {
  static constexpr int kAhead = 2, kBuffers = kAhead + 1, kUses = 4 * kWarpColumns;

  u32 tile, source;  // shared memory
  int row0, token0;

  __device__ __forceinline__ void load_a(u32 (&a)[kWarpBlocks][4], int step) const {
    const int lane = threadIdx.x % 32, chunk = 2 * step + lane / 16;
#pragma unroll
    for (int h = 0; h < kWarpBlocks; ++h) {
      const int row = row0 + 16 * h + lane % 16;
      load_matrix_x4(a[h], tile + row * 128 + (chunk ^ (row & 7)) * 16);
    }
  }

  __device__ __forceinline__ void load_b(u32 (&b)[4], int use) const {
    const int lane = threadIdx.x % 32, chunk = use / kWarpColumns * 4 + lane / 8;
    const int token = token0 + use % kWarpColumns * 8 + lane % 8;
    load_matrix_x4(b, source + token * 256 + (chunk ^ (token & 7)) * 16);
  }

  __device__ __forceinline__ void multiply(float (&acc)[kWarpBlocks][kWarpColumns][4]) const {
    u32 metadata[kWarpBlocks][2], a[2][kWarpBlocks][4], b[kBuffers][4];
#pragma unroll
    for (int h = 0; h < kWarpBlocks; ++h) {
      const u32 at = tile + kValueBytes + ((row0 / 16 + h) * 32 + threadIdx.x % 32) * 8;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(metadata[h][0]), "=r"(metadata[h][1]) : "r"(at));
    }
    load_a(a[0], 0);
#pragma unroll
    for (int use = 0; use < kAhead; ++use) load_b(b[use], use);
#pragma unroll
    for (int use = 0; use < kUses; ++use) {
      const int step = use / kWarpColumns, column = use % kWarpColumns;
      if (use + kAhead < kUses) load_b(b[(use + kAhead) % kBuffers], use + kAhead);
      if (column == 0 && step < 3) load_a(a[(step + 1) % 2], step + 1);
#pragma unroll
      for (int h = 0; h < kWarpBlocks; ++h) {  // the selector is an immediate
        if (step % 2 == 0) mma_sp_m16n8k32<S24_ELEMENT, 0>(acc[h][column], a[step % 2][h], b[use % kBuffers], metadata[h][step / 2]);
        else mma_sp_m16n8k32<S24_ELEMENT, 1>(acc[h][column], a[step % 2][h], b[use % kBuffers], metadata[h][step / 2]);
      }
    }
  }
};

// Where the block that summed `slice` keeps its sums: [group][token][row] floats.
__device__ __forceinline__ u32 slice_address(u32 base, int slice) {
  const u32 at = base + (slice % kGroups) * kTokens * kFoldPitch * 4;
  return kCluster > 1 ? cluster_address(at, slice / kGroups) : at;
}

__device__ __forceinline__ float slice_sum(u32 address, int token, int row) {
  const u32 at = address + (token * kFoldPitch + row) * 4;
  return kCluster > 1 ? load_cluster(at) : load_shared(at);
}

#if S24_SLICES / (4 / S24_BLOCK_TILES) > 1
#define S24_CLUSTER __cluster_dims__(S24_SLICES / (4 / S24_BLOCK_TILES), 1, 1)
#else
#define S24_CLUSTER
#endif

extern "C" __global__ void S24_CLUSTER __launch_bounds__(kThreads, S24_BLOCKS_PER_SM)
    gemm_mma_sp(const __grid_constant__ MmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int rank = blockIdx.x % kCluster;
  const u32 base = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stream = warp / 2;
  const int row0 = kSplitTokens ? 0 : warp % 2 * 32, token0 = kSplitTokens ? warp % 2 * kWarpColumns * 8 : 0;
  const u32 item = blockIdx.x / kCluster;  // token blocks of the same rows follow each other: W stays in L2
  const i64 first_token = (i64)(item % p.token_blocks) * kTokens;
  const i64 block_tile = (i64)(item / p.token_blocks) * kBlockTiles, row_tile = block_tile + stream % kBlockTiles;
  const int slice = rank * kGroups + stream / kBlockTiles;
  const i64 k_tile = slice_begin(p.k_tiles, slice), count = slice_begin(p.k_tiles, slice + 1) - k_tile;
  const i64 steps = (p.k_tiles + kSlices - 1) / kSlices;  // of the longest slice
  Loader loader(p, base, first_token, row_tile, k_tile, count);

  float acc[kWarpBlocks][kWarpColumns][4];
#pragma unroll
  for (int h = 0; h < kWarpBlocks; ++h)
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[h][c][i] = 0.0f;

  follow_predecessors();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    loader.next(s);
    copy_async_commit();
  }
  int slot = 0;
  for (i64 step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    loader.next(slot == 0 ? kStages - 1 : slot - 1);
    copy_async_commit();
    if (step < count && row_tile < p.row_tiles) {
      const u32 at = base + slot * kStageBytes;
      const u32 source = at + kStreams * kTileBytes + stream / kBlockTiles * kSourceBytes;
      WarpTile{at + stream * kTileBytes, source, row0, token0}.multiply(acc);
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the stages are free: the sums take their place

  float* const sums = (float*)shared + (stream / kBlockTiles * kTokens) * kFoldPitch + stream % kBlockTiles * kTileM + row0;
#pragma unroll
  for (int h = 0; h < kWarpBlocks; ++h)
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(token0 + 8 * c + lane % 4 * 2 + i % 2) * kFoldPitch + 16 * h + lane / 4 + i / 2 * 8] = acc[h][c][i];
  if constexpr (kCluster > 1) cluster_meet();
  else __syncthreads();

  // Each block of the cluster finishes its share of the rows.
  constexpr int kShare = kRows / kCluster;
  u32 slices[kSlices];
#pragma unroll
  for (int i = 0; i < kSlices; ++i) slices[i] = slice_address(base, i);
#pragma unroll 4
  for (int i = threadIdx.x; i < kShare * kTokens; i += kThreads) {
    const int token = i / kShare, row = rank * kShare + i % kShare;
    float v[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) v[s] = slice_sum(slices[s], token, row);
    float total = v[0];
#pragma unroll
    for (int s = 1; s < kSlices; ++s) total += v[s];
    const i64 m = block_tile * kTileM + row;
    if (first_token + token >= p.n || m >= p.m) continue;
    const float bias = p.bias ? Bias::to_float(((const Bias::Bits*)p.bias)[m]) : 0.0f;
    ((Out::Bits*)p.y)[(first_token + token) * p.y_stride + m] = Out::from_float(epilogue<FastMath>(total, p.alpha, bias));
  }
  if constexpr (kCluster > 1) cluster_meet();  // nobody leaves while its sums are still read
}
