// C = epilogue(alpha * op(S) @ X) for a block-sparse S and few tokens: the kept blocks are read once, at the speed of
// memory. dds is computed as C^T = op(S)^T @ op(A)^T.
//
// op(S) is the A operand of mma m16n8k16, and X is B. Lanes load both from global memory into registers, without shared
// memory: blocksparse/blocks_mma/fragments.cuh says which cells. If an operand's rows or tokens are contiguous, and not
// its k, a lane has the values of two k in two words, and exchanges their halves.
//
// A CTA computes kStrips * 16 rows of a block row and up to kN8Tiles * 8 tokens. A unit is the kDepth k of a block that
// a warp multiplies at a time. The warps take the units of the block row in turns. Each warp adds its own in increasing
// k; then the upper half of the warps is added to the lower half, and these are added from the first to the last. So
// the bits of a result depend on its block row and kWarps alone, and kWarps follows from the layout's shape.
//
//   role       threads     what it does
//   Mainloop   all warps   loads and multiplies its units, kUnits of op(S) and kXUnits of X ahead
//   store_sums all warps   the upper half of the warps to shared memory, and the lower half adds them to its own
//   write      all threads adds the sums of warps, epilogue, store
//
//   barriers   two __syncthreads, round the sums of the upper half
//   registers  4 * kStrips * kN8Tiles accumulators, at most 32; op(S) of kUnits and X of kXUnits, up to 32 words each
//
//   table   | blocks of 32 units |                    one load a lane; the next 32 are prefetched to L2
//   load    |                    | 0 .. kUnits - 1 | kUnits | ..  each takes the registers of a multiplied unit
//   mma     |                                      | 0      | 1 | ..
#include "blocksparse/blocks_mma/fragments.cuh"
#include "blocksparse/params/blocks_mma.cuh"
#include "common/epilogue.cuh"
#include "gemm/split_k.cuh"
#include "ptx/async.cuh"
#include "ptx/mma.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK, kWarps = S24_WARPS, kStrips = S24_STRIPS, kN8Tiles = S24_N8_TILES;
  static constexpr int kUnits = S24_UNITS, kXUnits = S24_X_UNITS;
  // Whether k is contiguous in op(S), and in X; otherwise rows or tokens are.
  static constexpr bool kLeftAlongK = S24_LEFT_ALONG_K, kRightAlongK = S24_RIGHT_ALONG_K;
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; otherwise rows are

  static constexpr int kDepth = S24_DEPTH, kSteps = kDepth / 16, kLaneK = kDepth / 4;  // k of a unit, and of a lane
  static constexpr int kBlockUnits = kBlock / kDepth, kBlockWarps = kWarps / kBlockUnits;
  static constexpr int kThreads = 32 * kWarps, kSlots = kWarps / 2;
  // Resident warps of an SM, which bound a thread's registers. More fit if a unit has few rows, and X is not loaded as
  // single tokens, each of which takes a register.
  static constexpr int kResidentWarps = kN8Tiles == 1 && kStrips < 4 && (kRightAlongK || kStrips > 1) ? 24 : 16;
  static constexpr int kTileM = 16 * kStrips, kTileN = 8 * kN8Tiles, kRowTiles = kBlock / kTileM;
  // Words of a lane's loads: of a unit, and of one load.
  static constexpr int kLeftWords = kStrips * kLaneK, kLeftLoad = kLeftAlongK ? kLaneK / 2 : kStrips;
  static constexpr int kRightLoad = kRightAlongK ? kLaneK / 2 : (kN8Tiles + 1) / 2;
  static constexpr int kRightWords = kRightLoad * (kRightAlongK ? kN8Tiles : kLaneK);
  static_assert(kWarps % kBlockUnits == 0, "a warp's units have the same place in their blocks");
  static_assert(32 % kUnits == 0 && kUnits % kXUnits == 0, "units of a round have the same registers in each");
};
using Bits = Config::In::Bits;
using Buffer = ReduceBuffer<Config::kTileM, Config::kTileN, Config::kTokensContiguous>;
constexpr int kStrips = Config::kStrips, kN8Tiles = Config::kN8Tiles, kSlots = Config::kSlots;

// The work tile of a CTA. CTAs with the same values follow each other, so that L2 has them.
struct WorkTile {
  u32 block_row, head, batch, token;  // block_row: among all heads; token: the tile's first
  int row;                            // the tile's first, in the block row
  int first, count;                   // entries of the block row

  __device__ __forceinline__ explicit WorkTile(const BlocksMmaParams& p) {
    u32 at = blockIdx.x;
    token = at % p.n_tiles * Config::kTileN, at /= p.n_tiles;
    row = at % Config::kRowTiles * Config::kTileM, at /= Config::kRowTiles;
    block_row = at % p.block_rows, batch = at / p.block_rows;
    if (p.order) block_row = p.order[block_row];
    head = block_row / p.head_block_rows;
    first = p.pointers[block_row], count = p.pointers[block_row + 1] - first;
  }
  __device__ __forceinline__ i64 matrix(const BlocksMmaParams& p) const { return (i64)batch * p.heads + head; }
  // First row of the tile, in its head.
  __device__ __forceinline__ i64 first_row(const BlocksMmaParams& p) const {
    return (i64)(block_row % p.head_block_rows) * Config::kBlock + row;
  }
};

