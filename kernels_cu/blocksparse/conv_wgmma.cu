// A 2-D convolution with a block-sparse filter, and its gradients, as products whose dense operand is never in memory:
// the copy engine finds the pixels that results meet (ptx/tma_im2col.cuh).
//
//   op       rows of a strip                pixels             a sum runs over
//   forward  out channels: lines of blocks  Y's                kept columns of blocks: in channels of a tap
//   dgrad    in channels                    dX's, of a phase   kept blocks of out channels, tap by tap
//   wgrad    out channels: one line         -                  all pixels: columns are in channels of kept blocks
//
// Results of forward and dgrad lie with channels contiguous. A cluster takes a strip of 128 rows and kPixels pixels for
// each of its blocks, which share the values of the filter. A step is 64 channels that the strip keeps any block of, at
// one tap. Of dgrad with strides a phase is the pixels that are a stride apart: they meet the same taps, and no other
// phase does. Of wgrad an item is a group of neighbouring kept blocks of a line over a part of all pixels, and a step
// 64 pixels; add_parts adds the parts in order. Sums run in a fixed order, so bits depend on a problem's sizes alone.
//
//   role        who                          what
//   copy        last warpgroup, two warps    the filter (of wgrad dY), and the other two pixels, a stage a step, up to
//               each                         kStages ahead, also of the next items
//   multiply    each of kWarpgroups          64 rows x kColumns; passes over steps without its lines
//   write       the same                     its results, staged for the copy engine; of a phase by themselves
//
//   barriers    full: a stage's bytes have come; free: all warps of the cluster that read it are done. Named 1 ..: a
//               warpgroup's staging area.
//   registers   kColumns / 2 accumulators; threads that copy hand theirs over.
//
// Items: pixel tiles of a strip, then the next strip, in bands of tiles that L2 holds. Cluster c of G takes item c,
// then 2G - 1 - c, then 2G + c: in turns.
#include "blocksparse/multiplier.cuh"
#include "blocksparse/writer.cuh"
#include "ptx/tma_im2col.cuh"

#define S24_CLUSTER_SIZE S24_CLUSTER_N
#include "common/cluster.cuh"

enum class ConvOp { FORWARD = 0, DGRAD = 1, WGRAD = 2 };

#if S24_SPLIT_K
#define S24_IN_PARTS  // what compiles for a sum in parts alone
#endif

using Problem = ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE>;
// What the kernel writes: results, or float32 parts of them.
using Written = ProblemType<S24_ELEMENT, S24_SPLIT_K ? (int)ElementKind::F32 : S24_OUT, S24_BIAS, S24_EPILOGUE>;

// Everything that is compiled in.
struct Config : Written {
  static constexpr ConvOp kOp = ConvOp(S24_OP);
  static constexpr bool kFilter = kOp == ConvOp::WGRAD, kTurned = kOp == ConvOp::DGRAD, kPhases = S24_PHASES;
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kPixels = S24_TILE_N;          // of a block of threads; of wgrad columns
  static constexpr int kWarpgroups = S24_WARPGROUPS;  // that multiply
  static constexpr int kShare = S24_CLUSTER_N;        // blocks of a cluster
  static constexpr int kStages = S24_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;  // of a staging area
  // How the operands lie: with the summed channels contiguous, or not.
  static constexpr Major kLeftMajor = kOp == ConvOp::FORWARD ? Major::K : Major::MN;
  static constexpr Major kRightMajor = kFilter ? Major::MN : Major::K;

  // A step has 64 channels: half of a large block, or small ones side by side.
  static constexpr int kHalves = kBlock > 64 ? kBlock / 64 : 1, kBeside = kBlock < 64 ? 64 / kBlock : 1;
  static constexpr int kBox = kBlock < 64 ? kBlock : 64, kBoxBytes = 2 * kBox;
  static constexpr int kLines = kFilter ? 1 : 128 / kBlock;          // of a strip
  static constexpr int kLineGroups = kBlock > 64 ? kBlock / 64 : 1;  // row tiles of a line
  static constexpr int kTileLines = kBlock < 64 ? 64 / kBlock : 1;   // lines of a row tile
  static constexpr int kRowGroups = kFilter ? kLineGroups : 2;
  static constexpr int kColumns = kPixels * kRowGroups / kWarpgroups;
  static constexpr int kGroup = kPixels / kBlock;  // of wgrad: blocks of an item
  static constexpr int kSums = kColumns / 2;
  static constexpr bool kMixed = kLines > 1;  // whether a stage may lack some lines
  static constexpr bool kByLanes = false;     // the copy engine copies all
  static constexpr int kMultiplying = 128 * kWarpgroups, kThreads = kMultiplying + 128;
  // Pixels are read by every line that keeps a block of their channels, results are not read at all.
  static constexpr u64 kReadPolicy = kEvictLast, kOutPolicy = kEvictFirst;
  static constexpr int kGroupBytes = 64 * 128;           // 64 lines of 128 bytes
  static constexpr int kLineBytes = kBlock * kBoxBytes;  // a line's block, or half of one
  static constexpr int kLeftBytes = kRowGroups * kGroupBytes, kRightBytes = kPixels * 128;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;

