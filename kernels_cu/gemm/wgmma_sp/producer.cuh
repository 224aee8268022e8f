// The producers of gemm/wgmma_sp.cu, which load W and X into shared memory.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"
#include "gemm/wgmma_sp/tile_scheduler.cuh"
#include "ptx/tma_batches.cuh"

__device__ __forceinline__ const u8* weight_tile(const WgmmaSpParams& p, WorkTile work, int i, i64 tile) {
  i64 row_tile = min(work.row_tile + i, p.row_tiles - 1);  // rows past the end are multiplied, not stored
  if constexpr (Config::kGrouped) row_tile += work.group * p.row_tiles;
  if constexpr (Config::kBatched) row_tile += work.group * (p.batches.weight_rows / Tile::kRows);
  return p.packed + (row_tile * p.k_tiles + tile) * Tile::kBytes;
}

// Prefetches the first K tiles of W to L2 while the kernel before this one may still run. Only as much is prefetched as
// an SM can read in that time: more would delay what is needed first.
__device__ __forceinline__ void prefetch_weights(const WgmmaSpParams& p, u32 m_rank, u32 slice) {
  constexpr int kSmTiles = Config::kQuantized ? 36864 / Tile::kBytes : 4;
  constexpr int kTiles = kSmTiles / (Config::kMTiles * Config::kCtasPerSm);
  constexpr int kAhead = Config::kTileN > 64 ? 0 : kTiles > 0 ? kTiles : 1;
  const TileScheduler scheduler(p, slice);
  const WorkTile work(p, scheduler.index, m_rank);
  for (u32 tile = scheduler.first, end = min(tile + kAhead, scheduler.last); tile < end; ++tile)
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i) prefetch_bulk(weight_tile(p, work, i, tile), Tile::kBytes);
}

// Loads a box of X into this CTA, or into all CTAs of the cluster that share it.
template <class... Coordinates> __device__ __forceinline__ void load_x_box(const WgmmaSpParams& p, WorkTile work,
                                                                           u32 to, const TensorMap* map, u32 full,
                                                                           u32 slice, Coordinates... at) {
  const auto load = [&](auto... at) {
    if constexpr (Config::kClusterM == 1) tma_load(to, map, at..., full);
    else tma_load_multicast(to, map, at..., full, (u16)(((1 << Config::kClusterM) - 1) << Config::kClusterM * slice));
  };
  if constexpr (Config::kBatched) load(at..., work.coordinate<&BatchParams::x>(p));
  else load(at...);
}

// Loads one stage of a column-major X by TMA. The CTAs of the cluster alternate: each loads every kClusterM-th stage
// into all of them. All whole groups of tokens are one box, since beginning another box is slow.
__device__ __forceinline__ void load_x_column_major(const WgmmaSpParams& p, u32 to, u32 box, WorkTile work, u32 full,
                                                    u32 m_rank, u32 slice) {
  const bool is_tail = work.token + Config::kTileN >= p.n;
  const u32 tokens = is_tail ? p.x_tail_tokens : Config::kTileN;
  const u32 whole = (is_tail ? (u32)(p.n - work.token) : Config::kTileN) / Config::kTokenGroup * Config::kTokenGroup;
  barrier_arrive_expect_tx(full, tokens * Config::kBoxColumns * 2);
  if (box % Config::kClusterM != m_rank) return;
  const u32 token = (u32)work.token, column = box * Config::kBoxColumns, rest_to = to + whole * 128;
  const TensorMap *groups = is_tail ? &p.x_tail_map : &p.x_map,
                  *rest = is_tail ? &p.x_tail_remainder_map : &p.x_remainder_map;
  if (whole) load_x_box(p, work, to, groups, full, slice, token, column, 0u);
  if (whole < tokens) load_x_box(p, work, rest_to, rest, full, slice, token + whole, column, 0u);
}

// How threads copy a stage of a column-major X of few tokens: each a chunk of 8 tokens of every kStep-th column.
struct XCopy {
  static constexpr int kChunks = Config::kTileN / 8, kLanes = kChunks <= 2 ? kChunks : kChunks <= 4 ? 4 : 8;
  static constexpr int kStep = Config::kXCopyThreads / kLanes, kPasses = 64 / kStep;
  static constexpr int kSwapped = Config::kTokenGroup / 8, kLine = 2 * Config::kTokenGroup;
  static_assert(!Config::kXCpAsync || kChunks <= 8, "a line holds one group of tokens");

