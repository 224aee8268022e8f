// Groups of four cells, and the choice of two of them. Cells of 1, 2 and 4 bytes have overloads for Group<1>, Group<2>
// and Group<4>. Bits are only moved and compared, so every result is exact.
#pragma once
#include "prepare/packed_u16.cuh"

// How a cell's bits are read as a number; the codes are those of S24_NUMBER.
enum class Number { UNSIGNED = 0, TWOS_COMPLEMENT = 1, SIGN_MAGNITUDE = 2 };

// A cell of kWidth bytes. kFirstNan is the smallest magnitude that is a NaN, or 0 if there is none. kSigned ranks cells
// by value, otherwise by |value|.
template <int kWidth_, int kNumberCode, u32 kFirstNan_, bool kSigned_ = false> struct CellType {
  static constexpr int kWidth = kWidth_;
  static constexpr Number kNumber = Number(kNumberCode);
  static constexpr u32 kFirstNan = kFirstNan_;
  static constexpr bool kSigned = kSigned_;
  static constexpr bool kNarrowKeys = kWidth == 1 || !kSigned;  // keys leave the top bit free
};

// Four cells, with the first in the lowest bytes.
template <int kWidth> struct Group {
  u32 word[kWidth];
};

// Keys ----------------------------------------------------------------------------------------------
// Keys are unsigned numbers that order as the cells do: NaN is above all, all NaNs are alike, and so are -0 and +0.

// Keys of 32-bit cells, one in each word. Bit 31 of at_least is a >= b.
template <bool kNarrow> struct WordKeys {
  u32 cell[4];
  static __device__ __forceinline__ u32 at_least(u32 a, u32 b) {
    return kNarrow ? (a | 0x80000000u) - b : (a >= b ? 0xffffffffu : 0u);
  }
};

// Keys of narrower cells, two in each word: 0 and 1, 2 and 3. Bits 15 and 31 of at_least compare the halves of a and b.
template <bool kNarrow> struct PackedKeys {
  u32 low, high;
  static __device__ __forceinline__ u32 at_least(u32 a, u32 b) {
    return kNarrow ? (a | 0x80008000u) - b : u16x2_at_least(a, b);
  }
};

template <class Cell> __device__ __forceinline__ u32 float_key(u32 bits) {
  if constexpr (Cell::kSigned) {
    // A negative number's bits become 2^31 - bits, minus its magnitude. Then all move up by the bits of Inf, so that
    // -Inf is 0 and NaNs of either sign are beyond +Inf.
    constexpr u32 kInf = Cell::kFirstNan - 1;
    const u32 negative = (u32)((int)bits >> 31);
    return min((bits ^ negative) + (negative & 0x80000001u) + kInf, 2 * kInf + 1);
  } else {
    return min(bits & 0x7fffffffu, (u32)Cell::kFirstNan);
  }
}

// Keys of two floats in 16-bit halves; `negative` masks the negative ones.
template <class Cell> __device__ __forceinline__ u32 float_keys(u32 bits, u32 negative) {
  constexpr u32 kSign = 1u << (8 * Cell::kWidth - 1);
  if constexpr (Cell::kSigned) {
    // The mapping of float_key: kSign - bits for negative numbers; all move up by the largest number's bits.
    constexpr u32 kLargest = Cell::kFirstNan - 1, kFlip = ((kLargest + kSign + 1) ^ kLargest) & 0xffffu;
    const u32 up = (negative & kFlip * kBothHalves) ^ kLargest * kBothHalves;
    return min_u16x2(add_u16x2(bits ^ negative, up), (2 * kLargest + 1) * kBothHalves);
  } else {
    return min_u16x2(bits & (kSign - 1) * kBothHalves, Cell::kFirstNan * kBothHalves);
  }
}

template <class Cell> __device__ __forceinline__ WordKeys<Cell::kNarrowKeys> keys_of(const Group<4>& g) {
  return {
      {float_key<Cell>(g.word[0]), float_key<Cell>(g.word[1]), float_key<Cell>(g.word[2]), float_key<Cell>(g.word[3])}};
}

template <class Cell> __device__ __forceinline__ PackedKeys<Cell::kNarrowKeys> keys_of(const Group<2>& g) {
  const u32* w = g.word;
  return {float_keys<Cell>(w[0], prmt(w[0], 0, 0xbb99)), float_keys<Cell>(w[1], prmt(w[1], 0, 0xbb99))};
}

template <class Cell> __device__ __forceinline__ PackedKeys<Cell::kNarrowKeys> keys_of(const Group<1>& g) {
  const u32 w = g.word[0];
  if constexpr (Cell::kNumber == Number::TWOS_COMPLEMENT) {
    const u32 low = prmt(w, 0, 0x9180), high = prmt(w, 0, 0xb3a2);  // sign-extended
    if constexpr (Cell::kSigned) return {add_u16x2(low, 0x80 * kBothHalves), add_u16x2(high, 0x80 * kBothHalves)};
    const u32 sign_low = prmt(w, 0, 0x9988), sign_high = prmt(w, 0, 0xbbaa);
    return {(low ^ sign_low) + (sign_low & kBothHalves), (high ^ sign_high) + (sign_high & kBothHalves)};
  } else {
    const u32 low = prmt(w, 0, 0x4140), high = prmt(w, 0, 0x4342);
    if constexpr (Cell::kNumber == Number::UNSIGNED) return {low, high};
    else return {float_keys<Cell>(low, prmt(w, 0, 0x9988)), float_keys<Cell>(high, prmt(w, 0, 0xbbaa))};
  }
}

// Flags of a group: bit 7 of byte i stands for cell i -----------------------------------------------------

// Chooses two cells from the six comparisons "cell i is at least cell j" in bit 31: the cells that win two of three are
// kept.
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

template <bool kNarrow> __device__ __forceinline__ u32 two_largest(const PackedKeys<kNarrow>& k) {
  // Both halves are compared at once; a name lists the comparisons in the low and the high half.
  const u32 c02_13 = k.at_least(k.low, k.high), c03_12 = k.at_least(k.low, prmt(k.high, 0, 0x1032));
  const u32 c01_23 = k.at_least(prmt(k.low, k.high, 0x5410), prmt(k.low, k.high, 0x7632));
  const u32 c01_10 = prmt(c01_23, 0, 0x1010) ^ 0x80000000u, c23_32 = prmt(c01_23, 0, 0x3232) ^ 0x80000000u;
  const u32 low = majority(c02_13, c03_12, c01_10);
  const u32 high = majority(~c02_13, ~prmt(c03_12, 0, 0x1032), c23_32);
  return prmt(low, high, 0x7531);
}

// Flags the cells that are not zero; -0 counts as zero.
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

// Moves flags to bits 0 to 3.
__device__ __forceinline__ u32 nibble(u32 flags) { return (flags & 0x80808080u) * 0x00204081u >> 28; }

// Moves bits 0 to 3 to flags.
__device__ __forceinline__ u32 flags_of(u32 nibble) { return nibble * 0x10204080u & 0x80808080u; }

// Returns the group with the unflagged cells set to zero.
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