  // Shared memory: stages, a staging area a warpgroup, barriers, which lines each stage has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static_assert(kRowGroups <= kWarpgroups && kColumns % 64 == 0, "a warpgroup has 64 rows and whole groups of columns");
  static_assert(!kFilter || kBlock >= 64, "a line of wgrad is a row tile at least");
  static_assert(!kPhases || kTurned, "phases are those of dX");

  // Registers of a thread that copies and of one that multiplies, once they part.
  static constexpr int kCopyRegisters = 40, kSumRegisters = 232;
};
constexpr int kLeftGroup = Config::kBlock < 64 ? Config::kLineBytes : Config::kGroupBytes;
using LeftOperand = DenseOperand<Config::kLeftMajor, Config::kBoxBytes, kLeftGroup>;
using RightOperand = DenseOperand<Config::kRightMajor, Config::kBoxBytes, Config::kGroupBytes>;
using Sums = float[Config::kSums];  // a thread's share of 64 rows x kColumns

// How results meet the pixels that are read, along one axis: result i of phase f the pixel `lower + stride * i +
// (start + f + step * t) / divide` at tap t, where the quotient has no rest. Phase f's results are f + divide * i.
struct Axis {
  int lower, stride, start, step, divide;
  u32 count;              // results of a phase
  u32 size;               // all of X's pixels
  u32 multiplier, shift;  // of a division by count

  __device__ __forceinline__ int numerator(u32 phase, u32 tap) const { return start + (int)phase + step * (int)tap; }
  // index / count, below 2^31; index becomes the rest.
  __device__ __forceinline__ u32 divide_by_count(u32& index) const {
    const u32 quotient = (u32)((u64)index * multiplier >> shift);
    index -= quotient * count;
    return quotient;
  }
};

struct ConvWgmmaParams {
  TensorMap left_map;   // values [blocks * b, b], of wgrad dY [pixels, K]: boxes of kBoxBytes
  TensorMap right_map;  // pixels of X, of dgrad of dY
  TensorMap out_map;    // results [pixels, rows], of wgrad [parts * blocks * b, b]: boxes of 128 bytes
  const int* order;     // forward [strips]: from the longest to the shortest; wgrad [groups]: the line of each
  const int* counts;    // forward [strips]: columns of blocks of each; wgrad [groups]: a group's first block
  const u32* kept;      // [lines][words]: bit c % 32 of word c / 32: whether the line keeps column c
  const int* pointers;  // where each line's entries begin; of dgrad each tap's of it
  const int* columns;   // of wgrad [blocks]
  const int* places;    // of dgrad [blocks]: its entries among the values
  const void* bias;     // [rows], or null
  void* results;        // of phases [images, h, w, rows]; of add_parts [cells]
  const float* sums;    // of add_parts [parts, cells]
  i64 cells;
  Axis h, w;
  float alpha;
  int blocks;            // kept
  u32 lines, strips;     // strips: of a phase
  u32 words, tap_words;  // of a line's bits, and of dgrad of a tap's
  u32 taps, taps_w;      // of the filter, and of a row of it
  u32 phases, images;
  u32 pixels, pixel_clusters;  // of a phase: clusters' tiles that cover them; of wgrad a group's tiles
  u32 band;                    // of tiles, before the next band
  u32 groups, parts, steps;    // of wgrad: steps of a part
};
static_assert(matches_host<ConvWgmmaParams>(), "the host has another ConvWgmmaParams");

// Where a tile of pixels begins.
struct Pixel {
  int w, h;
  u32 image;

