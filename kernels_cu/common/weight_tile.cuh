// Tiles of a packed weight (sparse24_plans/weights/packing.py defines their bytes): 64 rows x 256 bytes of columns.
// First the kept values, 128 bytes a row under the 128-byte swizzle; then the metadata, in the order of fragments:
// for 16 rows at a time, each lane's words.
#pragma once
#include "common/types.cuh"

// Of elements of so many bytes.
template <int kItemBytes> struct WeightTile {
  static constexpr int kRows = 64, kColumns = 256 / kItemBytes;
  static constexpr int kRowBytes = 128, kValueBytes = kRows * kRowBytes;
  static constexpr int kWords = 4 / kItemBytes;  // of metadata, a lane and 16 rows
  static constexpr int kFragments = kRows / 16;
  static constexpr int kBytes = kValueBytes + kFragments * 32 * kWords * 4;
};
