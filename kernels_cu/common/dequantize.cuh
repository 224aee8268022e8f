// Stored values of a quantized weight as pairs of 16-bit elements. An element is element(f32(stored) * f32(scale)),
// rounded once: the product of a stored value and a scale of 16 bits is exact in float32.
#pragma once
#include "ptx/async.cuh"
#include "ptx/fp8.cuh"

// Arithmetic of pairs, each result rounded to nearest even.
template <ElementKind kElement> __device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (kElement == ElementKind::F16) asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <ElementKind kElement> __device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (kElement == ElementKind::F16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The two elements of a pair as float32.
template <ElementKind kElement> __device__ __forceinline__ float low_of(u32 pair) {
  return Element<kElement>::to_float((u16)pair);
}
template <ElementKind kElement> __device__ __forceinline__ float high_of(u32 pair) {
  if constexpr (kElement == ElementKind::BF16) return __uint_as_float(pair & 0xffff0000u);
  else return Element<kElement>::to_float((u16)(pair >> 16));
}

// (value & kMask) | kOnes, in one instruction.
template <u32 kMask, u32 kOnes> __device__ __forceinline__ u32 masked_or(u32 value) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(value), "n"(kMask), "n"(kOnes));
  return d;
}

// A pair of stored values as elements, without a scale and exact. kPart says which of a word's values they are: of 4
// bits the nibbles kPart and kPart + 4, of 8 bits the bytes kPart and kPart + 2. An integer q is stored as q + 8 or
// q + 128; with an exponent for which a unit is the last bit these bits are the element 2^e + q + 8, say.
template <ElementKind kStored, ElementKind kElement, int kPart> __device__ __forceinline__ u32 stored_pair(u32 word) {
  constexpr bool kIsF16 = kElement == ElementKind::F16;
  if constexpr (kStored == ElementKind::S4) {
    constexpr u32 kUnit = kIsF16 ? 0x64006400 : 0x43004300;  // 2^10 or 2^7, whose last bit is 1
    return subtract_pairs<kElement>(masked_or<0x000f000f, kUnit>(word >> 4 * kPart), kUnit + 0x00080008);
  } else if constexpr (kStored == ElementKind::S8) {
    const u32 bytes = word >> 8 * kPart;
    if constexpr (kIsF16) return subtract_pairs<kElement>(masked_or<0x00ff00ff, 0x64006400>(bytes), 0x64806480);
    // A bf16 stores seven bits of mantissa: 128 + the low seven bits of q + 128, minus 128 if its high bit is set,
    // otherwise minus 256.
    return subtract_pairs<kElement>(masked_or<0x007f007f, 0x43004300>(bytes), (bytes & 0x00800080) ^ 0x43804380);
  } else {
    static_assert(kStored == ElementKind::FP8_E4M3);
    const u32 pair = f16_pair_of_e4m3((u16)__byte_perm(word, 0, kPart ? 0x4431 : 0x4420));
    if constexpr (kIsF16) return pair;
    else return Element<kElement>::pair(low_of<ElementKind::F16>(pair), high_of<ElementKind::F16>(pair));
  }
}

// The scales of rows g and g + 8 of a fragment, and the multiplication by one of them.
template <ElementKind kElement, ElementKind kScale> struct RowScales {
  static_assert(kScale == kElement || kScale == ElementKind::F32);
  static constexpr int kBytes = kScale == ElementKind::F32 ? 4 : 2;
  u32 rows[2];  // float32, or pairs of equal elements

  // Loads the scales from shared memory, where the two rows' follow each other.
  __device__ __forceinline__ void load(u32 address) {
    if constexpr (kScale == ElementKind::F32) {
      load_shared_words(rows, address);
    } else {
      u32 both[1];
      load_shared_words(both, address);
      rows[0] = __byte_perm(both[0], 0, 0x1010), rows[1] = __byte_perm(both[0], 0, 0x3232);
    }
  }
  template <int kRow> __device__ __forceinline__ u32 multiply(u32 pair) const {
    if constexpr (kScale == ElementKind::F32) {
      const float scale = __uint_as_float(rows[kRow]);
      return Element<kElement>::pair(__fmul_rn(low_of<kElement>(pair), scale),
                                     __fmul_rn(high_of<kElement>(pair), scale));
    } else {
      return multiply_pairs<kElement>(pair, rows[kRow]);
    }
  }
};
