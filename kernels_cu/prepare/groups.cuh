// Groups of four cells: which two are kept, their code, and the moves that follow.
//
// Compiled for one element: S24_WIDTH is its bytes (1, 2, 4); S24_NUMBER how its bits count (below);
// S24_FIRST_NAN the smallest magnitude that is a NaN, 0 where there is none; S24_SIGNED 1 ranks by value, 0 by
// |value|. Bits are moved, never computed with, so every result is exact.
#pragma once
#include "common/common.cuh"

#define S24_UNSIGNED 0
#define S24_TWOS_COMPLEMENT 1
#define S24_SIGN_MAGNITUDE 2

#ifndef S24_SIGNED
#define S24_SIGNED 0
#endif

// Bytes 0-3 of a and 4-7 of b, picked by the nibbles of the selector; bit 3 of a nibble spreads the byte's sign.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ u32 majority(u32 a, u32 b, u32 c) { return (a & b) | (c & (a | b)); }

// Sum and minimum of 16-bit lanes, unsigned.
__device__ __forceinline__ u32 add_lanes(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("add.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return ((a & 0x7fff7fffu) + (b & 0x7fff7fffu)) ^ ((a ^ b) & 0x80008000u);
#endif
}

// Bits 15 and 31: the lanes of a are at least those of b.
__device__ __forceinline__ u32 lanes_at_least(u32 a, u32 b) {
  const u32 tops = 0x80008000u, difference = (a | tops) - (b & ~tops);
  return (a & ~b) | (~(a ^ b) & difference);
}

__device__ __forceinline__ u32 min_lanes(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  const u32 larger = prmt(lanes_at_least(a, b), 0, 0xbb99);
  return (b & larger) | (a & ~larger);
#endif
}

// Keys ----------------------------------------------------------------------------------------------
// Unsigned numbers that order as the cells do: NaN above all and all NaNs alike, -0 and +0 alike.

#if S24_WIDTH == 4

constexpr bool kNarrowKeys = !S24_SIGNED;  // the top bit is free
struct Keys {
  u32 cell[4];
};

__device__ __forceinline__ u32 key_of(u32 bits) {
#if S24_SIGNED
  // A negative number's bits become 2^31 - bits, minus its magnitude; then all are moved up by the bits of Inf,
  // so that -Inf is 0 and NaNs, of either sign, are beyond +Inf.
  constexpr u32 kInf = S24_FIRST_NAN - 1;
  const u32 negative = (u32)((int)bits >> 31);
  return min((bits ^ negative) + (negative & 0x80000001u) + kInf, 2 * kInf + 1);
#else
  return min(bits & 0x7fffffffu, (u32)S24_FIRST_NAN);
#endif
}

// Bit 31: a >= b.
__device__ __forceinline__ u32 at_least(u32 a, u32 b) {
  return kNarrowKeys ? (a | 0x80000000u) - b : (a >= b ? 0xffffffffu : 0u);
}

#else

constexpr bool kNarrowKeys = S24_WIDTH == 1 || !S24_SIGNED;
struct Keys {
  u32 low, high;  // 16-bit lanes: cells 0 and 1, cells 2 and 3
};

// Bits 15 and 31: the lanes of a are at least those of b.
__device__ __forceinline__ u32 at_least(u32 a, u32 b) {
  return kNarrowKeys ? (a | 0x80008000u) - b : lanes_at_least(a, b);
}

constexpr u32 kTwice = 0x00010001u;  // times a number: both lanes hold it

#if S24_NUMBER == S24_SIGN_MAGNITUDE
// Two floats, in 16-bit lanes, with the masks of the negative ones -> keys.
__device__ __forceinline__ u32 float_keys(u32 bits, u32 negative) {
  constexpr u32 kSign = 1u << (8 * S24_WIDTH - 1);
#if S24_SIGNED
  // As key_of above does it: kSign - bits for the negative ones, and all up by the bits of the largest number.
  constexpr u32 kLargest = S24_FIRST_NAN - 1, kTurn = ((kLargest + kSign + 1) ^ kLargest) & 0xffffu;
  const u32 up = (negative & kTurn * kTwice) ^ kLargest * kTwice;
  return min_lanes(add_lanes(bits ^ negative, up), (2 * kLargest + 1) * kTwice);
#else
  return min_lanes(bits & (kSign - 1) * kTwice, S24_FIRST_NAN * kTwice);
#endif
}
#endif

#endif

// Groups --------------------------------------------------------------------------------------------

struct Group {
  u32 word[S24_WIDTH];  // four cells, the first in the lowest bytes
};

__device__ __forceinline__ Keys keys_of(const Group& g) {
#if S24_WIDTH == 4
  return {{key_of(g.word[0]), key_of(g.word[1]), key_of(g.word[2]), key_of(g.word[3])}};
#elif S24_WIDTH == 2
  const u32* w = g.word;
  return {float_keys(w[0], prmt(w[0], 0, 0xbb99)), float_keys(w[1], prmt(w[1], 0, 0xbb99))};
#else
  const u32 w = g.word[0];
#if S24_NUMBER == S24_TWOS_COMPLEMENT
  const u32 low = prmt(w, 0, 0x9180), high = prmt(w, 0, 0xb3a2);  // sign-extended
#if S24_SIGNED
  return {add_lanes(low, 0x80 * kTwice), add_lanes(high, 0x80 * kTwice)};
#else
  const u32 sign_low = prmt(w, 0, 0x9988), sign_high = prmt(w, 0, 0xbbaa);
  return {(low ^ sign_low) + (sign_low & kTwice), (high ^ sign_high) + (sign_high & kTwice)};
#endif
#else
  const u32 low = prmt(w, 0, 0x4140), high = prmt(w, 0, 0x4342);
#if S24_NUMBER == S24_UNSIGNED
  return {low, high};
#else
  return {float_keys(low, prmt(w, 0, 0x9988)), float_keys(high, prmt(w, 0, 0xbbaa))};
#endif
#endif
#endif
}

// Flags of a group: bit 7 of byte i is cell i's.

// From the six comparisons "cell i is at least cell j" in bit 31: the cells that win two of three are kept.
__device__ __forceinline__ u32 two_largest(u32 c01, u32 c02, u32 c03, u32 c12, u32 c13, u32 c23) {
  const u32 first = majority(c01, c02, c03), second = majority(~c01, c12, c13);
  const u32 third = majority(~c02, ~c12, c23), fourth = majority(~c03, ~c13, ~c23);
  return prmt(prmt(first, second, 0x0073), prmt(third, fourth, 0x0073), 0x5410);
}

__device__ __forceinline__ u32 two_largest(const Keys& k) {
#if S24_WIDTH == 4
  const u32* c = k.cell;
  return two_largest(at_least(c[0], c[1]), at_least(c[0], c[2]), at_least(c[0], c[3]), at_least(c[1], c[2]),
                     at_least(c[1], c[3]), at_least(c[2], c[3]));
#else
  // Lanes of two cells at once; a name lists the comparisons in the low and the high lane.
  const u32 c02_13 = at_least(k.low, k.high), c03_12 = at_least(k.low, prmt(k.high, 0, 0x1032));
  const u32 c01_23 = at_least(prmt(k.low, k.high, 0x5410), prmt(k.low, k.high, 0x7632));
  const u32 c01_10 = prmt(c01_23, 0, 0x1010) ^ 0x80000000u, c23_32 = prmt(c01_23, 0, 0x3232) ^ 0x80000000u;
  const u32 low = majority(c02_13, c03_12, c01_10);
  const u32 high = majority(~c02_13, ~prmt(c03_12, 0, 0x1032), c23_32);
  return prmt(low, high, 0x7531);
#endif
}

// Cells that aren't zero; -0 is one.
__device__ __forceinline__ u32 nonzero(const Group& g) {
#if S24_WIDTH == 4
  u32 flag[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) flag[i] = (g.word[i] & 0x7fffffffu) + 0x7fffffffu;
  return prmt(prmt(flag[0], flag[1], 0x0073), prmt(flag[2], flag[3], 0x0073), 0x5410);
#elif S24_WIDTH == 2
  return prmt((g.word[0] & 0x7fff7fffu) + 0x7fff7fffu, (g.word[1] & 0x7fff7fffu) + 0x7fff7fffu, 0x7531);
#else
  const u32 low_bits = (g.word[0] & 0x7f7f7f7fu) + 0x7f7f7f7fu;
  return S24_NUMBER == S24_SIGN_MAGNITUDE ? low_bits : low_bits | g.word[0];
#endif
}

// Flags -> bits 0 to 3.
__device__ __forceinline__ u32 nibble(u32 flags) { return (flags & 0x80808080u) * 0x00204081u >> 28; }

// The inverse: bits 0 to 3 -> flags.
__device__ __forceinline__ u32 flags_of(u32 nibble) { return nibble * 0x10204080u & 0x80808080u; }

// The group with the other cells zero.
__device__ __forceinline__ Group only(const Group& g, u32 flags) {
  Group out;
#if S24_WIDTH == 4
#pragma unroll
  for (int i = 0; i < 4; ++i) out.word[i] = g.word[i] & prmt(flags, 0, 0x8888 + 0x1111 * i);
#elif S24_WIDTH == 2
  out.word[0] = g.word[0] & prmt(flags, 0, 0x9988);
  out.word[1] = g.word[1] & prmt(flags, 0, 0xbbaa);
#else
  out.word[0] = g.word[0] & prmt(flags, 0, 0xba98);
#endif
  return out;
}

// Codes ---------------------------------------------------------------------------------------------

constexpr u32 kTooMany = 0x10, kSpareFirst = 0x40, kSpareSecond = 0x20;  // marks beside a code
constexpr u32 kCodeBits = 0x0f0f0f0fu;

// The code of the first two cells of a mask. Spare slots take the lowest free positions, and are marked.
constexpr u32 code_of(u32 mask) {
  u32 used[4] = {}, count = 0;
  for (u32 i = 0; i < 4; ++i)
    if (mask >> i & 1) used[count++] = i;
  u32 marks = count > 2 ? kTooMany : 0;
  u32 slots = count >= 2 ? (1u << used[0] | 1u << used[1]) : mask;
  for (u32 i = 0; count < 2; ++i)
    if (!(slots >> i & 1)) slots |= 1u << i, ++count;
  u32 first = 0, second = 3;
  while (!(slots >> first & 1)) ++first;
  while (!(slots >> second & 1)) --second;
  if (!(mask >> first & 1)) marks |= kSpareFirst;
  if (!(mask >> second & 1)) marks |= kSpareSecond;
  return first | second << 2 | marks;
}

constexpr u32 codes_of_four(u32 mask) {
  return code_of(mask) | code_of(mask + 1) << 8 | code_of(mask + 2) << 16 | code_of(mask + 3) << 24;
}

// Four masks, a nibble each in the low half -> four codes, a byte each, with their marks. A nibble's bit 3 makes prmt spread a
// sign, which is 0 in the tables: so either table answers, and the other gives 0.
__device__ __forceinline__ u32 codes_of(u32 masks) {
  constexpr u32 k0 = codes_of_four(0), k4 = codes_of_four(4), k8 = codes_of_four(8), k12 = codes_of_four(12);
  return prmt(k0, k4, masks) | prmt(k8, k12, masks ^ 0x8888u);
}

// Kept values ---------------------------------------------------------------------------------------

// What gathers the kept values of four groups, from their codes.
struct Gather {
  u32 codes, first, second;

  __device__ __forceinline__ explicit Gather(u32 given) : codes(given & kCodeBits) {
#if S24_WIDTH == 2
    first = (codes & 0x03030303u) * 0x22 + 0x10101010u;  // bytes 2i and 2i+1 of cell i
    second = (codes >> 2 & 0x03030303u) * 0x22 + 0x10101010u;
#endif
  }

  // The two kept values of group i, whose cells are g.
#if S24_WIDTH == 4
  __device__ __forceinline__ uint2 operator()(const Group& g, int i) const {
    const u32 code = codes >> (8 * i) & 15, one = code & 3, two = code >> 2;
    uint2 kept;
    kept.x = one == 0 ? g.word[0] : one == 1 ? g.word[1] : g.word[2];
    kept.y = two == 1 ? g.word[1] : two == 2 ? g.word[2] : g.word[3];
    return kept;
  }
#elif S24_WIDTH == 2
  __device__ __forceinline__ u32 operator()(const Group& g, int i) const {
    return prmt(g.word[0], g.word[1], prmt(first, second, i | (4 + i) << 4));
  }
#else
  __device__ __forceinline__ u32 operator()(const Group& g, int i) const {
    const u32 code = codes >> (8 * i);
    return prmt(g.word[0], 0, 0x4400u | (code & 3) | (code & 12) << 2);
  }
#endif
};

// Violations ----------------------------------------------------------------------------------------

// The first bad group and what is wrong with it, in one word: group << 8 | detail. All ones: none.
__device__ __forceinline__ void report(u64* status, u64 group, u32 detail) {
  const u64 found = group << 8 | detail;
  if (found < *(volatile u64*)status) atomicMin(status, found);
}
