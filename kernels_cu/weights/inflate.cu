// Canonical 2:4 weight -> dense row-major [M, K]. Memory bound: 0.625 of the dense bytes in, all of them out
// (16-bit elements). K is a multiple of 8, so rows never split a unit and the matrix is one flat array.
#include "common/common.cuh"

struct InflateParams {
  const uint2* values;       // 8 bytes: the kept values of one vector
  const void* metadata;      // one byte a group of four
  uint4* dense;              // 16 bytes: one vector
  u64 bytes;                 // of the dense matrix
};

#ifndef S24_WIDTH
#define S24_WIDTH (S24_ELEMENT == S24_F32 ? 4 : 2)
#endif

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // independent loads in flight

#if S24_WIDTH == 4
typedef u8 Codes;  // a vector is one group
__device__ __forceinline__ uint4 expand(uint2 kept, Codes code) {
  u32 first = code & 3, second = code >> 2;
  uint4 out;
  out.x = first == 0 ? kept.x : 0;
  out.y = first == 1 ? kept.x : second == 1 ? kept.y : 0;
  out.z = first == 2 ? kept.x : second == 2 ? kept.y : 0;
  out.w = second == 3 ? kept.y : 0;
  return out;
}
#elif S24_WIDTH == 1
typedef u32 Codes;  // a vector is four groups
__device__ __forceinline__ u32 expand_group(u32 kept, u32 code) {
  return (kept & 0xffu) << (8 * (code & 3)) | (kept >> 8 & 0xffu) << (8 * (code >> 2 & 3));
}
__device__ __forceinline__ uint4 expand(uint2 kept, Codes codes) {
  return make_uint4(expand_group(kept.x, codes), expand_group(kept.x >> 16, codes >> 8),
                    expand_group(kept.y, codes >> 16), expand_group(kept.y >> 16, codes >> 24));
}
#else
typedef u16 Codes;  // a vector is two groups
__device__ __forceinline__ u64 expand_group(u32 kept, u32 code) {
  return ((u64)(kept & 0xffffu) << (16 * (code & 3))) | ((u64)(kept >> 16) << (16 * (code >> 2 & 3)));
}
__device__ __forceinline__ uint4 expand(uint2 kept, Codes codes) {
  u64 low = expand_group(kept.x, codes & 15), high = expand_group(kept.y, codes >> 8 & 15);
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads) inflate(const __grid_constant__ InflateParams p) {
  const u64 vectors = p.bytes / sizeof(uint4);
  u64 first = (u64)blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  uint2 kept[kPerThread];
  Codes codes[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    u64 at = first + i * kThreads;
    if (at < vectors) {
      kept[i] = __ldcs(p.values + at);
      codes[i] = __ldcs((const Codes*)p.metadata + at);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    u64 at = first + i * kThreads;
    if (at < vectors) p.dense[at] = expand(kept[i], codes[i]);
  }
#if S24_WIDTH == 1
  if (p.bytes % sizeof(uint4) && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {  // eight cells are left
    const u32 last = ((const u32*)p.values)[2 * vectors], code = ((const u16*)p.metadata)[2 * vectors];
    *(uint2*)(p.dense + vectors) = make_uint2(expand_group(last, code), expand_group(last >> 16, code >> 8));
  }
#endif
}
