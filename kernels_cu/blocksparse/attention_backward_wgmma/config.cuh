// What blocksparse/attention_backward_wgmma.cu is compiled for: its macros as constants, and what the host hands it.
#pragma once
#include "blocksparse/attention.cuh"
#include "blocksparse/params/attention_backward_wgmma.cuh"

// Everything that is compiled in.
struct Config : AttentionType<S24_ELEMENT, S24_BLOCK, S24_HEAD, bool(S24_CAUSAL), bool(S24_LENGTHS), S24_TILE,
                              S24_PIPELINE_STAGES> {
  static constexpr bool kKeys = S24_STATIONARY_KV;  // which of the two passes
  static constexpr int kPieces = kBlock / kTile;    // tiles of a block
  static constexpr int kResults = kKeys ? 2 : 1;

  // Shared memory of a channel: what stays; slots; bases and deltas of each slot's rows; barriers; items, of which it
  // has one, writes one and looks for one; where the rows of its slots begin.
  static constexpr int kSlotsAt = kGroups * 2 * kOwnBytes, kLinesAt = kSlotsAt + kSlots * 2 * kTileBytes;
  static constexpr int kLineBytes = kKeys ? kTile * 4 : 0;
  static constexpr int kBarrierAt = kLinesAt + kSlots * 2 * kLineBytes;
  static constexpr int kItems = 4, kItemBytes = 20, kItemsAt = kBarrierAt + 16 * kSlots + 16;
  static constexpr int kStartsAt = kItemsAt + kItems * kItemBytes;
  static constexpr int kChannelBytes = (kStartsAt + 4 * kSlots + 1023) / 1024 * 1024;
  static_assert(kBlock % kTile == 0, "whole tiles");

  static constexpr int kCopyRegisters = 24, kSumRegisters = 240;
  static constexpr int kRowThreads = 256, kRowLanes = kHead / 8;  // of the first launch; of a row
};
