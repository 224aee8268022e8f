// Producer warps of blocksparse/blocks_wgmma.cu that load both operands by TMA.
#pragma once
#include "blocksparse/blocks_wgmma/tile_scheduler.cuh"
#include "blocksparse/pipeline.cuh"
#include "blocksparse/token_boxes.cuh"

using Ring = PipelineState<Config::kStages>;

using Barriers = StageBarriers<Config>;

using Boxes = TokenBoxes<Config>;

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
      if constexpr (Config::kMayLackBlocks) store_shared(barriers.present(at.stage), present);
      barrier_arrive_expect_tx(full, __popc(present) * Config::kBlockBytes + filled * x_bytes);
    }
    __syncwarp();
    if (here) {
      const u32 to = stage() + lane / 8 * (Config::kTileM * Config::kBoxBytes) + lane % 8 * Config::kBlockBytes;
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
    if constexpr (Config::kXCopied && !kLeft) grid_dependency_wait();
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
