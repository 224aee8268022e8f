// The compile-time configuration of gemm/wgmma_sp.cu. Only this file reads the macros.
#pragma once
#include "common/epilogue.cuh"
#include "common/weight_tile.cuh"
#include "gemm/params/wgmma_sp.cuh"
#include "gemm/split_k.cuh"
#include "ptx/wgmma.cuh"

#define S24_CLUSTER_SIZE (S24_CLUSTER_M * S24_SPLIT_K)
#include "common/cluster.cuh"

struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE, S24_C, S24_RELU_THRESHOLD,
                            S24_RELU_UPPER_BOUND, S24_X_ELEMENT> {
  // Tiling ------------------------------------------------------------------------------------------
  static constexpr int kWarpgroups = S24_WARPGROUPS;                     // consumer warpgroups
  static constexpr int kMTilesPerWarpgroup = S24_M_TILES_PER_WARPGROUP;  // m64 tiles of one consumer warpgroup
  static constexpr int kTileN = S24_TILE_N;                              // tokens of a CTA tile
  static constexpr int kClusterM = S24_CLUSTER_M;                        // CTAs along M, which share X by multicast
  static constexpr int kSplitK = S24_SPLIT_K;                            // CTAs along K
  static constexpr int kClusterSize = S24_CLUSTER_SIZE;
  static constexpr int kCtasPerSm = S24_CTAS_PER_SM;
  static constexpr int kKChunks = S24_K_CHUNKS;   // chunks of K that one CTA sums one after the other
  static constexpr bool kStreamK = S24_STREAM_K;  // each cluster computes an equal range of K tiles
  static constexpr int kRasterGroupM = 8;         // CTA tiles along M that share a column of X in L2
  static constexpr int kSavedAccumulators =  // accumulators per thread that earlier K chunks leave in the workspace
      S24_SAVED_ACCUMULATORS;
  static_assert(kSplitK == 1 || kKChunks == 1, "K is cut either along the cluster or within the CTA");
  static constexpr bool kGrouped = S24_GROUPED;  // groups of tokens have weights of their own
  static constexpr bool kBatched = S24_BATCHED;  // several products of one size
  static_assert(!kBatched || (!kGrouped && !kStreamK), "batches have whole work tiles");
  static_assert(!kGrouped || (kKChunks == 1 && !kStreamK && !kHasC), "a CTA has one piece of a group's K");
  static_assert(kSavedAccumulators % 4 == 0 && (!kSavedAccumulators || kKChunks > 1),
                "accumulators of earlier K chunks are saved four at a time");

  // Arithmetic --------------------------------------------------------------------------------------
  static constexpr int kSplitTerms = S24_SPLIT_TERMS;  // bf16 terms of a float32; 0: X and W are multiplied as they are
  static constexpr bool kWPresplit = kSplitTerms == 2;  // W was split into bf16 terms when it was packed
  static constexpr int kTilesPerPromotion =
      S24_TILES_PER_PROMOTION;  // K tiles of split terms that one wgmma sum covers
  static constexpr int kTilesPerUnit = kSplitTerms == 3 ? 2 : kTilesPerPromotion;  // K tiles of a stream-K unit
  static constexpr int kTilesPerBlockedSum = S24_TILES_PER_BLOCKED_SUM;  // K tiles of a blocked sum; 0: no blocked sums
  static constexpr bool kPromote = S24_PROMOTE;  // float32 adds the sum of each box of X outside the tensor cores
  static constexpr bool kRaw = S24_RAW;          // Y is the integer sum itself
  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;  // 0: none, 1: one per tensor, 2: one per row
  static_assert(!kStreamK || (kSplitK == 1 && !kPromote && kCtasPerSm == 1), "stream-K is the only cut of K");
  static_assert(!kGated || !kRaw, "gated sums are not stored as integers");
  static constexpr bool kIntegers = kElement == ElementKind::S8;
  static constexpr bool kEightBit = kIntegers || is_fp8(kElement);
  static constexpr ElementKind kWeight = ElementKind(S24_WEIGHT);  // what W stores; kElement if it isn't quantized
  static constexpr bool kQuantized = kWeight != kElement;
  static constexpr ElementKind kWeightScale = ElementKind(S24_WEIGHT_SCALE);
  static_assert(!kQuantized || (!kSplitTerms && !kPromote && !kEightBit), "elements of quantized weights have 16 bits");

  // Tiles and boxes ---------------------------------------------------------------------------------
  using Tile =
      TileOf<kQuantized,
             kSplitTerms ? 4
             : kEightBit ? 1
                         : 2,
             kWeight == ElementKind::S4 ? 4 : 8, S24_WEIGHT_GROUP, kWeightScale == ElementKind::F32 ? 4 : 2>::Type;
  static constexpr int kMTiles = kWarpgroups * kMTilesPerWarpgroup, kTileM = kMTiles * Tile::kRows;
  static constexpr int kMTileOutputs = Tile::kRows / kRowsPerOutput;   // results per token of an m64 tile
  static constexpr int kBoxesPerTile = kSplitTerms ? kSplitTerms : 2;  // boxes of X for a K tile of W
  static constexpr int kBoxColumns = kSplitTerms ? Tile::kColumns : Tile::kColumns / 2;
  static constexpr bool kXColumnMajor = S24_X_COLUMN_MAJOR, kYColumnMajor = S24_Y_COLUMN_MAJOR;
  // A column-major X is staged in groups of tokens: for each column a line of 16, 32, 64 or 128 bytes. TMA is fast for
  // lines of 128 bytes alone, so cp.async loads X of few tokens.
  static constexpr int kTokenGroup = kTileN <= 8 ? 8 : kTileN <= 16 ? 16 : kTileN <= 32 ? 32 : 64;
  static constexpr int kTokenGroups = (kTileN + kTokenGroup - 1) / kTokenGroup, kTokenGroupBytes = kTokenGroup * 128;

  // Roles -------------------------------------------------------------------------------------------
  static constexpr int kConsumerThreads = 128 * kWarpgroups, kThreads = kConsumerThreads + 128;
  static constexpr int kAccumulators = kTileN / 2;  // accumulators per thread and m64 tile
  static constexpr int kHeldAccumulators =          // accumulators per thread that earlier K chunks leave in registers
      kMTilesPerWarpgroup * kAccumulators - kSavedAccumulators;
  static constexpr bool kXCpAsync = S24_X_CP_ASYNC;          // cp.async loads X, not TMA
  static constexpr bool kXFromPrepass = S24_X_FROM_PREPASS;  // a pre-pass kernel, launched just before, writes X
  static constexpr bool kXSplit = S24_X_SPLIT;               // two warps split X of few tokens into bf16 terms
  static_assert(!kXSplit || (kSplitTerms && !kXFromPrepass && kClusterM == 1 && !kStreamK), "X stays in its CTA");
  static constexpr int kXCopyThreads = kStreamK ? 32 : 64;       // stream-K needs one of the warps for its flags
  static constexpr int kXMulticast = kXCpAsync ? 1 : kClusterM;  // CTAs that receive a stage of X
  // One thread loads W and X in the order of their use where it can. Larger tiles have few stages, and W would wait for
  // X; after a pre-pass kernel W need not wait at all: then W and X have a thread each.
  static constexpr bool kOneProducer =
      !kSplitTerms && !kXCpAsync && !kXFromPrepass && kTileN <= (kMTiles == 1 ? 128 : 64);
  // A stage of a quantized W and the two of X that it is multiplied with then share their barriers, because one
  // barrier takes as long as an eighth of such a tile.
  static constexpr bool kJointStages = kQuantized && kOneProducer && !kXColumnMajor && kClusterM == 1;
  // Two warpgroups of three split terms alternate at the tensor cores: wgmma runs for one while the other adds.
  static constexpr bool kPingPong = kSplitTerms == 3 && kWarpgroups == 2;
  // Producers release registers to consumers. Small tiles need no more than an equal number per thread.
  static constexpr bool kReallocRegisters = kCtasPerSm == 1 && kWarpgroups == 2;
  static constexpr int kProducerRegisters = kXSplit ? 104 : 40, kConsumerRegisters = kXSplit ? 200 : 232;
  // A CTA is launched with 168 registers per thread. setmaxnreg would wait forever for more than that in total.
  static_assert(!kReallocRegisters || kProducerRegisters + kWarpgroups * kConsumerRegisters <= 3 * 168);

  // Shared memory: stages of W, stages of X, a staging area per warpgroup, barriers -----------------
  static constexpr int kWeightStages = S24_WEIGHT_STAGES, kXStages = S24_X_STAGES;
  // wgmma reads W under a swizzle, whose pattern begins at multiples of 1024 bytes. Registers read W without one.
  static constexpr int kWeightTileBytes =
      kQuantized || (kSplitTerms && !kWPresplit) ? Tile::kBytes : (Tile::kBytes + 1023) / 1024 * 1024;
  static constexpr int kWeightStageBytes = kMTiles * kWeightTileBytes;
  static constexpr int kXStageBytes = kXColumnMajor ? kTokenGroups * kTokenGroupBytes : kTileN * 128;
  static constexpr int kXAt = (kWeightStages * kWeightStageBytes + 1023) / 1024 * 1024;
  static constexpr int kStagingAt = kXAt + kXStages * kXStageBytes;
  // TMA loads C into the staging buffers, from which the results replace it.
  static constexpr bool kCStaged = S24_C_STAGED;
  static constexpr int kStepTokens = S24_STEP_TOKENS,  // tokens of an epilogue step
      kStagingBuffers = kCStaged ? 4 : 2;
  static_assert(!kJointStages || kXStages == 2 * kWeightStages, "a K tile of W is multiplied with two boxes of X");
  static_assert(kStagingBuffers >= 2, "TMA may read the buffer of the step before");
  static constexpr int kTokenBytes = kStepTokens * sizeof(Out::Bits);  // tokens of one step of a column-major Y
  static constexpr int kLineBytes = kTokenBytes <= 16 ? 16 : kTokenBytes <= 32 ? 32 : kTokenBytes <= 64 ? 64 : 128;
  static constexpr int kStepBytes = Tile::kRows * (kYColumnMajor ? kLineBytes : kTokenBytes);
  static constexpr int kStagingBytes = kStagingBuffers * kStepBytes;
  static_assert(!kCStaged || (kSplitK == 1 && !kXCpAsync && sizeof(C::Bits) == sizeof(Out::Bits)),
                "a warp is free to load C, and a result fits the place of its C");
  // With split-K each of the CTAs that sum slices of the same rows reduces a share of the rows. It receives a part from
  // every slice. Small shares have a place of their own, others lie over the stages.
  static constexpr int kCtaOutputs = kMTiles * kMTileOutputs;  // results per token
  static constexpr int kShareOutputs = 4 * ((kCtaOutputs / 4 + kSplitK - 1) / kSplitK);
  static constexpr int kShareRows = (kShareOutputs * kRowsPerOutput + 7) / 8 * 8;
  using SharePart = ReduceBuffer<kShareRows, kTileN, kYColumnMajor>;
  static constexpr bool kShareApart = S24_SHARE_APART;
  static constexpr int kShareAt = kShareApart ? kStagingAt : 0, kShareBytes = kSplitK * SharePart::kBytes;
  // Parts for other CTAs leave from where stages were.
  static constexpr int kOutgoingAt = kShareApart ? 0 : kShareBytes;
  static_assert(kSplitK == 1 || kOutgoingAt + (kSplitK - 1) * SharePart::kBytes <= kStagingAt);
  static constexpr int kBarrierAt = kStagingAt + (kSplitK == 1  ? kWarpgroups * kStagingBytes
                                                  : kShareApart ? kShareBytes
                                                                : 0);
  static constexpr int kBarrierBytes = 512;
  static_assert(8 * (2 * kWeightStages + (kXCpAsync ? 3 : 2) * kXStages) <= kBarrierBytes);
  // With split-K the share's barrier follows, and with groups the group table.
  static constexpr int kShareBarrierAt = kBarrierAt + kBarrierBytes,
                       kGroupTableAt = kShareBarrierAt + (kSplitK > 1 ? 16 : 0);
};
using Tile = Config::Tile;
extern __shared__ __align__(1024) u8 shared[];
