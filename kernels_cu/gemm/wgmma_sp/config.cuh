// What gemm/wgmma_sp.cu is compiled for: its macros as constants, and what the host hands it.
#pragma once
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/split_k.cuh"
#include "ptx/wgmma.cuh"

#define S24_CLUSTER_SIZE (S24_CLUSTER_M * S24_SPLIT_K)
#include "common/cluster.cuh"

#if S24_SPLIT_TERMS
#define S24_F32_SPLIT  // what compiles for float32 alone
#endif
#if S24_SPLIT_TERMS == 2
#define S24_W_PRESPLIT  // where W lies in parts too, from which wgmma reads it
#endif

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kWarpgroups = S24_WARPGROUPS;                     // that multiply
  static constexpr int kMTilesPerWarpgroup = S24_M_TILES_PER_WARPGROUP;  // row tiles of a warpgroup
  static constexpr int kTileN = S24_TILE_N;                              // of a block
  static constexpr int kClusterM = S24_CLUSTER_M, kSplitK = S24_SPLIT_K, kClusterSize = S24_CLUSTER_SIZE;
  static constexpr int kKChunks = S24_K_CHUNKS;
  static constexpr int kSavedAccumulators =
      S24_SAVED_ACCUMULATORS;                     // sums of a thread, of the parts before, that wait in the workspace
  static constexpr bool kStreamK = S24_STREAM_K;  // clusters have equal ranges of tiles, wherever items begin and end
  static constexpr int kSplitTerms =
      S24_SPLIT_TERMS;  // of bf16, that stand for float32; 0: X and W are multiplied as they are
  static constexpr bool kWPresplit = kSplitTerms == 2;  // W comes in parts too
  static constexpr int kTilesPerPromotion =
      S24_TILES_PER_PROMOTION;  // of W, whose products of parts are one sum of the tensor cores
  static constexpr int kTilesPerUnit =
      kSplitTerms == 3 ? 2 : kTilesPerPromotion;  // of which ranges are cut: whole sums
  static constexpr int kTilesPerBlockedSum =
      S24_TILES_PER_BLOCKED_SUM;                 // whose sums are added up by themselves; 0: all of K
  static constexpr bool kPromote = S24_PROMOTE;  // sums of one box of X are added up outside of the tensor cores
  static constexpr bool kRaw = S24_RAW;          // the result is the integer sum itself
  static constexpr bool kXColumnMajor = S24_X_COLUMN_MAJOR, kYColumnMajor = S24_Y_COLUMN_MAJOR;  // X, Y lie in columns
  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;  // 0: none, 1: one for all, 2: one a row
  static constexpr int kCtasPerSm = S24_CTAS_PER_SM;
  static constexpr int kWeightStages = S24_WEIGHT_STAGES, kXStages = S24_X_STAGES;
  static constexpr int kStepTokens = S24_STEP_TOKENS, kStagingBuffers = 2;  // of a staging area
  static_assert(kSplitK == 1 || kKChunks == 1, "a cut is either along the cluster or within the block");
  static_assert(kSavedAccumulators % 4 == 0 && (!kSavedAccumulators || kKChunks > 1),
                "saved are quads of parts before");
  static_assert(!kStreamK || (kSplitK == 1 && !kPromote && kCtasPerSm == 1), "ranges are the cut");
  static_assert(kStagingBuffers >= 2, "a buffer is free again only two steps later");
  static_assert(!kGated || (!kSplitTerms && !kRaw),
                "gates are of sums that need no mending, and never the sums themselves");

  static constexpr bool kIntegers = kElement == ElementKind::S8;
  static constexpr bool kEightBit = kIntegers || kElement == ElementKind::FP8_E4M3;
  using Tile = WeightTile<kSplitTerms ? 4 : kEightBit ? 1 : 2>;
  static constexpr int kBoxesPerTile = kSplitTerms ? kSplitTerms : 2;                    // of X, a tile of W
  static constexpr int kBoxColumns = kSplitTerms ? Tile::kColumns : Tile::kColumns / 2;  // of X
  static constexpr int kMTiles = kWarpgroups * kMTilesPerWarpgroup, kTileM = kMTiles * Tile::kRows;  // of a block
  static constexpr int kMTileOutputs = Tile::kRows / kRowsPerOutput;  // results of a token that a row tile makes
  static constexpr int kConsumerThreads = 128 * kWarpgroups, kThreads = kConsumerThreads + 128;
  // X in columns lies in groups of tokens, each a line of 16, 32, 64 or 128 bytes for every column. The copy engine is
  // fast for lines of 128 bytes alone; few tokens are copied by threads, which load_partials what is adjacent at once.
  static constexpr int kTokenGroup = kTileN <= 8 ? 8 : kTileN <= 16 ? 16 : kTileN <= 32 ? 32 : 64;
  static constexpr int kTokenGroups = (kTileN + kTokenGroup - 1) / kTokenGroup, kTokenGroupBytes = kTokenGroup * 128;
  static constexpr bool kXCpAsync = S24_X_CP_ASYNC;
  // Another pass writes the X that is read here, in a launch between this one and all that W may come from.
  static constexpr bool kXFromPrepass = S24_X_FROM_PREPASS;
  static constexpr int kXCopyThreads = kStreamK ? 32 : 64;  // sums are handed over by a warp of the others
  // Whether one thread copies W and X. Of larger blocks two do: their rings are short, and W would wait for X. So they
  // do after a pass, which W needn't wait for.
  static constexpr bool kOneProducer =
      !kSplitTerms && !kXCpAsync && !kXFromPrepass && kTileN <= (kMTiles == 1 ? 128 : 64);
  static constexpr int kXMulticast = kXCpAsync ? 1 : kClusterM;  // blocks that a stage of X goes to
  // Of a tile of W in shared memory: under a swizzle it begins where the pattern does.
  static constexpr int kWeightTileBytes =
      kSplitTerms && !kWPresplit ? Tile::kBytes : (Tile::kBytes + 1023) / 1024 * 1024;
  static constexpr int kWeightStageBytes = kMTiles * kWeightTileBytes,  // of a stage
      kXStageBytes = kXColumnMajor ? kTokenGroups * kTokenGroupBytes : kTileN * 128;
  static constexpr int kAccumulators = kTileN / 2;  // accumulators of a thread and row tile
  static constexpr int kHeldAccumulators =
      kMTilesPerWarpgroup * kAccumulators - kSavedAccumulators;  // of the parts before, in registers
  static constexpr int kRasterGroupM = 8;  // row blocks that are taken with one block of tokens before the next, for L2

  // Shared memory: W stages, X stages, a staging area a warpgroup, barriers.
  static constexpr int kXAt = kWeightStages * kWeightStageBytes;
  static_assert(kXAt % 1024 == 0, "where a swizzle's pattern begins");
  static constexpr int kStagingAt = kXAt + kXStages * kXStageBytes;
  static constexpr int kTokenBytes = kStepTokens * sizeof(Out::Bits);  // of a row of Y, where that is a line
  static constexpr int kLineBytes = kTokenBytes <= 16 ? 16 : kTokenBytes <= 32 ? 32 : kTokenBytes <= 64 ? 64 : 128;
  static constexpr int kStepBytes = Tile::kRows * (kYColumnMajor ? kLineBytes : kTokenBytes);
  static constexpr int kStagingBytes = kStagingBuffers * kStepBytes;
  static constexpr int kBarrierAt = kStagingAt + (kSplitK == 1 ? kWarpgroups * kStagingBytes : 0);

  // Of six products: whether two warpgroups load_partials turns in front of the tensor cores, so that one is multiplied for
  // while the other adds.
  static constexpr bool kPingPong = kSplitTerms == 3 && kWarpgroups == 2;

  // Registers of a thread that copies and of one that multiplies, once they part; small sums need no such trade.
  static constexpr bool kReallocRegisters = kCtasPerSm == 1 && kWarpgroups == 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};
