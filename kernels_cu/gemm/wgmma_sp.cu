// Y[n, m] = epilogue(alpha * scale_x[n] * scale_w[m] * sum_k X[n, k] * W[m, k]), operands fed by the copy engine.
//
// W is the sparse A operand of wgmma.sp, X is B; both are read from shared memory. W comes packed in tiles of 64 rows
// x 256 bytes of columns, each one bulk copy; X comes through a tensor map in boxes of 128 bytes of columns. W and X
// have rings of their own, for a tile of W is two boxes of X long. X of 16-bit elements may lie in columns, where the
// tokens of a column are adjacent: then a stage is boxes of up to 64 tokens, a line for each of 64 columns, and wgmma
// reads them N-major. So may Y: its tiles are staged as they lie there. Neither changes a bit of a result.
//
// The blocks of a cluster lie kShare along M, which share X: each copies a part of it to all; and kSlices along K.
// With one slice, blocks stay and take tile after tile; such a block may still sum K in kParts, one after the other, or
// kRanges of tiles that begin and end anywhere (Turns): sums of an item are then handed over to the next block.
// A slice or part is summed in increasing k, and they are folded from the first to the last, ((0+1)+2)+3. So the bits
// of a row depend on kSlices * kParts alone, and they are those of gemm/mma_sp.cu for as many slices. The tensor
// cores add products of fp8 with few bits; kPromote moves their sums to float32 every 128 columns.
//
// float32 (kXParts) is multiplied in parts of bf16: X comes in parts that gemm/f32_split.cu has made, W is split in
// registers. gemm/split_products.cuh says how.
//
//   role         who                            what
//   copy_weights last warpgroup, thread 0       W, kRowTiles tiles a stage
//   copy_source  last warpgroup, thread 32      X, this block's part of a stage to all blocks that share it
//   copy_lines   last warpgroup, threads 64 ..  instead: X in columns of fewer than 64 tokens, for this block
//   report_lines last warpgroup, thread 32      that a stage of these has come
//   Multiplier   each of kWarpgroups            kRowBlocks row tiles of W, all of the block's tokens
//   Handover     last warpgroup, warp 2         kRanges: waits for the flags of sums, and sets them
//   Writer       each of kWarpgroups, 1 slice   its results, staged for the copy engine, or element by element
//   Folder       all of kWarpgroups, slices     the block's share of the cluster's rows: sums, epilogue, stores
//
//   barriers     weight_full, source_full: a stage's bytes have come; weight_free, source_free: all warps that read
//                a stage are done with it (X: those of all blocks that share it); source_came: threads have copied a
//                stage. Named barriers 1 ..: a warpgroup's staging area; with slices, 1: all stages have been read;
//                with ranges, further ones: a warpgroup's sums have been stored, or can be loaded. The cluster meets
//                round the fold. Of float32, kTurnBarrier and up: a warpgroup's turn in front of the tensor cores.
//   registers    kSums * kRowBlocks accumulators, twice that with kPromote or kParts > 1: at most 128 a thread. Where
//                kTrade says so, threads that copy hand theirs over and keep 40; those that multiply have 232.
//
//   copy_weights | W0           | W1           | W2           | ..       up to kWeightStages ahead
//   copy_source  | X0   | X1    | X2   | X3    | X4   | X5    | ..       up to kSourceStages ahead
//   Multiplier          | wgmma X0 | X1 | X2 | X3 | ..                   one step of wgmma in flight, the stages of
//                                                                        the step before it freed meanwhile
//   Writer                                        | fill | copy |        while the next item is copied in
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/parts.cuh"
#include "gemm/slices.cuh"
#include "ptx/wgmma.cuh"

#define S24_CLUSTER_BLOCKS (S24_SHARE * S24_SLICES)
#include "common/cluster.cuh"

#if S24_X_PARTS
#define S24_OF_PARTS  // what compiles for float32 alone
#endif

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kWarpgroups = S24_WARPGROUPS;  // that multiply
  static constexpr int kRowBlocks = S24_ROW_BLOCKS;   // row tiles of a warpgroup
  static constexpr int kTokens = S24_TOKENS;          // of a block
  static constexpr int kShare = S24_SHARE, kSlices = S24_SLICES, kCluster = S24_CLUSTER_BLOCKS;
  static constexpr int kParts = S24_PARTS;
  static constexpr bool kRanges = S24_RANGES;  // clusters have equal ranges of tiles, wherever items begin and end
  static constexpr int kXParts = S24_X_PARTS;  // of bf16, that stand for float32; 0: X and W are multiplied as they are
  static constexpr bool kPromote = S24_PROMOTE;  // sums of one box of X are added up outside of the tensor cores
  static constexpr bool kRaw = S24_RAW;          // the result is the integer sum itself
  static constexpr bool kColumnsX = S24_X_COLUMNS, kColumnsY = S24_Y_COLUMNS;  // X, Y lie in columns
  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;           // 0: none, 1: one for all, 2: one a row
  static constexpr int kBlocksPerSm = S24_BLOCKS_PER_SM;
  static constexpr int kWeightStages = S24_WEIGHT_STAGES, kSourceStages = S24_SOURCE_STAGES;
  static constexpr int kStepTokens = S24_STEP_TOKENS, kBuffers = 2;  // of a staging area
  static_assert(kSlices == 1 || kParts == 1, "a cut is either along the cluster or within the block");
  static_assert(!kRanges || (kSlices == 1 && kParts == 1 && !kPromote && kBlocksPerSm == 1), "ranges are the cut");
  static_assert(kBuffers >= 2, "a buffer is free again only two steps later");
  static_assert(!kRanges || !(kColumnsX || kColumnsY), "the warp that hands sums over copies X in columns");

  static constexpr bool kIntegers = kElement == ElementKind::S8;
  static constexpr bool kEightBit = kIntegers || kElement == ElementKind::FP8_E4M3;
  using Tile = WeightTile<kXParts ? 4 : kEightBit ? 1 : 2>;
  static constexpr int kBoxes = kXParts ? kXParts : 2;                                         // of X, a tile of W
  static constexpr int kBoxColumns = kXParts ? Tile::kColumns : Tile::kColumns / 2;            // of X
  static constexpr int kRowTiles = kWarpgroups * kRowBlocks, kRows = kRowTiles * Tile::kRows;  // of a block
  static constexpr int kMultiplying = 128 * kWarpgroups, kThreads = kMultiplying + 128;
  // X in columns lies in groups of tokens, each a line of 16, 32, 64 or 128 bytes for every column. Groups of 64 come
  // in boxes, for which 128 bytes is fast; shorter lines are copied by threads, which take what is adjacent at once.
  static constexpr int kGroup = kTokens <= 8 ? 8 : kTokens <= 16 ? 16 : kTokens <= 32 ? 32 : 64;
  static constexpr int kGroups = (kTokens + kGroup - 1) / kGroup, kGroupBytes = kGroup * 128;
  static constexpr int kBoxLines = S24_BOX_LINES;
  static constexpr bool kByThreads = kColumnsX && kTokens < 64;
  static constexpr int kLineThreads = 64;
  static constexpr int kSourceShare = kByThreads ? 1 : kShare;   // blocks that a stage of X goes to
  static constexpr int kWeightBytes = kRowTiles * Tile::kBytes,  // of a stage
      kSourceBytes = kColumnsX ? kGroups * kGroupBytes : kTokens * 128;
  static constexpr int kSums = kTokens / 2;  // accumulators of a thread and row tile
  static constexpr int kBand = 8;  // row blocks that are taken with one block of tokens before the next, for L2

  // Shared memory: W stages, X stages, a staging area a warpgroup, barriers.
  static constexpr int kSourceAt = kWeightStages * kWeightBytes;
  static constexpr int kStagingAt = kSourceAt + kSourceStages * kSourceBytes;
  static constexpr int kTokenBytes = kStepTokens * sizeof(Out::Bits);  // of a row of Y, where that is a line
  static constexpr int kLineBytes = kTokenBytes <= 16 ? 16 : kTokenBytes <= 32 ? 32 : kTokenBytes <= 64 ? 64 : 128;
  static constexpr int kStepBytes = Tile::kRows * (kColumnsY ? kLineBytes : kTokenBytes);
  static constexpr int kStagingBytes = kBuffers * kStepBytes;
  static constexpr int kBarrierAt = kStagingAt + (kSlices == 1 ? kWarpgroups * kStagingBytes : 0);

  // Of float32: whether two warpgroups take turns in front of the tensor cores, so that one is multiplied for while the
  // other adds; and whether a tile of W is read before the one in front of it is multiplied, or after, as measured.
  static constexpr bool kTurns = kXParts && kWarpgroups == 2, kReadAhead = kXParts == 2 && kTokens > 64;

  // Registers of a thread that copies and of one that multiplies, once they part; small sums need no such trade.
  static constexpr bool kTrade = kBlocksPerSm == 1 && kWarpgroups == 2;
  static constexpr int kCopyRegisters = 40, kSumRegisters = 232;
};
using Tile = Config::Tile;
using Area = FoldArea<Config::kRows, Config::kTokens, Config::kColumnsY>;

