// C = epilogue(alpha * op(S) @ X) for a block-sparse S and few tokens: the kept blocks are read once, at the speed of
// memory. dds is computed as C^T = op(S)^T @ op(A)^T.
//
// op(S) is the A operand of mma m16n8k16, and X is B. Lanes load both from global memory into registers, without shared
// memory: blocksparse/blocks_mma/fragments.cuh says which cells. If an operand's rows or tokens are contiguous, and not
// its k, a lane has the values of two k in two words, and exchanges their halves.
//
// A CTA computes kM16Tiles * 16 rows of a block row and up to kN8Tiles * 8 tokens. Its warps take the shares of the
// block row, and blocksparse/blocks_mma/shares.cuh says which, so that bits depend on the row and on kRowSlices alone.
// With kRowSlices above 1, a cluster computes each tile of a long block row: each CTA takes a slice of the row.
//
//   role       threads      what it does
//   Mainloop   warps        loads and multiplies its units, kUnits of op(S) and kXUnits of X ahead; after a share puts
//                           its sums into shared memory. If a pre-pass copies X, it loads tables and op(S) meanwhile
//   write      all threads  adds the sums of slots, then those of slices; epilogue, store
//
//   barriers   two __syncthreads, round the sums of the upper half of the shares; one if a warp has both halves. With
//              slices, two cluster syncs: one before and one after CTAs read each other's sums
//   registers  4 * kM16Tiles * kN8Tiles accumulators, at most 32; op(S) of kUnits and X of kXUnits, up to 32 words each
//
//   table   | blocks of 32 units |                    to shared memory; the next 32 are prefetched to L2
//   load    |                    | 0 .. kUnits - 1 | kUnits | ..  each takes the registers of a multiplied unit
//   mma     |                                      | 0      | 1 | ..
#include "blocksparse/blocks_mma/fragments.cuh"
#include "blocksparse/blocks_mma/shares.cuh"
#include "blocksparse/params/blocks_mma.cuh"
#include "common/epilogue.cuh"
#include "gemm/split_k.cuh"
#include "ptx/async.cuh"
#include "ptx/mma.cuh"
#include "ptx/prefetch.cuh"

#define S24_CLUSTER_SIZE S24_ROW_SLICES
#include "common/cluster.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK, kWarps = S24_WARPS, kM16Tiles = S24_M16_TILES, kN8Tiles = S24_N8_TILES;
  static constexpr int kUnits = S24_UNITS, kXUnits = S24_X_UNITS;
  static constexpr int kRowSlices = S24_ROW_SLICES;  // CTAs of a cluster: the most slices of a block row
  // Whether k is contiguous in op(S), and in X; otherwise rows or tokens are.
  static constexpr bool kLeftAlongK = S24_LEFT_ALONG_K, kRightAlongK = S24_RIGHT_ALONG_K;
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; otherwise rows are
  // Whether a pre-pass has just copied X, which began once everything before it was done.
  static constexpr bool kXCopied = S24_X_COPIED;

  static constexpr int kDepth = S24_DEPTH, kSteps = kDepth / 16, kLaneK = kDepth / 4;  // k of a unit, and of a lane
  static constexpr int kBlockUnits = kBlock / kDepth;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kResidentWarps = S24_RESIDENT_WARPS;  // of an SM, which bound a thread's registers
  static constexpr int kTileM = 16 * kM16Tiles, kTileN = 8 * kN8Tiles, kRowTiles = kBlock / kTileM;
  // Words of a lane's loads: of a unit, and of one load.
  static constexpr int kLeftWords = kM16Tiles * kLaneK, kLeftLoad = kLeftAlongK ? kLaneK / 2 : kM16Tiles;
  static constexpr int kRightLoad = kRightAlongK ? kLaneK / 2 : (kN8Tiles + 1) / 2;
  static constexpr int kRightWords = kRightLoad * (kRightAlongK ? kN8Tiles : kLaneK);
  static_assert(kWarps % kBlockUnits == 0, "a warp's units have the same place in their blocks");
  static_assert(32 % kUnits == 0 && kUnits % kXUnits == 0, "units of a round have the same registers in each");
};
using Bits = Config::In::Bits;
using Buffer = ReduceBuffer<Config::kTileM, Config::kTileN, Config::kTokensContiguous>;
constexpr int kM16Tiles = Config::kM16Tiles, kN8Tiles = Config::kN8Tiles;
using Accumulators = float[kM16Tiles][kN8Tiles][4];

