// Groups of four cells, and which two of them are kept. What differs between cells of 1, 2 and 4 bytes is an overload
// for Group<1>, Group<2> and Group<4>. Bits are moved, never computed with, so every result is exact.
#pragma once
#include "prepare/packed_u16.cuh"

// How a cell's bits count, by the number in S24_NUMBER.
enum class Number { UNSIGNED = 0, TWOS_COMPLEMENT = 1, SIGN_MAGNITUDE = 2 };

// A cell of kWidth bytes. kFirstNan: the smallest magnitude that is a NaN, 0 where there is none. kSigned: cells rank
// by value, else by |value|.
template <int kWidth_, int kNumberCode, u32 kFirstNan_, bool kSigned_ = false> struct CellType {
  static constexpr int kWidth = kWidth_;
  static constexpr Number kNumber = Number(kNumberCode);
  static constexpr u32 kFirstNan = kFirstNan_;
  static constexpr bool kSigned = kSigned_;
  static constexpr bool kNarrowKeys = kWidth == 1 || !kSigned;  // the top bit is free
};

// Four cells, the first in the lowest bytes.
template <int kWidth> struct Group {
  u32 word[kWidth];
};

// Keys ----------------------------------------------------------------------------------------------
// Unsigned numbers that order as the cells do: NaN above all and all NaNs alike, -0 and +0 alike.

// One a word, of 32-bit cells. at_least, bit 31: a >= b.
template <bool kNarrow> struct WordKeys {
  u32 cell[4];
  static __device__ __forceinline__ u32 at_least(u32 a, u32 b) {
    return kNarrow ? (a | 0x80000000u) - b : (a >= b ? 0xffffffffu : 0u);
  }
};

// Two a word, of narrower cells: 0 and 1, 2 and 3. at_least, bits 15 and 31: the lanes of a are at least those of b.
template <bool kNarrow> struct LaneKeys {
  u32 low, high;
  static __device__ __forceinline__ u32 at_least(u32 a, u32 b) {
    return kNarrow ? (a | 0x80008000u) - b : lanes_at_least(a, b);
  }
};

template <class Cell> __device__ __forceinline__ u32 float_key(u32 bits) {
  if constexpr (Cell::kSigned) {
    // A negative number's bits become 2^31 - bits, minus its magnitude; then all are moved up by the bits of Inf, so
    // that -Inf is 0 and NaNs, of either sign, are beyond +Inf.
    constexpr u32 kInf = Cell::kFirstNan - 1;
    const u32 negative = (u32)((int)bits >> 31);
    return min((bits ^ negative) + (negative & 0x80000001u) + kInf, 2 * kInf + 1);
  } else {
    return min(bits & 0x7fffffffu, (u32)Cell::kFirstNan);
  }
}

// Two floats, in 16-bit lanes, with the masks of the negative ones -> keys.
template <class Cell> __device__ __forceinline__ u32 float_keys(u32 bits, u32 negative) {
  constexpr u32 kSign = 1u << (8 * Cell::kWidth - 1);
  if constexpr (Cell::kSigned) {
    // As float_key does it: kSign - bits for the negative ones, and all up by the bits of the largest number.
    constexpr u32 kLargest = Cell::kFirstNan - 1, kTurn = ((kLargest + kSign + 1) ^ kLargest) & 0xffffu;
    const u32 up = (negative & kTurn * kTwice) ^ kLargest * kTwice;
    return min_lanes(add_lanes(bits ^ negative, up), (2 * kLargest + 1) * kTwice);
  } else {
    return min_lanes(bits & (kSign - 1) * kTwice, Cell::kFirstNan * kTwice);
  }
}

template <class Cell> __device__ __forceinline__ WordKeys<Cell::kNarrowKeys> keys_of(const Group<4>& g) {
  return {
      {float_key<Cell>(g.word[0]), float_key<Cell>(g.word[1]), float_key<Cell>(g.word[2]), float_key<Cell>(g.word[3])}};
}

template <class Cell> __device__ __forceinline__ LaneKeys<Cell::kNarrowKeys> keys_of(const Group<2>& g) {
  const u32* w = g.word;
  return {float_keys<Cell>(w[0], prmt(w[0], 0, 0xbb99)), float_keys<Cell>(w[1], prmt(w[1], 0, 0xbb99))};
}

