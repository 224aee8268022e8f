// C = epilogue(alpha * op(S) @ X) for a block-sparse S, with operands loaded by TMA. dsd is computed as it stands, dds
// as C^T = op(S)^T @ op(A)^T. Here rows are rows of op(S), and tokens are columns of X, whichever way C lies in memory.
//
// A row panel has 128 rows of op(S), or 64 for small blocks and few tokens: one block row, or several that share the
// columns of X that more than one of them keeps. A cluster computes one row panel times kTileN tokens for each of its
// CTAs. The CTAs share the values of S: each loads a part of them and multicasts it. A step covers 128 bytes of k in
// which the panel keeps any block, and the rows of X at that k. A panel that is longer than in random layouts may be
// cut into slices of its kept columns; panels.py says where. Steps are summed in increasing k, then slices in their
// order, so the bits of a result depend on the layout, its token, and on whether panels are cut.
//
// For sdd a row panel is one block row, or 64 rows of small blocks. A work tile is some of the block columns in which
// the panel keeps a block. A step is 128 bytes of k of op(A)'s rows, which the cluster shares, and of op(B)'s columns.
// The columns of a panel are divided evenly among the fewest work tiles. 8-bit elements require that k is contiguous in
// all operands.
//
// role       warps                        work
// producer   last warpgroup, 2 warps      S; the other two warps X: a stage a step, up to kStages ahead, also into the
//            each                         next work tiles. With small blocks each warp loads a block column of S and X,
//                                         S by cp.async, because a TMA request costs more than such a block
// consumer   each of kWarpgroups          64 rows x kWarpgroupN tokens by wgmma; skips steps without its blocks;
//                                         stages its results and stores them by TMA while the next stages are loaded
//
// barriers   full: a stage's bytes have arrived. empty: all warps of the cluster that read the stage are done.
//            Named barriers from 1 on guard a warpgroup's staging area.
// registers  kWarpgroupN / 2 accumulators; producer warps release registers to the consumers.
//
// producer | step 0 | step 1 | step 2 | ..
// mainloop          | wgmma 0 | 1 | 2 | ..                     one step in flight; the previous stage is released
//                                                              meanwhile
// epilogue                                  | fill | store |
//
// The kernel is persistent. Work tiles: slices, or whole panels if one CTA sums the slices of a panel, from the longest
// to the shortest with every token tile of a raster group, then the next raster group. For sdd the first work tile of
// every panel and batch, then the second of each panel that has one, and so on. Cluster c of G takes work tile c, then
// 2G - 1 - c, then 2G + c, so that no cluster gets only long panels. Where a panel is long, clusters claim all but
// their first work tile from a counter; which cluster computes a work tile changes no bit.
#include "blocksparse/block_mainloop.cuh"
#include "blocksparse/blocks_wgmma/slice_sums.cuh"
#include "blocksparse/tile_epilogue.cuh"
#include "blocksparse/token_boxes.cuh"
#include "ptx/stmatrix.cuh"

constexpr int kSparseGroup = Config::kSCpAsync ? Config::kBlockBytes : Config::kBox64Bytes;
using SparseOperand = DenseOperand<Config::kSparseMajor, Config::kBoxBytes, kSparseGroup>;
// A shared-memory row of X holds one token's k. Otherwise it holds 64 tokens, for sdd at most those of one block
// column, and a group holds all k of these tokens.
constexpr int kTokensBeside = Config::kSampled && Config::kSmall ? Config::kBlock : 64;
constexpr int kDenseLine = Config::kDenseMajor == Major::K ? Config::kBoxBytes : Config::kBytes * kTokensBeside;
constexpr int kDenseGroup = Config::kSmall ? Config::kBox * kDenseLine : Config::kBox64Bytes;
constexpr int kTokenBytes = Config::kSmall ? Config::kBoxBytes : kDenseLine;  // average distance between tokens
using XOperand = DenseOperand<Config::kDenseMajor, kDenseLine, kDenseGroup>;
template <bool kInteger> struct AccumulatorOf {
  using Type = float;
};
template <> struct AccumulatorOf<true> {
  using Type = int;
};
using Sum = AccumulatorOf<Config::kElement == ElementKind::S8>::Type;
using AccumulatorTile = Sum[Config::kAccumulators];  // one thread's part of 64 rows x kWarpgroupN