// The work tile of a CTA. CTAs with the same values follow each other, so that L2 has them. If rows may have several
// slices, clusters for them come first. The CTAs behind have a whole row each, and share nothing with their cluster.
struct WorkTile {
  u32 block_row, head, batch, token;  // block_row: among all heads; token: the tile's first
  int row;                            // the tile's first, in the block row
  int slice = 0, slices = 1;          // of the block row
  int first, count;                   // entries of the slice

  __device__ __forceinline__ explicit WorkTile(const BlocksMmaParams& p) {
    u32 at = blockIdx.x, begin = 0, end = p.block_rows;  // the CTA's row is one of these, in their order
    bool is_long = false;
    if constexpr (Config::kRowSlices > 1) {
      const u32 clusters = p.long_rows * p.n_tiles * Config::kRowTiles * p.batch;
      is_long = at / Config::kRowSlices < clusters;
      if (is_long) slice = at % Config::kRowSlices, at /= Config::kRowSlices, end = p.long_rows;
      else at -= clusters * Config::kRowSlices, begin = p.long_rows;
    }
    token = at % p.n_tiles * Config::kTileN, at /= p.n_tiles;
    row = at % Config::kRowTiles * Config::kTileM, at /= Config::kRowTiles;
    block_row = begin + at % (end - begin), batch = at / (end - begin);
    if (p.order) block_row = p.order[block_row];
    head = block_row / p.head_block_rows;
    first = p.pointers[block_row], count = p.pointers[block_row + 1] - first;
    if (is_long) take_slice();
  }
  __device__ __forceinline__ void take_slice() {
    slices = slices_of<Config::kRowSlices>(count * Config::kBlockUnits);
    const int begin = slice_start(count, slice, slices), end = slice_start(count, slice + 1, slices);
    first += begin, count = end - begin;
  }
  // CTAs of a cluster have no work if their row has fewer slices, or if they are behind the last row.
  __device__ __forceinline__ bool exists(const BlocksMmaParams& p) const { return slice < slices && batch < p.batch; }
  __device__ __forceinline__ i64 matrix(const BlocksMmaParams& p) const { return (i64)batch * p.heads + head; }
  // First row of the tile, in its head.
  __device__ __forceinline__ i64 first_row(const BlocksMmaParams& p) const {
    return (i64)(block_row % p.head_block_rows) * Config::kBlock + row;
  }
};

// Calls `visit(sum, place in a buffer)` for the sums of a thread.
template <class Visit> __device__ __forceinline__ void visit_sums(Accumulators& acc, Visit visit) {
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int m16_tile = 0; m16_tile < kM16Tiles; ++m16_tile)
#pragma unroll
    for (int tile = 0; tile < kN8Tiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = fragment_row<Config::kLeftAlongK, kM16Tiles>(group, m16_tile, i / 2);
        const int token = fragment_token<Config::kRightAlongK, kN8Tiles>(2 * quad + i % 2, tile);
        visit(acc[m16_tile][tile][i], Buffer::offset(token, row) / 4);
      }
}
__device__ __forceinline__ void clear(Accumulators& acc) {
  visit_sums(acc, [](float& sum, int) { sum = 0.0f; });
}

// The slots in shared memory.
struct Slots {
  float* buffers;
  int count;  // half of the row's shares