  static __device__ __forceinline__ constexpr int swizzle(int line) { return line * kSwapped / 8 % kSwapped * 16; }
  // The column that a thread copies first, and its chunk, of which there may be none.
  static __device__ __forceinline__ constexpr int line(u32 thread) {
    return int(thread % Config::kXCopyThreads) / kLanes;
  }
  static __device__ __forceinline__ constexpr int chunk(u32 thread) {
    return int(thread % Config::kXCopyThreads) % kLanes;
  }
  // The offset of the thread's chunk in a stage, and from there the address of the chunk of its pass-th column.
  static __device__ __forceinline__ constexpr u32 offset(u32 thread) {
    return line(thread) * kLine + (chunk(thread) * 16 ^ swizzle(line(thread)));
  }
  static __device__ __forceinline__ constexpr u32 address_of_pass(u32 to, int pass) {
    return (to ^ swizzle(pass * kStep)) + pass * kStep * kLine;
  }
};

// Loads a column-major X of few tokens by cp.async. Its lines are short and may begin anywhere, where TMA is slow.
__device__ __forceinline__ void load_x_cp_async(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                                u32 slice) {
  const int line = XCopy::line(threadIdx.x), chunk = XCopy::chunk(threadIdx.x);
  const u32 into = base + Config::kXAt + XCopy::offset(threadIdx.x);
  const i64 ahead = XCopy::kStep * p.x_stride;
  PipelineState<Config::kXStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const WorkTile work(p, scheduler.index, m_rank);
    const i64 token = work.token + chunk * 8;
    const bool has = chunk < XCopy::kChunks && token < p.n;
    int column = (int)scheduler.first * Tile::kColumns + line;
    const int end = (int)scheduler.last * Tile::kColumns;
    const u16* source = work.of_batch<&BatchParams::x>(p, (const u16*)p.x) + token + column * p.x_stride;
    for (; column < end; column += Config::kBoxColumns, source += XCopy::kPasses * ahead, at.next()) {
      barrier_wait(barriers.x_empty(at.stage), at.parity ^ 1);
      const u32 to = into + at.stage * Config::kXStageBytes;
      const u16* from = source;
      if (has) {
#pragma unroll
        for (int i = 0; i < XCopy::kPasses; ++i, from += ahead)
          cp_async_16_cached(XCopy::address_of_pass(to, i), from, column + i * XCopy::kStep < (int)p.k);
      }
      cp_async_mbarrier_arrive(barriers.x_copied(at.stage));
    }
  }
}

// Publishes the stages that cp.async loaded: wgmma sees them only after a proxy fence. The copying threads do not fence
// themselves: such a fence would wait for all their copies in flight.
__device__ __forceinline__ void publish_x(const WgmmaSpParams& p, Barriers barriers, u32 slice) {
  PipelineState<Config::kXStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p))
    for (int boxes = 2 * (int)(scheduler.last - scheduler.first); boxes > 0; --boxes, at.next()) {
      barrier_wait(barriers.x_copied(at.stage), at.parity);
      async_proxy_fence();
      barrier_arrive(barriers.x_full(at.stage));
    }
}

// Loads one stage of W.
__device__ __forceinline__ void load_weight_stage(const WgmmaSpParams& p, u32 base, Barriers barriers, WorkTile work,
                                                  u32 tile, PipelineState<Config::kWeightStages>& at) {
  barrier_wait(barriers.weight_empty(at.stage), at.parity ^ 1);
  barrier_arrive_expect_tx(barriers.weight_full(at.stage), Config::kMTiles * Tile::kBytes);
#pragma unroll
  for (int i = 0; i < Config::kMTiles; ++i)
    bulk_load(base + at.stage * Config::kWeightStageBytes + i * Config::kWeightTileBytes, weight_tile(p, work, i, tile),
              Tile::kBytes, barriers.weight_full(at.stage));
  at.next();
}

// Loads X for one work tile. The last tokens have boxes of their own: rows past them would be written as zeros, which
// is slow. The stage keeps old values there instead, which are multiplied and never stored.
struct XLoader {
  WorkTile work;
  const TensorMap* map;
  u32 rows;

  __device__ __forceinline__ XLoader(const WgmmaSpParams& p, WorkTile work) : work(work) {
    // The last tokens of a group are followed by another group's, which are multiplied and not stored.
    const bool is_tail = !Config::kGrouped && work.token + Config::kTileN >= p.n;
    map = is_tail ? &p.x_tail_map : &p.x_map;
    rows = is_tail ? p.x_tail_tokens : Config::kTileN / Config::kClusterM;
  }

