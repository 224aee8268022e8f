// The compile-time constants and parameters of blocksparse/attention_backward_wgmma.cu.
#pragma once
#include "blocksparse/attention.cuh"
#include "blocksparse/params/attention_backward_wgmma.cuh"

// All compile-time constants; macros are read here alone.
struct Config : AttentionType<S24_ELEMENT, S24_BLOCK, S24_HEAD, bool(S24_CAUSAL), bool(S24_LENGTHS), S24_TILE,
                              S24_PIPELINE_STAGES> {
  static constexpr bool kStationaryKv = S24_STATIONARY_KV;  // whether K and V are stationary, in the pass for dK and dV
  static constexpr int kPieces = kBlock / kTile;            // tiles of a block
  static constexpr int kResults = kStationaryKv ? 2 : 1;

  // Shared memory of a pipeline group: stationary operands; stages; bases and deltas of each stage's rows; barriers;
  // descriptions of work tiles (one in use, one being published, one being looked up); the first row of each stage.
  static constexpr int kStagesAt = kGroupWarpgroups * 2 * kStationaryBytes,
                       kRowStatsAt = kStagesAt + kPipelineStages * 2 * kTileBytes;
  static constexpr int kRowStatBytes = kStationaryKv ? kTile * 4 : 0;
  static constexpr int kBarrierAt = kRowStatsAt + kPipelineStages * 2 * kRowStatBytes;
  static constexpr int kItems = 4, kItemBytes = 20, kItemsAt = kBarrierAt + 16 * kPipelineStages + 16;
  static constexpr int kStartsAt = kItemsAt + kItems * kItemBytes;
  static constexpr int kPipelineBytes = (kStartsAt + 4 * kPipelineStages + 1023) / 1024 * 1024;
  static_assert(kBlock % kTile == 0, "whole tiles");

  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kRowThreads = 256,
                       kRowLanes = kHead / 8;  // threads of a CTA of attention_backward_rows, and threads for one row
};
