// A 2-D convolution with a block-sparse filter, and its gradients, as implicit GEMMs: the dense operand is never in
// memory, because TMA's im2col mode finds the pixels that results read (ptx/tma_im2col.cuh).
//
// op       rows of a panel             pixels             a sum runs over
// forward  out channels: block rows    Y's                kept block columns: in channels of a tap
// dgrad    in channels                 dX's, of a phase   kept blocks of out channels, tap by tap
// wgrad    out channels: 1 block row   -                  all pixels: columns are in channels of kept blocks
//
// Results of forward and dgrad have contiguous channels. A cluster computes a row panel of 128 rows times kTileN pixels
// for each of its CTAs, which share the values of the filter. A step is 64 channels at one tap in which the panel keeps
// any block. For dgrad with strides a phase is the set of pixels that are a stride apart: they read at the same taps,
// and no other phase reads there. For wgrad a work tile is a group of neighbouring kept blocks of a block row over one
// split of all pixels, and a step is 64 pixels; reduce_split_k adds the splits in order. Sums run in a fixed order, so
// bits depend on a problem's sizes alone.
//
// role       warps                        work
// producer   last warpgroup, 2 warps      the filter (for wgrad dY); the other two warps pixels: a stage a step, up to
//            each                         kStages ahead, also into the next work tiles
// consumer   each of kWarpgroups          64 rows x kWarpgroupN by wgmma; skips steps in which it has no block; stages
//                                         its results for TMA stores; with phases threads store them
//
// barriers   full: a stage's bytes have arrived. empty: all warps of the cluster that read the stage are done.
//            Named barriers from 1 on guard a warpgroup's staging area.
// registers  kWarpgroupN / 2 accumulators; producer warps release registers to the consumers.
//
// The kernel is persistent. Work tiles: the pixel tiles of a panel, then the next panel, in raster groups of tiles that
// L2 holds. Cluster c of G takes work tile c, then 2G - 1 - c, then 2G + c.
#include "blocksparse/block_mainloop.cuh"
#include "blocksparse/params/conv_wgmma.cuh"
#include "blocksparse/tile_epilogue.cuh"
#include "ptx/tma_im2col.cuh"

#define S24_CLUSTER_SIZE S24_CLUSTER_N
#include "common/cluster.cuh"

