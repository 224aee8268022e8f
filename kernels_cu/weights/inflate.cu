// Canonical 2:4 weight -> dense row-major [M, K]. Memory bound: 0.625 of the dense bytes in, all of them out (16-bit
// elements). K is a multiple of 8, so rows never split a unit and the matrix is one flat array.
//
//   role        who            what
//   every warp  256 threads    4 vectors of 16 dense bytes a thread, 256 apart; a CTA 16384 bytes
//   last CTA    thread 0       8-bit elements: the half vector that may be left
//
//   no barriers, no shared memory; few registers
//
//   thread   | load values and metadata x 4 | expand | store x 4 |
#include "common/types.cuh"
#include "weights/params/inflate.cuh"

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr int kWidth = S24_WIDTH;  // bytes of an element
  static constexpr int kThreads = 256;
  static constexpr int kPerThread = 4;  // independent loads in flight
};

// A vector of 16 dense bytes, from its kept values and its groups' codes, by the bytes of an element.
template <int kWidth> struct Vector;

template <> struct Vector<4> {
  using Codes = u8;  // one group
  static __device__ __forceinline__ uint4 expand(uint2 kept, Codes code) {
    u32 first = code & 3, second = code >> 2;
    uint4 out;
    out.x = first == 0 ? kept.x : 0;
    out.y = first == 1 ? kept.x : second == 1 ? kept.y : 0;
    out.z = first == 2 ? kept.x : second == 2 ? kept.y : 0;
    out.w = second == 3 ? kept.y : 0;
    return out;
  }
};

template <> struct Vector<2> {
  using Codes = u16;  // two groups
  static __device__ __forceinline__ u64 expand_group(u32 kept, u32 code) {
    return ((u64)(kept & 0xffffu) << (16 * (code & 3))) | ((u64)(kept >> 16) << (16 * (code >> 2 & 3)));
  }
  static __device__ __forceinline__ uint4 expand(uint2 kept, Codes codes) {
    u64 low = expand_group(kept.x, codes & 15), high = expand_group(kept.y, codes >> 8 & 15);
    return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
  }
};

template <> struct Vector<1> {
  using Codes = u32;  // four groups
  static __device__ __forceinline__ u32 expand_group(u32 kept, u32 code) {
    return (kept & 0xffu) << (8 * (code & 3)) | (kept >> 8 & 0xffu) << (8 * (code >> 2 & 3));
  }
  static __device__ __forceinline__ uint4 expand(uint2 kept, Codes codes) {
    return make_uint4(expand_group(kept.x, codes), expand_group(kept.x >> 16, codes >> 8),
                      expand_group(kept.y, codes >> 16), expand_group(kept.y >> 16, codes >> 24));
  }
};

// 8-bit elements: eight cells may be left behind the last whole vector.
template <int kWidth> __device__ __forceinline__ void store_last_half(const InflateParams& p, u64 vectors) {
  if constexpr (kWidth == 1) {
    using V = Vector<kWidth>;
    if (p.bytes % sizeof(uint4) && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
      const u32 last = ((const u32*)p.values)[2 * vectors], code = ((const u16*)p.metadata)[2 * vectors];
      *(uint2*)(p.dense + vectors) = make_uint2(V::expand_group(last, code), V::expand_group(last >> 16, code >> 8));
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) inflate(const __grid_constant__ InflateParams p) {
  using V = Vector<Config::kWidth>;
  const u64 vectors = p.bytes / sizeof(uint4);
  u64 first = (u64)blockIdx.x * (Config::kThreads * Config::kPerThread) + threadIdx.x;
  uint2 kept[Config::kPerThread];
  V::Codes codes[Config::kPerThread];
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
    u64 at = first + i * Config::kThreads;
    if (at < vectors) {
      kept[i] = __ldcs(p.values + at);
      codes[i] = __ldcs((const V::Codes*)p.metadata + at);
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i) {
    u64 at = first + i * Config::kThreads;
    if (at < vectors) p.dense[at] = V::expand(kept[i], codes[i]);
  }
  store_last_half<Config::kWidth>(p, vectors);
}
