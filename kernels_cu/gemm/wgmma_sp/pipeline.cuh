// What the roles of gemm/wgmma_sp.cu m_rank: its rings' barriers, and what a block works on, one after the other.
#pragma once
#include "common/pipeline_state.cuh"
#include "gemm/wgmma_sp/config.cuh"

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 weight_full(u32 stage) const { return at + 8 * stage; }
  __device__ __forceinline__ u32 weight_empty(u32 stage) const { return at + 8 * (Config::kWeightStages + stage); }
  __device__ __forceinline__ u32 x_full(u32 stage) const { return at + 8 * (2 * Config::kWeightStages + stage); }
  __device__ __forceinline__ u32 x_empty(u32 stage) const {
    return at + 8 * (2 * Config::kWeightStages + Config::kXStages + stage);
  }
  __device__ __forceinline__ u32 x_copied(u32 stage) const {
    return at + 8 * (2 * Config::kWeightStages + 2 * Config::kXStages + stage);
  }
};

// 0, which only the host knows: what is combined with it depends on it, and stays what it is.
__device__ __forceinline__ u32 opaque_zero(const WgmmaSpParams& p) { return p.aligned >> 1; }

// What a block works on: its first row tile and token.
struct WorkTile {
  i64 row_tile, token;

  __device__ __forceinline__ WorkTile(const WgmmaSpParams& p, u32 index, u32 m_rank) {
    u32 row_block = index, token_block = 0;
    if (Config::kTileN > 64 || p.token_blocks > 1) {  // few tokens are spared the divisions
      const u32 row_blocks =
          (u32)((p.row_tiles + Config::kMTiles * Config::kClusterM - 1) / (Config::kMTiles * Config::kClusterM));
      const u32 raster_group = index / (Config::kRasterGroupM * p.token_blocks),
                rest = index % (Config::kRasterGroupM * p.token_blocks);
      const u32 wide = min((u32)Config::kRasterGroupM, row_blocks - raster_group * Config::kRasterGroupM);
      row_block = raster_group * Config::kRasterGroupM + rest % wide, token_block = rest / wide;
    }
    row_tile = ((i64)row_block * Config::kClusterM + m_rank) * Config::kMTiles;
    token = (i64)token_block * Config::kTileN;
  }
};

// Of K, in a slice; its end is the next one's first.
__device__ __forceinline__ u32 first_k_tile(const WgmmaSpParams& p, u32 slice) {
  return slice_begin<Config::kSplitK>((u32)p.k_tiles, slice);
}

// What a cluster works on, one after the other: an work, and the tiles of K that it multiplies of it.
//
// kStreamK: each cluster loads_partials as many tiles as any other. The last p.items - p.whole items' tiles lie in a row, which
// is cut into equal ranges, an work long at least. Who has an work's first tiles does them before all else of its range
// and hands the sums over; who has its other tiles does those last, and goes on from these sums: the bits are those of
// an work that isn't cut. The giver is the cluster before, which runs if this one does.
struct TileScheduler {
  u32 index, stride;
  u32 first, last;  // tiles of K
  // kStreamK. 0: whole items; then, of the range: 1 the work to store_partials, 2 whole ones, 3 the work to go on with.
  u32 stage = 0;

  // Items where the range of this cluster begins and ends, and their tiles there. Found again where they are needed:
  // few registers are left beside sums.
  struct Range {
    u32 low, low_first, high, high_last;

    __device__ __forceinline__ Range(const WgmmaSpParams& p) {
      constexpr u32 kUnit = Config::kTilesPerUnit;
      const u32 cluster = blockIdx.x / Config::kClusterSize, units = ((u32)p.k_tiles + kUnit - 1) / kUnit;
      const u32 begin = p.range * cluster + min(cluster, p.longer), end = begin + p.range + (cluster < p.longer);
      low = p.whole + begin / units, low_first = begin % units * kUnit;
      high = p.whole + end / units, high_last = end % units * kUnit;
    }
    __device__ __forceinline__ u32 first_inside() const { return low + (low_first > 0); }
  };

  __device__ __forceinline__ TileScheduler(const WgmmaSpParams& p, u32 slice)
      : index(blockIdx.x / Config::kClusterSize),
        stride(gridDim.x / Config::kClusterSize),
        first(first_k_tile(p, slice)),
        last(first_k_tile(p, slice + 1)) {
    if constexpr (Config::kStreamK) whole(p, index);
  }
  __device__ __forceinline__ bool more(const WgmmaSpParams& p) const { return index < p.items; }
  __device__ __forceinline__ void next(const WgmmaSpParams& p) {
    if (Config::kSplitK > 1) index = p.items;  // a cluster each
    else if (!Config::kStreamK) index += stride;
    else if (stage == 0) whole(p, index + stride);
    else if (stage == 1) last = (u32)p.k_tiles, inside(p, Range(p), Range(p).first_inside());
    else if (stage == 2) inside(p, Range(p), index + 1);
    else index = p.items;
  }
  __device__ __forceinline__ bool stores_partials() const { return Config::kStreamK && stage == 1; }
  __device__ __forceinline__ bool loads_partials() const { return Config::kStreamK && stage == 3; }

  __device__ __forceinline__ void whole(const WgmmaSpParams& p, u32 work) {
    index = work;
    if (work < p.whole) return;
    const Range range(p);
    if (range.high_last > 0) stage = 1, index = range.high, last = range.high_last;
    else inside(p, range, range.first_inside());
  }
  __device__ __forceinline__ void inside(const WgmmaSpParams& p, const Range& range, u32 work) {
    stage = 2, index = work;
    if (work < range.high) return;
    stage = 3, index = range.low_first > 0 ? range.low : p.items, first = range.low_first;
  }
};
