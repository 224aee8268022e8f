// The roles of gemm/wgmma_sp.cu that copy W and X to shared memory.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"

__device__ __forceinline__ const u8* weight_tile(const WgmmaSpParams& p, Item item, int i, i64 tile) {
  const i64 row_tile = min(item.row_tile + i, p.row_tiles - 1);  // past the end: multiplied, not stored
  return p.packed + (row_tile * p.k_tiles + tile) * Tile::kBytes;
}

// Has the first tiles of W brought to L2 while the kernel before this one may still run: as much as memory gives a
// multiprocessor in that time, more delays what is needed first.
__device__ __forceinline__ void prefetch_weights(const WgmmaSpParams& p, u32 share, u32 slice) {
  constexpr int kTiles = 4 / (Config::kRowTiles * Config::kBlocksPerSm);
  constexpr int kAhead = Config::kTokens > 64 ? 0 : kTiles > 0 ? kTiles : 1;
  const Turns turn(p, slice);
  const Item item(p, turn.index, share);
  for (u32 tile = turn.first, end = min(tile + kAhead, turn.last); tile < end; ++tile)
#pragma unroll
    for (int i = 0; i < Config::kRowTiles; ++i) prefetch_bulk(weight_tile(p, item, i, tile), Tile::kBytes);
}

// X in columns, one stage, for every block that shares it: they take stages in turn. Whole groups of tokens are one
// box: the copy engine takes long to begin another.
__device__ __forceinline__ void copy_columns(const WgmmaSpParams& p, u32 to, u32 box, Item item, u32 full, u32 share,
                                             u32 slice) {
  const bool is_tail = item.token + Config::kTokens >= p.n;
  const u32 tokens = is_tail ? p.x_tail_tokens : Config::kTokens;
  const u32 whole = (is_tail ? (u32)(p.n - item.token) : Config::kTokens) / Config::kGroup * Config::kGroup;
  barrier_arrive_expect_tx(full, tokens * Config::kBoxColumns * 2);
  if (box % Config::kShare != share) return;
  const u32 token = (u32)item.token, column = box * Config::kBoxColumns, rest_to = to + whole * 128;
  const TensorMap *groups = is_tail ? &p.x_tail_map : &p.x_map,
                  *rest = is_tail ? &p.x_tail_remainder_map : &p.x_remainder_map;
  if constexpr (Config::kShare == 1) {
    if (whole) tma_load(to, groups, token, column, 0, full);
    if (whole < tokens) tma_load(rest_to, rest, token + whole, column, 0, full);
  } else {
    const u16 mask = (u16)(((1 << Config::kShare) - 1) << Config::kShare * slice);
    if (whole) tma_load_multicast(to, groups, token, column, 0, full, mask);
    if (whole < tokens) tma_load_multicast(rest_to, rest, token + whole, column, 0, full, mask);
  }
}

// The threads that copy X in columns of few tokens, whose lines are short and begin anywhere: the copy engine is slow
// there. A thread has 8 tokens of every kStep-th column.
__device__ __forceinline__ void copy_lines(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share, u32 slice) {
  constexpr int kChunks = Config::kTokens / 8, kLanes = kChunks <= 2 ? kChunks : kChunks <= 4 ? 4 : 8;
  constexpr int kStep = Config::kLineThreads / kLanes, kPasses = 64 / kStep;
  constexpr int kSwapped = Config::kGroup / 8, kLine = 2 * Config::kGroup;
  static_assert(!Config::kByThreads || kChunks <= 8, "a line has a group, and a thread for each 8 tokens");
  const int thread = threadIdx.x % Config::kLineThreads, line = thread / kLanes, chunk = thread % kLanes;
  const auto swizzle = [](int line) { return line * kSwapped / 8 % kSwapped * 16; };
  const u32 into = base + Config::kSourceAt + line * kLine + (chunk * 16 ^ swizzle(line));
  const i64 ahead = kStep * p.x_stride;
  PipelineState<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    const i64 token = item.token + chunk * 8;
    const bool has = chunk < kChunks && token < p.n;
    int column = (int)turn.first * Tile::kColumns + line;
    const int end = (int)turn.last * Tile::kColumns;
    const u16* source = (const u16*)p.x + token + column * p.x_stride;
    for (; column < end; column += Config::kBoxColumns, source += kPasses * ahead, at.next()) {
      barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
      const u32 to = into + at.slot * Config::kSourceBytes;
      const u16* from = source;
      if (has) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i, from += ahead)
          cp_async_16_cached((to ^ swizzle(i * kStep)) + i * kStep * kLine, from, column + i * kStep < (int)p.k);
      }
      cp_async_mbarrier_arrive(barriers.source_came(at.slot));
    }
  }
}

