// The shared memory of a pipeline group of blocksparse/attention_wgmma.cu, and its work tiles.
#pragma once
#include "blocksparse/attention_wgmma/config.cuh"

// A pipeline group's part of shared memory.
struct PipelineGroup : PipelineBarriers<Config, PipelineGroup> {
  u32 base, index;
  __device__ __forceinline__ PipelineGroup(u32 base, u32 index) : base(base), index(index) {}
  __device__ __forceinline__ u32 barriers() const { return base + Config::kBarrierAt + index * Config::kPipelineBytes; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(Config::kPipelineStages + stage); }
  // Address of the description of its work tile.
  __device__ __forceinline__ u32 work() const { return barriers() + kBarrierBytes; }
  __device__ __forceinline__ u32 starts(u32 stage) const {  // address of the first keys of a stage's pieces
    return work() + 32 + stage * Config::kPiecesPerStep * 4;
  }
  __device__ __forceinline__ u32 tile(u32 stage) const {
    return base + Config::kStagesAt + (index * Config::kPipelineStages + stage) * Config::kTileBytes;
  }
  __device__ __forceinline__ u32 query(u32 group) const {
    return base + (index * Config::kGroupWarpgroups + group) * Config::kStationaryBytes;
  }
};

// Work tiles -----------------------------------------------------------------------------------------------

// The work tile of a pipeline group.
struct WorkTile {
  u32 matrix, row;  // block row, in its head
  int count,
      last;        // pieces of kept blocks that are valid, -1: no work tile; the last one's keys begin at last * kPiece
  int rows, keys;  // valid cells of the batch
  int begin;       // first entry of the tables, known to the producer alone

  // Looks up work tile `index`. A whole warp calls it.
  __device__ __forceinline__ void find(const AttentionWgmmaParams& p, u32 index, u32 lane) {
    const RasterPosition place(p, index);
    matrix = place.matrix;
    const u32 head = matrix % p.heads, batch = matrix / p.heads;
    const u32 line = (u32)p.tables.order[head * p.matrix_tiles + place.line];
    row = line - head * p.matrix_tiles;
    begin = p.tables.pointers[line];
    count = p.tables.pointers[line + 1] - begin;
    rows = valid_cells<Config>(p.queries, p.tables.q_lengths, batch);
    keys = valid_cells<Config>(p.keys, p.tables.kv_lengths, batch);
    if (Config::kLengths && (int)(row * Config::kBlock) >= rows) count = 0;
    if constexpr (Config::kLengths || Config::kCausal) {
      int limit = (keys + Config::kBlock - 1) / Config::kBlock;
      if constexpr (Config::kCausal) limit = min(limit, (int)row + 1);
      int found = 0;
      for (int at = 0; at < count; at += 32) {
        const bool counts = at + (int)lane < count && p.tables.entries[begin + at + lane] < limit;
        const u32 those = __ballot_sync(~0u, counts);
        found += __popc(those);
        if (those != ~0u) break;  // columns increase
      }
      count = found;
    }
    last = count > 0 ? p.tables.entries[begin + count - 1] : 0;
    if constexpr (Config::kPiecesPerBlock > 1) {
      int valid = Config::kPiecesPerBlock;  // pieces of the last block
      if constexpr (Config::kLengths)
        valid = min(valid, (keys - last * Config::kBlock + Config::kPiece - 1) / Config::kPiece);
      if (count > 0) count = (count - 1) * Config::kPiecesPerBlock + valid;
      last = last * Config::kPiecesPerBlock + valid - 1;
    }
  }
  __device__ __forceinline__ int tiles() const { return (count + Config::kPiecesPerStep - 1) / Config::kPiecesPerStep; }

  __device__ __forceinline__ void store(u32 at) const {
    store_shared(at, matrix), store_shared(at + 4, row), store_shared(at + 8, (u32)count);
    store_shared(at + 12, (u32)last), store_shared(at + 16, (u32)rows), store_shared(at + 20, (u32)keys);
  }
  __device__ __forceinline__ void load(u32 at) {
    matrix = uniform(at), row = uniform(at + 4), count = (int)uniform(at + 8);
    last = (int)uniform(at + 12), rows = (int)uniform(at + 16), keys = (int)uniform(at + 20);
  }
};