enum class ConvOp { FORWARD = 0, DGRAD = 1, WGRAD = 2 };

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_SPLIT_K ? (int)ElementKind::F32 : S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr bool kSplitK = S24_SPLIT_K;  // conv_wgmma writes float32 splits, which reduce_split_k adds
  using Reduced = ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE>;
  static constexpr ConvOp kOp = ConvOp(S24_OP);
  static constexpr bool kWgrad = kOp == ConvOp::WGRAD, kTransposed = kOp == ConvOp::DGRAD, kPhases = S24_PHASES;
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kTileN = S24_TILE_N;           // pixels of a CTA's tile; for wgrad columns
  static constexpr int kWarpgroups = S24_WARPGROUPS;  // consumer warpgroups
  static constexpr int kClusterN = S24_CLUSTER_N;     // CTAs of a cluster, along N
  static constexpr int kStages = S24_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;  // buffers of a staging area
  // Major dimensions of the operands: K where the summed channels are contiguous.
  static constexpr Major kLeftMajor = kOp == ConvOp::FORWARD ? Major::K : Major::MN;
  static constexpr Major kRightMajor = kWgrad ? Major::MN : Major::K;

  // A step has 64 channels: half of a large block, or several small blocks side by side.
  static constexpr int kHalves = kBlock > 64 ? kBlock / 64 : 1, kBlocksPerStep = kBlock < 64 ? 64 / kBlock : 1;
  static constexpr int kBox = kBlock < 64 ? kBlock : 64, kBoxBytes = 2 * kBox;
  static constexpr int kPanelBlockRows = kWgrad ? 1 : 128 / kBlock;       // block rows of a row panel
  static constexpr int kM64PerBlock = kBlock > 64 ? kBlock / 64 : 1;      // 64-row tiles of a block row
  static constexpr int kBlockRowsPerM64 = kBlock < 64 ? 64 / kBlock : 1;  // block rows of a 64-row tile
  static constexpr int kWarpgroupsM = kWgrad ? kM64PerBlock : 2;
  static constexpr int kWarpgroupN = kTileN * kWarpgroupsM / kWarpgroups;
  static constexpr int kBlocksPerTile = kTileN / kBlock;  // for wgrad: blocks of a work tile
  static constexpr int kAccumulators = kWarpgroupN / 2;
  static constexpr bool kMayLackBlocks = kPanelBlockRows > 1;  // whether a stage may lack blocks of some block rows
  static constexpr bool kSCpAsync = false;                     // TMA loads everything
  static constexpr int kConsumerThreads = 128 * kWarpgroups, kThreads = kConsumerThreads + 128;
  // Pixels are read by every block row that keeps a block of their channels. The kernel never reads its results.
  static constexpr u64 kReadPolicy = kEvictLast, kOutPolicy = kEvictFirst;
  static constexpr int kBox64Bytes = 64 * 128;            // 64 rows of 128 bytes
  static constexpr int kBlockBytes = kBlock * kBoxBytes;  // the k of a step in one block
  static constexpr int kLeftBytes = kWarpgroupsM * kBox64Bytes, kRightBytes = kTileN * 128;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;

  // Shared memory: stages, a staging area for each warpgroup, barriers, a word for each stage that says which blocks it
  // has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static_assert(kWarpgroupsM <= kWarpgroups && kWarpgroupN % 64 == 0,
                "a warpgroup has 64 rows and whole groups of columns");
  static_assert(!kWgrad || kBlock >= 64, "a block_row of wgrad is a row tile at least");
  static_assert(!kPhases || kTransposed, "phases are those of dX");

  // Registers of a producer and of a consumer thread after reallocation.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};
constexpr int kLeftGroup = Config::kBlock < 64 ? Config::kBlockBytes : Config::kBox64Bytes;
using LeftOperand = DenseOperand<Config::kLeftMajor, Config::kBoxBytes, kLeftGroup>;
using RightOperand = DenseOperand<Config::kRightMajor, Config::kBoxBytes, Config::kBox64Bytes>;
using AccumulatorTile = float[Config::kAccumulators];  // one thread's part of 64 rows x kWarpgroupN

// The pixel that a result reads along one axis: at tap t, result i of phase f reads the pixel `lower + stride * i +
// offset_numerator / divide`, if that division has no remainder. The results of phase f are f + divide * i.
__device__ __forceinline__ int offset_numerator(const AxisParams& axis, u32 phase, u32 tap) {
  return axis.start + (int)phase + axis.step * (int)tap;
}
// Returns index / results, for an index below 2^31, and leaves the remainder in `index`.
__device__ __forceinline__ u32 divide_by_results(const AxisParams& axis, u32& index) {
  const u32 quotient = (u32)((u64)index * axis.multiplier >> axis.shift);
  index -= quotient * axis.results;
  return quotient;
}

// The first pixel of a tile.
struct Pixel {
  int w, h;
  u32 image;