using Ring = PipelineState<Config::kStages>;

using Barriers = StageBarriers<Config>;

using Boxes = TokenBoxes<Config>;

// Producer ---------------------------------------------------------------------------------------------

// Loads this CTA's part of one step of a kept block, and multicasts it to the cluster.
__device__ __forceinline__ void load_sparse(const BlocksWgmmaParams& p, u32 to, i64 place, u32 half, u32 cta_rank,
                                            u32 full) {
  constexpr u32 kAll = (1 << Config::kClusterN) - 1;
  constexpr u32 kPartRows = (Config::kSparseMajor == Major::K ? Config::kBlock : Config::kBox) / Config::kClusterN;
  const u32 row = (u32)place * Config::kBlock + cta_rank * kPartRows;
  if constexpr (Config::kSparseMajor == Major::K) {
    const u32 at = to + cta_rank * kPartRows * Config::kBoxBytes;
    if constexpr (Config::kClusterN == 1) tma_load(at, &p.left_map, half * Config::kDepth, row, full);
    else tma_load_multicast(at, &p.left_map, half * Config::kDepth, row, full, (u16)kAll);
  } else {
#pragma unroll
    for (int group = 0; group < Config::kM64PerBlock; ++group) {
      const u32 at = to + group * Config::kBox64Bytes + cta_rank * kPartRows * Config::kBoxBytes;
      if constexpr (Config::kClusterN == 1) tma_load(at, &p.left_map, group * 64, row + half * 64, full);
      else tma_load_multicast(at, &p.left_map, group * 64, row + half * 64, full, (u16)kAll);
    }
  }
}

// Loads kBox k of the first `extent` of kExtent rows or tokens of a dense operand: box `first`, then each step-th one.
template <Major kMajor, int kExtent, int kBox>
__device__ __forceinline__ void load_dense(const TensorMap* map, u32 to, u32 k, u32 start, u32 matrix, u32 full,
                                           u32 first = 0, u32 step = 1, u32 extent = kExtent) {
  constexpr int kWide = kExtent < 64 ? kExtent : 64, kAcross = kMajor != Major::K ? kWide
                                                               : kExtent <= 256   ? kExtent
                                                                                  : kExtent / 2;
#pragma unroll
  for (u32 at = first * kAcross; at < extent; at += step * kAcross) {
    if constexpr (kMajor == Major::K)
      tma_load(to + at * kBox * Config::kBytes, map, k, start + at, matrix, full, Config::kDensePolicy);
    else tma_load(to + at * 128, map, start + at, k, matrix, full, Config::kDensePolicy);
  }
}

