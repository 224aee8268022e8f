// Producers of gemm/wgmma_sp.cu that split X of few tokens into its bf16 terms (kXSplit), as gemm/f32_split.cu does
// with more tokens in a launch of its own. The terms are the same, and so are the bits of a product.
#pragma once
#include "gemm/bf16_terms.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"
#include "gemm/wgmma_sp/tile_scheduler.cuh"

// The elements of X that a lane splits for a K tile: 8 adjacent columns of every fourth token.
struct SplitPiece {
  static constexpr int kPasses = Config::kTileN / 4, kTerms = Config::kSplitTerms ? Config::kSplitTerms : 1;

  float4 low[kPasses], high[kPasses];

  static __device__ __forceinline__ constexpr int token(u32 lane, int pass) { return int(lane) / 8 + 4 * pass; }
  static __device__ __forceinline__ constexpr int chunk(u32 lane) { return int(lane) % 8; }
  // The offset in a stage of a pass's terms, swizzled as wgmma reads them.
  static __device__ __forceinline__ constexpr u32 offset(u32 lane, int pass) {
    return token(lane, pass) * 128 + (chunk(lane) ^ token(lane, pass) % 8) * 16;
  }

  __device__ __forceinline__ void load(const WgmmaSpParams& p, WorkTile work, u32 tile, u32 end) {
    const u32 lane = threadIdx.x % 32;
    const i64 column = (i64)tile * Config::kBoxColumns + chunk(lane) * 8;
    const float* from = (const float*)p.x + (work.token + token(lane, 0)) * p.x_stride + column;
#pragma unroll
    for (int i = 0; i < kPasses; ++i, from += 4 * p.x_stride) {
      low[i] = high[i] = make_float4(0, 0, 0, 0);
      if (tile >= end || column >= p.k || work.token + token(lane, i) >= p.n) continue;
      low[i] = ((const float4*)from)[0], high[i] = ((const float4*)from)[1];
    }
  }

  // Stores the terms in one stage each, the low term first.
  __device__ __forceinline__ void store(u32 base, Barriers barriers, PipelineState<Config::kXStages> at) {
    u32 stages[kTerms];
#pragma unroll
    for (int i = 0; i < kTerms; ++i, at.next()) {
      barrier_wait(barriers.x_empty(at.stage), at.parity ^ 1);
      stages[i] = at.stage;
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const u32 a = take_term(low[i].x, low[i].y), b = take_term(low[i].z, low[i].w);
        const u32 c = take_term(high[i].x, high[i].y), d = take_term(high[i].z, high[i].w);
        const u32 to = base + Config::kXAt + stages[kTerms - 1 - term] * Config::kXStageBytes;
        store_shared_x4(to + offset(threadIdx.x % 32, i), a, b, c, d);
      }
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kTerms; ++i) barrier_arrive(barriers.x_full(stages[i]));
  }
};

// Two warps load and split X, one the even and the other the odd K tiles: what a warp waits for, the other does not. A
// warp loads its next K tile before the other splits the one between.
__device__ __forceinline__ void load_and_split_x(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 m_rank,
                                                 u32 slice, bool odd) {
  static_assert(!Config::kXSplit || Config::kXStages >= 2 * SplitPiece::kTerms,
                "a warp that is ahead finds no stage that was free a round before");
  PipelineState<Config::kXStages> at;
  for (TileScheduler scheduler(p, slice); scheduler.more(p); scheduler.next(p)) {
    const WorkTile work(p, scheduler.index, m_rank);
    SplitPiece piece;
    piece.load(p, work, scheduler.first + odd, scheduler.last);
    for (u32 tile = scheduler.first; tile < scheduler.last; ++tile, odd = !odd) {
      if (!odd) {
        piece.store(base, barriers, at);
        piece.load(p, work, tile + 2, scheduler.last);
      }
#pragma unroll
      for (int i = 0; i < SplitPiece::kTerms; ++i) at.next();
    }
  }
}