  // Loads this CTA's part of a stage into every CTA that shares it.
  __device__ __forceinline__ void load(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 box, u32 m_rank,
                                       u32 slice, PipelineState<Config::kXStages>& at) const {
    barrier_wait(barriers.x_empty(at.stage), at.parity ^ 1);
    const u32 full = barriers.x_full(at.stage), to = base + Config::kXAt + at.stage * Config::kXStageBytes;
    at.next();
    if constexpr (Config::kXColumnMajor) {
      load_x_column_major(p, to, box, work, full, m_rank, slice);
    } else {
      barrier_arrive_expect_tx(full, Config::kClusterM * rows * 128);
      // The bf16 terms of the same columns follow each other, the low term first.
      const u32 column = (Config::kSplitTerms ? box / Config::kBoxesPerTile : box) * Config::kBoxColumns;
      const u32 term = Config::kSplitTerms ? Config::kBoxesPerTile - 1 - box % Config::kBoxesPerTile : 0;
      const u32 token = (u32)work.token + term * (u32)p.n;
      load_x_box(p, work, to + m_rank * rows * 128, map, full, slice, column, token + m_rank * rows);
    }
  }
};

// No CTA exits while others may still arrive at its barriers.
__device__ __forceinline__ void drain_x_stages(Barriers barriers, PipelineState<Config::kXStages> at) {
  if constexpr (Config::kClusterM > 1)
    for (int i = 0; i < Config::kXStages; ++i, at.next()) barrier_wait(barriers.x_empty(at.stage), at.parity ^ 1);
}

// One thread loads all of W.
__device__ __forceinline__ void load_weights(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                             u32 slice) {
  PipelineState<Config::kWeightStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const WorkTile work(p, scheduler.index, m_rank);
    for (u32 tile = scheduler.first; tile < scheduler.last; ++tile)
      load_weight_stage(p, base, barriers, work, tile, at);
  }
}

// One thread loads all of X.
__device__ __forceinline__ void load_x(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank, u32 slice) {
  PipelineState<Config::kXStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const XLoader x(p, WorkTile(p, scheduler.index, m_rank));
    for (u32 box = Config::kBoxesPerTile * scheduler.first; box < Config::kBoxesPerTile * scheduler.last; ++box)
      x.load(p, base, barriers, box, m_rank, slice, at);
  }
  drain_x_stages(barriers, at);
}

// Loads joint stages of W and X. All lanes of a warp take part and one issues the loads, so that the compiler knows
// their addresses to be uniform and computes them once.
__device__ __forceinline__ void load_joint_stages(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                                  u32 slice) {
  const bool issues = elect_one();
  PipelineState<Config::kWeightStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const WorkTile work(p, scheduler.index, m_rank);
    const XLoader x(p, work);
    const u8* from[Config::kMTiles];
#pragma unroll
    for (int i = 0; i < Config::kMTiles; ++i) from[i] = weight_tile(p, work, i, scheduler.first);
    for (u32 tile = scheduler.first; tile < scheduler.last; ++tile, at.next()) {
      const u32 full = barriers.weight_full(at.stage), to = base + at.stage * Config::kWeightStageBytes,
                x_to = base + Config::kXAt + 2 * at.stage * Config::kXStageBytes;
      barrier_wait(barriers.weight_empty(at.stage), at.parity ^ 1);
      if (issues) {
        barrier_arrive_expect_tx(full, Config::kMTiles * Tile::kBytes + 2 * 128 * x.rows);
#pragma unroll
        for (int i = 0; i < Config::kMTiles; ++i)
          bulk_load(to + i * Config::kWeightTileBytes, from[i], Tile::kBytes, full);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load_x_box(p, work, x_to + half * Config::kXStageBytes, x.map, full, slice,
                     (2 * tile + half) * Config::kBoxColumns, (u32)work.token);
      }
#pragma unroll
      for (int i = 0; i < Config::kMTiles; ++i) from[i] += Tile::kBytes;
    }
  }
}

// One thread loads W and X in the order of their use, because TMA serves one request after the other.
__device__ __forceinline__ void load_weights_and_x(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                                   u32 slice) {
  PipelineState<Config::kWeightStages> weight_at;
  PipelineState<Config::kXStages> x_at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const WorkTile work(p, scheduler.index, m_rank);
    const XLoader x(p, work);
    for (u32 tile = scheduler.first; tile < scheduler.last; ++tile) {
      load_weight_stage(p, base, barriers, work, tile, weight_at);
#pragma unroll
      for (u32 i = 0; i < Config::kBoxesPerTile; ++i)
        x.load(p, base, barriers, Config::kBoxesPerTile * tile + i, m_rank, slice, x_at);
    }
  }
  drain_x_stages(barriers, x_at);
}
