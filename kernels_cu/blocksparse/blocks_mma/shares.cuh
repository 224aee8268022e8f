// How the warps of blocksparse/blocks_mma.cu share the units of a block row. A unit is the kDepth k of a block that a
// warp multiplies at a time. A long row may be cut into slices of nearly equal length, whose sums are added in order; a
// slice is then shared as a row is. The units of a row are dealt out to its shares round-robin. Their number follows
// from the row's own length. A share is summed in increasing k. The sums of the upper half of the shares are added to
// those of the lower half, and these from the first to the last. So bits depend on the row and the most slices alone,
// not on the number of warps: a warp takes its shares one after the other.
#pragma once
#include "common/types.cuh"

constexpr int kMostShares = 16, kSlots = kMostShares / 2;  // a slot holds the sums of two shares

// Number of slices of a block row with so many units.
constexpr int kSliceUnits = 128;
template <int kMost> __device__ constexpr int slices_of(int units) {
  return units <= kSliceUnits ? 1 : units < kMost * kSliceUnits ? (units + kSliceUnits - 1) / kSliceUnits : kMost;
}
// The entry with which a slice begins, counted from the row's first.
__device__ constexpr int slice_start(int count, int slice, int slices) { return (int)((i64)count * slice / slices); }

// Number of shares of a block row with so many units.
__device__ constexpr int shares_of(int units) { return units <= 16 ? 4 : units <= 64 ? 8 : kMostShares; }

// The units of one of kWarps warps. A block has kBlockUnits units. A warp takes kRound units at a time, and begins each
// of its shares with such a round, so between shares there are units that do not exist.
template <int kWarps, int kBlockUnits, int kRound> struct WarpShares {
  int shares;      // of the block row
  int begin, end;  // the warp's first entry; the end of the row's
  int length;      // units of each of the warp's shares

  // first, count: entries of the block row.
  static __device__ constexpr WarpShares of(int first, int count, int warp) {
    const int shares = shares_of(count * kBlockUnits), apart = shares / kBlockUnits, ahead = warp / kBlockUnits;
    return {shares, first + ahead, first + count, warp < shares ? (count - ahead + apart - 1) / apart : 0};
  }

  __device__ constexpr bool has_several() const { return kWarps < kMostShares && shares > kWarps; }
  // Units from the first of a share to the first of the warp's next one.
  __device__ constexpr int pitch() const { return (length + kRound - 1) / kRound * kRound; }
  // The warp's units.
  __device__ constexpr int units() const { return has_several() ? pitch() * (shares / kWarps) : length; }
  // The warp's shares before that of a unit.
  __device__ constexpr int shares_before(int unit) const {
    return has_several() ? (unit >= pitch()) + (unit >= 2 * pitch()) + (unit >= 3 * pitch()) : 0;
  }
  // The entry of a unit, or -1 if there is none.
  __device__ constexpr int entry_of(int unit) const {
    const int before = shares_before(unit);
    const int at = begin + before * (kWarps / kBlockUnits) + (unit - before * pitch()) * (shares / kBlockUnits);
    return unit < units() && at < end ? at : -1;
  }
};