// A producer warp. kLeft: it loads the left operand and announces a stage's bytes and blocks; otherwise it loads the
// right operand. Two warps of each kind alternate between stages. Lane l handles block row l % 8 of the panel and the
// (l / 8)-th block column of a stage.
template <bool kLeft> struct Producer {
  // A stage has one box of S, and one of X. An elected lane requests it, because the compiler makes a loop over all
  // lanes for a lane that is chosen by its number. Every lane then looks up the same block row.
  static constexpr bool kOneBlockRow = Config::kPanelBlockRows == 1 && Config::kBlocksPerStep == 1;
  static constexpr bool kOneBox = kOneBlockRow && Config::kDenseMajor == Major::K && Config::kTileN <= 256;

  const BlocksWgmmaParams& p;
  u32 base, cta_rank, lane, warp;  // warp: 0 or 1, of the two that load this operand
  Barriers barriers;
  Ring at;
  u32 number = 0;  // sequence number of the stage
  // The next stage so far: its block columns; this lane's block column; the place of this lane's block among all
  // values, valid if `here`.
  u32 filled = 0, column = 0, place = 0;
  bool here = false;

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Returns whether this warp fills the stage, after waiting until the stage is empty.
  __device__ __forceinline__ bool acquire_stage() const {
    if (number % 2 != warp) return false;
    barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
    return true;
  }
  __device__ __forceinline__ void advance() {
    ++number;
    at.next();
  }

  // Loads the rows of X: each lane requests one box of its block column.
  __device__ __forceinline__ void load_x(const WorkTile& work, u32 matrix, u32 half) const {
    const u32 tokens = Boxes::loaded(work.token, p.tokens);
    const TensorMap* const map = Boxes::kLines ? Boxes::map(p, tokens) : &p.right_map;
    if constexpr (kOneBox) {
      if (tokens && elect_one())
        tma_load(stage() + Config::kSparseBytes, map, column * Config::kBlock + half * Config::kDepth, work.token,
                 matrix, barriers.full(at.stage), Config::kDensePolicy);
      return;
    }
    const u32 to =
        stage() + Config::kSparseBytes +
        lane / 8 * (Config::kDenseMajor == Major::K ? Config::kTileN * Config::kBoxBytes : Config::kBox * 128);
    if (lane / 8 < filled)
      load_dense<Config::kDenseMajor, Config::kTileN, Config::kBox>(
          map, to, column * Config::kBlock + half * Config::kDepth, work.token, matrix, barriers.full(at.stage),
          lane % 8, 8, tokens);
  }

  __device__ __forceinline__ void load_panel_blocks(const WorkTile& work, u32 half) const {
    const u32 full = barriers.full(at.stage), x_bytes = Boxes::loaded(work.token, p.tokens) * Config::kBoxBytes;
    if constexpr (kOneBlockRow) {
      if (elect_one()) {
        barrier_arrive_expect_tx(full, Config::kBlockBytes + x_bytes);
        load_sparse(p, stage(), place, half, cta_rank, full);
      }
      return;
    }
    const u32 present = __ballot_sync(~0u, here);
    if (lane == 0) {
      if constexpr (Config::kPanelBlockRows > 1) store_shared(barriers.present(at.stage), present);
      barrier_arrive_expect_tx(full, __popc(present) * Config::kBlockBytes + filled * x_bytes);
    }
    __syncwarp();
    if (here) {
      const u32 to = stage() + lane / 8 * (128 * Config::kBoxBytes) + lane % 8 * Config::kBlockBytes;
      load_sparse(p, to, place, half, cta_rank, full);
    }
  }

  __device__ __forceinline__ void load_step(const WorkTile& work, u32 matrix) {
    for (u32 half = 0; half < Config::kHalves; ++half, advance()) {
      if (!acquire_stage()) continue;
      if constexpr (kLeft) load_panel_blocks(work, half);
      else load_x(work, matrix, half);
      __syncwarp();
    }
    filled = 0, here = false;
  }

  // Loads the panel's block columns in increasing order.
  __device__ __forceinline__ void load_panel(const WorkTile& work) {
    const u32 matrix = work.matrix(p), of = kOneBlockRow ? 0 : lane % 8;
    const i64 block_row = (i64)work.head * p.head_block_rows + work.block_row + of;
    const bool mine = of < Config::kPanelBlockRows && work.block_row + of < p.head_block_rows;
    const u32* kept = p.kept + block_row * p.bit_words;
    int next = kLeft && mine ? p.pointers[block_row] : p.blocks, entry = entry_at(next);
    int skip = work.first, left = work.count;
    u32 ahead = mine && p.bit_words ? kept[0] : 0;
    for (u32 word = 0; word < p.bit_words && (!Config::kCuts || left > 0); ++word) {
      const u32 bits = ahead;
      ahead = mine && word + 1 < p.bit_words ? kept[word + 1] : 0;
      u32 any = __reduce_or_sync(~0u, bits);
      if (Config::kCuts && skip > 0) {
        const u32 before = columns_before(any, skip);
        skip -= __popc(any & before), any &= ~before;
        if (kLeft) next += __popc(bits & before), entry = entry_at(next);
      }
      if (Config::kCuts) any &= columns_before(any, left), left -= __popc(any);
      for (; any; any &= any - 1) {
        const u32 bit = __ffs(any) - 1;
        const bool keeps = bits >> bit & 1;
        if (kOneBlockRow || lane / 8 == filled)
          column = word * 32 + bit, here = keeps, place = work.batch * p.blocks + entry;
        if (kLeft && keeps) entry = entry_at(++next);
        if (++filled == Config::kBlocksPerStep) load_step(work, matrix);
      }
    }
    if (filled > 0) load_step(work, matrix);
  }
  // A mask of a word's columns that ends behind the first `count` kept ones, or has all columns if no more are kept.
  static __device__ __forceinline__ u32 columns_before(u32 any, int count) {
    if (__popc(any) <= count) return ~0u;
    for (; count > 0; --count) any &= any - 1;
    return (any & -any) - 1;
  }
  // Place of an entry's values. Past the last entry there is none, and `next` itself is returned.
  __device__ __forceinline__ int entry_at(int next) const {
    return p.value_index && next < p.blocks ? p.value_index[next] : next;
  }

  // Loads this CTA's part of the panel's rows of op(A), and multicasts it to the cluster.
  __device__ __forceinline__ void load_rows(const WorkTile& work, u32 k, u32 matrix, u32 full) const {
    constexpr bool kAlongK = Config::kSparseMajor == Major::K;
    constexpr u32 kPartRows = (kAlongK ? Config::kTileM : Config::kBox) / Config::kClusterN;
    const u32 row = work.row() + (kAlongK ? cta_rank * kPartRows : 0), from = k + (kAlongK ? 0 : cta_rank * kPartRows);
#pragma unroll
    for (u32 at = 0; at < (kAlongK ? 1 : Config::kTileM); at += 64) {
      const u32 to = stage() + at * 128 + cta_rank * kPartRows * 128;
      const u32 across = kAlongK ? from : row + at, down = kAlongK ? row : from;
      if constexpr (Config::kClusterN == 1) tma_load(to, &p.left_map, across, down, matrix, full, Config::kDensePolicy);
      else tma_load_multicast(to, &p.left_map, across, down, matrix, full, (u16)((1 << Config::kClusterN) - 1));
    }
  }

  // For sdd: loads the panel's rows of op(A), or op(B)'s columns of every block of the work tile, one lane for each
  // block.
  __device__ __forceinline__ void load_work(const WorkTile& work) {
    const u32 matrix = work.matrix(p);
    const int column = lane < work.count ? p.columns[work.first + lane] : 0;
    for (u32 step = 0; step < p.k_steps; ++step, advance()) {
      if (!acquire_stage()) continue;
      const u32 full = barriers.full(at.stage), right = stage() + Config::kSparseBytes;
      if (kLeft && lane == 0) {
        barrier_arrive_expect_tx(full, Config::kSparseBytes + work.count * Config::kPieceN * 128);
        load_rows(work, step * Config::kDepth, matrix, full);
      }
      if (!kLeft && lane < work.count)
        load_dense<Config::kDenseMajor, Config::kPieceN, Config::kBox>(
            &p.right_map, right + lane * Config::kPieceN * 128, step * Config::kDepth,
            column * Config::kBlock + work.token, matrix, full);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void produce() {
    for (WorkSequence sequence(p, base); sequence.has_work(p); sequence.next<kLeft>(p)) {
      WorkTile work(p, sequence, cta_rank);
      if constexpr (Config::kSampled) load_work(work);
      else work.for_slices([this](const WorkTile& slice) { load_panel(slice); });
    }
    // No CTA exits while another CTA may still arrive at its barriers.
    if constexpr (kLeft && Config::kClusterN > 1)
      for (int i = 0; i < Config::kStages; ++i, at.next()) barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
  }
};

// A producer warp for small blocks: in every step it loads one block column, or a part of its block rows.
struct CpAsyncProducer {
  // Warps that share one block column. Each has block rows of its own if these form whole 64-row tiles; otherwise each
  // loads a part of every block row.
  static constexpr int kWarpsPerColumn = 4 / Config::kBlocksPerStep;
  static constexpr bool kOwnBlockRows = Config::kPanelBlockRows / kWarpsPerColumn % Config::kBlockRowsPerM64 == 0 &&
                                        Config::kPanelBlockRows >= kWarpsPerColumn;
  static constexpr int kOwnRows = kOwnBlockRows ? Config::kPanelBlockRows / kWarpsPerColumn : Config::kPanelBlockRows;
  static constexpr int kAhead = 32 / Config::kPanelBlockRows;  // steps that one table lookup covers
  static constexpr int kBlockBytes = Config::kBlock * Config::kBoxBytes,
                       kChunks = Config::kBoxBytes / 16;  // of a block's row
  static constexpr int kPasses =
      kBlockBytes / 512 / (kOwnBlockRows ? 1 : kWarpsPerColumn);  // passes of 512 bytes over a block
  static_assert(!Config::kSCpAsync || (kOwnRows <= 8 && Config::kStages <= 8), "bits of a u64");
  static_assert(!Config::kSCpAsync || kPasses > 0, "a warp copies 512 bytes at a time");

  const BlocksWgmmaParams& p;
  u32 base, lane, column, warp_of_column;  // block column of a step, and warp of this block column
  Barriers barriers;
  Ring at;
  u64 dirty = ~0ull;  // bit l of a stage's byte: block row l of this warp holds other values than zeros

  // Looks up step l / kPanelBlockRows and block row l % kPanelBlockRows for lane l. `column` is negative past the last
  // column, `place` is negative where the block row keeps no block.
  struct Found {
    int column, place;
  };
  __device__ __forceinline__ Found look_up(int first, int count, int step) const {
    const int index = (step + (int)lane / Config::kPanelBlockRows) * Config::kBlocksPerStep + (int)column;
    if (index >= count) return {-1, -1};
    return {p.columns[first + index],
            p.value_index[(i64)(first + index) * Config::kPanelBlockRows + lane % Config::kPanelBlockRows]};
  }

  // Block rows that must be zeroed: they share a 64-row tile with a block in `present`, have no block themselves, and
  // hold old values.
  static __device__ __forceinline__ u32 stale(u32 present, u32 dirty) {
    constexpr int kOf = Config::kBlockRowsPerM64;
    u32 tiles = present | present >> 1;
    if constexpr (kOf == 4) tiles |= tiles >> 2;
    tiles &= kOf == 4 ? 0x11 : 0x55;
    return dirty & tiles * ((1 << kOf) - 1) & ~present;
  }

  __device__ __forceinline__ void load_x(const WorkTile& work, u32 tokens, u32 matrix, u32 k, u32 to, u32 full) const {
    const TensorMap* const map = Boxes::map(p, tokens);
    if constexpr (Boxes::kLines) {
      if (lane == 0) tma_load(to, map, k, work.token, matrix, full, Config::kDensePolicy);
    } else if (p.full_boxes) {
      if (lane == 0) tma_load(to, map, 0, k, work.token / 64, matrix, full, Config::kDensePolicy);
    } else if (lane * 64 < tokens) {
      tma_load(to + lane * (Config::kBox * 128), &p.right_map, work.token + lane * 64, k, 0, matrix, full,
               Config::kDensePolicy);
    }
  }

  // Copies at most kOwnRows blocks, or zeros, to `to` and on.
  __device__ __forceinline__ void copy_blocks(const WorkTile& work, u32 to, int place, u32 from, u32 present,
                                              u32 zeros) const {
    const u8* const values = (const u8*)p.values + (i64)work.batch * p.blocks * kBlockBytes + lane * 16;
#pragma unroll
    for (int block_row = 0; block_row < kOwnRows;
         ++block_row) {  // no branches, so that one copy need not wait for another
      const bool keep = present >> block_row & 1, copies = (present | zeros) >> block_row & 1;
      const i64 which = max(__shfl_sync(~0u, place, from + block_row), 0);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const u32 at = kOwnBlockRows ? i : warp_of_column * kPasses + i, row = (lane + 32 * at) / kChunks,
                  chunk = lane % kChunks;
        const u32 swizzled = Config::kBoxBytes == 64 ? row / 2 % 4 : row / 4 % 2;  // TMA's swizzle
        cp_async_16_if(copies, to + block_row * kBlockBytes + row * Config::kBoxBytes + (chunk ^ swizzled) * 16,
                       values + which * kBlockBytes + at * 512, keep);
      }
    }
  }

  // Loads one step. Lanes `from` and on hold its block column and places in `found`; `kept` tells which block rows keep
  // the column.
  __device__ __forceinline__ void load_step(const WorkTile& work, u32 matrix, const Found& found, u32 from, u32 kept) {
    const u32 to = base + at.stage * Config::kStageBytes, full = barriers.full(at.stage);
    const u32 block_row = kOwnBlockRows ? warp_of_column * kOwnRows : 0,
              present = kept >> block_row & ((1 << kOwnRows) - 1);  // first block row of this warp
    const int kept_column = __shfl_sync(~0u, found.column, from);
    const u32 held = (u32)(dirty >> 8 * at.stage) & 0xff, zeros = stale(present, held);
    dirty ^= (u64)(held ^ ((held & ~zeros) | present)) << 8 * at.stage;
    barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
    const u32 tokens = warp_of_column == 0 && kept_column >= 0 ? Boxes::loaded(work.token, p.tokens) : 0;
    constexpr u32 kColumnBytes = Config::kTileN * Config::kBoxBytes;
    if (lane == 0) {
      if (warp_of_column == 0) store_shared(barriers.present(at.stage) + column, (u8)kept);
      barrier_arrive_expect_tx(full, tokens * Config::kBoxBytes);
    }
    __syncwarp();
    if (tokens)
      load_x(work, tokens, matrix, kept_column * Config::kBlock, to + Config::kSparseBytes + column * kColumnBytes,
             full);
    __syncwarp();
    copy_blocks(work, to + column * (Config::kTileM * Config::kBoxBytes) + block_row * kBlockBytes, found.place,
                from + block_row, present, zeros);
    cp_async_mbarrier_arrive(full);
  }

  __device__ __forceinline__ void load_panel(const WorkTile& work) {
    const int first = work.first + p.pointers[work.head * p.head_panels + work.block_row / Config::kPanelBlockRows],
              steps = work.steps(p);
    const u32 matrix = work.matrix(p);
    Found next = look_up(first, work.count, 0);
    for (int begin = 0; begin < steps; begin += kAhead) {
      const Found found = next;
      next = look_up(first, work.count, begin + kAhead);
      const u32 kept = __ballot_sync(~0u, found.place >= 0);
      for (int i = 0; i < min(kAhead, steps - begin); ++i, at.next())
        load_step(work, matrix, found, i * Config::kPanelBlockRows,
                  kept >> i * Config::kPanelBlockRows & ((1 << Config::kPanelBlockRows) - 1));
    }
  }

  __device__ __forceinline__ void produce() {
    for (WorkSequence sequence(p, base); sequence.has_work(p); sequence.next<true>(p))
      WorkTile(p, sequence, 0).for_slices([this](const WorkTile& slice) { load_panel(slice); });
  }
};

// Mainloop -----------------------------------------------------------------------------------------------

// The mainloop of one consumer warpgroup: 64 rows x kWarpgroupN tokens.
struct ConsumerMainloop : BlockMainloop<Config, ConsumerMainloop, Config::kClaims> {
  __device__ __forceinline__ void issue(AccumulatorTile& sums, u32 present) const {
    const u64 a = SparseOperand::descriptor(stage() + warpgroup_m * 64 * Config::kBoxBytes);
    const u64 b =
        XOperand::descriptor(stage() + Config::kSparseBytes + warpgroup_n * Config::kWarpgroupN * kTokenBytes);
    constexpr u32 kBlockStrideB =
        Config::kDenseMajor == Major::K || Config::kSmall ? Config::kTileN * Config::kBoxBytes : Config::kBox * 128;
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < Config::kBlocksPerStep; ++block) {  // the block columns of the stage, in order
      if (Config::kBlocksPerStep > 1 && !(present >> 8 * block & 0xff)) continue;
#pragma unroll
      for (int k = 0; k < Config::kBoxBytes / 32; ++k)
        wgmma_dense<Config::kElement, Config::kSparseMajor, Config::kDenseMajor>(
            sums, a + (block * (Config::kTileM * Config::kBoxBytes) >> 4) + k * SparseOperand::kStep,
            b + (block * kBlockStrideB >> 4) + k * XOperand::kStep);
    }
    wgmma_commit();
  }
};