struct WgmmaSpParams {
  // X[n, k] in boxes of kTokens / kShare rows x 128 bytes, 128-byte swizzle; in columns: in boxes of kGroup tokens x
  // kBoxLines columns, lines of kGroup tokens swizzled.
  TensorMap x_map;
  TensorMap x_tail_map;  // the same in boxes of tail_rows, for the last block of tokens; in columns: its last group's
  TensorMap x_rest_map;  // in columns: of the last group of the other blocks
  TensorMap y_map;       // Y[n, m] in boxes of kStepTokens rows x kBoxBytes, swizzled; in columns: of 64 rows of W x
                         // kStepTokens tokens, lines of kLineBytes swizzled; if `aligned` and one slice
  const void* x;         // [n, k]: in columns, their stride x_stride; of float32, X itself: its maps are of its parts
  const u8* packed;      // [row tiles][K tiles][Tile::kBytes]
  const void* bias;      // [m], or null
  const float* scale_x;  // [1] or [n], as kScaleX says
  const float* scale_w;  // [1] or [m], as kScaleW says
  void* y;               // [n, m], row or column stride y_stride
  u64* flags;            // [blocks][kWarpgroups], kRanges: `mark` where the sums have been handed over
  float* sums;           // [blocks][kRowTiles][kSums / 4][128][4], kRanges: those that are handed over
  u64 mark;              // of this launch and no other
  i64 n, m, k, x_stride, y_stride, row_tiles, k_tiles;
  float alpha;
  u32 token_blocks;   // of kTokens, that cover n
  u32 items;          // of a cluster's rows and tokens
  u32 aligned;        // lines of y begin at multiples of 16 bytes, and end there where the copy engine stores them
  u32 tail_rows;      // of X that a block copies for the last block of tokens
  u32 whole;          // items that aren't cut: the first ones
  u32 range, longer;  // kRanges: tiles of a range, and ranges that have one more: the first ones
};
static_assert(matches_host<WgmmaSpParams>(), "the host has another WgmmaSpParams");

constexpr int kTurnBarrier = 8;

// Sums -----------------------------------------------------------------------------------------------

template <bool kInteger> struct SumOf {
  using Type = float;
};
template <> struct SumOf<true> {
  using Type = int;
};
using Sum = SumOf<Config::kIntegers>::Type;
using Sums = Sum[Config::kSums];  // a thread's share of 64 rows x kTokens

__device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 bits_of(int sum) { return (u32)sum; }
__device__ __forceinline__ Sum sum_of(u32 bits) {
  if constexpr (Config::kIntegers) return (int)bits;
  else return __uint_as_float(bits);
}

// A scale of kind kScaleX or kScaleW.
template <int kKind> __device__ __forceinline__ float scale_at(const float* scales, i64 index) {
  return kKind == 0 ? 1.0f : scales[kKind == 1 ? 0 : index];
}

// The result before it is rounded to its type.
__device__ __forceinline__ float finished(Sum sum, const WgmmaSpParams& p, float scale_x, float scale_w, float bias) {
  float v = Config::kIntegers ? __int2float_rn((int)sum) : (float)sum;
  if (Config::kScaleX) v = __fmul_rn(v, scale_x);
  if (Config::kScaleW) v = __fmul_rn(v, scale_w);
  return activated<Config, FastMath>(v, p.alpha, bias);
}
template <class Result> __device__ __forceinline__ typename Result::Bits rounded(Sum sum, float v) {
  if constexpr (Config::kRaw) return (typename Result::Bits)sum;
  else if constexpr (Config::kOut == ElementKind::F32) return Result::from_float(canonical_nan(v));
  else return Result::from_float(v);
}

// The pipeline ---------------------------------------------------------------------------------------