using Tile = Config::Tile;
using Buffer = ReduceBuffer<Config::kTileM, Config::kTileN, Config::kYColumnMajor>;

struct WgmmaSpParams {
  // X[n, k] in boxes of kTokens / kShare rows x 128 bytes, 128-byte swizzle; in columns: all whole groups of a block,
  // [group, column, token], in boxes of kBoxColumns columns, lines of kGroup tokens swizzled.
  TensorMap x_map;
  TensorMap x_tail_map;       // the same in boxes of tail_rows, for the last block of tokens; in columns: its groups
  TensorMap x_rest_map;       // in columns: what is left of a block, part of a group
  TensorMap x_tail_rest_map;  // and of the last one
  TensorMap y_map;       // Y[n, m] in boxes of kStepTokens rows x kBoxBytes, swizzled; in columns: of kOutputs columns
                         // x kStepTokens tokens, lines of kLineBytes swizzled; if `aligned` and one slice
  const void* x;         // [n, k]: in columns, their stride x_stride; of float32, X itself: its maps are of its parts
  const u8* packed;      // [row tiles][K tiles][Tile::kBytes]
  const void* bias;      // [m], or null
  const float* scale_x;  // [1] or [n], as kScaleX says
  const float* scale_w;  // [1] or [m], as kScaleW says
  void* y;               // [n, m / kRowsPerOutput], row or column stride y_stride
  u64* flags;            // [blocks][kWarpgroups], kRanges: `mark` where the sums have been handed over
  float* sums;           // [blocks][kRowTiles][kSums / 4][128][4], kRanges: those that are handed over; or parked
  float* groups;         // the same twice, kTilesOfGroup, or kRanges with kParts: what groups or parts have come to,
                         // of an item that isn't handed over, and of one that is
  u64 mark;              // of this launch and no other
  i64 n, m, k, x_stride, y_stride, row_tiles, k_tiles;
  float alpha;
  u32 token_blocks;   // of kTokens, that cover n
  u32 items;          // of a cluster's rows and tokens
  u32 aligned;        // lines of y begin at multiples of 16 bytes, and end there where the copy engine stores them
  u32 tail_rows;      // of X that a block copies for the last block of tokens
  u32 whole;          // items that aren't cut: the first ones
  u32 range, longer;  // kRanges: kTilesOfRange tiles each; of a range, and ranges that have one more: the first ones
};
static_assert(matches_host<WgmmaSpParams>(), "the host has another WgmmaSpParams");