// Epilogue --------------------------------------------------------------------------------------------

constexpr StoredBy kStoredBy = Config::kSampled && Config::kSmall ? StoredBy::Threads
                               : Config::kUnalignedRows           ? StoredBy::Warps
                                                                  : StoredBy::Tma;

// Stores the results of one warpgroup: 64 rows x kWarpgroupN tokens. For sdd with small blocks threads store the kept
// blocks.
struct EpilogueStore : TileEpilogue<EpilogueStore, Config, BlocksWgmmaParams, Config::kTokensContiguous, kStoredBy> {
  template <class Sums>
  __device__ __forceinline__ void write(const Sums& sums, const WorkTile& work, u32 warpgroup_m, u32 warpgroup_n) {
    const u32 row0 = work.row() + warpgroup_m * 64, token0 = work.token + warpgroup_n * Config::kWarpgroupN;
    const u32 tokens = Config::kSampled ? work.token + work.count * Config::kPieceN : p.tokens;
    const u32 rows = p.head_block_rows * Config::kBlock;
    write_tile(sums, work, row0, rows, (i64)work.head * rows + row0, token0, tokens);
  }

  __device__ __forceinline__ void store(u32 buffer, const WorkTile& work, u32 row, u32 token) const {
    const u32 warpgroup_m = (row - work.row()) / 64;
    if constexpr (Config::kSampled && Config::kSmall) {
      copy_blocks<Config::kBlock>(buffer, work, warpgroup_m, token);
    } else if constexpr (Config::kSampled) {
      const i64 place = work.first + token / Config::kBlock + (i64)work.batch * p.blocks;
      tma_store(&p.out_map, token % Config::kBlock, (u32)place * Config::kBlock + warpgroup_m * 64, buffer);
      tma_store_commit();
    } else {
      store_boxes(buffer, row, token, work.matrix(p));
    }
  }