  __device__ __forceinline__ Pixel() : w(0), h(0), image(0) {}
  __device__ __forceinline__ Pixel(const ConvWgmmaParams& p, u32 index) {
    u32 row = p.w.divide_by_count(index);
    image = p.h.divide_by_count(row);
    w = p.w.lower + p.w.stride * (int)index, h = p.h.lower + p.h.stride * (int)row;
  }
  // A box from it on, of what results of a phase meet at a tap.
  __device__ __forceinline__ void copy(const ConvWgmmaParams& p, u32 to, u32 channel, u32 phase, u32 tap,
                                       u32 full) const {
    int below = p.h.numerator(Config::kPhases ? phase / p.w.divide : 0, tap / p.taps_w);
    int beside = p.w.numerator(Config::kPhases ? phase % p.w.divide : 0, tap % p.taps_w);
    if constexpr (Config::kPhases) below /= p.h.divide, beside /= p.w.divide;
    tma_load_im2col(to, &p.right_map, channel, w, h, image, (u16)beside, (u16)below, full, Config::kReadPolicy);
  }
};

// Whether a phase's results meet any pixels at a tap.
__device__ __forceinline__ bool meets(const ConvWgmmaParams& p, u32 phase, u32 tap) {
  if constexpr (!Config::kPhases) return true;
  return p.h.numerator(phase / p.w.divide, tap / p.taps_w) % p.h.divide == 0 &&
         p.w.numerator(phase % p.w.divide, tap % p.taps_w) % p.w.divide == 0;
}

using Ring = PipelineState<Config::kStages>;

struct Barriers : StageBarriers<Config> {
  // A word: which of a stage's places hold no zeros.
  __device__ __forceinline__ u32 dirty(u32 slot) const { return at + 20 * Config::kStages + 4 * slot; }
};

// What a block of threads works on.
struct Item {
  u32 phase, line, pixel;  // line: the first
  int count;               // columns of blocks; of wgrad kept blocks
  int first;               // of wgrad: the first block's place
  u32 part;                // of wgrad

  __device__ __forceinline__ Item(const ConvWgmmaParams& p, u32 index, u32 share)
      : phase(0), line(0), pixel(0), count(0), first(0), part(0) {
    if constexpr (Config::kFilter) {
      const u32 group = index % p.groups;
      const int row = p.order[group];  // below 0: there is no such group
      part = index / p.groups;
      if (row < 0) return;
      line = row, first = p.counts[group];
      count = min(Config::kGroup, p.pointers[row + 1] - first);
      return;
    }
    const u32 strips = p.phases * p.strips, in_band = p.band * strips, band = index / in_band, rest = index % in_band;
    const u32 wide = min(p.band, p.pixel_clusters - band * p.band), at = rest / wide;
    const u32 strip = Config::kTurned ? at : (u32)p.order[at];
    phase = Config::kPhases ? strip / p.strips : 0;
    line = strip % p.strips * Config::kLines;
    pixel = ((band * p.band + rest % wide) * Config::kShare + share) * Config::kPixels;
    if constexpr (!Config::kTurned) count = p.counts[strip];
  }
  // Of dgrad: count, which takes a warp.
  __device__ __forceinline__ void count_columns(const ConvWgmmaParams& p) {
    const u32* kept = p.kept + (u64)line * p.words;
    const u32 lines = min((u32)Config::kLines, p.lines - line);
    u32 found = 0;
    for (u32 word = threadIdx.x % 32; word < p.words; word += 32) {
      if (!meets(p, phase, word / p.tap_words)) continue;
      u32 any = 0;
      for (u32 of = 0; of < lines; ++of) any |= kept[of * p.words + word];
      found += __popc(any);
    }
    count = (int)__reduce_add_sync(~0u, found);
  }
  __device__ __forceinline__ int steps(const ConvWgmmaParams& p) const {
    return Config::kFilter ? (int)p.steps : (count + Config::kBeside - 1) / Config::kBeside * Config::kHalves;
  }
  __device__ __forceinline__ u32 row() const { return line * Config::kBlock; }
};

// Of all clusters.
__device__ __forceinline__ u32 items_of(const ConvWgmmaParams& p) {
  return Config::kFilter ? p.parts * p.groups : p.pixel_clusters * p.phases * p.strips;
}
// Copies ---------------------------------------------------------------------------------------------