// Where a role is in a ring of stages, and the parity of the barriers there.
template <int kStages> struct RingPosition {
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

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

// What a block works on: its first row tile and token.
struct Item {
  i64 row_tile, token;

  __device__ __forceinline__ Item(const WgmmaSpParams& p, u32 index, u32 share) {
    const u32 row_blocks =
        (u32)((p.row_tiles + Config::kRowTiles * Config::kShare - 1) / (Config::kRowTiles * Config::kShare));
    const u32 band = index / (Config::kBand * p.token_blocks), rest = index % (Config::kBand * p.token_blocks);
    const u32 wide = min((u32)Config::kBand, row_blocks - band * Config::kBand);
    row_tile = ((i64)(band * Config::kBand + rest % wide) * Config::kShare + share) * Config::kRowTiles;
    token = (i64)(rest / wide) * Config::kTokens;
  }
};

// Of K, in a slice; its end is the next one's first.
__device__ __forceinline__ i64 first_tile(const WgmmaSpParams& p, u32 slice) {
  return slice_begin<Config::kSlices>(p.k_tiles, slice);
}

// What a cluster works on, one after the other: an item, and the tiles of K that it multiplies of it.
//
// kRanges: each cluster takes as many tiles as any other. The last p.items - p.whole items' tiles lie in a row, which
// is cut into equal ranges, an item long at least. Who has an item's first tiles does them before all else of its range
// and hands the sums over; who has its other tiles does those last, and goes on from these sums: the bits are those of
// an item that isn't cut. The giver is the cluster before, which runs if this one does.
struct Turns {
  u32 index;
  i64 first, last;  // tiles of K
  u32 stride;
  // kRanges. 0: whole items; then, of the range: 1 the item to give, 2 whole ones, 3 the item to go on with.
  u32 stage = 0;
  u32 low, low_first, high, high_last;  // items where the range begins and ends, and their tiles there

  __device__ __forceinline__ Turns(const WgmmaSpParams& p, u32 slice)
      : index(blockIdx.x / Config::kCluster),
        first(first_tile(p, slice)),
        last(first_tile(p, slice + 1)),
        stride(gridDim.x / Config::kCluster) {
    if constexpr (!Config::kRanges) return;
    const u32 tiles = (u32)p.k_tiles, begin = p.range * index + min(index, p.longer),
              end = begin + p.range + (index < p.longer);
    low = p.whole + begin / tiles, low_first = begin % tiles;
    high = p.whole + end / tiles, high_last = end % tiles;
    whole(p, index);
  }
  __device__ __forceinline__ bool more(const WgmmaSpParams& p) const { return index < p.items; }
  __device__ __forceinline__ void next(const WgmmaSpParams& p) {
    if (!Config::kRanges) index += stride;
    else if (stage == 0) whole(p, index + stride);
    else if (stage == 1) last = p.k_tiles, inside(p, low + (low_first > 0));
    else if (stage == 2) inside(p, index + 1);
    else index = p.items;
  }
  __device__ __forceinline__ bool gives() const { return Config::kRanges && stage == 1; }
  __device__ __forceinline__ bool takes() const { return Config::kRanges && stage == 3; }

  __device__ __forceinline__ void whole(const WgmmaSpParams& p, u32 item) {
    index = item;
    if (item < p.whole) return;
    if (high_last > 0) stage = 1, index = high, last = high_last;
    else inside(p, low + (low_first > 0));
  }
  __device__ __forceinline__ void inside(const WgmmaSpParams& p, u32 item) {
    stage = 2, index = item;
    if (item < high) return;
    stage = 3, index = low_first > 0 ? low : p.items, first = low_first;
  }
};

__device__ __forceinline__ const u8* weight_tile(const WgmmaSpParams& p, Item item, int i, i64 tile) {
  const i64 row_tile = min(item.row_tile + i, p.row_tiles - 1);  // past the end: multiplied, not stored
  return p.packed + (row_tile * p.k_tiles + tile) * Tile::kBytes;
}

// Has the first tiles of W brought to L2 while the kernel before this one may still run: as much as memory gives a
// multiprocessor in that time, more delays what is needed first.
__device__ __forceinline__ void prefetch_weights(const WgmmaSpParams& p, u32 share, u32 slice) {
  constexpr int kTiles = 4 / (Config::kRowTiles * Config::kBlocksPerSm);
  constexpr int kAhead = Config::kTokens > 64 ? 0 : kTiles > 0 ? kTiles : 1;
  const Turns turn(p, slice);
  const Item item(p, turn.index, share);
  for (i64 tile = turn.first, end = min(tile + kAhead, turn.last); tile < end; ++tile)
#pragma unroll
    for (int i = 0; i < Config::kRowTiles; ++i) prefetch_bulk(weight_tile(p, item, i, tile), Tile::kBytes);
}

// The thread that copies W.
__device__ __forceinline__ void copy_weights(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share,
                                             u32 slice) {
  RingPosition<Config::kWeightStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    for (i64 tile = turn.first; tile < turn.last; ++tile, at.next()) {
      barrier_wait(barriers.weight_free(at.slot), at.parity ^ 1);
      barrier_expect(barriers.weight_full(at.slot), Config::kWeightBytes);
#pragma unroll
      for (int i = 0; i < Config::kRowTiles; ++i)
        copy_bulk(base + at.slot * Config::kWeightBytes + i * Tile::kBytes, weight_tile(p, item, i, tile), Tile::kBytes,
                  barriers.weight_full(at.slot));
    }
  }
}

// X in columns, one stage: this block's part of the boxes, for every block that shares them: whole groups, or of each
// the same columns.
__device__ __forceinline__ void copy_columns(const WgmmaSpParams& p, u32 to, u32 box, Item item, u32 full, u32 share,
                                             u32 slice) {
  constexpr bool kSplitsGroups = Config::kShare > 1 && Config::kBoxLines == Config::kBoxColumns;
  constexpr u32 kMine = kSplitsGroups ? Config::kGroups / Config::kShare : Config::kGroups;
  const bool is_tail = item.token + Config::kTokens >= p.n;
  const u32 tokens = is_tail ? p.tail_rows : Config::kTokens;
  barrier_expect(full, tokens * Config::kBoxColumns * 2);
  const u32 line = kSplitsGroups ? 0 : share * Config::kBoxLines;
#pragma unroll
  for (u32 i = 0; i < kMine; ++i) {
    const u32 group = kSplitsGroups ? share * kMine + i : i, first = group * Config::kGroup;
    if (first >= tokens) break;
    const TensorMap* map = first + Config::kGroup <= tokens ? &p.x_map : is_tail ? &p.x_tail_map : &p.x_rest_map;
    const u32 at = to + group * Config::kGroupBytes + line * Config::kGroup * 2;
    const u32 token = (u32)item.token + first, column = box * Config::kBoxColumns + line;
    if constexpr (Config::kShare == 1) copy_tensor(at, map, token, column, full);
    else
      copy_tensor_multicast(at, map, token, column, full, (u16)(((1 << Config::kShare) - 1) << Config::kShare * slice));
  }
}

