// The shared memory of a pipeline group of attention's gradients, its work tiles, and their entries of the tables.
#pragma once
#include "blocksparse/attention_backward_wgmma/config.cuh"

// A pipeline group's part of shared memory.
struct PipelineGroup : PipelineBarriers<Config, PipelineGroup> {
  u32 base;
  __device__ __forceinline__ PipelineGroup(u32 base) : base(base) {}
  __device__ __forceinline__ u32 barriers() const { return base + Config::kBarrierAt; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(stage) + 8 * Config::kPipelineStages; }
  __device__ __forceinline__ u32 work(u32 count) const {  // address of a work tile's description
    return base + Config::kItemsAt + count % Config::kItems * Config::kItemBytes;
  }
  // Addresses of a stage's first row, of its matrix of Q, and of its block of dS.
  __device__ __forceinline__ u32 start(u32 stage) const {
    return base + Config::kStartsAt + Config::kStartBytes * stage;
  }
  __device__ __forceinline__ u32 matrix(u32 stage) const { return start(stage) + 4; }
  __device__ __forceinline__ u32 block(u32 stage) const { return start(stage) + 4 + 4 * Config::kDropout; }
  __device__ __forceinline__ u32 tile(u32 stage, u32 which) const {
    return base + Config::kStagesAt + stage * Config::kStageBytes + which * Config::kTileBytes;
  }
  __device__ __forceinline__ u32 line(u32 stage, u32 which) const {
    return base + Config::kRowStatsAt + (stage * 2 + which) * Config::kRowStatBytes;
  }
  __device__ __forceinline__ u32 stationary(u32 group, u32 which) const {
    return base + (group * Config::kStationaries + which) * Config::kStationaryBytes;
  }
};

// Work tiles -----------------------------------------------------------------------------------------------

// The description of a pipeline group's work tile, as it lies in shared memory.
struct WorkTile {
  u32 matrix, line;  // matrix of the stationary operands; block row or block column in it
  int tiles;         // streamed tiles, -1: no work tile
  int rows, keys;    // valid cells of the batch

  static constexpr u32 kBlockLineAt = 4, kTilesAt = 8, kRowsAt = 12, kKeysAt = 16,
                       kBlocksBeforeAt = 20;  // blocks of dS in the batches before, which the producer alone reads

  // Loads the description. A whole warp calls it.
  __device__ __forceinline__ void load(u32 at) {
    matrix = uniform(at), line = uniform(at + kBlockLineAt), tiles = (int)uniform(at + kTilesAt);
    rows = (int)uniform(at + kRowsAt), keys = (int)uniform(at + kKeysAt);
  }
};

// The valid table entries of a work tile, for its `one`-th head of Q: from index `first` to `end`. They increase. The
// producer has few registers, so everything is loaded where it is needed.
struct Entries {
  int first, end;

  static __device__ __forceinline__ u32 batch(const AttentionBackwardWgmmaParams& p, u32 work) {
    return load_shared_as<u32>(work) / (Config::kStationaryKv ? p.kv_heads : p.heads);
  }
  static __device__ __forceinline__ u32 head(const AttentionBackwardWgmmaParams& p, u32 work, u32 one) {
    const u32 matrix = load_shared_as<u32>(work);
    return Config::kStationaryKv ? matrix % p.kv_heads * p.heads_per_kv + one : matrix % p.heads;
  }
  // Returns the matrix of the streamed operands.
  static __device__ __forceinline__ u32 matrix(const AttentionBackwardWgmmaParams& p, u32 work, u32 one) {
    const u32 from = batch(p, work), of_head = head(p, work, one);
    return Config::kStationaryKv ? from * p.heads + of_head : from * p.kv_heads + of_head / p.heads_per_kv;
  }

  // Returns the index of the first entry that is not below `limit`.
  __device__ __forceinline__ int bound(const AttentionBackwardWgmmaParams& p, int limit) const {
    int found = first;
    for (int last = end; found < last;) {
      const int middle = (found + last) / 2;
      if (p.tables.entries[middle] < limit) found = middle + 1;
      else last = middle;
    }
    return found;
  }

  __device__ __forceinline__ Entries(const AttentionBackwardWgmmaParams& p, u32 work, u32 one) {
    const int line = load_shared_as<int>(work + WorkTile::kBlockLineAt);
    const int* const from = p.tables.pointers + (head(p, work, one) * p.matrix_tiles + line);
    first = from[0], end = from[1];
    if constexpr (Config::kLengths) {
      const int own = load_shared_as<int>(work + (Config::kStationaryKv ? WorkTile::kKeysAt : WorkTile::kRowsAt));
      const int other = load_shared_as<int>(work + (Config::kStationaryKv ? WorkTile::kRowsAt : WorkTile::kKeysAt));
      end = line * Config::kBlock < own ? bound(p, (other + Config::kBlock - 1) / Config::kBlock) : first;
    }
    if constexpr (Config::kCausal && !Config::kStationaryKv) end = bound(p, line + 1);
    if constexpr (Config::kCausal && Config::kStationaryKv) first = bound(p, line);
  }
};
