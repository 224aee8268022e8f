// How the clusters of blocksparse/blocks_wgmma.cu divide its work.
#pragma once
#include "blocksparse/blocks_wgmma/config.cuh"

// Number of work tiles of all clusters; for sdd an upper bound.
__device__ __forceinline__ u32 work_tile_count(const BlocksWgmmaParams& p) {
  return p.batch * p.panels * (Config::kSampled ? p.panel_groups : p.cluster_tiles);
}

// Enumerates the work tiles of sdd: the first one of every panel, longest panels first, then the second of each panel
// that has one, and so on. All lanes of a warp call it together.
struct TileScheduler {
  static constexpr int kMost =
      Config::kBlocksPerTile * Config::kClusterN;  // pieces of block columns that a cluster computes

  // Pieces of a panel that earlier rounds can compute: a panel with more has a work tile in round `group`.
  static __device__ __forceinline__ constexpr int pieces_before(u32 group) { return (int)group * kMost; }
  // Pieces of each CTA of the panel's work tiles: the columns are divided evenly among as few CTAs as possible.
  static __device__ __forceinline__ constexpr int pieces_of_cta(int columns) {
    const int parts = columns * Config::kPiecesPerBlock, groups = (parts + kMost - 1) / kMost;
    const int ctas = groups * Config::kClusterN;
    return (parts + ctas - 1) / ctas;
  }
  // The first piece of a CTA's work tile, counted from the panel's first block column; `each`: pieces_of_cta.
  static __device__ __forceinline__ constexpr int first_piece(int each, u32 group, u32 cta_rank) {
    return ((int)group * Config::kClusterN + (int)cta_rank) * each;
  }

  u32 group = 0, before = 0, panels;  // round; work tiles of earlier rounds; panels with a work tile in this round

  __device__ __forceinline__ explicit TileScheduler(const BlocksWgmmaParams& p) : panels(having(p, 0)) {}

  // Number of panels that have a work tile in round `group`: these are the first ones of the order.
  static __device__ __forceinline__ u32 having(const BlocksWgmmaParams& p, u32 group) {
    u32 low = 0, high = Config::kSampled ? p.panels : 0;
    while (low < high) {
      const u32 step = (high - low + 31) / 32, at = low + threadIdx.x % 32 * step;
      const bool has = at < high && p.panel_columns[p.panel_order[at]] * Config::kPiecesPerBlock > pieces_before(group);
      const u32 having = __popc(__ballot_sync(~0u, has));
      high = min(high, low + having * step);
      if (having) low += (having - 1) * step + 1;
    }
    return low;
  }

  // Returns whether work tile `index` exists. Calls must use increasing indices.
  __device__ __forceinline__ bool find(const BlocksWgmmaParams& p, u32 index) {
    if constexpr (Config::kSampled) {
      while (panels && index - before >= panels * p.batch) {
        before += panels * p.batch;
        panels = having(p, ++group);
      }
      return panels > 0;
    } else {
      return index < work_tile_count(p);
    }
  }
};

// The work tile of a CTA.
struct WorkTile {
  u32 head, block_row, batch, token;  // block_row: the panel's first, in its head; token: for sdd, in the first block
  int count;                          // block columns; for sdd those of this CTA
  int first;                          // for sdd: index of the first block column in the tables

  __device__ __forceinline__ WorkTile(const BlocksWgmmaParams& p, const TileScheduler& scheduler, u32 index,
                                      u32 cta_rank) {
    if constexpr (Config::kSampled) {
      const u32 in_round = index - scheduler.before, panel = (u32)p.panel_order[in_round / p.batch];
      batch = in_round % p.batch, head = panel / p.head_panels,
      block_row = panel % p.head_panels * Config::kPanelBlockRows;
      const int columns = p.panel_columns[panel], each = TileScheduler::pieces_of_cta(columns);
      const int before = TileScheduler::first_piece(each, scheduler.group, cta_rank);
      count = max(0, min(each, columns * Config::kPiecesPerBlock - before));
      token = before % Config::kPiecesPerBlock * Config::kPieceN,
      first = p.pointers[panel] + before / Config::kPiecesPerBlock;
      return;
    }
    const u32 tiles = p.batch * p.cluster_tiles, per_group = p.raster_tiles * p.panels,
              raster_group = index / per_group;
    const u32 rest = index % per_group, group_width = min(p.raster_tiles, tiles - raster_group * p.raster_tiles),
              tile = raster_group * p.raster_tiles + rest % group_width;
    const u32 panel = (u32)p.panel_order[rest / group_width];
    head = panel / p.head_panels, block_row = panel % p.head_panels * Config::kPanelBlockRows;
    batch = tile / p.cluster_tiles;
    token = (tile % p.cluster_tiles * Config::kClusterN + cta_rank) * Config::kTileN;
    first = 0, count = p.panel_columns[panel];
  }
  __device__ __forceinline__ int steps(const BlocksWgmmaParams& p) const {
    return Config::kSampled ? (int)p.k_steps
                            : (count + Config::kBlocksPerStep - 1) / Config::kBlocksPerStep * Config::kHalves;
  }
  __device__ __forceinline__ u32 row() const {
    return block_row * Config::kBlock;
  }  // first row of the panel, in its head
  __device__ __forceinline__ u32 matrix(const BlocksWgmmaParams& p) const { return batch * p.heads + head; }
};