// The threads that copy X in columns of few tokens. Each has 8 tokens of every kStep-th column, and so one swizzle.
__device__ __forceinline__ void copy_lines(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share, u32 slice) {
  constexpr int kChunks = Config::kTokens / 8, kSwapped = Config::kGroup / 8, kLine = 2 * Config::kGroup;
  constexpr int kStep = kChunks <= 1 ? 64 : kChunks <= 2 ? 32 : kChunks <= 4 ? 16 : 8, kPasses = 64 / kStep;
  static_assert(!Config::kByThreads || kStep * kChunks <= Config::kLineThreads, "a pass has a thread for each chunk");
  const int thread = threadIdx.x % Config::kLineThreads, line = thread / kChunks, chunk = thread % kChunks;
  const u32 into = base + Config::kSourceAt + line * kLine + (chunk ^ line * kSwapped / 8 % kSwapped) * 16;
  const i64 ahead = kStep * p.x_stride;
  RingPosition<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    const bool has = line < kStep && item.token + chunk * 8 < p.n;
    const int first = (int)turn.first * Tile::kColumns + line;
    const u16* source = (const u16*)p.x + item.token + chunk * 8 + first * p.x_stride;
    int left = (int)p.k - first;  // columns from this thread's first on
    for (int boxes = 2 * (int)(turn.last - turn.first); boxes > 0; --boxes, at.next()) {
      barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
      const u32 to = into + at.slot * Config::kSourceBytes;
      if (has) {
        const bool all = left > (kPasses - 1) * kStep;
        const u16* from = source;
#pragma unroll
        for (int i = 0; i < kPasses; ++i, from += ahead) {
          const bool keep = all || i * kStep < left;
          copy_async_16(to + i * kStep * kLine, keep ? from : p.x, keep);
        }
      }
      barrier_arrive_after_copies(barriers.source_came(at.slot));
      source += kPasses * ahead, left -= Config::kBoxColumns;
    }
  }
}

// The thread that reports stages which threads copied: what they stored is seen by wgmma only after a fence. Theirs
// would wait for all that they have on the way.
__device__ __forceinline__ void report_lines(const WgmmaSpParams& p, Barriers barriers, u32 slice) {
  RingPosition<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p))
    for (int boxes = 2 * (int)(turn.last - turn.first); boxes > 0; --boxes, at.next()) {
      barrier_wait(barriers.source_came(at.slot), at.parity);
      async_proxy_fence();
      barrier_arrive(barriers.source_full(at.slot));
    }
}

// The thread that copies X: its part, for every block that shares it.
__device__ __forceinline__ void copy_source(const WgmmaSpParams& p, u32 base, Barriers barriers, u32 share, u32 slice) {
  RingPosition<Config::kSourceStages> at;
  for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
    const Item item(p, turn.index, share);
    // The last tokens come in boxes of their own: rows past them would be written as zeros, which is slow. What the
    // stage holds there instead is multiplied, and not stored.
    const bool is_tail = item.token + Config::kTokens >= p.n;
    const TensorMap* map = is_tail ? &p.x_tail_map : &p.x_map;
    const u32 rows = is_tail ? p.tail_rows : Config::kTokens / Config::kShare;
    for (i64 box = Config::kBoxes * turn.first; box < Config::kBoxes * turn.last; ++box, at.next()) {
      barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
      const u32 full = barriers.source_full(at.slot), to = base + Config::kSourceAt + at.slot * Config::kSourceBytes;
      if constexpr (Config::kColumnsX) {
        copy_columns(p, to, (u32)box, item, full, share, slice);
        continue;
      }
      barrier_expect(full, Config::kShare * rows * 128);
      // Of float32, the boxes of the same columns: those of the low part first.
      const u32 column = (u32)(Config::kXParts ? box / Config::kBoxes : box) * Config::kBoxColumns;
      const u32 part = Config::kXParts ? Config::kBoxes - 1 - (u32)(box % Config::kBoxes) : 0;
      const u32 token = (u32)item.token + part * (u32)p.n;
      if constexpr (Config::kShare == 1) copy_tensor(to, map, column, token, full);
      else
        copy_tensor_multicast(to + share * rows * 128, map, column, token + share * rows, full,
                              (u16)(((1 << Config::kShare) - 1) << Config::kShare * slice));
    }
  }
  // Nobody leaves while others may still report to its barriers.
  if constexpr (Config::kShare > 1)
    for (int i = 0; i < Config::kSourceStages; ++i, at.next())
      barrier_wait(barriers.source_free(at.slot), at.parity ^ 1);
}

#ifdef S24_OF_PARTS
#include "gemm/split_products.cuh"
#endif

// One warpgroup's sums of one item.
struct Multiplier {
  RingPosition<Config::kWeightStages> weight;
  RingPosition<Config::kSourceStages> source;
  u32 base, warpgroup, source_free;  // the last: of the block of the cluster that this lane reports to
  Barriers barriers;
  u32 last_weight = 0, last_source = 0;

  __device__ __forceinline__ void free_weight(u32 slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.weight_free(slot));
  }
  __device__ __forceinline__ void free_source(u32 slot) const {
    if (threadIdx.x % 32 >= Config::kSourceShare) return;
    if constexpr (Config::kSourceShare == 1) barrier_arrive(source_free + 8 * slot);
    else barrier_arrive_cluster(source_free + 8 * slot);
  }

  static __device__ __forceinline__ u64 source_descriptor(u32 address) {
    if constexpr (Config::kColumnsX)
      return matrix_descriptor_of_lines<2 * Config::kGroup, Config::kGroupBytes>(address);
    else return matrix_descriptor(address);
  }

  static __device__ __forceinline__ void clear(Sums (&sums)[Config::kRowBlocks]) {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[r][i] = 0;
  }
  static __device__ __forceinline__ void add(Sums (&totals)[Config::kRowBlocks],
                                             const Sums (&sums)[Config::kRowBlocks]) {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) totals[r][i] += sums[r][i];
  }

