// The persistent tile scheduler of gemm/wgmma_sp.cu: every role iterates over the same work tiles and K tiles.
#pragma once
#include "gemm/batches.cuh"
#include "gemm/wgmma_sp/group_table.cuh"

// Number of work tiles along the rows of W, or of one group's W.
__device__ __forceinline__ u32 m_blocks_of(const WgmmaSpParams& p) {
  return (u32)((p.row_tiles + Config::kMTiles * Config::kClusterM - 1) / (Config::kMTiles * Config::kClusterM));
}

// A work tile of one CTA, given by its first row tile of W and its first token. kRasterGroupM tiles along M are
// computed with the same tokens before the next tokens, so that L2 serves both operands. With groups, row tiles count
// from the first one of the group's weight.
struct WorkTile {
  i64 row_tile, token;
  u32 group = 0;      // the group of tokens, or the batch
  u32 group_end = 0;  // the end of the group's tokens

  __device__ __forceinline__ WorkTile(const WgmmaSpParams& p, u32 index, u32 m_rank) {
    u32 n_tiles = p.n_tiles, group_begin = 0;
    if constexpr (Config::kGrouped) {
      const GroupTable table(p);
      group = table.group_of(index), group_begin = table.begin(group), group_end = table.end(group);
      n_tiles = (group_end - group_begin + Config::kTileN - 1) / Config::kTileN;
      index -= table.tiles_before(group);
    }
    Batch<Config::kBatched> batch;
    if constexpr (Config::kBatched) batch.take(p.batches, index, n_tiles);
    u32 m_block = index, n_block = 0;
    if (Config::kTileN > 64 || n_tiles > 1) {  // few tokens are spared the divisions
      const u32 m_blocks = m_blocks_of(p);
      const u32 panel = index / (Config::kRasterGroupM * n_tiles), rest = index % (Config::kRasterGroupM * n_tiles);
      const u32 height = min((u32)Config::kRasterGroupM, m_blocks - panel * Config::kRasterGroupM);
      m_block = panel * Config::kRasterGroupM + rest % height, n_block = rest / height;
    }
    if constexpr (Config::kBatched) batch.take_token_tile(n_block, p.n_tiles), batch.store(group);
    row_tile = ((i64)m_block * Config::kClusterM + m_rank) * Config::kMTiles;
    token = (i64)n_block * Config::kTileN;
    if constexpr (Config::kGrouped) token += group_begin;
  }

  // The end of the tokens whose results the work tile may store.
  __device__ __forceinline__ i64 token_end(const WgmmaSpParams& p) const { return Config::kGrouped ? group_end : p.n; }
  // The first row of the group's weight, in bias and scale_w.
  __device__ __forceinline__ i64 first_row(const WgmmaSpParams& p) const { return Config::kGrouped ? group * p.m : 0; }
  // The batch's part of an operand, or all of it without batches.
  template <BatchStride kStride, class T>
  __device__ __forceinline__ T* of_batch(const WgmmaSpParams& p, T* from) const {
    return Config::kBatched ? from + group * (p.batches.*kStride) : from;
  }
  // The coordinate of the batch in an operand's tensor map, which has one batch if all have the same operand.
  template <BatchStride kStride> __device__ __forceinline__ u32 coordinate(const WgmmaSpParams& p) const {
    return p.batches.*kStride ? group : 0;
  }
};

// The first K tile of a split-K slice. A slice ends where the next one begins.
__device__ __forceinline__ u32 first_k_tile(const WgmmaSpParams& p, u32 slice) {
  return slice_begin<Config::kSplitK>((u32)p.k_tiles, slice);
}

// Gives a cluster its work tiles one after the other, each with the K tiles [first, last) to multiply.
//
// Without stream-K a cluster computes every stride-th tile, or with split-K exactly one. With stream-K (kStreamK) the
// first data-parallel tiles are distributed in the same way. The K tiles of all remaining work tiles form one row,
// which is cut into equal ranges, one for each cluster and at least one work tile long. Two clusters share a split
// tile. The first computes its leading K tiles before the rest of its range and stores the partial sums. The second
// computes the remaining K tiles last, starting from those sums, so the result has the bits of an unsplit tile. Partial
// sums come from the cluster with the next lower index. That cluster has already started when this one runs.
struct TileScheduler {
  enum Phase : u32 {
    kDataParallel,   // whole tiles in front of the ranges
    kStorePartials,  // the tile at the end of the range, whose remaining K tiles the next cluster computes
    kInside,         // whole tiles of the range
    kLoadPartials    // the tile at the beginning of the range, whose leading K tiles the previous cluster computes
  };

  u32 index, stride;
  u32 first, last;  // K tiles
  u32 phase = kDataParallel;

  // The work tiles where this cluster's range begins and ends, and their K tiles there. The range is computed anew
  // wherever it is needed, because few registers are left beside the accumulators.
  struct Range {
    u32 low, low_first, high, high_last;

    __device__ __forceinline__ Range(const WgmmaSpParams& p) {
      constexpr u32 kUnit = Config::kTilesPerUnit;
      const u32 cluster = blockIdx.x / Config::kClusterSize, units = ((u32)p.k_tiles + kUnit - 1) / kUnit;
      const u32 begin = p.units_per_cluster * cluster + min(cluster, p.big_units),
                end = begin + p.units_per_cluster + (cluster < p.big_units);
      low = p.data_parallel_tiles + begin / units, low_first = begin % units * kUnit;
      high = p.data_parallel_tiles + end / units, high_last = end % units * kUnit;
    }
    __device__ __forceinline__ u32 first_inside() const { return low + (low_first > 0); }
  };

  __device__ __forceinline__ TileScheduler(const WgmmaSpParams& p, u32 slice)
      : index(blockIdx.x / Config::kClusterSize),
        stride(gridDim.x / Config::kClusterSize),
        first(first_k_tile(p, slice)),
        last(first_k_tile(p, slice + 1)) {
    if constexpr (Config::kStreamK) go_to(p, index);
  }
  __device__ __forceinline__ bool more(const WgmmaSpParams& p) const {
    return index < (Config::kGrouped ? GroupTable(p).work_tiles() : p.work_tiles);
  }
  __device__ __forceinline__ void next(const WgmmaSpParams& p) {
    if (Config::kSplitK > 1) index = ~0u;
    else if (!Config::kStreamK) index += stride;
    else if (phase == kDataParallel) go_to(p, index + stride);
    else if (phase == kStorePartials) last = (u32)p.k_tiles, go_inside(p, Range(p), Range(p).first_inside());
    else if (phase == kInside) go_inside(p, Range(p), index + 1);
    else index = p.work_tiles;
  }
  __device__ __forceinline__ bool stores_partials() const { return Config::kStreamK && phase == kStorePartials; }
  __device__ __forceinline__ bool loads_partials() const { return Config::kStreamK && phase == kLoadPartials; }

  // Goes to a data-parallel tile, or to the beginning of this cluster's range.
  __device__ __forceinline__ void go_to(const WgmmaSpParams& p, u32 tile) {
    index = tile;
    if (tile < p.data_parallel_tiles) return;
    const Range range(p);
    if (range.high_last > 0) phase = kStorePartials, index = range.high, last = range.high_last;
    else go_inside(p, range, range.first_inside());
  }
  // Goes to a whole tile of the range, or after the last one to the tile that the range begins in.
  __device__ __forceinline__ void go_inside(const WgmmaSpParams& p, const Range& range, u32 tile) {
    phase = kInside, index = tile;
    if (tile < range.high) return;
    phase = kLoadPartials, index = range.low_first > 0 ? range.low : p.work_tiles, first = range.low_first;
  }
};
