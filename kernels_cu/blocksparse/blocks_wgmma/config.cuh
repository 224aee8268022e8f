// The compile-time configuration of blocksparse/blocks_wgmma.cu. Only this file reads the macros.
#pragma once
#include "blocksparse/params/blocks_wgmma.cuh"
#include "common/epilogue.cuh"
#include "ptx/tma_cache_hint.cuh"
#include "ptx/wgmma_dense.cuh"

#define S24_CLUSTER_SIZE (S24_CLUSTER_N * S24_CLUSTER_SLICES)
#include "common/cluster.cuh"

// How long panels are computed. None: like other panels. Apart: several CTAs each sum a slice, and exchange the sums
// in the workspace. Sequential: one CTA sums the slices one after the other. LongFirst: whole, before all other panels.
enum class Slices { None, Apart, Sequential, LongFirst };

struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kTileN = S24_TILE_N;           // tokens of a CTA's tile
  static constexpr int kWarpgroups = S24_WARPGROUPS;  // consumer warpgroups
  static constexpr int kClusterN = S24_CLUSTER_N;     // CTAs of a cluster, along N
  static constexpr int kStages = S24_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;                      // buffers of a staging area
  static constexpr bool kSampled = S24_SAMPLED;                     // sdd
  static constexpr Major kSparseMajor = Major(S24_SPARSE_MAJOR);    // major dimension of op(S) within a block
  static constexpr Major kDenseMajor = Major(S24_DENSE_MAJOR);      // major dimension of X; MN: tokens are contiguous
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; otherwise rows of op(S) are contiguous
  static constexpr bool kUnalignedRows = S24_UNALIGNED_ROWS;        // rows of C begin where TMA cannot store them
  static constexpr Slices kSlices = Slices(S24_SLICES);
  // Slices of every panel, which a cluster computes and adds; 1 if panels are whole.
  static constexpr int kClusterSlices = S24_CLUSTER_SLICES;
  static constexpr bool kCuts = kSlices == Slices::Apart || kSlices == Slices::Sequential || kClusterSlices > 1;
  static constexpr bool kClaims = kSlices == Slices::Apart || kSlices == Slices::LongFirst;  // if a panel is long
  static constexpr bool kXCopied = S24_X_COPIED;  // by a pre-pass, which began once everything before it was done
  static constexpr bool kRaw = S24_RAW;           // results are the integer sums themselves

  // A step has kDepth k: half of a large block, or several small blocks side by side.
  static constexpr int kBytes = kElement == ElementKind::F16 || kElement == ElementKind::BF16 ? 2 : 1;
  static constexpr int kDepth = 128 / kBytes, kHalves = kBlock > kDepth ? kBlock / kDepth : 1;
  static constexpr int kBlocksPerStep = kBlock < kDepth && !kSampled ? kDepth / kBlock : 1;
  static constexpr int kBox = kDepth / kBlocksPerStep, kBoxBytes = kBytes * kBox;  // k of one TMA box of S or X
  static constexpr bool kSmall = kBlock < 64;
  static constexpr int kTileM = S24_TILE_M, kWarpgroupsM = kTileM / 64,
                       kPanelBlockRows = kTileM / kBlock;                  // block rows of a row panel
  static constexpr int kM64PerBlock = kBlock > 64 ? kBlock / 64 : 1;       // 64-row tiles of a block row
  static constexpr int kBlockRowsPerM64 = kBlock < 64 ? 64 / kBlock : 1;   // block rows of a 64-row tile
  static constexpr int kWarpgroupN = kTileN * kWarpgroupsM / kWarpgroups;  // tokens of a warpgroup
  // For sdd: block columns of a CTA's tile, and cells that it has of each. A narrow tile has a piece of one block.
  static constexpr int kBlocksPerTile = kTileN > kBlock ? kTileN / kBlock : 1,
                       kPieceN = kTileN < kBlock ? kTileN : kBlock;
  static constexpr int kPiecesPerBlock = kBlock / kPieceN;
  static constexpr int kAccumulators = kWarpgroupN / 2;
  static constexpr bool kMayLackBlocks =
      (kPanelBlockRows > 1 || kBlocksPerStep > 1) && !kSampled;  // whether a stage may lack some of its blocks
  static constexpr int kConsumerThreads = 128 * kWarpgroups;
  static constexpr bool kSCpAsync = kSmall && !kSampled;  // cp.async loads S, instead of TMA
  static constexpr int kFullArrivals =
      kSCpAsync ? 132 : 1;  // arrivals of a full barrier: 4 with bytes, 128 of cp.async
  // X is read by every block row that keeps a block at its rows. The kernel never reads C.
  static constexpr u64 kDensePolicy = kEvictLast, kOutPolicy = kEvictFirst;
  static constexpr int kThreads = kConsumerThreads + 128;
  static constexpr int kBox64Bytes = 64 * 128;            // 64 rows of 128 bytes
  static constexpr int kBlockBytes = kBlock * kBoxBytes;  // the k of a step in one block
  static constexpr int kSparseBytes = kWarpgroupsM * kBox64Bytes, kDenseBytes = kTileN * 128;
  static constexpr int kStageBytes = kSparseBytes + kDenseBytes;

  // Shared memory: stages, a staging area for each warpgroup, barriers, a word for each stage that says which blocks it
  // has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static constexpr int kClaimsAt = kBarrierAt + (20 * kStages + 7) / 8 * 8;
  static_assert(kWarpgroupsM <= kWarpgroups && kWarpgroupN % 64 == 0,
                "a warpgroup has 64 rows and whole groups of tokens");
  static_assert(kBytes == 2 || (kSparseMajor == Major::K && kDenseMajor == Major::K),
                "only 16-bit elements may be MN-major");
  static_assert(kClusterSlices == 1 || (kSlices == Slices::None && !kSampled && kClusterN == 1),
                "if every panel is cut, a cluster has its slices");
  static_assert(kBoxBytes >= 32, "a block holds at least one k step of wgmma");

  // CTAs that share a multiprocessor; registers of a producer and of a consumer thread after reallocation.
  static constexpr int kCtasPerSm = kWarpgroups == 1 ? 2 : 1;
  static constexpr bool kBusyProducers = kSCpAsync || kCuts || kClaims || kCtasPerSm > 1;
  static constexpr int kProducerRegisters = kBusyProducers ? 56 : 40, kConsumerRegisters = kCtasPerSm > 1   ? 200
                                                                                           : kBusyProducers ? 224
                                                                                                            : 232;
};