  __device__ __forceinline__ float* of(int share) const {
    return buffers + (share < count ? share : share - count) * (Buffer::kBytes / 4);
  }
  __device__ __forceinline__ void store(Accumulators& acc, int share) const {
    float* const slot = of(share);
    visit_sums(acc, [&](float& sum, int at) { slot[at] = sum; });
  }
  // Adds the sums of the other share with the same slot.
  __device__ __forceinline__ void add(Accumulators& acc, int share) const {
    float* const slot = of(share);
    visit_sums(acc, [&](float& sum, int at) { slot[at] = sum + slot[at]; });
  }
};

// The block of a unit: its block column, or -1 if there is none, and its index in the values.
struct alignas(8) Block {
  int column, place;
};

// The part of shared memory that keeps a warp's values during the mainloop, which needs the registers.
using Shares = WarpShares<Config::kWarps, Config::kBlockUnits, Config::kUnits>;
struct WarpTables {
  Shares units;
  Block blocks[32];  // of 32 units
};

// The mainloop of a warp.
struct Mainloop {
  const BlocksMmaParams& p;
  WarpTables& mine;        // of the warp, in shared memory
  const Bits *values, *x;  // this lane's first cells of block 0 and of block column 0, in the warp's unit
  int tokens;              // tokens from the lane's first on, if lanes load k of single tokens

  int columns[Config::kUnits];  // block column of each unit in flight, or -1
  u32 left[Config::kUnits][Config::kLeftWords], right[Config::kXUnits][Config::kRightWords];

  __device__ __forceinline__ Mainloop(const BlocksMmaParams& p, WarpTables& mine, const WorkTile& work, int warp)
      : p(p), mine(mine) {
    const int group = threadIdx.x % 32 / 4;
    const int k = warp % Config::kBlockUnits * Config::kDepth + fragment_k<Config::kDepth>(threadIdx.x % 4, 0, 0);
    const int row = work.row + fragment_row<Config::kLeftAlongK, kM16Tiles>(group, 0, 0);
    constexpr int kPitch = Config::kBlock;
    values = (const Bits*)p.values + (i64)work.batch * p.blocks * kPitch * kPitch +
             (Config::kLeftAlongK ? row * kPitch + k : k * kPitch + row);
    i64 token = work.token + fragment_token<Config::kRightAlongK, kN8Tiles>(group, 0);
    if (!Config::kRightAlongK && token >= p.tokens) token = work.token;  // no result is stored for them
    x = (const Bits*)p.x + work.matrix(p) * p.x_matrix +
        (Config::kRightAlongK ? token * p.x_stride + k : k * p.x_stride + token);
    tokens = (int)(p.tokens - token);
  }

  // Finds the blocks of 32 units from `begin` on, and prefetches the tables of the next 32. op(S) has k contiguous if
  // it is not transposed, and then its entries are in the order of the values.
  __device__ __forceinline__ void look_up(int begin) {
    const int lane = threadIdx.x % 32, at = mine.units.entry_of(begin + lane),
              next = mine.units.entry_of(begin + 32 + lane);
    Block found{-1, at};
    if (at >= 0) {
      found.column = p.columns[at];
      if constexpr (!Config::kLeftAlongK) found.place = p.value_index[at];
    }
    if (next >= 0) {
      prefetch_l2(p.columns + next);
      if constexpr (!Config::kLeftAlongK) prefetch_l2(p.value_index + next);
    }
    __syncwarp();
    mine.blocks[lane] = found;
    __syncwarp();
  }

