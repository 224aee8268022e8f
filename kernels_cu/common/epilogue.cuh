// What becomes of a sum: alpha, bias, activation, a gate. Every kernel that ends in an epilogue has its Config derive
// from ProblemType, and these functions take that Config.
#pragma once
#include "common/element.cuh"
#include "common/strict_math.inc"

// Words of the host, by the numbers that it passes.
enum class EpilogueKind {
  IDENTITY = 0,
  BIAS = 1,
  BIAS_RELU = 2,
  BIAS_GELU = 3,
  BIAS_SILU = 4,
  BIAS_SWIGLU = 5,
  BIAS_GEGLU = 6
};

// The types of a problem, from the numbers in S24_ELEMENT, S24_OUT, S24_BIAS and S24_EPILOGUE.
template <int kElementCode, int kOutCode, int kBiasCode, int kEpilogueCode> struct ProblemType {
  static constexpr ElementKind kElement = ElementKind(kElementCode), kOut = ElementKind(kOutCode);
  static constexpr EpilogueKind kEpilogue = EpilogueKind(kEpilogueCode);
  // Rows of W alternate: kGateRows gates, then as many rows that they let through. Two of them make a result.
  static constexpr bool kGated = kEpilogue == EpilogueKind::BIAS_SWIGLU || kEpilogue == EpilogueKind::BIAS_GEGLU;
  static constexpr int kGateRows = 8, kRowsPerOutput = kGated ? 2 : 1;
  using In = Element<kElement>;
  using Out = Element<kOut>;
  using Bias = Element<ElementKind(kBiasCode)>;
};

// Activations ---------------------------------------------------------------------------------------

// Strict: float64 additions, multiplications and divisions in a fixed order, each rounded to nearest, no
// contraction. The host does the same steps, so the bits agree everywhere.
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

// None: of the row that a gate lets through.
struct NoMath {
  static __device__ float silu(float v) { return v; }
  static __device__ float gelu(float v) { return v; }
};

// Epilogues -----------------------------------------------------------------------------------------

// The bias of output `index`, where there is one: the caller asks, and takes 0 where there isn't.
template <class Config> __device__ __forceinline__ float bias_at(const void* bias, i64 index) {
  return Config::Bias::to_float(((const typename Config::Bias::Bits*)bias)[index]);
}

// v = alpha * acc, plus bias, then the activation; of a gated kind its gate's. NaN passes through every activation.
template <class Config, class Math> __device__ __forceinline__ float activated(float acc, float alpha, float bias) {
  constexpr EpilogueKind kKind = Config::kEpilogue;
  float v = __fmul_rn(alpha, acc);
  if constexpr (kKind != EpilogueKind::IDENTITY) v = __fadd_rn(v, bias);
  if constexpr (kKind == EpilogueKind::BIAS_RELU) v = v < 0.0f ? 0.0f : v;
  if constexpr (kKind == EpilogueKind::BIAS_GELU || kKind == EpilogueKind::BIAS_GEGLU) v = v == v ? Math::gelu(v) : v;
  if constexpr (kKind == EpilogueKind::BIAS_SILU || kKind == EpilogueKind::BIAS_SWIGLU) v = v == v ? Math::silu(v) : v;
  return v;
}

// The same with the one NaN, which conversions to 16 bits give by themselves.
template <class Config, class Math> __device__ __forceinline__ float epilogue(float acc, float alpha, float bias) {
  return canonical_nan(activated<Config, Math>(acc, alpha, bias));
}

// The same of a gated epilogue, of the two that make a result: the activated gate and what it lets through.
__device__ __forceinline__ float gated_epilogue(float gate, float up) { return canonical_nan(__fmul_rn(gate, up)); }

// The row of W behind a result; of a gated one its gate's, kGateRows before the other's.
template <class Config, class Index> __device__ __forceinline__ Index row_of_output(Index result) {
  return Config::kGated ? result + (result & -Config::kGateRows) : result;
}

// And back, from that row: a gate's is 16 * i + j with j < kGateRows, its result 8 * i + j.
template <class Config, class Index> __device__ __forceinline__ Index output_of_row(Index row) {
  return Config::kGated ? (row + row % Config::kGateRows) / 2 : row;
}
