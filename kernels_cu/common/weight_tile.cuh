// A tile of a packed weight: 64 rows x 256 bytes of columns; sparse24_plans/weights/packing.py defines its bytes. The
// kept values come first, 128 bytes per row under the 128-byte swizzle. The metadata follows in fragment order: for
// each 16 rows the words of each lane.
#pragma once
#include "common/types.cuh"

// kItemBytes is the size of an element.
template <int kItemBytes> struct WeightTile {
  static constexpr int kRows = 64, kColumns = 256 / kItemBytes;
  static constexpr int kRowBytes = 128, kValueBytes = kRows * kRowBytes;
  static constexpr int kWords = 4 / kItemBytes;  // words of metadata per lane and 16 rows
  static constexpr int kFragments = kRows / 16;
  static constexpr int kBytes = kValueBytes + kFragments * 32 * kWords * 4;
};