  __device__ __forceinline__ Pixel() : w(0), h(0), image(0) {}
  __device__ __forceinline__ Pixel(const ConvWgmmaParams& p, u32 index) {
    u32 row = divide_by_results(p.w, index);
    image = divide_by_results(p.h, row);
    w = p.w.lower + p.w.stride * (int)index, h = p.h.lower + p.h.stride * (int)row;
  }
  // Loads a box of the pixels that results of a phase read at a tap, from this pixel on.
  __device__ __forceinline__ void copy(const ConvWgmmaParams& p, u32 to, u32 channel, u32 phase, u32 tap,
                                       u32 full) const {
    int offset_h = offset_numerator(p.h, Config::kPhases ? phase / p.w.divide : 0, tap / p.taps_w);
    int offset_w = offset_numerator(p.w, Config::kPhases ? phase % p.w.divide : 0, tap % p.taps_w);
    if constexpr (Config::kPhases) offset_h /= p.h.divide, offset_w /= p.w.divide;
    tma_load_im2col(to, &p.right_map, channel, w, h, image, (u16)offset_w, (u16)offset_h, full, Config::kReadPolicy);
  }
};

// Returns whether a phase's results read any pixels at a tap.
__device__ __forceinline__ bool reads_pixels(const ConvWgmmaParams& p, u32 phase, u32 tap) {
  if constexpr (!Config::kPhases) return true;
  return offset_numerator(p.h, phase / p.w.divide, tap / p.taps_w) % p.h.divide == 0 &&
         offset_numerator(p.w, phase % p.w.divide, tap % p.taps_w) % p.w.divide == 0;
}

using Ring = PipelineState<Config::kStages>;

struct Barriers : StageBarriers<Config> {
  // A word that tells which places of a stage hold other values than zeros.
  __device__ __forceinline__ u32 dirty(u32 stage) const { return at + 20 * Config::kStages + 4 * stage; }
};

// The work tile of a CTA.
struct WorkTile {
  u32 phase, block_row, pixel;  // block_row: the panel's first
  int count;                    // block columns; for wgrad kept blocks
  int first;                    // for wgrad: place of the first block
  u32 k_split;                  // of wgrad

  __device__ __forceinline__ WorkTile(const ConvWgmmaParams& p, u32 index, u32 cta_rank)
      : phase(0), block_row(0), pixel(0), count(0), first(0), k_split(0) {
    if constexpr (Config::kWgrad) {
      const u32 group = index % p.groups;
      const int row = p.work_rows[group];  // negative: there is no such group
      k_split = index / p.groups;
      if (row < 0) return;
      block_row = row, first = p.work_blocks[group];
      count = min(Config::kBlocksPerTile, p.pointers[row + 1] - first);
      return;
    }
    const u32 panels = p.phases * p.panels, per_group = p.raster_tiles * panels, raster_group = index / per_group,
              rest = index % per_group;
    const u32 group_width = min(p.raster_tiles, p.cluster_tiles - raster_group * p.raster_tiles),
              at = rest / group_width;
    const u32 panel = Config::kTransposed ? at : (u32)p.work_rows[at];
    phase = Config::kPhases ? panel / p.panels : 0;
    block_row = panel % p.panels * Config::kPanelBlockRows;
    pixel = ((raster_group * p.raster_tiles + rest % group_width) * Config::kClusterN + cta_rank) * Config::kTileN;
    if constexpr (!Config::kTransposed) count = p.work_blocks[panel];
  }
  // For dgrad: counts the block columns that the phase reads. A whole warp calls it.
  __device__ __forceinline__ void count_columns(const ConvWgmmaParams& p) {
    const u32* kept = p.kept + (u64)block_row * p.bit_words;
    const u32 lines = min((u32)Config::kPanelBlockRows, p.block_rows - block_row);
    u32 found = 0;
    for (u32 word = threadIdx.x % 32; word < p.bit_words; word += 32) {
      if (!reads_pixels(p, phase, word / p.tap_words)) continue;
      u32 any = 0;
      for (u32 of = 0; of < lines; ++of) any |= kept[of * p.bit_words + word];
      found += __popc(any);
    }
    count = (int)__reduce_add_sync(~0u, found);
  }
  __device__ __forceinline__ int steps(const ConvWgmmaParams& p) const {
    return Config::kWgrad ? (int)p.k_steps
                          : (count + Config::kBlocksPerStep - 1) / Config::kBlocksPerStep * Config::kHalves;
  }
  __device__ __forceinline__ u32 row() const { return block_row * Config::kBlock; }
};

