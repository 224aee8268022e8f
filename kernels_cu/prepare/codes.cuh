// Codes of groups. A code is a nibble with the positions of a group's two kept cells. This file maps masks to codes,
// and gathers kept values by codes.
#pragma once
#include "prepare/groups.cuh"

constexpr u32 kTooMany = 0x10, kSpareFirst = 0x40, kSpareSecond = 0x20;  // marks beside a code
constexpr u32 kCodeBits = 0x0f0f0f0fu;

// Returns the code of the first two cells of a mask. Spare slots take the lowest free positions and are marked.
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

// Converts four masks (nibbles in the low half) to four codes (bytes) with their marks. Bit 3 of a nibble makes prmt
// spread a sign, which is 0 in the tables, so one table answers and the other gives 0.
__device__ __forceinline__ u32 codes_of(u32 masks) {
  constexpr u32 k0 = codes_of_four(0), k4 = codes_of_four(4), k8 = codes_of_four(8), k12 = codes_of_four(12);
  return prmt(k0, k4, masks) | prmt(k8, k12, masks ^ 0x8888u);
}

// Gathers the kept values of four groups by their codes. It is called with a group and the group's index among the
// four.
template <int kWidth> struct Gather;

template <> struct Gather<4> {
  using Kept = uint2;
  u32 codes;

  __device__ __forceinline__ explicit Gather(u32 given) : codes(given & kCodeBits) {}
  __device__ __forceinline__ Kept operator()(const Group<4>& g, int i) const {
    const u32 code = codes >> (8 * i) & 15, one = code & 3, two = code >> 2;
    uint2 kept;
    kept.x = one == 0 ? g.word[0] : one == 1 ? g.word[1] : g.word[2];
    kept.y = two == 1 ? g.word[1] : two == 2 ? g.word[2] : g.word[3];
    return kept;
  }
};

template <> struct Gather<2> {
  using Kept = u32;
  u32 codes, first, second;

  __device__ __forceinline__ explicit Gather(u32 given) : codes(given & kCodeBits) {
    first = (codes & 0x03030303u) * 0x22 + 0x10101010u;  // bytes 2i and 2i+1 of cell i
    second = (codes >> 2 & 0x03030303u) * 0x22 + 0x10101010u;
  }
  __device__ __forceinline__ Kept operator()(const Group<2>& g, int i) const {
    return prmt(g.word[0], g.word[1], prmt(first, second, i | (4 + i) << 4));
  }
};

template <> struct Gather<1> {
  using Kept = u32;  // the lower half
  u32 codes;

  __device__ __forceinline__ explicit Gather(u32 given) : codes(given & kCodeBits) {}
  __device__ __forceinline__ Kept operator()(const Group<1>& g, int i) const {
    const u32 code = codes >> (8 * i);
    return prmt(g.word[0], 0, 0x4400u | (code & 3) | (code & 12) << 2);
  }
};

// Reports a bad group in one word, group << 8 | detail; the smallest one is kept. All ones means that no group is bad.
__device__ __forceinline__ void report(u64* status, u64 group, u32 detail) {
  const u64 found = group << 8 | detail;
  if (found < *(volatile u64*)status) atomicMin(status, found);
}
