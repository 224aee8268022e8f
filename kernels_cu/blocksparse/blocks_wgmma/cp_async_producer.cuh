// Producer warps of blocksparse/blocks_wgmma.cu for small blocks, whose values they load by cp.async.
#pragma once
#include "blocksparse/blocks_wgmma/producer.cuh"

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
    if constexpr (Config::kXCopied) grid_dependency_wait();
    for (WorkSequence sequence(p, base); sequence.has_work(p); sequence.next<true>(p))
      WorkTile(p, sequence, 0).for_slices([this](const WorkTile& slice) { load_panel(slice); });
  }
};