// Number of work tiles of all clusters.
__device__ __forceinline__ u32 work_tile_count(const ConvWgmmaParams& p) {
  return Config::kWgrad ? p.split_k * p.groups : p.cluster_tiles * p.phases * p.panels;
}

// Producer ---------------------------------------------------------------------------------------------

// Loads this CTA's part of 64 channels of a kept block, and multicasts it to the cluster.
__device__ __forceinline__ void load_values(const ConvWgmmaParams& p, u32 to, u32 place, u32 half, u32 cta_rank,
                                            u32 full) {
  constexpr u32 kAll = (1 << Config::kClusterN) - 1;
  constexpr u32 kPartRows = (Config::kTransposed ? Config::kBox : Config::kBlock) / Config::kClusterN;
  const u32 row = place * Config::kBlock + cta_rank * kPartRows;
#pragma unroll
  for (int group = 0; group < (Config::kTransposed ? Config::kM64PerBlock : 1); ++group) {
    const u32 at = to + group * Config::kBox64Bytes + cta_rank * kPartRows * Config::kBoxBytes;
    const u32 column = Config::kTransposed ? group * 64 : half * 64, from = row + (Config::kTransposed ? half * 64 : 0);
    if constexpr (Config::kClusterN == 1) tma_load(at, &p.left_map, column, from, full);
    else tma_load_multicast(at, &p.left_map, column, from, full, (u16)kAll);
  }
}

