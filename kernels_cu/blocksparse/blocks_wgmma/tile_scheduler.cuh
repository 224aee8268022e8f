// How the clusters of blocksparse/blocks_wgmma.cu divide its work.
#pragma once
#include "blocksparse/blocks_wgmma/claims.cuh"
#include "blocksparse/pipeline.cuh"

// Enumerates the work tiles. For sdd: the first one of every panel, longest panels first, then the second of each panel
// that has one, and so on. Otherwise: the slices of all panels, or the panels, the longest first, each with every token
// tile of a raster group, then the next raster group. With LongFirst, long panels with every token tile come before
// all raster groups. All lanes of a warp call it together.
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

  // The token tile of a work tile, and the position of its slice or panel in their order. Not for sdd.
  struct Place {
    u32 tile, position;
  };
  static __device__ __forceinline__ constexpr Place place_of(u32 index, u32 tiles, u32 raster_tiles, u32 slices,
                                                             u32 first_slices) {
    if (raster_tiles >= tiles || index < first_slices * tiles) return {index % tiles, index / tiles};
    const u32 rest = index - first_slices * tiles, per_group = raster_tiles * (slices - first_slices);
    const u32 group = rest / per_group, before = group * raster_tiles,
              width = tiles - before < raster_tiles ? tiles - before : raster_tiles;
    return {before + rest % per_group % width, first_slices + rest % per_group / width};
  }

  u32 group = 0, before = 0, panels;  // round; work tiles of earlier rounds; panels with a work tile in this round
  u32 slices;                         // slices of all panels, or panels
  u32 long_panels = 0;                // with kClaims

  __device__ __forceinline__ explicit TileScheduler(const BlocksWgmmaParams& p)
      : panels(having(p, 0)), slices(Config::kSlices == Slices::Apart ? (u32)*p.slice_count : p.panels) {
    if constexpr (Config::kClaims) long_panels = (u32)*p.long_panels;
  }

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
      // The first work tiles are known to exist before the number of slices has been loaded.
      const u32 least = p.panels * p.batch * p.cluster_tiles;
      return index < least || (Config::kSlices == Slices::Apart && index < count(p));
    }
  }
  // Number of work tiles; not for sdd.
  __device__ __forceinline__ u32 count(const BlocksWgmmaParams& p) const { return slices * p.batch * p.cluster_tiles; }
};

// The work tiles that a cluster takes. If clusters claim them, a producer warp does so once it has requested all loads
// of the work tile before: earlier, a cluster with a long panel would claim what others have time for. If every panel
// is cut, the launch has a cluster for each work tile.
struct WorkSequence {
  TileScheduler scheduler;
  u32 base, round = 0, index;

  __device__ __forceinline__ WorkSequence(const BlocksWgmmaParams& p, u32 base)
      : scheduler(p), base(base), index(work_tile(0)) {}

  static constexpr int kCtas = Config::kClusterN * Config::kClusterSlices;  // of a cluster
  static __device__ __forceinline__ u32 clusters() { return gridDim.x / kCtas; }
  static __device__ __forceinline__ u32 work_tile(u32 round) {
    return work_tile_of(round, blockIdx.x / kCtas, clusters());
  }
  __device__ __forceinline__ bool has_work(const BlocksWgmmaParams& p) { return scheduler.find(p, index); }
  // All lanes of a warp call it together. kMayClaim: the first producer warp, which claims, is among the callers.
  // Shuffles tell the compiler what is uniform in the warp: else it guards the loads of the next work tile against
  // lanes that come later.
  template <bool kMayClaim> __device__ __forceinline__ void next(const BlocksWgmmaParams& p) {
    const u32 slot = round % Claims::kSlots, parity = round / Claims::kSlots % 2;
    index = work_tile(++round);
    if constexpr (Config::kClaims) {
      if (__shfl_sync(~0u, scheduler.long_panels == 0 || scheduler.count(p) <= clusters(), 0)) return;
      if (kMayClaim && __shfl_sync(~0u, is_claiming_warp(), 0)) {
        index = clusters() + claim(p.claimed, p.launch_id << 8, scheduler.count(p), round == 1);
        Claims{base}.publish(slot, parity, index);
      } else {
        index = Claims{base}.read(slot, parity);
      }
    }
  }
  static __device__ __forceinline__ bool is_claiming_warp() {
    return threadIdx.x / 32 == 4 * Config::kWarpgroups && blockIdx.x % Config::kClusterN == 0;
  }
};