#ifdef S24_OF_PARTS
  using RowParts = WeightParts[Config::kRowBlocks];
  using RowTiles = WeightTile32[Config::kRowBlocks];

  // All of K, tile by tile: while the tensor cores multiply one, the next is split.
  __device__ __forceinline__ void multiply_split(Sums (&totals)[Config::kRowBlocks], i64 tiles) {
    clear(totals);
    RowParts one, other;
    if (tiles > 0) {
      RowTiles tile;
      read_weight(tile);
      split_weight(tile, one);
    }
    for (i64 at = 1; at <= tiles; at += 2) {
      multiply_tile(totals, one, other, at < tiles);
      if (at < tiles) multiply_tile(totals, other, one, at + 1 < tiles);
    }
  }

  __device__ __forceinline__ void multiply_tile(Sums (&totals)[Config::kRowBlocks], const RowParts& parts,
                                                RowParts& next, bool has_next) {
    RowTiles tile;
    if (Config::kReadAhead && has_next) read_weight(tile);
    u64 boxes[Config::kXParts];
    RingPosition<Config::kSourceStages> box = source;
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i, box.next()) {
      barrier_wait(barriers.source_full(box.slot), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kSourceAt + box.slot * Config::kSourceBytes);
    }
    if constexpr (Config::kTurns) threads_meet(kTurnBarrier + warpgroup, Config::kMultiplying);
    Sums sums[Config::kRowBlocks];
    issue(sums, parts, boxes);
    if constexpr (Config::kTurns) threads_arrive(kTurnBarrier + (warpgroup ^ 1), Config::kMultiplying);
    if (!Config::kReadAhead && has_next) read_weight(tile);
    if (has_next) split_weight(tile, next);
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_settle(sums[r]);
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i, source.next()) free_source(source.slot);
    add(totals, sums);
  }

  // Box i is of X's part kXParts - 1 - i, which meets those parts of W whose products with it are large enough.
  __device__ __forceinline__ void issue(Sums (&sums)[Config::kRowBlocks], const RowParts& parts,
                                        const u64 (&boxes)[Config::kXParts]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i)
#pragma unroll
      for (int part = i; part >= 0; --part)
#pragma unroll
        for (int r = 0; r < Config::kRowBlocks; ++r) {
          const WeightParts& w = parts[r];
          if (i == 0) wgmma_sp_bf16<0, 0>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          else wgmma_sp_bf16<0, 1>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          wgmma_sp_bf16<1, 1>(sums[r], w.words[1][part], boxes[i] + 4, w.metadata[0]);
        }
    wgmma_commit();
  }

  __device__ __forceinline__ void read_weight(RowTiles& tile) const {
    barrier_wait(barriers.weight_full(weight.slot), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
      tile[r].read(base + weight.slot * Config::kWeightBytes + (warpgroup * Config::kRowBlocks + r) * Tile::kBytes);
  }
  __device__ __forceinline__ void split_weight(RowTiles& tile, RowParts& parts) {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) parts[r].take(tile[r]);
    __syncwarp();
    free_weight(weight.slot);
    weight.next();
  }
#else
  // Two steps: half a tile of W with one stage of X. The half's metadata stays in its registers while its wgmma run,
  // which read them whenever they like; the other half has others.
  template <int kHalf>
  __device__ __forceinline__ void multiply_half(Sums (&sums)[Config::kRowBlocks],
                                                u32 (&metadata)[Config::kRowBlocks][Tile::kWords / 2]) {
    const u32 values = base + weight.slot * Config::kWeightBytes + warpgroup * Config::kRowBlocks * Tile::kBytes;
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
      load_shared_words(metadata[r], values + r * Tile::kBytes + Tile::kValueBytes +
                                         (threadIdx.x % 128 * Tile::kWords + kHalf * Tile::kWords / 2) * 4);
    barrier_wait(barriers.source_full(source.slot), source.parity);
    const u64 a = matrix_descriptor(values);
    const u64 b = source_descriptor(base + Config::kSourceAt + source.slot * Config::kSourceBytes);
    constexpr u64 kSecond = Config::kColumnsX ? 4 * Config::kGroup : 4;  // half of the box's columns
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {  // the selector is an immediate; descriptors count 16 bytes
      const u64 at = a + r * (Tile::kBytes >> 4) + kHalf * 4;
      wgmma_sp<Config::kElement, 0, Config::kPromote ? 0 : 1, Config::kColumnsX>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<Config::kElement, Config::kEightBit ? 0 : 1, 1, Config::kColumnsX>(
          sums[r], at + 2, b + kSecond, metadata[r][Config::kEightBit ? 1 : 0]);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void free_last() const {
    free_source(last_source);
    free_weight(last_weight);
  }

  // kOn: on top of what the sums are.
  template <bool kOn = false> __device__ __forceinline__ void multiply(Sums (&sums)[Config::kRowBlocks], i64 tiles) {
    if constexpr (!kOn) clear(sums);
    u32 first[Config::kRowBlocks][Tile::kWords / 2], second[Config::kRowBlocks][Tile::kWords / 2];
    for (i64 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.slot), weight.parity);
      multiply_half<0>(sums, first);
      wgmma_wait<1>();  // all but the half just issued: the stages before it are free
      if (at > 0) free_last();
      last_source = source.slot, last_weight = weight.slot;
      source.next();
      multiply_half<1>(sums, second);
      wgmma_wait<1>();
      free_source(last_source);
      last_source = source.slot;
      source.next(), weight.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_settle(sums[r]);
    if (tiles > 0) free_last();
  }

  // All of K, in kParts.
  __device__ __forceinline__ void multiply_parts(Sums (&totals)[Config::kRowBlocks], i64 tiles) {
    multiply(totals, tiles / Config::kParts);
#pragma unroll 1
    for (int part = 1; part < Config::kParts; ++part) {
      Sums sums[Config::kRowBlocks];
      multiply(sums, tiles * (part + 1) / Config::kParts - tiles * part / Config::kParts);
      add(totals, sums);
    }
  }

  // All of K, box by box. The other warpgroup's wgmma run while this one adds.
  __device__ __forceinline__ void multiply_promoting(Sums (&totals)[Config::kRowBlocks], i64 tiles) {
    clear(totals);
    Sums sums[Config::kRowBlocks];
    u32 metadata[Config::kRowBlocks][Tile::kWords / 2];
    for (i64 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.slot), weight.parity);
      multiply_half<0>(sums, metadata);
      promote(totals, sums);
      multiply_half<1>(sums, metadata);
      promote(totals, sums);
      free_weight(weight.slot);
      weight.next();
    }
  }
  __device__ __forceinline__ void promote(Sums (&totals)[Config::kRowBlocks], Sums (&sums)[Config::kRowBlocks]) {
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_settle(sums[r]);
    free_source(source.slot);
    source.next();
    add(totals, sums);
  }