// This block's part of 64 channels of a kept block, to every block of the cluster.
__device__ __forceinline__ void copy_values(const ConvWgmmaParams& p, u32 to, u32 place, u32 half, u32 share,
                                            u32 full) {
  constexpr u32 kAll = (1 << Config::kShare) - 1;
  constexpr u32 kLines = (Config::kTurned ? Config::kBox : Config::kBlock) / Config::kShare;
  const u32 row = place * Config::kBlock + share * kLines;
#pragma unroll
  for (int group = 0; group < (Config::kTurned ? Config::kLineGroups : 1); ++group) {
    const u32 at = to + group * Config::kGroupBytes + share * kLines * Config::kBoxBytes;
    const u32 column = Config::kTurned ? group * 64 : half * 64, line = row + (Config::kTurned ? half * 64 : 0);
    if constexpr (Config::kShare == 1) tma_load(at, &p.left_map, column, line, full);
    else tma_load_multicast(at, &p.left_map, column, line, full, (u16)kAll);
  }
}

// A warp that copies: the left operand, and all that is to say of a stage, or the right one. Two of each take stages in
// turn. Lane l has line l % 8 and, of the columns of blocks that a stage has, the l / 8-th.
template <bool kLeft> struct Copier {
  const ConvWgmmaParams& p;
  u32 base, share, lane, mine;  // the last: of the two
  Barriers barriers;
  Ring at;
  u32 number = 0;  // of the stage
  // What the next stage has: columns of blocks; this lane's; its line's block among all values, if it keeps one.
  u32 beside = 0, column = 0, place = 0;
  bool here = false;
  Pixel pixel;  // the item's first

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Until the stage is free, if it is this warp's turn.
  __device__ __forceinline__ bool take_stage() const {
    if (number % 2 != mine) return false;
    barrier_wait(barriers.free(at.stage), at.parity ^ 1);
    return true;
  }
  __device__ __forceinline__ void next_stage() {
    ++number;
    at.next();
  }

  // A lane each column of blocks.
  __device__ __forceinline__ void copy_right(const Item& item, u32 half) const {
    if (lane / 8 >= beside || lane % 8) return;
    const u32 to = stage() + Config::kLeftBytes + lane / 8 * (Config::kPixels * Config::kBoxBytes);
    const u32 before = Config::kTurned ? p.tap_words * 32 : p.taps;
    const u32 tap = Config::kTurned ? column / before : column % before;
    const u32 channels = Config::kTurned ? column % before : column / before;
    pixel.copy(p, to, channels * Config::kBlock + half * 64, item.phase, tap, barriers.full(at.stage));
  }

  // Of small blocks: the lines of the row tiles in `present` that lack a block and whose places hold no zeros.
  __device__ __forceinline__ u32 stale(u32 present) const {
    if constexpr (Config::kTileLines == 1) return 0;
    u32 tiles = present | present >> 1;
    if constexpr (Config::kTileLines == 4) tiles |= tiles >> 2;
    tiles &= Config::kTileLines == 4 ? 0x11111111u : 0x55555555u;
    tiles *= (1 << Config::kTileLines) - 1;
    return load_shared_as<u32>(barriers.dirty(at.stage)) & tiles & ~present;
  }

  __device__ __forceinline__ void copy_lines(u32 half) const {
    const u32 full = barriers.full(at.stage), present = __ballot_sync(~0u, here), zeros = stale(present);
    __syncwarp();  // all have read what the stage has had
    if (lane == 0) {
      if constexpr (Config::kLines > 1) store_shared(barriers.present(at.stage), present);
      if constexpr (Config::kTileLines > 1) {
        const u32 dirty = load_shared_as<u32>(barriers.dirty(at.stage));
        store_shared(barriers.dirty(at.stage), (dirty & ~zeros) | present);
      }
      barrier_arrive_expect_tx(
          full, __popc(present | zeros) * Config::kLineBytes + beside * (Config::kPixels * Config::kBoxBytes));
    }
    __syncwarp();
    if ((present | zeros) >> lane & 1) {  // what lies beyond the values reads as zeros
      const u32 to = stage() + lane / 8 * (128 * Config::kBoxBytes) + lane % 8 * Config::kLineBytes;
      copy_values(p, to, here ? place : (u32)p.blocks, half, share, full);
    }
  }

  __device__ __forceinline__ void copy_columns(const Item& item) {
    for (u32 half = 0; half < Config::kHalves; ++half, next_stage()) {
      if (!take_stage()) continue;
      if constexpr (kLeft) copy_lines(half);
      else copy_right(item, half);
      __syncwarp();
    }
    beside = 0, here = false;
  }

  // A strip's columns of blocks, in increasing order: of dgrad tap by tap.
  __device__ __forceinline__ void copy_strip(const Item& item) {
    const u32 of = lane % 8, line = item.line + of;
    const bool mine = of < Config::kLines && line < p.lines;
    const u32* kept = p.kept + (u64)line * p.words;
    int next = kLeft && mine ? p.pointers[Config::kTurned ? line * p.taps : line] : p.blocks, entry = entry_at(next);
    pixel = Pixel(p, item.pixel);
    u32 ahead = mine && p.words ? kept[0] : 0;
    for (u32 word = 0; word < p.words; ++word) {
      u32 bits = ahead;
      ahead = mine && word + 1 < p.words ? kept[word + 1] : 0;
      if (Config::kPhases && !meets(p, item.phase, word / p.tap_words)) {
        if (kLeft && bits) entry = entry_at(next += __popc(bits));
        bits = 0;
      }
      for (u32 any = __reduce_or_sync(~0u, bits); any; any &= any - 1) {
        const u32 bit = __ffs(any) - 1;
        const bool keeps = bits >> bit & 1;
        if (lane / 8 == beside) column = word * 32 + bit, here = keeps, place = entry;
        if (kLeft && keeps) entry = entry_at(++next);
        if (++beside == Config::kBeside) copy_columns(item);
      }
    }
    if (beside > 0) copy_columns(item);
  }
  // Where an entry has its values; past the end there is none.
  __device__ __forceinline__ int entry_at(int next) const {
    return Config::kTurned && next < p.blocks ? p.places[next] : next;
  }

  // Of wgrad: 64 pixels of the line's channels of dY, or of X's of every block of the group, a lane each.
  __device__ __forceinline__ void copy_group(const Item& item) {
    const u32 column = lane < item.count ? p.columns[item.first + lane] : 0;
    const u32 channel = column / p.taps * Config::kBlock, tap = column % p.taps;
    for (u32 step = 0; step < p.steps; ++step, next_stage()) {
      if (!take_stage()) continue;
      const u32 full = barriers.full(at.stage), first = (item.part * p.steps + step) * 64;
      if (kLeft && lane == 0) {
        barrier_arrive_expect_tx(full, Config::kLeftBytes + item.count * Config::kBlock * 128);
#pragma unroll
        for (u32 row = 0; row < Config::kBlock; row += 64)
          tma_load(stage() + row * 128, &p.left_map, item.row() + row, first, full);
      }
      if (!kLeft && lane < item.count) {
        const u32 to = stage() + Config::kLeftBytes + lane * (Config::kBlock * 128);
        const Pixel begin(p, first);
#pragma unroll
        for (u32 row = 0; row < Config::kBlock; row += 64) begin.copy(p, to + row * 128, channel + row, 0, tap, full);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void copy_all() {
    for (u32 turn = 0; turn < turns_of<Config>(p); ++turn) {
      if (item_of<Config>(turn) >= items_of(p)) continue;
      const Item item(p, item_of<Config>(turn), share);
      if constexpr (!Config::kFilter) copy_strip(item);
      else if (item.count) copy_group(item);
    }
    // Nobody leaves while others may still report to its barriers.
    if constexpr (kLeft && Config::kShare > 1)
      for (int i = 0; i < Config::kStages; ++i, at.next()) barrier_wait(barriers.free(at.stage), at.parity ^ 1);
  }
};

// Sums -----------------------------------------------------------------------------------------------

// 64 rows x kColumns of one warpgroup.
struct Multiplier : StepMultiplier<Config, Multiplier> {
  __device__ __forceinline__ void issue(Sums& sums, u32 lines) const {
    const u64 a = LeftOperand::descriptor(stage() + row_group * 64 * Config::kBoxBytes);
    const u64 b =
        RightOperand::descriptor(stage() + Config::kLeftBytes + column_group * Config::kColumns * Config::kBoxBytes);
#pragma unroll 1
    do {  // the columns of blocks that it has, in order
      const u32 beside = Config::kBeside > 1 ? (__ffs(lines) - 1) / 8 : 0;
      const u64 left = a + (beside * (128 * Config::kBoxBytes) >> 4);
      const u64 right = b + (beside * (Config::kPixels * Config::kBoxBytes) >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Config::kBox / 16; ++k)
        wgmma_dense<Config::kElement, Config::kLeftMajor, Config::kRightMajor>(sums, left + k * LeftOperand::kStep,
                                                                               right + k * RightOperand::kStep);
      lines &= ~(0xff << 8 * beside);
    } while (Config::kBeside > 1 && lines);
    wgmma_commit();
  }
};

// Results --------------------------------------------------------------------------------------------

// 64 rows x kColumns of one warpgroup; of phases, threads store pixels.
struct Writer : TileWriter<Writer, Config, ConvWgmmaParams, Config::kFilter, Config::kPhases> {
  __device__ __forceinline__ void write(const Sums& sums, const Item& item, u32 row_group, u32 column_group) {
    const u32 row0 = item.row() + row_group * 64, column0 = item.pixel + column_group * Config::kColumns;
    const u32 columns = Config::kFilter ? item.count * Config::kBlock : p.pixels;
    write_tile(sums, item, row0, p.lines * Config::kBlock, row0, column0, columns);
  }

  __device__ __forceinline__ void store(u32 buffer, const Item& item, u32 row, u32 column) const {
    if constexpr (Config::kPhases) {
      store_pixels(buffer, row, column, item.phase);
    } else if constexpr (Config::kFilter) {
      const u32 place = item.part * p.blocks + item.first + column / Config::kBlock;
      tma_store(&p.out_map, column % Config::kBlock, place * Config::kBlock + row % Config::kBlock, buffer);
      tma_store_commit();
    } else {
      copy_out(buffer, row, column, 0);
    }
  }

  // Of a phase: its pixels lie apart, and the copy engine's im2col mode writes none beyond an image.
  __device__ __forceinline__ void store_pixels(u32 buffer, u32 row0, u32 column, u32 phase) const {
    constexpr u32 kVector = 16 / Config::kOutBytes, kVectors = 64 / kVector;
    const u32 rows = p.lines * Config::kBlock, row = threadIdx.x % kVectors * kVector;
    const u32 below = phase / p.w.divide, beside = phase % p.w.divide;
    if (row0 + row >= rows) return;
#pragma unroll
    for (u32 at = threadIdx.x % 128 / kVectors; at < Config::kStepColumns; at += 128 / kVectors) {
      u32 x = column + at, y = p.w.divide_by_count(x);
      const u32 image = p.h.divide_by_count(y);
      x = x * p.w.divide + beside, y = y * p.h.divide + below;
      if (image >= p.images || y >= p.h.size || x >= p.w.size) continue;
      float v[4];  // bits of some results
      load_shared_x4(v, buffer + staged_at(row, at));
      const i64 pixel = ((i64)image * p.h.size + y) * p.w.size + x;
      ((float4*)p.results)[(pixel * rows + row0 + row) / kVector] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
};

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    conv_wgmma(const __grid_constant__ ConvWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{{base + Config::kBarrierAt}};
  const u32 share = blockIdx.x % Config::kShare, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      store_shared(barriers.dirty(i), ~0u);
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.free(i), 4 * Config::kWarpgroups * Config::kShare);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kShare > 1) cluster_sync_relaxed();
  launch_dependents_and_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (warp < 2) Copier<true>{p, base, share, lane, warp, barriers}.copy_all();
    else Copier<false>{p, base, share, lane, warp - 2, barriers}.copy_all();
  } else {
    warpgroup_reg_alloc<Config::kSumRegisters>();
    const u32 row_group = warpgroup % Config::kRowGroups, column_group = warpgroup / Config::kRowGroups;
    Multiplier multiplier{{{}, base, row_group, column_group, Reporter<Config>(barriers.free(0)), barriers}};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    Writer writer{{p, staging, 1 + (int)warpgroup}};
    Sums sums;
    for (u32 turn = 0; turn < turns_of<Config>(p); ++turn) {
      if (item_of<Config>(turn) >= items_of(p)) continue;
      Item item(p, item_of<Config>(turn), share);
      if constexpr (Config::kTurned) item.count_columns(p);
      if (Config::kFilter && item.count == 0) continue;  // a group that isn't there
      multiplier.multiply(sums, item.steps(p));
      writer.write(sums, item, row_group, column_group);
    }
    if (writer.is_copier()) tma_store_wait_read<0>();
  }
}

#ifdef S24_IN_PARTS
// The parts of wgrad, in order. Cells are a multiple of four.
extern "C" __global__ void __launch_bounds__(256) add_parts(const __grid_constant__ ConvWgmmaParams p) {
  using Out = Problem::Out;
  const i64 step = (i64)gridDim.x * blockDim.x * 4;
  for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < p.cells; at += step) {
    float4 sum = *(const float4*)(p.sums + at);
    for (u32 part = 1; part < p.parts; ++part) {
      const float4 one = *(const float4*)(p.sums + part * p.cells + at);
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ((Out::Bits*)p.results)[at + i] = Out::from_float(epilogue<Problem, FastMath>(v[i], p.alpha, 0.0f));
  }
}
#endif