template <class Cell> __device__ __forceinline__ LaneKeys<Cell::kNarrowKeys> keys_of(const Group<1>& g) {
  const u32 w = g.word[0];
  if constexpr (Cell::kNumber == Number::TWOS_COMPLEMENT) {
    const u32 low = prmt(w, 0, 0x9180), high = prmt(w, 0, 0xb3a2);  // sign-extended
    if constexpr (Cell::kSigned) return {add_lanes(low, 0x80 * kTwice), add_lanes(high, 0x80 * kTwice)};
    const u32 sign_low = prmt(w, 0, 0x9988), sign_high = prmt(w, 0, 0xbbaa);
    return {(low ^ sign_low) + (sign_low & kTwice), (high ^ sign_high) + (sign_high & kTwice)};
  } else {
    const u32 low = prmt(w, 0, 0x4140), high = prmt(w, 0, 0x4342);
    if constexpr (Cell::kNumber == Number::UNSIGNED) return {low, high};
    else return {float_keys<Cell>(low, prmt(w, 0, 0x9988)), float_keys<Cell>(high, prmt(w, 0, 0xbbaa))};
  }
}

// Flags of a group: bit 7 of byte i is cell i's -----------------------------------------------------

// From the six comparisons "cell i is at least cell j" in bit 31: the cells that win two of three are kept.
__device__ __forceinline__ u32 two_largest(u32 c01, u32 c02, u32 c03, u32 c12, u32 c13, u32 c23) {
  const u32 first = majority(c01, c02, c03), second = majority(~c01, c12, c13);
  const u32 third = majority(~c02, ~c12, c23), fourth = majority(~c03, ~c13, ~c23);
  return prmt(prmt(first, second, 0x0073), prmt(third, fourth, 0x0073), 0x5410);
}

template <bool kNarrow> __device__ __forceinline__ u32 two_largest(const WordKeys<kNarrow>& k) {
  const u32* c = k.cell;
  return two_largest(k.at_least(c[0], c[1]), k.at_least(c[0], c[2]), k.at_least(c[0], c[3]), k.at_least(c[1], c[2]),
                     k.at_least(c[1], c[3]), k.at_least(c[2], c[3]));
}

template <bool kNarrow> __device__ __forceinline__ u32 two_largest(const LaneKeys<kNarrow>& k) {
  // Lanes of two cells at once; a name lists the comparisons in the low and the high lane.
  const u32 c02_13 = k.at_least(k.low, k.high), c03_12 = k.at_least(k.low, prmt(k.high, 0, 0x1032));
  const u32 c01_23 = k.at_least(prmt(k.low, k.high, 0x5410), prmt(k.low, k.high, 0x7632));
  const u32 c01_10 = prmt(c01_23, 0, 0x1010) ^ 0x80000000u, c23_32 = prmt(c01_23, 0, 0x3232) ^ 0x80000000u;
  const u32 low = majority(c02_13, c03_12, c01_10);
  const u32 high = majority(~c02_13, ~prmt(c03_12, 0, 0x1032), c23_32);
  return prmt(low, high, 0x7531);
}

// Cells that aren't zero; -0 is one.
template <class Cell> __device__ __forceinline__ u32 nonzero(const Group<4>& g) {
  u32 flag[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) flag[i] = (g.word[i] & 0x7fffffffu) + 0x7fffffffu;
  return prmt(prmt(flag[0], flag[1], 0x0073), prmt(flag[2], flag[3], 0x0073), 0x5410);
}

template <class Cell> __device__ __forceinline__ u32 nonzero(const Group<2>& g) {
  return prmt((g.word[0] & 0x7fff7fffu) + 0x7fff7fffu, (g.word[1] & 0x7fff7fffu) + 0x7fff7fffu, 0x7531);
}

template <class Cell> __device__ __forceinline__ u32 nonzero(const Group<1>& g) {
  const u32 low_bits = (g.word[0] & 0x7f7f7f7fu) + 0x7f7f7f7fu;
  return Cell::kNumber == Number::SIGN_MAGNITUDE ? low_bits : low_bits | g.word[0];
}

// Flags -> bits 0 to 3.
__device__ __forceinline__ u32 nibble(u32 flags) { return (flags & 0x80808080u) * 0x00204081u >> 28; }

// The inverse: bits 0 to 3 -> flags.
__device__ __forceinline__ u32 flags_of(u32 nibble) { return nibble * 0x10204080u & 0x80808080u; }

// The group with the other cells zero.
__device__ __forceinline__ Group<4> only(const Group<4>& g, u32 flags) {
  Group<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.word[i] = g.word[i] & prmt(flags, 0, 0x8888 + 0x1111 * i);
  return out;
}

__device__ __forceinline__ Group<2> only(const Group<2>& g, u32 flags) {
  Group<2> out;
  out.word[0] = g.word[0] & prmt(flags, 0, 0x9988);
  out.word[1] = g.word[1] & prmt(flags, 0, 0xbbaa);
  return out;
}

__device__ __forceinline__ Group<1> only(const Group<1>& g, u32 flags) {
  Group<1> out;
  out.word[0] = g.word[0] & prmt(flags, 0, 0xba98);
  return out;
}
