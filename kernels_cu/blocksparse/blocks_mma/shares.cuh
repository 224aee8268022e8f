// How the warps of blocksparse/blocks_mma.cu share the units of a block row. A unit is the kDepth k of a block that a
// warp multiplies at a time. The units of a row are dealt out to its shares in turns, and the number of shares follows
// from the row's own length. A share is summed in increasing k. The sums of the upper half of the shares are added to
// those of the lower half, and these from the first to the last. So bits depend on the row alone: however many warps
// there are, each takes shares one after the other.
#pragma once

constexpr int kMostShares = 16, kSlots = kMostShares / 2;  // a slot holds the sums of two shares

// Number of shares of a block row with so many units.
__device__ constexpr int shares_of(int units) { return units <= 16 ? 4 : units <= 64 ? 8 : kMostShares; }

// The units of a share. A block has kBlockUnits units.
template <int kBlockUnits> struct ShareUnits {
  int begin, end, apart;  // the share's first entry; the end of the row's; from one of its entries to the next

  // first, count: entries of the block row.
  __device__ constexpr ShareUnits(int first, int count, int share, int shares)
      : begin(first + share / kBlockUnits), end(first + count), apart(shares / kBlockUnits) {}

  // The entry of a unit, or -1 if there is none.
  __device__ constexpr int entry_of(int unit) const { return begin + unit * apart < end ? begin + unit * apart : -1; }
  __device__ constexpr int count() const { return (end - begin + apart - 1) / apart; }
};
