// What gemm/wgmma_sp.cu is compiled for: its macros as constants, and what the host hands it.
#pragma once
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/params/wgmma_sp.cuh"
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
  static constexpr int kWarpgroups = S24_WARPGROUPS;            // that multiply
  static constexpr int kRowBlocks = S24_M_TILES_PER_WARPGROUP;  // row tiles of a warpgroup
  static constexpr int kTokens = S24_TILE_N;                    // of a block
  static constexpr int kShare = S24_CLUSTER_M, kSlices = S24_SPLIT_K, kCluster = S24_CLUSTER_SIZE;
  static constexpr int kParts = S24_K_CHUNKS;
  static constexpr int kParked =
      S24_SAVED_ACCUMULATORS;                    // sums of a thread, of the parts before, that wait in the workspace
  static constexpr bool kRanges = S24_STREAM_K;  // clusters have equal ranges of tiles, wherever items begin and end
  static constexpr int kXParts =
      S24_SPLIT_TERMS;  // of bf16, that stand for float32; 0: X and W are multiplied as they are
  static constexpr bool kPlanes = kXParts == 2;  // W comes in parts too
  static constexpr int kTilesOfSum =
      S24_TILES_PER_PROMOTION;  // of W, whose products of parts are one sum of the tensor cores
  static constexpr int kTilesOfRange = kXParts == 3 ? 2 : kTilesOfSum;  // of which ranges are cut: whole sums
  static constexpr int kTilesOfGroup = S24_TILES_PER_BLOCKED_SUM;  // whose sums are added up by themselves; 0: all of K
  static constexpr bool kPromote = S24_PROMOTE;  // sums of one box of X are added up outside of the tensor cores
  static constexpr bool kRaw = S24_RAW;          // the result is the integer sum itself
  static constexpr bool kColumnsX = S24_X_COLUMN_MAJOR, kColumnsY = S24_Y_COLUMN_MAJOR;  // X, Y lie in columns
  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;  // 0: none, 1: one for all, 2: one a row
  static constexpr int kBlocksPerSm = S24_CTAS_PER_SM;
  static constexpr int kWeightStages = S24_WEIGHT_STAGES, kSourceStages = S24_X_STAGES;
  static constexpr int kStepTokens = S24_STEP_TOKENS, kBuffers = 2;  // of a staging area
  static_assert(kSlices == 1 || kParts == 1, "a cut is either along the cluster or within the block");
  static_assert(kParked % 4 == 0 && (!kParked || kParts > 1), "parked are quads of parts before");
  static_assert(!kRanges || (kSlices == 1 && !kPromote && kBlocksPerSm == 1), "ranges are the cut");
  static_assert(kBuffers >= 2, "a buffer is free again only two steps later");
  static_assert(!kGated || (!kXParts && !kRaw),
                "gates are of sums that need no mending, and never the sums themselves");

  static constexpr bool kIntegers = kElement == ElementKind::S8;
  static constexpr bool kEightBit = kIntegers || kElement == ElementKind::FP8_E4M3;
  using Tile = WeightTile<kXParts ? 4 : kEightBit ? 1 : 2>;
  static constexpr int kBoxes = kXParts ? kXParts : 2;                                         // of X, a tile of W
  static constexpr int kBoxColumns = kXParts ? Tile::kColumns : Tile::kColumns / 2;            // of X
  static constexpr int kRowTiles = kWarpgroups * kRowBlocks, kRows = kRowTiles * Tile::kRows;  // of a block
  static constexpr int kOutputs = Tile::kRows / kRowsPerOutput;  // results of a token that a row tile makes
  static constexpr int kMultiplying = 128 * kWarpgroups, kThreads = kMultiplying + 128;
  // X in columns lies in groups of tokens, each a line of 16, 32, 64 or 128 bytes for every column. The copy engine is
  // fast for lines of 128 bytes alone; few tokens are copied by threads, which take what is adjacent at once.
  static constexpr int kGroup = kTokens <= 8 ? 8 : kTokens <= 16 ? 16 : kTokens <= 32 ? 32 : 64;
  static constexpr int kGroups = (kTokens + kGroup - 1) / kGroup, kGroupBytes = kGroup * 128;
  static constexpr bool kByThreads = S24_X_CP_ASYNC;
  // Another pass writes the X that is read here, in a launch between this one and all that W may come from.
  static constexpr bool kAfterPass = S24_X_FROM_PREPASS;
  static constexpr int kLineThreads = kRanges ? 32 : 64;  // sums are handed over by a warp of the others
  // Whether one thread copies W and X. Of larger blocks two do: their rings are short, and W would wait for X. So they
  // do after a pass, which W needn't wait for.
  static constexpr bool kOneCopies = !kXParts && !kByThreads && !kAfterPass && kTokens <= (kRowTiles == 1 ? 128 : 64);
  static constexpr int kSourceShare = kByThreads ? 1 : kShare;  // blocks that a stage of X goes to
  // Of a tile of W in shared memory: under a swizzle it begins where the pattern does.
  static constexpr int kTileBytes = kXParts && !kPlanes ? Tile::kBytes : (Tile::kBytes + 1023) / 1024 * 1024;
  static constexpr int kWeightBytes = kRowTiles * kTileBytes,  // of a stage
      kSourceBytes = kColumnsX ? kGroups * kGroupBytes : kTokens * 128;
  static constexpr int kSums = kTokens / 2;                   // accumulators of a thread and row tile
  static constexpr int kHeld = kRowBlocks * kSums - kParked;  // of the parts before, in registers
  static constexpr int kBand = 8;  // row blocks that are taken with one block of tokens before the next, for L2

  // Shared memory: W stages, X stages, a staging area a warpgroup, barriers.
  static constexpr int kSourceAt = kWeightStages * kWeightBytes;
  static_assert(kSourceAt % 1024 == 0, "where a swizzle's pattern begins");
  static constexpr int kStagingAt = kSourceAt + kSourceStages * kSourceBytes;
  static constexpr int kTokenBytes = kStepTokens * sizeof(Out::Bits);  // of a row of Y, where that is a line
  static constexpr int kLineBytes = kTokenBytes <= 16 ? 16 : kTokenBytes <= 32 ? 32 : kTokenBytes <= 64 ? 64 : 128;
  static constexpr int kStepBytes = Tile::kRows * (kColumnsY ? kLineBytes : kTokenBytes);
  static constexpr int kStagingBytes = kBuffers * kStepBytes;
  static constexpr int kBarrierAt = kStagingAt + (kSlices == 1 ? kWarpgroups * kStagingBytes : 0);

  // Of six products: whether two warpgroups take turns in front of the tensor cores, so that one is multiplied for
  // while the other adds.
  static constexpr bool kTurns = kXParts == 3 && kWarpgroups == 2;

  // Registers of a thread that copies and of one that multiplies, once they part; small sums need no such trade.
  static constexpr bool kTrade = kBlocksPerSm == 1 && kWarpgroups == 2;
  static constexpr int kCopyRegisters = 40, kSumRegisters = 232;
};
using Tile = Config::Tile;
using Area = FoldArea<Config::kRows, Config::kTokens, Config::kColumnsY>;