#endif
};

// Where y has a result.
__device__ __forceinline__ i64 place(const WgmmaSpParams& p, i64 token, i64 row) {
  return Config::kColumnsY ? row * p.y_stride + token : token * p.y_stride + row;
}

// Stores 64 rows x kTokens tokens of one warpgroup: kStepTokens at a time are staged, from where the copy engine takes
// them while others are staged, and while the next item is multiplied.
template <class Result> struct Writer {
  typedef typename Result::Bits Bits;

  const WgmmaSpParams& p;
  u32 stage;
  int barrier;
  u32 turn = 0;  // the buffer of the next step

  static constexpr int kOutBytes = sizeof(Bits);
  // A token's, of a box.
  static constexpr int kBoxRows = kOutBytes == 4 && !Config::kColumnsY ? 32 : 64, kBoxBytes = kBoxRows * kOutBytes;

  // Where a buffer has a token's output: a box's tokens under the swizzle of kBoxBytes. In columns: a row's tokens,
  // under the swizzle of kLineBytes.
  static __device__ __forceinline__ u32 staged_at(int token, int row) {
    if constexpr (Config::kColumnsY) {
      constexpr int kLine = Config::kLineBytes, kChunks = kLine / 16;
      const int in = token * kOutBytes;
      return row * kLine + (in / 16 ^ row * kChunks / 8 % kChunks) * 16 + in % 16;
    }
    const int in = row % kBoxRows * kOutBytes;
    return (row / kBoxRows * Config::kStepTokens + token) * kBoxBytes +
           (in / 16 ^ (kBoxBytes == 128 ? token % 8 : token / 2 % 4)) * 16 + in % 16;
  }

  __device__ __forceinline__ void write(const Sums& sums, i64 row0, i64 token0) {
    if (row0 >= p.m) return;
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    float bias[2] = {0.0f, 0.0f}, scale_w[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i64 row = row0 + 16 * warp + g + 8 * i;
      if (row >= p.m) continue;
      if (p.bias) bias[i] = bias_at<Config>(p.bias, row);
      scale_w[i] = scale_at<Config::kScaleW>(p.scale_w, row);
    }
#pragma unroll
    for (int step = 0; step < Config::kTokens / Config::kStepTokens; ++step) {
      const i64 token = token0 + step * Config::kStepTokens;
      if (token >= p.n) break;
      const u32 buffer = stage + turn * Config::kStepBytes;
      if (++turn == Config::kBuffers) turn = 0;
      fill(buffer, sums + step * Config::kStepTokens / 2, row0, token, bias, scale_w);
      if (p.aligned) copy_out(buffer, row0, token);
      else copy_elements(buffer, row0, token);
    }
  }

  __device__ __forceinline__ void fill(u32 buffer, const Sum* sums, i64 row0, i64 token0, const float (&bias)[2],
                                       const float (&scale_w)[2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
    u32 nans = 0;  // of float32: which sums
#pragma unroll
    for (int j = 0; j < Config::kStepTokens / 8; ++j) {
      const Sum* d = sums + 4 * j;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 token = token0 + 8 * j + 2 * t + i % 2;
        const float scale_x = Config::kScaleX && token < p.n ? scale_at<Config::kScaleX>(p.scale_x, token) : 1.0f;
        v[i] = finished(d[i], p, scale_x, scale_w[i / 2], bias[i / 2]);
        if constexpr (Config::kXParts) nans |= (u32)(d[i] != d[i]) << (4 * j + i);
      }
      if constexpr (Config::kColumnsY && kOutBytes == 2) {
        store_matrix_x2(buffer + staged_at(8 * j, row + lane % 16), Result::pair(v[0], v[1]), Result::pair(v[2], v[3]));
      } else if constexpr (Config::kColumnsY) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_shared_x2(buffer + staged_at(8 * j + 2 * t, row + g + i * 8), rounded<Result>(d[2 * i], v[2 * i]),
                          rounded<Result>(d[2 * i + 1], v[2 * i + 1]));
      } else if constexpr (kOutBytes == 2) {
        store_matrix_transposed_x2(buffer + staged_at(8 * j + lane % 8, row + lane / 8 % 2 * 8),
                                   Result::pair(v[0], v[1]), Result::pair(v[2], v[3]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          store_shared(buffer + staged_at(8 * j + 2 * t + i % 2, row + g + i / 2 * 8), rounded<Result>(d[i], v[i]));
      }
    }
#ifdef S24_OF_PARTS
    mend(nans, buffer, row0, token0, bias);
#endif
  }
#ifdef S24_OF_PARTS
  // Sums that are NaN, again: each thread those that it has staged.
  __device__ __forceinline__ void mend(u32 nans, u32 buffer, i64 row0, i64 token0, const float (&bias)[2]) const {
    static_assert(Config::kStepTokens / 8 * 4 <= 32, "a bit a sum");
    for (; nans; nans &= nans - 1) {
      const int i = __ffs(nans) - 1, half = i / 2 % 2, lane = threadIdx.x % 32;
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * half;
      if (token0 + token >= p.n || row0 + row >= p.m) continue;
      const float sum = sum_in_order(p, token0 + token, row0 + row);
      store_shared(buffer + staged_at(token, row),
                   rounded<Result>(sum, finished(sum, p, 1.0f, 1.0f, half ? bias[1] : bias[0])));
    }
  }
#endif

  // What lies outside of Y isn't copied. A warp copies each box. Before the threads meet, it sees to it that the
  // next step's buffer has been read.
  __device__ __forceinline__ void copy_out(u32 buffer, i64 row0, i64 token) const {
    async_proxy_fence();
    if (is_copier()) copies_read<Config::kBuffers - 2>();
    threads_meet(barrier, 128);
    if (!is_copier()) return;
    const int box = threadIdx.x % 128 / 32;
    if constexpr (Config::kColumnsY) copy_tensor_out(&p.y_map, (u32)token, (u32)row0, buffer);
    else
      copy_tensor_out(&p.y_map, (u32)row0 + box * kBoxRows, (u32)token, buffer + box * Config::kStepTokens * kBoxBytes);
    copies_commit();
  }
  static __device__ __forceinline__ bool is_copier() {
    return threadIdx.x % 32 == 0 && threadIdx.x % 128 / 32 < 64 / kBoxRows;
  }

  __device__ __forceinline__ void copy_elements(u32 buffer, i64 row0, i64 token0) const {
    threads_meet(barrier, 128);
    for (int i = threadIdx.x % 128; i < Config::kStepTokens * 64; i += 128) {
      const int t = Config::kColumnsY ? i % Config::kStepTokens : i / 64,
                r = Config::kColumnsY ? i / Config::kStepTokens : i % 64;
      const i64 token = token0 + t, row = row0 + r;
      if (token < p.n && row < p.m) ((Bits*)p.y)[place(p, token, row)] = load_shared_as<Bits>(buffer + staged_at(t, r));
    }
  }
};

// Sums on their way from a cluster to the next one, through the workspace. An idle warp waits where one must be waited
// for, so that the warps that multiply don't.
struct Handover {
  const WgmmaSpParams& p;

  static constexpr int kQuads = Config::kSums / 4;
  static constexpr int kGiven = 1 + Config::kWarpgroups, kTaken = kGiven + Config::kWarpgroups;  // barriers, from here

  __device__ __forceinline__ u64* flag(u32 block, u32 warpgroup) const {
    return p.flags + block * Config::kWarpgroups + warpgroup;
  }
  __device__ __forceinline__ float* quads(u32 block, u32 warpgroup, int r) const {
    const i64 row_tile = (i64)block * Config::kRowTiles + warpgroup * Config::kRowBlocks + r;
    return p.sums + (row_tile * kQuads * 128 + threadIdx.x % 128) * 4;
  }

  __device__ __forceinline__ void give(const Sums (&sums)[Config::kRowBlocks], u32 warpgroup) const {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      float* to = quads(blockIdx.x, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const Sum* v = sums[r] + 4 * q;
        store_global(to + q * 512, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      }
    }
    threads_arrive(kGiven + warpgroup, 160);
  }

  // The sums of the cluster before, or zeros. Without a branch: the compiler keeps sums in place only so.
  __device__ __forceinline__ void take(Sums (&sums)[Config::kRowBlocks], u32 warpgroup, bool taking) const {
    if (taking) threads_meet(kTaken + warpgroup, 160);
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      const float* from = quads(blockIdx.x - Config::kCluster, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) load_global_or_zeros(&sums[r][4 * q], from + q * 512, taking);
    }
  }

  // The idle warp, all of it.
  __device__ __forceinline__ void wait() const {
    const Turns turn(p, 0);
    const bool first = threadIdx.x % 32 == 0;
    if (turn.high_last > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        threads_meet(kGiven + w, 160);
        if (first) store_release(flag(blockIdx.x, w), p.mark);
      }
    if (turn.low_first > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        u64* given = flag(blockIdx.x - Config::kCluster, w);
        if (first) {
          while (load_acquire(given) != p.mark) {
          }
          *given = 0;  // for the next launch with this mark
        }
        __syncwarp();
        threads_meet(kTaken + w, 160);
      }
  }
};