// The thread that reports stages which threads copied: what they stored is seen by wgmma only after a fence. Theirs
// would wait for all that they have on the way.
__device__ __forceinline__ void report_lines(const WgmmaSpParams& p, Barriers barriers, u32 slice) {
  PipelineState<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p))
    for (int boxes = 2 * (int)(turn.last - turn.first); boxes > 0; --boxes, at.next()) {
      barrier_wait(barriers.source_came(at.slot), at.parity);
      async_proxy_fence();
      barrier_arrive(barriers.source_full(at.slot));
    }
}

// A stage of W.
__device__ __forceinline__ void copy_weight(const WgmmaSpParams& p, u32 base, Barriers barriers, Item item, u32 tile,
                                            PipelineState<Config::kWeightStages>& at) {
  barrier_wait(barriers.weight_free(at.slot), at.parity ^ 1);
  barrier_arrive_expect_tx(barriers.weight_full(at.slot), Config::kRowTiles * Tile::kBytes);
#pragma unroll
  for (int i = 0; i < Config::kRowTiles; ++i)
    bulk_load(base + at.slot * Config::kWeightBytes + i * Config::kTileBytes, weight_tile(p, item, i, tile),
              Tile::kBytes, barriers.weight_full(at.slot));
  at.next();
}

// X of an item's tokens. The last tokens come in boxes of their own: rows past them would be written as zeros, which is
// slow. What the stage holds there instead is multiplied, and not stored.
struct Source {
  Item item;
  const TensorMap* map;
  u32 rows;

  __device__ __forceinline__ Source(const WgmmaSpParams& p, Item item) : item(item) {
    const bool is_tail = item.token + Config::kTokens >= p.n;
    map = is_tail ? &p.x_tail_map : &p.x_map;
    rows = is_tail ? p.x_tail_tokens : Config::kTokens / Config::kShare;
  }

  // A stage: this block's part, for every block that shares it.
  __device__ __forceinline__ void copy(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 box, u32 share,
                                       u32 slice, PipelineState<Config::kSourceStages>& at) const {
    barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
    const u32 full = barriers.source_full(at.slot), to = base + Config::kSourceAt + at.slot * Config::kSourceBytes;
    at.next();
    if constexpr (Config::kColumnsX) {
      copy_columns(p, to, box, item, full, share, slice);
    } else {
      barrier_arrive_expect_tx(full, Config::kShare * rows * 128);
      // Of float32, the boxes of the same columns: those of the low part first.
      const u32 column = (Config::kXParts ? box / Config::kBoxes : box) * Config::kBoxColumns;
      const u32 part = Config::kXParts ? Config::kBoxes - 1 - box % Config::kBoxes : 0;
      const u32 token = (u32)item.token + part * (u32)p.n;
      if constexpr (Config::kShare == 1) tma_load(to, map, column, token, full);
      else
        tma_load_multicast(to + share * rows * 128, map, column, token + share * rows, full,
                           (u16)(((1 << Config::kShare) - 1) << Config::kShare * slice));
    }
  }
};

// Nobody leaves while others may still report to its barriers.
__device__ __forceinline__ void await_reports(Barriers barriers, PipelineState<Config::kSourceStages> at) {
  if constexpr (Config::kShare > 1)
    for (int i = 0; i < Config::kSourceStages; ++i, at.next())
      barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
}

// The thread that copies W.
__device__ __forceinline__ void copy_weights(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share,
                                             u32 slice) {
  PipelineState<Config::kWeightStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    for (u32 tile = turn.first; tile < turn.last; ++tile) copy_weight(p, base, barriers, item, tile, at);
  }
}

// The thread that copies X.
__device__ __forceinline__ void copy_source(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share, u32 slice) {
  PipelineState<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Source source(p, Item(p, turn.index, share));
    for (u32 box = Config::kBoxes * turn.first; box < Config::kBoxes * turn.last; ++box)
      source.copy(p, base, barriers, box, share, slice, at);
  }
  await_reports(barriers, at);
}

// One thread that copies both asks for what is needed first: the copy engine serves one request after the other.
__device__ __forceinline__ void copy_both(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share, u32 slice) {
  PipelineState<Config::kWeightStages> weight_at;
  PipelineState<Config::kSourceStages> source_at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    const Source source(p, item);
    for (u32 tile = turn.first; tile < turn.last; ++tile) {
      copy_weight(p, base, barriers, item, tile, weight_at);
#pragma unroll
      for (u32 i = 0; i < Config::kBoxes; ++i)
        source.copy(p, base, barriers, Config::kBoxes * tile + i, share, slice, source_at);
    }
  }
  await_reports(barriers, source_at);
}