// The work tile of a CTA.
struct WorkTile {
  u32 head, block_row, batch, token;  // block_row: the panel's first, in its head; token: for sdd, in the first block
  int count;                          // block columns; for sdd those of this CTA
  int first;                          // the first block column: its index in the tables for sdd, or in the panel
  u32 slice, slices;                  // the slice of the panel; the panel's slices
  u32 in_partials;                    // index of the panel's first slice in p.partials
  int columns;                        // Sequential, or with kClusterSlices: block columns of the panel
  static constexpr int kSliceFields = 5;

  __device__ __forceinline__ WorkTile(const BlocksWgmmaParams& p, const WorkSequence& sequence, u32 cta_rank) {
    const TileScheduler& scheduler = sequence.scheduler;
    if constexpr (Config::kSampled) {
      const u32 in_round = sequence.index - scheduler.before, panel = (u32)p.panel_order[in_round / p.batch];
      batch = in_round % p.batch, head = panel / p.head_panels,
      block_row = panel % p.head_panels * Config::kPanelBlockRows;
      const int columns = p.panel_columns[panel], each = TileScheduler::pieces_of_cta(columns);
      const int before = TileScheduler::first_piece(each, scheduler.group, cta_rank);
      count = max(0, min(each, columns * Config::kPiecesPerBlock - before));
      token = before % Config::kPiecesPerBlock * Config::kPieceN,
      first = p.pointers[panel] + before / Config::kPiecesPerBlock;
      return;
    }
    // With one raster group the order is that of the panels, so the number of long ones need not have arrived.
    const bool has_groups = p.raster_tiles < p.batch * p.cluster_tiles;
    const auto [tile, position] =
        TileScheduler::place_of(sequence.index, p.batch * p.cluster_tiles, p.raster_tiles, scheduler.slices,
                                Config::kSlices == Slices::LongFirst && has_groups ? scheduler.long_panels : 0);
    batch = tile / p.cluster_tiles;
    token = (tile % p.cluster_tiles * Config::kClusterN + cta_rank) * Config::kTileN;
    u32 panel;
    if constexpr (!Config::kCuts) {
      panel = (u32)p.panel_order[position];
      first = 0, count = p.panel_columns[panel];
    } else if constexpr (Config::kSlices == Slices::Sequential) {
      panel = (u32)p.panel_order[position];
      columns = p.panel_columns[panel], slices = (u32)p.panel_slices[panel];
      take_slice(0);
    } else if constexpr (Config::kClusterSlices > 1) {
      panel = (u32)p.panel_order[position];
      columns = p.panel_columns[panel], slices = Config::kClusterSlices;
      take_slice(blockIdx.x % slices);
    } else {
      const int* const found = p.slices + (i64)kSliceFields * position;
      const u32 of_panel = (u32)found[3];
      panel = (u32)found[0], first = found[1], count = found[2];
      slice = of_panel % (1 << 16), slices = of_panel >> 16, in_partials = (u32)found[4];
    }
    head = panel / p.head_panels, block_row = panel % p.head_panels * Config::kPanelBlockRows;
  }
  // Takes a slice of the panel: all have nearly as many columns.
  __device__ __forceinline__ void take_slice(u32 index) {
    slice = index, first = (int)((u64)index * columns / slices);
    count = (int)((u64)(index + 1) * columns / slices) - first;
  }
  // Calls `act` for this slice; with Sequential for each slice of the panel.
  template <class Act> __device__ __forceinline__ void for_slices(Act act) {
    if constexpr (Config::kSlices == Slices::Sequential) {
      act(*this);
      for (u32 next = 1; next < slices; ++next) {
        take_slice(next);
        act(*this);
      }
    } else {
      act(*this);
    }
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
