// Quantizes the rows of a matrix to 8 bits: q = x / scale, with a scale for each row or a given one for all. Memory
// bound.
//
// role   threads    work
// row    32 or 256  loads a row, 16 bytes a thread at a time, and holds it in registers; finds its largest magnitude;
//                   divides, rounds and stores
//
// barriers   one __syncthreads where 256 threads share a row
// registers  what is held: up to 32 words
//
// thread | load | magnitude | reduce, sync | divide, round, store | the same for what a thread doesn't hold |
#include "common/element.cuh"
#include "prepare/params/quantize.cuh"
#include "ptx/async.cuh"
#include "ptx/fp8.cuh"

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr ElementKind kIn = ElementKind(S24_ELEMENT), kOut = ElementKind(S24_OUT);
  static constexpr bool kStatic = S24_STATIC;  // one given scale
  static constexpr int kThreads = 256, kRowThreads = S24_ROW_THREADS;
  static constexpr int kRows = kThreads / kRowThreads, kRowWarps = kRowThreads / 32;
  static constexpr int kHeld = S24_HELD;  // vectors of a row that a thread holds
  static constexpr int kVector = 16 / sizeof(Element<kIn>::Bits);
  static constexpr float kLargest = kOut == ElementKind::S8 ? 127.0f : 448.0f;
  static constexpr float kLeastScale = 0x1p-100f;
};
using In = Element<Config::kIn>;

union Vector {
  uint4 whole;
  In::Bits cells[Config::kVector];
};

// The quantized cells of a vector.
union Bytes {
  u8 cells[Config::kVector];
  u32 words[Config::kVector / 4];
};

// Divides by a scale as IEEE division does, as far as 8 bits show. The quotient is refined twice from the reciprocal,
// and is then rounded correctly (Markstein, IBM J. Res. Dev. 34, 1990) where nothing underflows that matters: for
// quotients from 2^-11 and scales from 2^-60 to 2^100, to which other scales are brought by a power of two, together
// with x. Smaller quotients become zeros. Quotients beyond 1024, and those of a scale that is 0, Inf or NaN, need no
// refinement.
struct Divisor {
  float scale, inverse, power;
  bool refines;

  __device__ __forceinline__ explicit Divisor(float given) {
    const float size = fabsf(given);
    power = size < 0x1p-60f ? 0x1p100f : size > 0x1p100f ? 0x1p-60f : 1.0f;
    scale = given * power;
    inverse = 1.0f / scale;
    refines = scale != 0 && fabsf(scale) <= 0x1p100f;
  }

  __device__ __forceinline__ float quotient(float x) const {
    x *= power;
    const float first = x * inverse;
    if (!refines || (Config::kStatic && !(fabsf(first) < 1024.0f))) return first;
    float q = fmaf(fmaf(-first, scale, x), inverse, first);
    q = fmaf(fmaf(-q, scale, x), inverse, q);
    return copysignf(q, first);
  }
};

__device__ __forceinline__ u32 s8_of(float q) {
  int b;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(q));
  return (u32)max(-127, min(127, b)) & 0xffu;
}

__device__ __forceinline__ u32 four(float a, float b, float c, float d) {
  if constexpr (Config::kOut == ElementKind::S8) return s8_of(a) | s8_of(b) << 8 | s8_of(c) << 16 | s8_of(d) << 24;
  else return e4m3_pair(a, b) | (u32)e4m3_pair(c, d) << 16;
}

__device__ __forceinline__ Bytes quantized(const Vector& v, const Divisor& by) {
  Bytes found;
#pragma unroll
  for (int i = 0; i < Config::kVector; i += 4) {
    float q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) q[j] = by.quotient(In::to_float(v.cells[i + j]));
    found.words[i / 4] = four(q[0], q[1], q[2], q[3]);
  }
  return found;
}

// The largest magnitude of a vector, as bits of a float: those of NaN are larger than those of Inf.
__device__ __forceinline__ u32 largest(const Vector& v) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < Config::kVector; ++i) most = max(most, __float_as_uint(In::to_float(v.cells[i])) & 0x7fffffffu);
  return most;
}

// A row of the matrix. Vectors are moved whole where its cells lie at multiples of their size.
struct Row {
  const In::Bits* from;
  u8* to;
  i64 k;
  bool loads_whole, stores_whole;

  __device__ __forceinline__ Row(const QuantizeParams& p, i64 row) : k(p.k) {
    from = (const In::Bits*)p.x + row * p.x_stride;
    to = (u8*)p.quantized + row * p.quantized_stride;
    loads_whole = (u64)from % 16 == 0;
    stores_whole = (u64)to % Config::kVector == 0;
  }

  __device__ __forceinline__ Vector load(i64 column) const {
    Vector v;
    v.whole = make_uint4(0, 0, 0, 0);
    if (loads_whole && column + Config::kVector <= k) {
      v.whole = *(const uint4*)(from + column);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kVector; ++i) {
        if (column + i < k) v.cells[i] = from[column + i];
      }
    }
    return v;
  }

  __device__ __forceinline__ void store(i64 column, const Bytes& b) const {
    if (stores_whole && column + Config::kVector <= k) {
      if constexpr (Config::kVector == 8) *(uint2*)(to + column) = make_uint2(b.words[0], b.words[1]);
      else *(u32*)(to + column) = b.words[0];
    } else {
#pragma unroll
      for (int i = 0; i < Config::kVector; ++i) {
        if (column + i < k) to[column + i] = b.cells[i];
      }
    }
  }
};

__device__ __forceinline__ u32 warp_max(u32 v) {
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
  return most;
}

// The largest value among the threads of a row.
__device__ __forceinline__ u32 row_max(u32 v) {
  v = warp_max(v);
  if constexpr (Config::kRowWarps > 1) {
    __shared__ u32 of_warps[Config::kRowWarps];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::kRowWarps; ++i) v = max(v, of_warps[i]);
  }
  return v;
}

__device__ __forceinline__ float scale_of(u32 largest_bits) {
  const float scale = __uint_as_float(largest_bits) / Config::kLargest;
  return scale < Config::kLeastScale ? Config::kLeastScale : scale;  // NaN stays
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) quantize(const QuantizeParams p) {
  launch_dependents_and_wait();
  const i64 row = (i64)blockIdx.x * Config::kRows + threadIdx.x / Config::kRowThreads;
  if (row >= p.m) return;
  const int lane = threadIdx.x % Config::kRowThreads;
  const Row at(p, row);
  const i64 begin = (i64)lane * Config::kVector;
  constexpr i64 kStep = Config::kRowThreads * Config::kVector, kRest = kStep * Config::kHeld;
  Vector held[Config::kHeld];
#pragma unroll
  for (int i = 0; i < Config::kHeld; ++i) held[i] = at.load(begin + i * kStep);
  float scale;
  if constexpr (Config::kStatic) {
    scale = *p.scale;
  } else {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < Config::kHeld; ++i) most = max(most, largest(held[i]));
    for (i64 column = begin + kRest; column < p.k; column += kStep) most = max(most, largest(at.load(column)));
    scale = scale_of(row_max(most));
    if (lane == 0) p.scale[row] = canonical_nan(scale);
  }
  const Divisor by(scale);
#pragma unroll
  for (int i = 0; i < Config::kHeld; ++i) at.store(begin + i * kStep, quantized(held[i], by));
  for (i64 column = begin + kRest; column < p.k; column += kStep) at.store(column, quantized(at.load(column), by));
}