  // Converts the accumulators of one step, which may be integers; results may have 8 bits or be the sums themselves. It
  // is a template of Out so that functions that a result type lacks are never looked up.
  template <class Sum, class Out = Config::Out>
  __device__ __forceinline__ void fill(u32 buffer, const Sum* sums, const float (&bias)[2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < Config::kStepColumns / 8; ++j) {
      const Sum* const sum = sums + 4 * j;
      if constexpr (Config::kOutBytes != 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 to = buffer + staged_at(row + g + i / 2 * 8, 8 * j + 2 * t + i % 2);
          if constexpr (Config::kRaw) store_shared(to, (u32)sum[i]);
          else store_shared(to, Out::from_float(canonical_nan(result(sum[i], bias[i / 2]))));
        }
      } else {
        const u32 above = Out::pair(result(sum[0], bias[0]), result(sum[1], bias[0]));
        const u32 below = Out::pair(result(sum[2], bias[1]), result(sum[3], bias[1]));
        if constexpr (Config::kTokensContiguous) stmatrix_x2(buffer + staged_at(row + lane % 16, 8 * j), above, below);
        else stmatrix_transposed_x2(buffer + staged_at(row + lane / 8 % 2 * 8, 8 * j + lane % 8), above, below);
      }
    }
  }

  // Stores the buffer's kept blocks, one warp for each block. It is a template so that larger blocks never instantiate
  // it.
  template <int kBlock>
  __device__ __forceinline__ void copy_blocks(u32 buffer, const WorkTile& work, u32 warpgroup_m, u32 token) const {
    constexpr int kBytes = Config::kOutBytes, kAcross = Config::kStepColumns / kBlock, kDown = 64 / kBlock;
    constexpr int kRowChunks = kBlock * kBytes / 16, kChunks = kBlock * kRowChunks;
    for (int at = threadIdx.x % 128 / 32; at < kAcross * kDown; at += 4) {
      const int across = at % kAcross, down = at / kAcross, column = (int)token / kBlock + across;
      if (column >= work.count) continue;
      const int place =
          p.value_index[(i64)(work.first + column) * Config::kPanelBlockRows + warpgroup_m * kDown + down];
      if (place < 0) continue;
      u8* const to = (u8*)p.values + ((i64)work.batch * p.blocks + place) * (kChunks * 16);
      for (int chunk = threadIdx.x % 32; chunk < kChunks; chunk += 32) {
        const int row = down * kBlock + chunk / kRowChunks, cell = across * kBlock + chunk % kRowChunks * (16 / kBytes);
        float v[4];
        load_shared_x4(v, buffer + staged_at(row, cell));
        *(float4*)(to + chunk * 16) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    blocks_wgmma(const __grid_constant__ BlocksWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 cta_rank = blockIdx.x % Config::kClusterN, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      store_shared(barriers.present(i), 0u);
      barrier_init(barriers.full(i), Config::kFullArrivals);
      barrier_init(barriers.empty(i), 4 * Config::kWarpgroups * Config::kClusterN);
    }
    barrier_init_fence();
  }
  if (Config::kClaims && threadIdx.x == 32) {  // another warp, so that the kernel starts no later
    Claims{base}.init();
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kClusterN > 1) cluster_sync_relaxed();
  if constexpr (Config::kSCpAsync) launch_dependent_grids();
  grid_dependency_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if constexpr (Config::kSCpAsync)
      CpAsyncProducer{
          p, base, lane, warp / CpAsyncProducer::kWarpsPerColumn, warp % CpAsyncProducer::kWarpsPerColumn, barriers}
          .produce();
    else if (warp < 2) Producer<true>{p, base, cta_rank, lane, warp, barriers}.produce();
    else Producer<false>{p, base, cta_rank, lane, warp - 2, barriers}.produce();
    // The next kernel starts only now: earlier, its requests would compete for memory with those of this kernel. With
    // small blocks that made no difference.
    if (!Config::kSCpAsync && warp == 3 && lane == 0) launch_dependent_grids();
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    const u32 warpgroup_m = warpgroup % Config::kWarpgroupsM, warpgroup_n = warpgroup / Config::kWarpgroupsM;
    ConsumerMainloop mainloop{
        {{}, base, warpgroup_m, warpgroup_n, ConsumerRelease<Config>(barriers.empty(0)), barriers}};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    EpilogueStore epilogue{{p, staging, 1 + (int)warpgroup}};
    AccumulatorTile sums;
    for (WorkSequence sequence(p, base); sequence.has_work(p); sequence.next<false>(p)) {
      WorkTile work(p, sequence, cta_rank);
      if constexpr (Config::kSlices == Slices::InTurn) {
        SlicesInTurn<Sum> in_turn{p, warpgroup, {}};
        work.for_slices([&](const WorkTile& slice) {
          mainloop.multiply(sums, slice.steps(p));
          if (slice.slices > 1) in_turn.add(sums, slice);
        });
        epilogue.write(sums, work, warpgroup_m, warpgroup_n);
      } else {
        const u32 token = work.token + warpgroup_n * Config::kWarpgroupN;
        const SlicesApart apart{p, 1 + (int)warpgroup, warpgroup_m, token};
        const u64 seen = Config::kSlices == Slices::Apart ? apart.seen(work) : 0;
        mainloop.multiply(sums, work.steps(p));
        if (Config::kSlices != Slices::Apart || work.slices == 1) epilogue.write(sums, work, warpgroup_m, warpgroup_n);
        else if (apart.store(sums, work, seen))
          epilogue.write(apart.sums_of<Sum>(work), work, warpgroup_m, warpgroup_n);
      }
    }
    if (epilogue.is_storing_thread()) tma_store_wait_read<0>();
  }
  if constexpr (Config::kClaims && Config::kClusterN > 1) {  // the other CTA's warps still tell that they read a claim
    __syncwarp();
    cluster_sync_relaxed();
  }
}
