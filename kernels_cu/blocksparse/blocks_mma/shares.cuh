// How the warps of blocksparse/blocks_mma.cu share the units of a block row. A unit is the kDepth k of a block that a
// warp multiplies at a time. The units of a row are dealt out to its shares in turns, and the number of shares follows
// from the row's own length. A share is summed in increasing k. The sums of the upper half of the shares are added to
// those of the lower half, and these from the first to the last. So bits depend on the row alone: however many warps
// there are, each takes one share after the other.
#pragma once

constexpr int kMostShares = 16, kSlots = kMostShares / 2;  // a slot holds the sums of two shares

// Number of shares of a block row with so many units.
__device__ constexpr int shares_of(int units) { return units <= 16 ? 4 : units <= 32 ? 8 : kMostShares; }

// The units of one of kWarps warps. A block has kBlockUnits units.
template <int kWarps, int kBlockUnits> struct WarpShares {
  static constexpr bool kMayHaveSeveral = kWarps < kMostShares;

  int shares;      // of the block row
  int begin, end;  // the warp's first entry; the end of the row's
  int units;       // of the warp: as many of each share. The last ones may be behind the row's last entry

  // first, count: entries of the block row.
  __device__ constexpr WarpShares(int first, int count, int warp)
      : shares(shares_of(count * kBlockUnits)), begin(first + warp / kBlockUnits), end(first + count), units(0) {
    const int apart = shares / kBlockUnits;
    if (warp < shares) units = (end - begin + apart - 1) / apart * (has_several() ? shares / kWarps : 1);
  }

  __device__ constexpr bool has_several() const { return kMayHaveSeveral && shares > kWarps; }
  // Units of each share: of one, two or four.
  __device__ constexpr int length() const { return units >> (has_several() ? shares / kWarps / 2 : 0); }
  // The warp takes its units share after share: the number of shares before that of a unit.
  __device__ constexpr int shares_before(int unit) const {
    return has_several() ? (unit >= length()) + (unit >= 2 * length()) + (unit >= 3 * length()) : 0;
  }
  // The entry of a unit, or -1 if there is none.
  __device__ constexpr int entry_of(int unit) const {
    const int before = shares_before(unit);
    const int at = begin + before * (kWarps / kBlockUnits) + (unit - before * length()) * (shares / kBlockUnits);
    return unit < units && at < end ? at : -1;
  }
};
