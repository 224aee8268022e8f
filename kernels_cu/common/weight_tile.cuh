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

// A tile of a quantized weight: 64 rows x 128 columns; sparse24_plans/weights/packing_quantized.py defines its bytes.
// The stored values of kBits bits come in fragment order, then the metadata of a tile of 16-bit elements, then the
// scales, one for kGroup adjacent columns of a row.
template <int kBits, int kGroup, int kScaleBytes> struct QuantizedTile {
  static constexpr int kRows = 64, kColumns = 128;
  static constexpr int kValueBytes = kRows * kColumns / 2 * kBits / 8;
  static constexpr int kWords = 2;
  static constexpr int kFragments = kRows / 16;
  static constexpr int kGroups = kColumns / kGroup;
  static constexpr int kScalesAt = kValueBytes + kFragments * 32 * kWords * 4;
  static constexpr int kBytes = kScalesAt + kGroups * kRows * kScaleBytes;
};

template <bool kQuantized, int kItemBytes, int kBits, int kGroup, int kScaleBytes> struct TileOf {
  using Type = WeightTile<kItemBytes>;
};
template <int kItemBytes, int kBits, int kGroup, int kScaleBytes>
struct TileOf<true, kItemBytes, kBits, kGroup, kScaleBytes> {
  using Type = QuantizedTile<kBits, kGroup, kScaleBytes>;
};