// A producer warp. kLeft: it loads the left operand and announces a stage's bytes and blocks; otherwise it loads the
// right operand. Two warps of each kind alternate between stages. Lane l handles block row l % 8 of the panel and the
// (l / 8)-th block column of a stage.
template <bool kLeft> struct Producer {
  const ConvWgmmaParams& p;
  u32 base, cta_rank, lane, warp;  // warp: 0 or 1, of the two that load this operand
  Barriers barriers;
  Ring at;
  u32 number = 0;  // sequence number of the stage
  // The next stage so far: its block columns; this lane's block column; the place of this lane's block among all
  // values, valid if `here`.
  u32 filled = 0, column = 0, place = 0;
  bool here = false;
  Pixel pixel;  // the work's first

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Returns whether this warp fills the stage, after waiting until the stage is empty.
  __device__ __forceinline__ bool acquire_stage() const {
    if (number % 2 != warp) return false;
    barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
    return true;
  }
  __device__ __forceinline__ void advance() {
    ++number;
    at.next();
  }

  // Loads the pixels of a stage: each lane requests one block column.
  __device__ __forceinline__ void load_right(const WorkTile& work, u32 half) const {
    if (lane / 8 >= filled || lane % 8) return;
    const u32 to = stage() + Config::kLeftBytes + lane / 8 * (Config::kTileN * Config::kBoxBytes);
    const u32 before = Config::kTransposed ? p.tap_words * 32 : p.taps;
    const u32 tap = Config::kTransposed ? column / before : column % before;
    const u32 channels = Config::kTransposed ? column % before : column / before;
    pixel.copy(p, to, channels * Config::kBlock + half * 64, work.phase, tap, barriers.full(at.stage));
  }

  // For small blocks: returns the block rows that must be zeroed. They share a 64-row tile with a block in `present`,
  // have no block themselves, and hold old values.
  __device__ __forceinline__ u32 stale(u32 present) const {
    if constexpr (Config::kBlockRowsPerM64 == 1) return 0;
    u32 tiles = present | present >> 1;
    if constexpr (Config::kBlockRowsPerM64 == 4) tiles |= tiles >> 2;
    tiles &= Config::kBlockRowsPerM64 == 4 ? 0x11111111u : 0x55555555u;
    tiles *= (1 << Config::kBlockRowsPerM64) - 1;
    return load_shared_as<u32>(barriers.dirty(at.stage)) & tiles & ~present;
  }

  __device__ __forceinline__ void load_panel_blocks(u32 half) const {
    const u32 full = barriers.full(at.stage), present = __ballot_sync(~0u, here), zeros = stale(present);
    __syncwarp();  // all lanes have read the stage's old word
    if (lane == 0) {
      if constexpr (Config::kPanelBlockRows > 1) store_shared(barriers.present(at.stage), present);
      if constexpr (Config::kBlockRowsPerM64 > 1) {
        const u32 dirty = load_shared_as<u32>(barriers.dirty(at.stage));
        store_shared(barriers.dirty(at.stage), (dirty & ~zeros) | present);
      }
      barrier_arrive_expect_tx(
          full, __popc(present | zeros) * Config::kBlockBytes + filled * (Config::kTileN * Config::kBoxBytes));
    }
    __syncwarp();
    if ((present | zeros) >> lane & 1) {  // TMA fills what lies beyond the values with zeros
      const u32 to = stage() + lane / 8 * (128 * Config::kBoxBytes) + lane % 8 * Config::kBlockBytes;
      load_values(p, to, here ? place : (u32)p.blocks, half, cta_rank, full);
    }
  }

  __device__ __forceinline__ void load_step(const WorkTile& work) {
    for (u32 half = 0; half < Config::kHalves; ++half, advance()) {
      if (!acquire_stage()) continue;
      if constexpr (kLeft) load_panel_blocks(half);
      else load_right(work, half);
      __syncwarp();
    }
    filled = 0, here = false;
  }

  // Loads the panel's block columns in increasing order, for dgrad tap by tap.
  __device__ __forceinline__ void load_panel(const WorkTile& work) {
    const u32 of = lane % 8, block_row = work.block_row + of;
    const bool mine = of < Config::kPanelBlockRows && block_row < p.block_rows;
    const u32* kept = p.kept + (u64)block_row * p.bit_words;
    int next = kLeft && mine ? p.pointers[Config::kTransposed ? block_row * p.taps : block_row] : p.blocks,
        entry = entry_at(next);
    pixel = Pixel(p, work.pixel);
    u32 ahead = mine && p.bit_words ? kept[0] : 0;
    for (u32 word = 0; word < p.bit_words; ++word) {
      u32 bits = ahead;
      ahead = mine && word + 1 < p.bit_words ? kept[word + 1] : 0;
      if (Config::kPhases && !reads_pixels(p, work.phase, word / p.tap_words)) {
        if (kLeft && bits) entry = entry_at(next += __popc(bits));
        bits = 0;
      }
      for (u32 any = __reduce_or_sync(~0u, bits); any; any &= any - 1) {
        const u32 bit = __ffs(any) - 1;
        const bool keeps = bits >> bit & 1;
        if (lane / 8 == filled) column = word * 32 + bit, here = keeps, place = entry;
        if (kLeft && keeps) entry = entry_at(++next);
        if (++filled == Config::kBlocksPerStep) load_step(work);
      }
    }
    if (filled > 0) load_step(work);
  }
  // Place of an entry's values. Past the last entry there is none, and `next` itself is returned.
  __device__ __forceinline__ int entry_at(int next) const {
    return Config::kTransposed && next < p.blocks ? p.value_index[next] : next;
  }

  // For wgrad: loads 64 pixels of the block row's channels of dY, or of X's channels of every block of the group, one
  // lane for each block.
  __device__ __forceinline__ void load_group(const WorkTile& work) {
    const u32 column = lane < work.count ? p.columns[work.first + lane] : 0;
    const u32 channel = column / p.taps * Config::kBlock, tap = column % p.taps;
    for (u32 step = 0; step < p.k_steps; ++step, advance()) {
      if (!acquire_stage()) continue;
      const u32 full = barriers.full(at.stage), first = (work.k_split * p.k_steps + step) * 64;
      if (kLeft && lane == 0) {
        barrier_arrive_expect_tx(full, Config::kLeftBytes + work.count * Config::kBlock * 128);
#pragma unroll
        for (u32 row = 0; row < Config::kBlock; row += 64)
          tma_load(stage() + row * 128, &p.left_map, work.row() + row, first, full);
      }
      if (!kLeft && lane < work.count) {
        const u32 to = stage() + Config::kLeftBytes + lane * (Config::kBlock * 128);
        const Pixel begin(p, first);
#pragma unroll
        for (u32 row = 0; row < Config::kBlock; row += 64) begin.copy(p, to + row * 128, channel + row, 0, tap, full);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void produce() {
    for (u32 round = 0; round < rounds_of<Config>(p); ++round) {
      if (work_tile_of<Config>(round) >= work_tile_count(p)) continue;
      const WorkTile work(p, work_tile_of<Config>(round), cta_rank);
      if constexpr (!Config::kWgrad) load_panel(work);
      else if (work.count) load_group(work);
    }
    // No CTA exits while another CTA may still arrive at its barriers.
    if constexpr (kLeft && Config::kClusterN > 1)
      for (int i = 0; i < Config::kStages; ++i, at.next()) barrier_wait(barriers.empty(at.stage), at.parity ^ 1);
  }
};

// Mainloop -----------------------------------------------------------------------------------------------

// The mainloop of one consumer warpgroup: 64 rows x kWarpgroupN.
struct ConsumerMainloop : BlockMainloop<Config, ConsumerMainloop> {
  __device__ __forceinline__ void issue(AccumulatorTile& sums, u32 present) const {
    const u64 a = LeftOperand::descriptor(stage() + warpgroup_m * 64 * Config::kBoxBytes);
    const u64 b =
        RightOperand::descriptor(stage() + Config::kLeftBytes + warpgroup_n * Config::kWarpgroupN * Config::kBoxBytes);
#pragma unroll 1
    do {  // the block columns of the stage, in order
      const u32 block = Config::kBlocksPerStep > 1 ? (__ffs(present) - 1) / 8 : 0;
      const u64 left = a + (block * (128 * Config::kBoxBytes) >> 4);
      const u64 right = b + (block * (Config::kTileN * Config::kBoxBytes) >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Config::kBox / 16; ++k)
        wgmma_dense<Config::kElement, Config::kLeftMajor, Config::kRightMajor>(sums, left + k * LeftOperand::kStep,
                                                                               right + k * RightOperand::kStep);
      present &= ~(0xff << 8 * block);
    } while (Config::kBlocksPerStep > 1 && present);
    wgmma_commit();
  }
};

// Epilogue --------------------------------------------------------------------------------------------

// Stores the results of one warpgroup: 64 rows x kWarpgroupN. With phases threads store the pixels.
struct EpilogueStore : TileEpilogue<EpilogueStore, Config, ConvWgmmaParams, Config::kWgrad,
                                    Config::kPhases ? StoredBy::Threads : StoredBy::Tma> {
  __device__ __forceinline__ void write(const AccumulatorTile& sums, const WorkTile& work, u32 warpgroup_m,
                                        u32 warpgroup_n) {
    const u32 row0 = work.row() + warpgroup_m * 64, column0 = work.pixel + warpgroup_n * Config::kWarpgroupN;
    const u32 columns = Config::kWgrad ? work.count * Config::kBlock : p.pixels;
    write_tile(sums, work, row0, p.block_rows * Config::kBlock, row0, column0, columns);
  }

  __device__ __forceinline__ void store(u32 buffer, const WorkTile& work, u32 row, u32 column) const {
    if constexpr (Config::kPhases) {
      store_pixels(buffer, row, column, work.phase);
    } else if constexpr (Config::kWgrad) {
      const u32 place = work.k_split * p.blocks + work.first + column / Config::kBlock;
      tma_store(&p.out_map, column % Config::kBlock, place * Config::kBlock + row % Config::kBlock, buffer);
      tma_store_commit();
    } else {
      store_boxes(buffer, row, column, 0);
    }
  }

  // Stores the pixels of a phase by threads: the pixels lie apart, and TMA's im2col mode stores none beyond an image.
  __device__ __forceinline__ void store_pixels(u32 buffer, u32 row0, u32 column, u32 phase) const {
    constexpr u32 kVector = 16 / Config::kOutBytes, kVectors = 64 / kVector;
    const u32 rows = p.block_rows * Config::kBlock, row = threadIdx.x % kVectors * kVector;
    const u32 phase_h = phase / p.w.divide, phase_w = phase % p.w.divide;
    if (row0 + row >= rows) return;
#pragma unroll
    for (u32 at = threadIdx.x % 128 / kVectors; at < Config::kStepColumns; at += 128 / kVectors) {
      u32 x = column + at, y = divide_by_results(p.w, x);
      const u32 image = divide_by_results(p.h, y);
      x = x * p.w.divide + phase_w, y = y * p.h.divide + phase_h;
      if (image >= p.images || y >= p.h.size || x >= p.w.size) continue;
      float v[4];  // bits of several results
      load_shared_x4(v, buffer + staged_at(row, at));
      const i64 pixel = ((i64)image * p.h.size + y) * p.w.size + x;
      ((float4*)p.out)[(pixel * rows + row0 + row) / kVector] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
};

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    conv_wgmma(const __grid_constant__ ConvWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{{base + Config::kBarrierAt}};
  const u32 cta_rank = blockIdx.x % Config::kClusterN, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      store_shared(barriers.dirty(i), ~0u);
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), 4 * Config::kWarpgroups * Config::kClusterN);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kClusterN > 1) cluster_sync_relaxed();
  launch_dependents_and_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (warp < 2) Producer<true>{p, base, cta_rank, lane, warp, barriers}.produce();
    else Producer<false>{p, base, cta_rank, lane, warp - 2, barriers}.produce();
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    const u32 warpgroup_m = warpgroup % Config::kWarpgroupsM, warpgroup_n = warpgroup / Config::kWarpgroupsM;
    ConsumerMainloop mainloop{
        {{}, base, warpgroup_m, warpgroup_n, ConsumerRelease<Config>(barriers.empty(0)), barriers}};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    EpilogueStore epilogue{{p, staging, 1 + (int)warpgroup}};
    AccumulatorTile sums;
    for (u32 round = 0; round < rounds_of<Config>(p); ++round) {
      if (work_tile_of<Config>(round) >= work_tile_count(p)) continue;
      WorkTile work(p, work_tile_of<Config>(round), cta_rank);
      if constexpr (Config::kTransposed) work.count_columns(p);
      if (Config::kWgrad && work.count == 0) continue;  // there is no such group
      mainloop.multiply(sums, work.steps(p));
      epilogue.write(sums, work, warpgroup_m, warpgroup_n);
    }
    if (epilogue.is_storing_thread()) tma_store_wait_read<0>();
  }
}

// Adds the splits of wgrad in order. The number of cells is a multiple of four.
extern "C" __global__ void __launch_bounds__(256) reduce_split_k(const __grid_constant__ ConvWgmmaParams p) {
  if constexpr (!Config::kSplitK) return;
  using Out = Config::Reduced::Out;
  const i64 step = (i64)gridDim.x * blockDim.x * 4;
  for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < p.elements; at += step) {
    float4 sum = *(const float4*)(p.partials + at);
    for (u32 split = 1; split < p.split_k; ++split) {
      const float4 one = *(const float4*)(p.partials + split * p.elements + at);
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ((Out::Bits*)p.out)[at + i] = Out::from_float(epilogue<Config::Reduced, FastMath>(v[i], p.alpha, 0.0f));
  }
}
