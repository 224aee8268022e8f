// The producer warps of blocksparse/attention_wgmma.cu, which load operands and look up work tiles.
#pragma once
#include "blocksparse/attention_wgmma/work_tiles.cuh"

using Ring = PipelineState<Config::kPipelineStages>;

// The producer warp of a pipeline group.
struct Producer {
  const AttentionWgmmaParams& p;
  const PipelineGroup pipeline;
  const u32 lane;
  Ring at;
  u32 work_parity = 1;

  // Loads the keys of up to kPiecesPerStep pieces.
  __device__ __forceinline__ void load_tile(const TensorMap* map, u32 matrix,
                                            const int (&found)[Config::kPiecesPerStep], int pieces) {
    if (lane == 0) {
      const u32 full = pipeline.full(at.stage), to = pipeline.tile(at.stage);
      barrier_wait(pipeline.empty(at.stage), at.parity ^ 1);
      if constexpr (Config::kDropout) {
#pragma unroll
        for (int beside = 0; beside < Config::kPiecesPerStep; ++beside)
          store_shared(pipeline.starts(at.stage) + 4 * beside, (u32)found[beside] * Config::kPiece);
      }
      barrier_arrive_expect_tx(full, min(pieces, Config::kPiecesPerStep) * Config::kPiece * Config::kRowBytes);
#pragma unroll
      for (int beside = 0; beside < Config::kPiecesPerStep; ++beside)
        if (beside < pieces)
          load_rows<Config, Config::kBoxBytes>(to + beside * Config::kPieceBytes, map,
                                               (u32)found[beside] * Config::kPiece, matrix, full);
    }
    __syncwarp();
    at.next();
  }

  __device__ __forceinline__ void publish(const WorkTile& work) {
    if (lane == 0) {
      const u32 full = pipeline.work_full();
      barrier_wait(pipeline.work_empty(), work_parity);
      work.store(pipeline.work());
      barrier_arrive_expect_tx(full, work.count > 0 ? Config::kGroupWarpgroups * Config::kStationaryBytes : 0);
      if (work.count > 0) {
#pragma unroll
        for (int group = 0; group < Config::kGroupWarpgroups; ++group)
          load_rows<Config, Config::kStationaryBoxBytes>(pipeline.query(group), &p.q_map,
                                                         work.row * Config::kBlock + group * 64, work.matrix, full);
      }
    }
    __syncwarp();
    work_parity ^= 1;
  }

  // Loads one work tile and looks up the next one, whose index lane 0 knows.
  __device__ __forceinline__ void load_work(WorkTile& work, u32 next) {
    const u32 matrix = work.matrix / p.heads * (p.heads / p.heads_per_kv) + work.matrix % p.heads / p.heads_per_kv;
    const int tiles = work.tiles(), count = work.count;
    int pieces[Config::kPiecesPerStep], before[Config::kPiecesPerStep], window = 0;
    const int* entries = p.tables.entries + work.begin;
    if (count == 0) publish(work);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int beside = 0; beside < Config::kPiecesPerStep; ++beside) {
        const int piece = tile * Config::kPiecesPerStep + beside, part = piece % Config::kPiecesPerBlock;
        const int entry = piece / Config::kPiecesPerBlock;
        if (entry % 32 == 0 && part == 0)
          window = (entry + (int)lane) * Config::kPiecesPerBlock < count ? entries[entry + lane] : 0;
        before[beside] = pieces[beside];
        pieces[beside] = __shfl_sync(~0u, window, entry % 32) * Config::kPiecesPerBlock + part;
      }
      load_tile(&p.k_map, matrix, pieces, count - tile * Config::kPiecesPerStep);
      if (tile == 0) publish(work);
      else load_tile(&p.v_map, matrix, before, Config::kPiecesPerStep);
    }
    next = __shfl_sync(~0u, next, 0);
    if (next < work_tile_count(p)) work.find(p, next, lane);
    else work.count = -1;
    if (tiles > 0) load_tile(&p.v_map, matrix, pieces, count - (tiles - 1) * Config::kPiecesPerStep);
  }

  __device__ __forceinline__ void produce() {
    WorkTile work;
    const u32 first = blockIdx.x + pipeline.index * gridDim.x;
    work.count = -1;
    if (first < work_tile_count(p)) work.find(p, first, lane);
    while (work.count >= 0) load_work(work, lane == 0 ? pipeline_groups<Config>() + atomicAdd(p.tables.claimed, 1) : 0);
    publish(work);
  }
};