  // Loads op(S) of a unit.
  __device__ __forceinline__ void load_left(int slot, int unit) {
    const Block block = mine.blocks[unit % 32];
    columns[slot] = block.column;
    const bool exists = block.column >= 0;
    const Bits* const from = values + (i64)block.place * (Config::kBlock * Config::kBlock);
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
      const bool exists = columns[slot] >= 0 && (!Config::kRightAlongK || tokens > 8 * i);
      if constexpr (!Config::kRightAlongK && kN8Tiles == 1) load_half_word(right[to][i], from, exists);
      else load_words<Config::kRightLoad>(right[to] + i * Config::kRightLoad, from, exists);
    }
  }

  __device__ __forceinline__ void left_fragment(u32 (&a)[4], int slot, int m16_tile, int step) const {
    const u32(&words)[Config::kLeftWords] = left[slot];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // of row i % 2, the k of pair i / 2
      const int at = left_word<Config::kLeftAlongK, kM16Tiles, Config::kDepth>(m16_tile, i % 2, step, i / 2 * 2);
      if constexpr (Config::kLeftAlongK) a[i] = words[at];
      else
        a[i] = i % 2 ? upper_halves(words[at], words[at + kM16Tiles]) : lower_halves(words[at], words[at + kM16Tiles]);
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

  __device__ __forceinline__ void multiply(Accumulators& acc, int slot) const {
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step)
#pragma unroll
      for (int m16_tile = 0; m16_tile < kM16Tiles; ++m16_tile) {
        u32 a[4];
        left_fragment(a, slot, m16_tile, step);
#pragma unroll
        for (int tile = 0; tile < kN8Tiles; ++tile) {
          u32 b[2];
          right_fragment(b, slot % Config::kXUnits, tile, step);
          mma_m16n8k16<Config::kElement>(acc[m16_tile][tile], a, b);
        }
      }
  }

  // Sums the warp's shares. If it has several, their sums are in the slots then.
  __device__ __forceinline__ void run(Accumulators& acc, float* buffers, int warp) {
    constexpr int kUnits = Config::kUnits, kXUnits = Config::kXUnits;
    const int units = mine.units.units();
    int end = mine.units.length;  // of the share's units
    look_up(0);
#pragma unroll
    for (int slot = 0; slot < kUnits; ++slot) load_left(slot, slot);
    if constexpr (Config::kXCopied) grid_dependency_wait();
#pragma unroll
    for (int slot = 0; slot < kXUnits; ++slot) load_right(slot, slot);
    for (int unit = 0; unit < units; unit += kUnits) {
      const int next = unit + kUnits;
      if (next % 32 == 0) look_up(next);
#pragma unroll
      for (int slot = 0; slot < kUnits; ++slot) {
        if (unit + slot >= units) break;
        if (unit + slot < end) multiply(acc, slot);
        load_left(slot, next + slot);
        load_right(slot % kXUnits, (slot + kXUnits) % kUnits);
      }
      if (next >= end && mine.units.has_several()) {
        const Slots slots{buffers, mine.units.shares / 2};
        const int share = warp + mine.units.shares_before(unit) * Config::kWarps;
        if (share < slots.count) slots.store(acc, share);
        else slots.add(acc, share);
        clear(acc), end += mine.units.pitch();
      }
    }
  }
};

// The place of a work tile's results: elements of C and of the bias before the first, and tokens of the tile. Shared
// memory keeps it during the mainloop, which needs the registers.
struct ResultTile {
  i64 out, bias;
  u32 tokens;
  int slice, slices;

  __device__ __forceinline__ void set(const BlocksMmaParams& p, const WorkTile& work) {
    slice = work.slice, slices = work.slices;
    const i64 row = work.first_row(p);
    out = work.matrix(p) * p.out_matrix + row * p.out_row + work.token * p.out_token;
    bias = (i64)work.head * p.head_block_rows * Config::kBlock + row;
    tokens = p.tokens - work.token;
  }
};

// Calls `visit(token, row, place in a buffer)` for the results of thread `own` of `threads`.
template <class Visit>
__device__ __forceinline__ void visit_results(const ResultTile& tile, int own, int threads, Visit visit) {
  for (int i = own; i < Config::kTileM * Config::kTileN; i += threads) {
    const int token = Config::kTokensContiguous ? i % Config::kTileN : i / Config::kTileM;
    if (token >= tile.tokens) continue;
    const int row = Config::kTokensContiguous ? i / Config::kTileN : i % Config::kTileM;
    visit(token, row, (int)Buffer::offset(token, row) / 4);
  }
}