// A warpgroup's sums to where the blocks of its cluster find them; `row_tile`: its first, in the block.
__device__ __forceinline__ void store_sums(const Sums (&sums)[Config::kRowBlocks], u32 base, u32 row_tile) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Config::kRowBlocks; ++r)
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      if constexpr (Config::kColumnsY) {
        if (i % 2) continue;
        const u32 row = (row_tile + r) * Tile::kRows + 16 * warp + lane / 4 + i / 2 % 2 * 8;
        store_shared_x2(base + Area::offset(i / 4 * 8 + lane % 4 * 2, row), bits_of(sums[r][i]),
                        bits_of(sums[r][i + 1]));
        continue;
      }
      const u32 at = (i / 4 * 8 + lane % 4 * 2 + i % 2) * Area::kPitch + (row_tile + r) * Tile::kRows + 16 * warp +
                     lane / 4 + i / 2 % 2 * 8;
      store_shared(base + at * 4, bits_of(sums[r][i]));
    }
}

// The blocks of a cluster that sum slices of the same rows fold them, each its share of the rows: four at a time of a
// line of Y, which is a token's row, or a column.
struct Folder {
  const WgmmaSpParams& p;
  Item item;
  u32 from[Config::kSlices];
  int row0;

  static constexpr bool kColumns = Config::kColumnsY;
  static constexpr int kRowQuads = (Config::kRows / 4 + Config::kSlices - 1) / Config::kSlices;
  static constexpr int kShareRows = kColumns ? (Config::kRows + Config::kSlices - 1) / Config::kSlices : 4 * kRowQuads;
  static constexpr int kQuads = kColumns ? Config::kTokens / 4 : kRowQuads,  // of a line
      kCount = kQuads * (kColumns ? kShareRows : Config::kTokens);
  static constexpr int kFolders = Config::kMultiplying;
  static constexpr int kLoads =
      (Config::kTrade || Config::kWarpgroups == 1 ? 12 : 4) / Config::kSlices / Config::kBlocksPerSm;
  static constexpr int kAhead = kLoads > 0 ? kLoads : 1;  // in flight, as far as there are registers

  __device__ __forceinline__ Folder(const WgmmaSpParams& p, Item item, u32 base, u32 share, u32 slice)
      : p(p), item(item), row0(slice * kShareRows) {
#pragma unroll
    for (int s = 0; s < Config::kSlices; ++s) from[s] = cluster_address(base, share + Config::kShare * s);
  }

  // Of the i-th four results the first's token and row.
  __device__ __forceinline__ int token_of(int i) const { return kColumns ? i % kQuads * 4 : i / kQuads; }
  __device__ __forceinline__ int row_of(int i) const { return row0 + (kColumns ? i / kQuads : i % kQuads * 4); }

  // Nothing else is loaded: a load that no store waits for could still be on its way when its block has left.
  __device__ __forceinline__ bool inside(int token, int row) const {
    return item.token + token < p.n && row < Config::kRows && item.row_tile * Tile::kRows + row < p.m;
  }

