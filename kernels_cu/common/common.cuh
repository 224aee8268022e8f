// Elements, epilogues and small helpers that every kernel shares. No CUDA headers: NVRTC needs none.
//
// A kernel is compiled for one problem type through -D macros: S24_ELEMENT, S24_OUT, S24_BIAS (element codes
// below) and S24_EPILOGUE.
#pragma once
#include "common/strict_math.inc"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Codes of ElementKind and EpilogueKind; jit.py passes them.
#define S24_F32 0
#define S24_F16 1
#define S24_BF16 2
#define S24_S8 3
#define S24_FP8_E4M3 4
#define S24_I32 5
#define S24_IDENTITY 0
#define S24_BIAS_ADD 1
#define S24_BIAS_RELU 2
#define S24_BIAS_GELU 3
#define S24_BIAS_SILU 4

// Elements ------------------------------------------------------------------------------------------

// Storage type and exact conversions of an element. from_float rounds to nearest even.
template <int kElement> struct Element;

template <> struct Element<S24_F32> {
  typedef u32 Bits;
  static __device__ __forceinline__ float to_float(u32 b) { return __uint_as_float(b); }
  static __device__ __forceinline__ u32 from_float(float v) { return __float_as_uint(v); }
};

template <> struct Element<S24_F16> {
  typedef u16 Bits;
  static __device__ __forceinline__ float to_float(u16 b) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(b));
    return v;
  }
  static __device__ __forceinline__ u16 from_float(float v) {
    u16 b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
  }
  // Two of them, `low` in the lower half.
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 b;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(high), "f"(low));
    return b;
  }
};

template <> struct Element<S24_BF16> {
  typedef u16 Bits;
  static __device__ __forceinline__ float to_float(u16 b) { return __uint_as_float((u32)b << 16); }
  static __device__ __forceinline__ u16 from_float(float v) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
  }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 b;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(high), "f"(low));
    return b;
  }
};

// Integers: nearest even, saturating, NaN to 0.
template <> struct Element<S24_I32> {
  typedef u32 Bits;
  static __device__ __forceinline__ u32 from_float(float v) {
    int b;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(v));
    return (u32)b;
  }
};

template <> struct Element<S24_S8> {
  typedef u8 Bits;
  static __device__ __forceinline__ u8 from_float(float v) {
    int b;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(v));
    return (u8)max(-128, min(127, b));
  }
};

// One NaN for all: the pattern that the conversions above map to 0x7fff.
__device__ __forceinline__ float canonical_nan(float v) { return v == v ? v : __uint_as_float(0x7fffffffu); }

// Activations ---------------------------------------------------------------------------------------

// Strict: float64 additions, multiplications and divisions in a fixed order, each rounded to nearest, no
// contraction. backends/host.py does the same steps, so the bits agree everywhere.
struct StrictMath {
  template <int kCount> static __device__ double polynomial(const double (&c)[kCount], double x) {
    double p = c[kCount - 1];
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) p = __dadd_rn(__dmul_rn(p, x), c[i]);
    return p;
  }

  // y in [-1000, 1000]
  static __device__ double exponential(double y) {
    const double c[] = {S24_EXP_COEFFICIENTS};
    double n = floor(__dadd_rn(__dmul_rn(y, S24_LOG2E), 0.5));
    double r = __dadd_rn(__dadd_rn(y, -__dmul_rn(n, S24_LN2_HI)), -__dmul_rn(n, S24_LN2_LO));
    double scale = __longlong_as_double((i64)(1023 + (int)n) << 52);
    return __dmul_rn(polynomial(c, r), scale);
  }

  // z in [0, 11]
  static __device__ double erfc(double z) {
    const double c[] = {S24_ERFC_COEFFICIENTS};
    double t = __ddiv_rn(2.0, __dadd_rn(2.0, z));
    double u = __ddiv_rn(__dadd_rn(t, -S24_ERFC_MIDDLE), S24_ERFC_HALF);
    return __dmul_rn(t, exponential(__dadd_rn(polynomial(c, u), -__dmul_rn(z, z))));
  }

  // Below these limits the exact value rounds to -0 in float32; -inf goes the same way.
  static __device__ __noinline__ float silu(float v) {
    if (v < -120.0f) return -0.0f;
    double d = v, bounded = v > 120.0f ? 120.0 : d;
    return __double2float_rn(__ddiv_rn(d, __dadd_rn(1.0, exponential(-bounded))));
  }

  static __device__ __noinline__ float gelu(float v) {
    if (v < -15.0f) return -0.0f;
    if (v > 15.0f) return v;
    double d = v, tail = __dmul_rn(0.5, erfc(__dmul_rn(fabs(d), S24_SQRT_HALF)));
    return __double2float_rn(__dmul_rn(d, v < 0.0f ? tail : __dadd_rn(1.0, -tail)));
  }
};

// Fast: float32 with CUDA's math library, within a few units in the last place.
struct FastMath {
  static __device__ float silu(float v) { return v < -120.0f ? -0.0f : v / (1.0f + expf(-v)); }
  static __device__ __noinline__ float gelu(float v) {
    return v < -15.0f ? -0.0f : v * (0.5f * erfcf(-0.70710678f * v));
  }
};

// v = alpha * acc, plus bias, then the activation. NaN passes through every activation.
template <class Math> __device__ __forceinline__ float activated(float acc, float alpha, float bias) {
  float v = __fmul_rn(alpha, acc);
#if S24_EPILOGUE != S24_IDENTITY
  v = __fadd_rn(v, bias);
#endif
#if S24_EPILOGUE == S24_BIAS_RELU
  v = v < 0.0f ? 0.0f : v;
#elif S24_EPILOGUE == S24_BIAS_GELU
  v = v == v ? Math::gelu(v) : v;
#elif S24_EPILOGUE == S24_BIAS_SILU
  v = v == v ? Math::silu(v) : v;
#endif
  return v;
}
// The same with the one NaN, which conversions to 16 bits give by themselves.
template <class Math> __device__ __forceinline__ float epilogue(float acc, float alpha, float bias) {
  return canonical_nan(activated<Math>(acc, alpha, bias));
}
