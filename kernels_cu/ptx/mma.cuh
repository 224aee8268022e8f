// Wrappers of mma on 16-bit floats, and of the loads and stores of global memory that fill and empty its fragments.
#pragma once
#include "common/element.cuh"

#define S24_MMA(types)                                                            \
  asm volatile("mma.sync.aligned.m16n8k16.row.col." types                         \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define S24_MMA_K8(types)                                                                                       \
  asm volatile("mma.sync.aligned.m16n8k8.row.col." types " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                         \
               : "r"(a[0]), "r"(a[1]), "r"(b))

// acc += A(16x16) * B(16x8). Lane 4g + q holds rows g and g + 8 of A, column g of B and columns 2q and 2q + 1 of acc.
template <ElementKind kElement>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  static_assert(kElement == ElementKind::F16 || kElement == ElementKind::BF16, "mma m16n8k16 multiplies 16-bit floats");
  if constexpr (kElement == ElementKind::F16) S24_MMA("f32.f16.f16.f32");
  else S24_MMA("f32.bf16.bf16.f32");
}
// acc += A(16x8) * B(8x8), with the first two registers of a and the first of b in mma_m16n8k16.
template <ElementKind kElement> __device__ __forceinline__ void mma_m16n8k8(float (&acc)[4], const u32 (&a)[2], u32 b) {
  static_assert(kElement == ElementKind::F16 || kElement == ElementKind::BF16, "mma m16n8k8 multiplies 16-bit floats");
  if constexpr (kElement == ElementKind::F16) S24_MMA_K8("f32.f16.f16.f32");
  else S24_MMA_K8("f32.bf16.bf16.f32");
}
#undef S24_MMA
#undef S24_MMA_K8

// The words made of the lower, or the upper, halves of two.
__device__ __forceinline__ u32 lower_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 upper_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

#define S24_LOAD_IF "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, "
#define S24_LOAD_WORDS(load)                                                                                         \
  if constexpr (kWords == 1)                                                                                         \
    asm volatile(S24_LOAD_IF "%2, 0;\n\tmov.b32 %0, 0;\n\t@p " load ".b32 %0, [%1];\n\t}"                            \
                 : "=&r"(v[0])                                                                                       \
                 : "l"(address), "r"((int)loaded));                                                                  \
  else if constexpr (kWords == 2)                                                                                    \
    asm volatile(S24_LOAD_IF "%3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t@p " load ".v2.b32 {%0, %1}, [%2];\n\t}" \
                 : "=&r"(v[0]), "=&r"(v[1])                                                                          \
                 : "l"(address), "r"((int)loaded));                                                                  \
  else                                                                                                               \
    asm volatile(S24_LOAD_IF                                                                                         \
                 "%5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t@p " load        \
                 ".v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"                                                              \
                 : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])                                                \
                 : "l"(address), "r"((int)loaded))

// Loads 1, 2 or 4 words. Where `loaded` is false they are zeros, and nothing is read.
template <int kWords> __device__ __forceinline__ void load_words(u32* v, const void* address, bool loaded) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  S24_LOAD_WORDS("ld.global");
}
// load_words for words that no other thread of the SM reads: they take no room in L1.
template <int kWords> __device__ __forceinline__ void load_words_once(u32* v, const void* address, bool loaded) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  S24_LOAD_WORDS("ld.global.L1::no_allocate");
}
// Loads 16 bits into the lower half of a word, whose upper half is zero.
__device__ __forceinline__ void load_half_word(u32& v, const void* address, bool loaded) {
  asm volatile(S24_LOAD_IF "%2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.u16 %0, [%1];\n\t}"
               : "=&r"(v)
               : "l"(address), "r"((int)loaded));
}
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
#undef S24_LOAD_WORDS
#undef S24_LOAD_IF

// Stores 2 or 4 words.
template <int kWords> __device__ __forceinline__ void store_words(void* address, const u32* v) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 2) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(v[0]), "r"(v[1]));
  else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}