  __device__ __forceinline__ void store(u32 (&v)[Config::kSlices][4], int token, int row) const {
    const i64 n = item.token + token, m = item.row_tile * Tile::kRows + row;
    Config::Out::Bits out[4];
    const float scale_x = scale_at<Config::kScaleX>(p.scale_x, n);
    u32 nans = 0;  // of float32: which sums
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Sum slices[Config::kSlices];
#pragma unroll
      for (int s = 0; s < Config::kSlices; ++s) slices[s] = sum_of(v[s][j]);
      fold(slices);
      const Sum total = slices[0];
      const i64 output = kColumns ? m : m + j;
      const bool inside = kColumns || m + j < p.m;
      if constexpr (Config::kXParts) nans |= (u32)(total != total) << j;
      const float bias = p.bias && inside ? bias_at<Config>(p.bias, output) : 0.0f;
      const float scale_w = inside ? scale_at<Config::kScaleW>(p.scale_w, output) : 1.0f;
      out[j] = rounded<Config::Out>(total, finished(total, p, scale_x, scale_w, bias));
    }
    Config::Out::Bits* to = (Config::Out::Bits*)p.y + place(p, n, m);
    if (p.aligned && (kColumns ? n + 4 <= p.n : m + 4 <= p.m)) {
      if constexpr (sizeof(Config::Out::Bits) == 1)
        *(u32*)to = out[0] | (u32)out[1] << 8 | (u32)out[2] << 16 | (u32)out[3] << 24;
      else if constexpr (sizeof(Config::Out::Bits) == 2)
        *(uint2*)to = make_uint2(out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
      else *(uint4*)to = make_uint4(out[0], out[1], out[2], out[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (kColumns ? n + j < p.n : m + j < p.m) to[j] = out[j];
    }
#ifdef S24_OF_PARTS
    for (; nans; nans &= nans - 1) {
      const int j = __ffs(nans) - 1;
      if (m + j >= p.m) break;
      const float sum = sum_in_order(p, n, m + j), bias = p.bias ? bias_at<Config>(p.bias, m + j) : 0.0f;
      to[j] = rounded<Config::Out>(sum, finished(sum, p, 1.0f, 1.0f, bias));
    }
#endif
  }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int first = threadIdx.x; first < kCount; first += kFolders * kAhead) {
      u32 v[kAhead][Config::kSlices][4];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kFolders, token = token_of(i), row = row_of(i);
        if (i >= kCount || !inside(token, row)) continue;
#pragma unroll
        for (int s = 0; s < Config::kSlices; ++s) load_cluster_x4(v[a][s], from[s] + Area::offset(token, row));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kFolders;
        const int token = token_of(i), row = row_of(i);
        if (i < kCount && inside(token, row)) store(v[a], token, row);
      }
    }
  }
};

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    gemm_wgmma_sp(const __grid_constant__ WgmmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 rank = blockIdx.x % Config::kCluster, share = rank % Config::kShare, slice = rank / Config::kShare;
  const u32 warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    prefetch_map(&p.x_map);
    prefetch_map(&p.x_tail_map);
    if (Config::kSlices == 1 && p.aligned) prefetch_map(&p.y_map);
    constexpr int kReaders = 4 * Config::kWarpgroups;  // warps that report a stage free
    for (int i = 0; i < Config::kWeightStages; ++i) {
      barrier_init(barriers.weight_full(i), 1);
      barrier_init(barriers.weight_free(i), kReaders);
    }
    for (int i = 0; i < Config::kSourceStages; ++i) {
      barrier_init(barriers.source_full(i), 1);
      barrier_init(barriers.source_free(i), kReaders * Config::kSourceShare);
      if (Config::kByThreads) barrier_init(barriers.source_came(i), Config::kLineThreads);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kCluster > 1) cluster_meet_relaxed();
  if constexpr (Config::kXParts) {
    // The pass that splits X lets this kernel start when all before it is done: W needs no wait.
    release_successors();
    if (threadIdx.x / 32 != Config::kMultiplying / 32) wait_for_predecessors();
  } else {
    if (threadIdx.x == Config::kMultiplying) prefetch_weights(p, share, slice);
    follow_predecessors();
  }

  if (warpgroup == Config::kWarpgroups) {
    if constexpr (Config::kTrade) registers_lower<Config::kCopyRegisters>();
    const u32 thread = threadIdx.x % 128;
    if (thread == 0) copy_weights(p, base, barriers, share, slice);
    if constexpr (Config::kByThreads) {
      if (thread == 32) report_lines(p, barriers, slice);
      if (thread >= 128 - Config::kLineThreads) copy_lines(p, base, barriers, share, slice);
    } else {
      if (thread == 32) copy_source(p, base, barriers, share, slice);
    }
    if (Config::kRanges && thread / 32 == 2) Handover{p}.wait();
    __syncwarp();
    if constexpr (Config::kSlices > 1) cluster_meet();
  } else {
    if constexpr (Config::kTrade) registers_raise<Config::kSumRegisters>();
    Multiplier multiplier{{}, {}, base, warpgroup, barriers.source_free(0), barriers};
    if constexpr (Config::kSourceShare > 1)
      multiplier.source_free =
          cluster_address(barriers.source_free(0), threadIdx.x % 32 % Config::kShare + Config::kShare * slice);
    if (Config::kTurns && warpgroup == 1) threads_arrive(kTurnBarrier, Config::kMultiplying);  // the other's is first
    Sums sums[Config::kRowBlocks];
    Writer<Config::Out> writer{p, base + Config::kStagingAt + warpgroup * Config::kStagingBytes, 1 + (int)warpgroup};
    for (Turns turn(p, slice); turn.more(p); turn.next(p)) {
      const Item item(p, turn.index, share);
      const i64 tiles = turn.last - turn.first;
#ifdef S24_OF_PARTS
      multiplier.multiply_split(sums, tiles);
#else
      if constexpr (Config::kRanges) {
        Handover{p}.take(sums, warpgroup, turn.takes());
        multiplier.multiply<true>(sums, tiles);
      } else if constexpr (Config::kPromote) multiplier.multiply_promoting(sums, tiles);
      else if constexpr (Config::kParts > 1) multiplier.multiply_parts(sums, tiles);
      else multiplier.multiply(sums, tiles);
#endif
      const u32 row_tile = warpgroup * Config::kRowBlocks;
      if constexpr (Config::kRanges) {
        if (turn.gives()) {
          Handover{p}.give(sums, warpgroup);
          continue;
        }
      }
      if constexpr (Config::kSlices == 1) {
#pragma unroll
        for (int r = 0; r < Config::kRowBlocks; ++r)
          writer.write(sums[r], (item.row_tile + row_tile + r) * Tile::kRows, item.token);
      } else {
        threads_meet(1, Config::kMultiplying);  // every stage has been read: the sums take their place
        store_sums(sums, base, row_tile);
        cluster_meet();
        Folder(p, item, base, share, slice).run();
      }
    }
    if (Config::kSlices == 1 && p.aligned && writer.is_copier()) copies_read<0>();
  }
  if constexpr (Config::kSlices > 1) cluster_meet_relaxed();  // nobody leaves while its sums are still read
}