struct Mainloop {
  const BlocksMmaParams& p;
  const Bits *values, *x;  // this lane's first cells of block 0 and of block column 0, in the warp's unit
  int entry, units;        // entry of the warp's first unit; number of its units
  bool inside[Config::kRightAlongK ? kN8Tiles : 1];  // whether the lane's token of each tile, or all, exist

  int column, place;            // block column, and index in the values, of unit lane of a round of 32
  int columns[Config::kUnits];  // block column of each unit in flight, or -1
  u32 left[Config::kUnits][Config::kLeftWords], right[Config::kXUnits][Config::kRightWords];

  __device__ __forceinline__ Mainloop(const BlocksMmaParams& p, const WorkTile& work) : p(p) {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4;
    const int k = warp % Config::kBlockUnits * Config::kDepth + fragment_k<Config::kDepth>(threadIdx.x % 4, 0, 0);
    const int row = work.row + fragment_row<Config::kLeftAlongK, kStrips>(group, 0, 0);
    constexpr int kPitch = Config::kBlock;
    values = (const Bits*)p.values + (i64)work.batch * p.blocks * kPitch * kPitch +
             (Config::kLeftAlongK ? row * kPitch + k : k * kPitch + row);
    const i64 token = work.token + fragment_token<Config::kRightAlongK, kN8Tiles>(group, 0);
    x = (const Bits*)p.x + work.matrix(p) * p.x_matrix +
        (Config::kRightAlongK ? token * p.x_stride + k : k * p.x_stride + token);
#pragma unroll
    for (int tile = 0; tile < (Config::kRightAlongK ? kN8Tiles : 1); ++tile) inside[tile] = token + 8 * tile < p.tokens;
    const int skipped = warp / Config::kBlockUnits;  // blocks before the warp's first
    entry = work.first + skipped;
    units = max(0, (work.count - skipped + Config::kBlockWarps - 1) / Config::kBlockWarps);
  }

  // Begins a round: finds the blocks of units first + lane, and prefetches the tables of the next round.
  __device__ __forceinline__ void look_up(int first) {
    const int unit = first + threadIdx.x % 32, at = entry + unit * Config::kBlockWarps;
    if (unit < units) {
      column = p.columns[at];
      if constexpr (!Config::kLeftAlongK) place = p.value_index[at];
    }
    if (unit + 32 < units) {
      prefetch_l2(p.columns + at + 32 * Config::kBlockWarps);
      if constexpr (!Config::kLeftAlongK) prefetch_l2(p.value_index + at + 32 * Config::kBlockWarps);
    }
  }

  // Loads op(S) of a unit, and finds its block column.
  __device__ __forceinline__ void load_left(int slot, int unit) {
    const int found = __shfl_sync(~0u, column, unit % 32);
    const bool exists = unit < units;
    columns[slot] = exists ? found : -1;
    // op(S) has k contiguous if it is not transposed, and then its entries are in the order of the values.
    i64 at = entry + unit * Config::kBlockWarps;
    if constexpr (!Config::kLeftAlongK) at = __shfl_sync(~0u, place, unit % 32);
    const Bits* const from = values + at * (Config::kBlock * Config::kBlock);
#pragma unroll
    for (int i = 0; i < Config::kLeftWords / Config::kLeftLoad; ++i)
      load_words_once<Config::kLeftLoad>(left[slot] + i * Config::kLeftLoad,
                                         from + i * (Config::kLeftAlongK ? 8 : 1) * Config::kBlock, exists);
  }

  // Loads X of the unit whose column is in `slot`.
  __device__ __forceinline__ void load_right(int to, int slot) {
    const Bits* from = x + (i64)columns[slot] * Config::kBlock * (Config::kRightAlongK ? 1 : p.x_stride);
    const i64 step = Config::kRightAlongK ? 8 * p.x_stride : p.x_stride;
#pragma unroll
    for (int i = 0; i < Config::kRightWords / Config::kRightLoad; ++i, from += step) {
      const bool exists = columns[slot] >= 0 && inside[Config::kRightAlongK ? i : 0];
      if constexpr (!Config::kRightAlongK && kN8Tiles == 1) load_half_word(right[to][i], from, exists);
      else load_words<Config::kRightLoad>(right[to] + i * Config::kRightLoad, from, exists);
    }
  }

