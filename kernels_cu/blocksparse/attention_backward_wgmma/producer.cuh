// The producer threads of blocksparse/attention_backward_wgmma.cu, which load operands and look up work tiles.
#pragma once
#include "blocksparse/attention_backward_wgmma/work_tiles.cuh"

// Keeps what is computed from `v` out of registers until here: the compiler may not hoist it out of a loop.
__device__ __forceinline__ u32 made_here(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// The producer thread of a pipeline group.
struct Producer {
  const AttentionBackwardWgmmaParams& p;
  const PipelineGroup pipeline;
  u32 sequence = 0, tiles = 0;  // so far

  // Loads the streamed rows of a piece of a table entry, for rows of Q with their bases and deltas.
  __device__ __forceinline__ void load_tiles(u32 matrix, int index) {
    const u32 entry = (u32)index / Config::kPieces, piece = (u32)index % Config::kPieces;
    const PipelineGroup pipeline{Config::kPipelineGroups == 1 ? this->pipeline.base : made_here(this->pipeline.base)};
    const u32 stage = made_here(tiles % Config::kPipelineStages), full = pipeline.full(stage);
    matrix = made_here(matrix);
    const u32 start = (u32)p.tables.entries[entry] * Config::kBlock + piece * Config::kTile;
    u32 block = entry;
    if constexpr (Config::kStores) block = (u32)p.places[entry];
    if constexpr (Config::kStored) block += load_shared_as<u32>(pipeline.work(sequence) + WorkTile::kBlocksBeforeAt);
    barrier_wait(pipeline.empty(stage), ~(tiles / Config::kPipelineStages) & 1);
    store_shared(pipeline.start(stage), start);
    if constexpr (Config::kDropout && Config::kStationaryKv) store_shared(pipeline.matrix(stage), matrix);
    if constexpr (Config::kStores) store_shared(pipeline.block(stage), block);
    barrier_arrive_expect_tx(full, Config::kStageBytes + 2 * Config::kRowStatBytes);
#pragma unroll
    for (int which = 0; which < (Config::kLoads ? 1 : 2); ++which) {
#pragma unroll
      for (int box = 0; box < Config::kBoxes; ++box)
        load_box(pipeline.tile(stage, which) + box * Config::kBoxBytes, &p.streamed_maps[which], box * 64, start,
                 matrix, full);
      if constexpr (Config::kStationaryKv)
        bulk_load(pipeline.line(stage, which), (which ? p.deltas : p.bases) + (i64)matrix * p.queries + start,
                  Config::kRowStatBytes, full);
    }
    if constexpr (Config::kLoads)
      bulk_load(pipeline.tile(stage, 1),
                (const u8*)p.score_gradients + (i64)block * Config::kBlockBytes + piece * Config::kPieceBytes,
                Config::kPieceBytes, full, kEvictFirst);
    ++tiles;
  }

  __device__ __forceinline__ u32 heads() const {
    return Config::kStationaryKv ? p.heads_per_kv : 1;
  }  // heads of Q of a work tile

  __device__ __forceinline__ void find(u32 index) const {
    const u32 work = pipeline.work(sequence);
    const RasterPosition place(p, index);
    store_shared(work, place.matrix);
    const u32 head = Entries::head(p, work, 0) * p.matrix_tiles;
    store_shared(work + WorkTile::kBlockLineAt, (u32)p.tables.order[head + place.line] - head);
    const u32 batch = Config::kLengths || Config::kStored ? Entries::batch(p, work) : 0;
    if constexpr (Config::kStored) store_shared(work + WorkTile::kBlocksBeforeAt, batch * p.blocks);
    const int rows = valid_cells<Config>(p.queries, p.tables.q_lengths, batch);
    const int keys = valid_cells<Config>(p.keys, p.tables.kv_lengths, batch);
    store_shared(work + WorkTile::kRowsAt, (u32)rows), store_shared(work + WorkTile::kKeysAt, (u32)keys);
    int tiles = 0;
#pragma unroll 1
    for (u32 one = 0; one < heads(); ++one) {
      const Entries entries(p, work, one);
      tiles += Config::kPieces * (entries.end - entries.first);
    }
    store_shared(work + WorkTile::kTilesAt, (u32)tiles);
  }

  // Publishes the description and loads the stationary operands, once the consumers are done with those of the
  // previous work tile.
  __device__ __forceinline__ void publish() {
    const u32 work = pipeline.work(sequence), full = pipeline.work_full();
    const int tiles = load_shared_as<int>(work + WorkTile::kTilesAt);
    barrier_wait(pipeline.work_empty(), ~sequence & 1);
    barrier_arrive_expect_tx(
        full, tiles > 0 ? Config::kGroupWarpgroups * Config::kStationaries * Config::kStationaryBytes : 0);
    if (tiles > 0) {
      const u32 matrix = load_shared_as<u32>(work), line = load_shared_as<u32>(work + WorkTile::kBlockLineAt);
#pragma unroll
      for (int which = 0; which < Config::kStationaries; ++which)
#pragma unroll
        for (u32 group = 0; group < Config::kGroupWarpgroups; ++group)
          load_rows<Config, Config::kStationaryBoxBytes>(pipeline.stationary(group, which), &p.stationary_maps[which],
                                                         line * Config::kBlock + group * 64, matrix, full);
    }
  }

  __device__ __forceinline__ void load_work() {
#pragma unroll 1
    for (u32 one = 0; one < heads(); ++one) {
      const Entries entries(p, pipeline.work(sequence), one);
      const u32 matrix = Entries::matrix(p, pipeline.work(sequence), one);
#pragma unroll 1
      for (int index = entries.first * Config::kPieces; index < entries.end * Config::kPieces; ++index)
        load_tiles(matrix, index);
    }
  }

  // Loads all work tiles from `index` on.
  __device__ __forceinline__ void produce(u32 index) {
    for (; index < work_tile_count(p); ++sequence) {
      find(index);
      publish();
      load_work();
      index = pipeline_groups<Config>() + atomicAdd(p.tables.claimed, 1);
    }
    store_shared(pipeline.work(sequence) + WorkTile::kTilesAt, ~0u);
    publish();
  }
};