// Adds the sums of slots.
__device__ __forceinline__ float sum_of_slots(const Slots& slots, int at) {
  float v[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) v[slot] = slot < slots.count ? slots.of(slot)[at] : 0.0f;
  reduce_in_order(v);
  return v[0];
}

__device__ __forceinline__ void write_result(const BlocksMmaParams& p, const ResultTile& tile, int token, int row,
                                             float sum) {
  const float bias = p.bias ? bias_at<Config>(p.bias, tile.bias + row) : 0.0f;
  ((Config::Out::Bits*)p.out)[tile.out + row * p.out_row + token * p.out_token] =
      Config::Out::from_float(epilogue<Config, FastMath>(sum, p.alpha, bias));
}

// Adds the sums of slices in their order. Each CTA writes a part of the results, and reads the first slots of all CTAs.
__device__ __forceinline__ void write_sliced(const BlocksMmaParams& p, const ResultTile& tile, const Slots& slots) {
  visit_results(tile, threadIdx.x, Config::kThreads,
                [&](int, int, int at) { slots.buffers[at] = sum_of_slots(slots, at); });
  cluster_sync();
  const int own = tile.slice * Config::kThreads + threadIdx.x;
  visit_results(tile, own, tile.slices * Config::kThreads, [&](int token, int row, int at) {
    const u32 mine = shared_address(slots.buffers + at);
    float sum = load_cluster(cluster_address(mine, 0));
    for (int slice = 1; slice < tile.slices; ++slice) sum += load_cluster(cluster_address(mine, slice));
    write_result(p, tile, token, row, sum);
  });
  cluster_sync();  // no CTA exits while another reads its sums
}

__device__ __forceinline__ void write(const BlocksMmaParams& p, const ResultTile& tile, const Slots& slots) {
  if (Config::kRowSlices > 1 && tile.slices > 1) return write_sliced(p, tile, slots);
  visit_results(tile, threadIdx.x, Config::kThreads,
                [&](int token, int row, int at) { write_result(p, tile, token, row, sum_of_slots(slots, at)); });
}

// Prefetches the tables and the values. All lanes of a warp call it together.
__device__ __forceinline__ void prefetch_operand(const BlocksMmaParams& p) {
  if (p.order) prefetch_part_l2(p.order, 4ll * p.block_rows);
  prefetch_part_l2(p.pointers, 4ll * p.block_rows);
  prefetch_part_l2(p.columns, 4 * p.blocks);
  if constexpr (!Config::kLeftAlongK) prefetch_part_l2(p.value_index, 4 * p.blocks);
  prefetch_part_l2(p.values, 2 * p.blocks * (Config::kBlock * Config::kBlock));
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kResidentWarps / Config::kWarps)
    blocks_mma(const __grid_constant__ BlocksMmaParams p) {
  extern __shared__ __align__(16) float buffers[];
  __shared__ ResultTile tile;
  __shared__ WarpTables of_warps[Config::kWarps];
  launch_dependent_grids();
  if constexpr (!Config::kXCopied) {
    if (threadIdx.x < 32) prefetch_operand(p);
    grid_dependency_wait();
  }
  const WorkTile work(p);
  if (Config::kRowSlices > 1 && !work.exists(p)) return;
  const int warp = threadIdx.x / 32;
  WarpTables& mine = of_warps[warp];
  if (threadIdx.x == 0) tile.set(p, work);
  if (threadIdx.x % 32 == 0) mine.units = Shares::of(work.first, work.count, warp);
  __syncwarp();
  Accumulators acc;
  clear(acc);
  Mainloop mainloop(p, mine, work, warp);
  mainloop.run(acc, buffers, warp);
  const Slots slots{buffers, mine.units.shares / 2};
  if (!mine.units.has_several()) {
    if (warp >= slots.count && warp < mine.units.shares) slots.store(acc, warp);
    __syncthreads();
    if (warp < slots.count) slots.add(acc, warp);
  }
  __syncthreads();
  write(p, tile, slots);
}