  __device__ __forceinline__ void left_fragment(u32 (&a)[4], int slot, int strip, int step) const {
    const u32(&words)[Config::kLeftWords] = left[slot];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // of row i % 2, the k of pair i / 2
      const int at = left_word<Config::kLeftAlongK, kStrips, Config::kDepth>(strip, i % 2, step, i / 2 * 2);
      if constexpr (Config::kLeftAlongK) a[i] = words[at];
      else a[i] = i % 2 ? upper_halves(words[at], words[at + kStrips]) : lower_halves(words[at], words[at + kStrips]);
    }
  }
  __device__ __forceinline__ void right_fragment(u32 (&b)[2], int slot, int tile, int step) const {
    const u32(&words)[Config::kRightWords] = right[slot];
    constexpr int kNext = Config::kRightLoad;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = right_word<Config::kRightAlongK, kN8Tiles, Config::kDepth>(tile, step, 2 * i);
      if constexpr (Config::kRightAlongK) b[i] = words[at];
      else b[i] = tile % 2 ? upper_halves(words[at], words[at + kNext]) : lower_halves(words[at], words[at + kNext]);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[kStrips][kN8Tiles][4], int slot) const {
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step)
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        u32 a[4];
        left_fragment(a, slot, strip, step);
#pragma unroll
        for (int tile = 0; tile < kN8Tiles; ++tile) {
          u32 b[2];
          right_fragment(b, slot % Config::kXUnits, tile, step);
          mma_m16n8k16<Config::kElement>(acc[strip][tile], a, b);
        }
      }
  }

  __device__ __forceinline__ void run(float (&acc)[kStrips][kN8Tiles][4]) {
    constexpr int kUnits = Config::kUnits, kXUnits = Config::kXUnits;
    column = place = 0;
    look_up(0);
#pragma unroll
    for (int slot = 0; slot < kUnits; ++slot) load_left(slot, slot);
#pragma unroll
    for (int slot = 0; slot < kXUnits; ++slot) load_right(slot, slot);
    for (int unit = 0, next = kUnits; unit < units; unit = next, next += kUnits) {
      if (next % 32 == 0) look_up(next);
#pragma unroll
      for (int slot = 0; slot < kUnits; ++slot) {
        if (unit + slot >= units) break;
        multiply(acc, slot);
        load_left(slot, next + slot);
        load_right(slot % kXUnits, (slot + kXUnits) % kUnits);
      }
    }
  }
};

// Calls `visit(sum, place in a buffer)` for the sums of a thread.
template <class Visit> __device__ __forceinline__ void visit_sums(float (&acc)[kStrips][kN8Tiles][4], Visit visit) {
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int tile = 0; tile < kN8Tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = fragment_row<Config::kLeftAlongK, kStrips>(group, strip, i / 2);
        const int token = fragment_token<Config::kRightAlongK, kN8Tiles>(2 * quad + i % 2, tile);
        visit(acc[strip][tile][i], Buffer::offset(token, row) / 4);
      }
}

// Stores the sums of the lower half of the warps, each with those of a warp of the upper half added.
__device__ __forceinline__ void store_sums(float* buffers, float (&acc)[kStrips][kN8Tiles][4]) {
  const int warp = threadIdx.x / 32;
  float* const mine = buffers + warp % kSlots * (Buffer::kBytes / 4);
  if (warp >= kSlots) visit_sums(acc, [&](float& sum, int at) { mine[at] = sum; });
  __syncthreads();
  if (warp < kSlots) visit_sums(acc, [&](float& sum, int at) { mine[at] = sum + mine[at]; });
  __syncthreads();
}

__device__ __forceinline__ void write(const BlocksMmaParams& p, const WorkTile& work, const float* buffers) {
  const i64 rows = (i64)p.head_block_rows * Config::kBlock;
  for (int i = threadIdx.x; i < Config::kTileM * Config::kTileN; i += Config::kThreads) {
    const int token = Config::kTokensContiguous ? i % Config::kTileN : i / Config::kTileM;
    const i64 n = work.token + token;
    if (n >= p.tokens) continue;
    const int tile_row = Config::kTokensContiguous ? i / Config::kTileN : i % Config::kTileM;
    float v[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
      v[slot] = buffers[(slot * Buffer::kBytes + Buffer::offset(token, tile_row)) / 4];
    reduce_in_order(v);
    const i64 row = work.first_row(p) + tile_row;
    const float bias = p.bias ? bias_at<Config>(p.bias, work.head * rows + row) : 0.0f;
    const i64 at = work.matrix(p) * p.out_matrix + row * p.out_row + n * p.out_token;
    ((Config::Out::Bits*)p.out)[at] = Config::Out::from_float(epilogue<Config, FastMath>(v[0], p.alpha, bias));
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kResidentWarps / Config::kWarps)
    blocks_mma(const __grid_constant__ BlocksMmaParams p) {
  extern __shared__ __align__(16) float buffers[];
  float acc[kStrips][kN8Tiles][4];
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int tile = 0; tile < kN8Tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[strip][tile][i] = 0.0f;
  launch_dependents_and_wait();
  const WorkTile work(p);
  Mainloop(p, work).run(acc);
  store_sums(buffers, acc);
  write(p, work, buffers);
}
