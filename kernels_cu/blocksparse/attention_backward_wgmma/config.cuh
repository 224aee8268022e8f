// The compile-time constants and parameters of blocksparse/attention_backward_wgmma.cu.
#pragma once
#include "blocksparse/attention.cuh"
#include "blocksparse/params/attention_backward_wgmma.cuh"

// The gradients that a launch computes; the values are those of PASSES in backends/attention_backward_wgmma.py.
enum class Gradients { Q = 0, KV = 1, K = 2, V = 3 };

// All compile-time constants; macros are read here alone.
struct Config : AttentionType<S24_ELEMENT, S24_BLOCK, S24_HEAD, bool(S24_CAUSAL), bool(S24_LENGTHS), bool(S24_DROPOUT),
                              S24_TILE, S24_PIPELINE_STAGES, S24_PIPELINE_GROUPS> {
  static constexpr Gradients kGradients = Gradients(S24_GRADIENTS);
  static constexpr bool kStationaryKv = kGradients != Gradients::Q;  // whether K and V are stationary
  static constexpr bool kOfScores = kGradients != Gradients::V,      // whether dS is needed, for dQ or dK
      kOfValues = kGradients == Gradients::KV || kGradients == Gradients::V;
  // Whether dV is issued before dS is computed. With dropout both need registers.
  static constexpr bool kEarlyValues = kOfValues && !(kDropout && kOfScores);
  static constexpr bool kStored = S24_STORED,  // whether the launch for dK stores dS, and the one for dQ loads it
      kStores = kStored && kStationaryKv && kOfScores, kLoads = kStored && !kStationaryKv;
  static constexpr u32 kBlockBytes = kBlock * kBlock * 2,
                       kPieceBytes = kTile * kBlock * 2;  // of dS: block, tile's part
  static constexpr int kPieces = kBlock / kTile;          // tiles of a block
  static constexpr int kResults = kOfScores && kOfValues ? 2 : 1;
  static constexpr int kStationaries = kLoads ? 0 : kOfScores ? 2 : 1;  // stationary operands; V has no part in dV

  // Shared memory of a pipeline group: stationary operands; stages; bases and deltas of each stage's rows; barriers;
  // descriptions of work tiles (one in use, one being published, one being looked up); the first row of each stage, its
  // head's matrix with dropout, and its block of dS if that is stored here.
  static constexpr int kStagesAt = kGroupWarpgroups * kStationaries * kStationaryBytes,
                       kStageBytes = kTileBytes + (kLoads ? kPieceBytes : kTileBytes),
                       kRowStatsAt = kStagesAt + kPipelineStages * kStageBytes;
  static constexpr int kRowStatBytes = kStationaryKv ? kTile * 4 : 0;
  static constexpr int kBarrierAt = kRowStatsAt + kPipelineStages * 2 * kRowStatBytes;
  static constexpr int kItems = 4, kItemBytes = 24, kItemsAt = kBarrierAt + 16 * kPipelineStages + 16;
  static constexpr int kStartsAt = kItemsAt + kItems * kItemBytes;
  static constexpr int kStartBytes = 4 + 4 * kDropout + 4 * kStores;
  static constexpr int kPipelineBytes = (kStartsAt + kStartBytes * kPipelineStages + 1023) / 1024 * 1024;
  static_assert(kBlock % kTile == 0, "whole tiles");

  static constexpr int kWarpgroups = kPipelineGroups * kGroupWarpgroups;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = kWarpgroups == 1 ? 248 : 240;
  // Threads of a CTA of attention_backward_rows; threads for one row, each of which reads 8 elements or none.
  static constexpr int kRowThreads = 256, kRowChunks = kHead / 8;
  static constexpr int kRowLanes = kRowChunks <= 4 ? 4 : kRowChunks <= 8 ? 8 : kRowChunks <= 16 ? 16 : 32;
};
