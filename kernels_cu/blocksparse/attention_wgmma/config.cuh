// The compile-time constants and parameters of blocksparse/attention_wgmma.cu.
#pragma once
#include "blocksparse/attention.cuh"
#include "blocksparse/params/attention_wgmma.cuh"

// All compile-time constants; macros are read here alone.
struct Config : AttentionType<S24_ELEMENT, S24_BLOCK, S24_HEAD, bool(S24_CAUSAL), bool(S24_LENGTHS), bool(S24_DROPOUT),
                              S24_TILE, S24_PIPELINE_STAGES, 128 / S24_BLOCK> {
  static constexpr int kSign = S24_SIGN;            // sign of the scale
  static constexpr bool kPingPong = S24_PING_PONG;  // whether the warpgroups alternate on the tensor cores

  // A piece is what a tile and a block have in common: a whole block, or a tile's part of one.
  static constexpr int kPiece = kBlock < kTile ? kBlock : kTile, kPiecesPerStep = kTile / kPiece,
                       kPiecesPerBlock = kBlock / kPiece;
  static constexpr int kPieceBytes = kPiece * 128;  // bytes of a piece in a box

  // Shared memory: Q of each warpgroup; stages of each pipeline group; for each pipeline group its barriers and the
  // description of its work tile.
  static constexpr int kStagesAt = 2 * kStationaryBytes,
                       kBarrierAt = kStagesAt + kPipelineGroups * kPipelineStages * kTileBytes;
  static constexpr int kPipelineBytes = 256;
  static_assert((16 + 4 * kPiecesPerStep) * kPipelineStages + 48 <= kPipelineBytes,
                "barriers, what the work is, first keys of the pieces of each stage");

  // Steps of 16 columns of Q that consumers hold in registers. With 0 the tensor cores read Q from shared memory: 1%
  // faster for small heads, and large ones leave no registers.
  static constexpr int kQuerySteps = kHead > 96 && kHead <= 128 && !kDropout ? (kHead + 15) / 16 : 0;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};
