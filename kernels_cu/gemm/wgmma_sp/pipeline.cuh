// What the roles of gemm/wgmma_sp.cu share: its rings' barriers, and what a block works on, one after the other.
#pragma once
#include "common/pipeline_state.cuh"
#include "gemm/wgmma_sp/config.cuh"

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 weight_full(u32 slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 weight_free(u32 slot) const { return at + 8 * (Config::kWeightStages + slot); }
  __device__ __forceinline__ u32 source_full(u32 slot) const { return at + 8 * (2 * Config::kWeightStages + slot); }
  __device__ __forceinline__ u32 source_free(u32 slot) const {
    return at + 8 * (2 * Config::kWeightStages + Config::kSourceStages + slot);
  }
  __device__ __forceinline__ u32 source_came(u32 slot) const {
    return at + 8 * (2 * Config::kWeightStages + 2 * Config::kSourceStages + slot);
  }
};

// Zero that the compiler cannot fold away: see WgmmaSpParams::opaque_zero.
__device__ __forceinline__ u32 nothing(const WgmmaSpParams& p) { return p.opaque_zero; }

// What a block works on: its first row tile and token.
struct Item {
  i64 row_tile, token;

  __device__ __forceinline__ Item(const WgmmaSpParams& p, u32 index, u32 share) {
    u32 row_block = index, token_block = 0;
    if (Config::kTokens > 64 || p.n_tiles > 1) {  // few tokens are spared the divisions
      const u32 row_blocks =
          (u32)((p.row_tiles + Config::kRowTiles * Config::kShare - 1) / (Config::kRowTiles * Config::kShare));
      const u32 band = index / (Config::kBand * p.n_tiles), rest = index % (Config::kBand * p.n_tiles);
      const u32 wide = min((u32)Config::kBand, row_blocks - band * Config::kBand);
      row_block = band * Config::kBand + rest % wide, token_block = rest / wide;
    }
    row_tile = ((i64)row_block * Config::kShare + share) * Config::kRowTiles;
    token = (i64)token_block * Config::kTokens;
  }
};

// Of K, in a slice; its end is the next one's first.
__device__ __forceinline__ u32 first_tile(const WgmmaSpParams& p, u32 slice) {
  return slice_begin<Config::kSlices>((u32)p.k_tiles, slice);
}

// What a cluster works on, one after the other: an item, and the tiles of K that it multiplies of it.
//
// kRanges: each cluster takes as many tiles as any other. The tiles of the last p.work_tiles - p.data_parallel_tiles
// items lie in a row, which is cut into equal ranges, an item long at least. Who has an item's first tiles does them
// before all else of its range and hands the sums over; who has its other tiles does those last, and goes on from these
// sums: the bits are those of an item that isn't cut. The giver is the cluster before, which runs if this one does.
struct Turns {
  u32 index, stride;
  u32 first, last;  // tiles of K
  // kRanges. 0: whole items; then, of the range: 1 the item to give, 2 whole ones, 3 the item to go on with.
  u32 stage = 0;

  // Items where the range of this cluster begins and ends, and their tiles there. Found again where they are needed:
  // few registers are left beside sums.
  struct Range {
    u32 low, low_first, high, high_last;

    __device__ __forceinline__ Range(const WgmmaSpParams& p) {
      constexpr u32 kUnit = Config::kTilesOfRange;
      const u32 cluster = blockIdx.x / Config::kCluster, units = ((u32)p.k_tiles + kUnit - 1) / kUnit;
      const u32 begin = p.units_per_cluster * cluster + min(cluster, p.big_units),
                end = begin + p.units_per_cluster + (cluster < p.big_units);
      low = p.data_parallel_tiles + begin / units, low_first = begin % units * kUnit;
      high = p.data_parallel_tiles + end / units, high_last = end % units * kUnit;
    }
    __device__ __forceinline__ u32 first_inside() const { return low + (low_first > 0); }
  };

  __device__ __forceinline__ Turns(const WgmmaSpParams& p, u32 slice)
      : index(blockIdx.x / Config::kCluster),
        stride(gridDim.x / Config::kCluster),
        first(first_tile(p, slice)),
        last(first_tile(p, slice + 1)) {
    if constexpr (Config::kRanges) whole(p, index);
  }
  __device__ __forceinline__ bool more(const WgmmaSpParams& p) const { return index < p.work_tiles; }
  __device__ __forceinline__ void next(const WgmmaSpParams& p) {
    if (Config::kSlices > 1) index = p.work_tiles;  // a cluster each
    else if (!Config::kRanges) index += stride;
    else if (stage == 0) whole(p, index + stride);
    else if (stage == 1) last = (u32)p.k_tiles, inside(p, Range(p), Range(p).first_inside());
    else if (stage == 2) inside(p, Range(p), index + 1);
    else index = p.work_tiles;
  }
  __device__ __forceinline__ bool gives() const { return Config::kRanges && stage == 1; }
  __device__ __forceinline__ bool takes() const { return Config::kRanges && stage == 3; }

  __device__ __forceinline__ void whole(const WgmmaSpParams& p, u32 item) {
    index = item;
    if (item < p.data_parallel_tiles) return;
    const Range range(p);
    if (range.high_last > 0) stage = 1, index = range.high, last = range.high_last;
    else inside(p, range, range.first_inside());
  }
  __device__ __forceinline__ void inside(const WgmmaSpParams& p, const Range& range, u32 item) {
    stage = 2, index = item;
    if (item < range.high) return;
    stage = 3, index = range.low_first > 0 ? range.low : p.work_tiles, first = range.low_first;
  }
};
