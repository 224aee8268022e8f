// The epilogue: alpha, C, bias, activation, gate. The Config of every kernel with an epilogue derives from ProblemType,
// and these functions take that Config.
#pragma once
#include "common/element.cuh"
#include "common/strict_math.inc"

// The numbers by which the host passes an epilogue.
enum class EpilogueKind {
  IDENTITY = 0,
  BIAS = 1,
  BIAS_RELU = 2,
  BIAS_GELU = 3,
  BIAS_SILU = 4,
  BIAS_SWIGLU = 5,
  BIAS_GEGLU = 6,
  BIAS_GELU_TANH = 7,
  BIAS_GEGLU_TANH = 8,
  BIAS_RELU2 = 9
};

// The types of a problem, from the numbers in S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE. Products also have S24_C,
// which is 0 without C and else the number of C's element plus 1, the bits of relu's bounds, S24_RELU_THRESHOLD and
// S24_RELU_UPPER_BOUND, by default 0 and infinity, and X's element, S24_X_ELEMENT, by default W's.
constexpr u32 kInfinityBits = 0x7f800000u;
template <int kElementCode, int kOutCode, int kBiasCode, int kEpilogueCode, int kCCode = 0, u32 kThresholdBits = 0,
          u32 kUpperBoundBits = kInfinityBits, int kXElementCode = kElementCode>
struct ProblemType {
  static constexpr ElementKind kElement = ElementKind(kElementCode), kXElement = ElementKind(kXElementCode),
                               kOut = ElementKind(kOutCode);
  static constexpr EpilogueKind kEpilogue = EpilogueKind(kEpilogueCode);
  // Rows of W alternate: kGateRows gate rows, then as many rows whose results the gates multiply. Two rows make a
  // result.
  static constexpr bool kGated = kEpilogue == EpilogueKind::BIAS_SWIGLU || kEpilogue == EpilogueKind::BIAS_GEGLU ||
                                 kEpilogue == EpilogueKind::BIAS_GEGLU_TANH;
  static constexpr int kGateRows = 8, kRowsPerOutput = kGated ? 2 : 1;
  using In = Element<kElement>;
  using X = Element<kXElement>;
  using Out = Element<kOut>;
  using Bias = Element<ElementKind(kBiasCode)>;
  static constexpr bool kHasC = kCCode > 0;
  static_assert(!kGated || !kHasC, "C is added to results of one sum");
  using C = Element<ElementKind(kHasC ? kCCode - 1 : 0)>;
  static constexpr u32 kReluThreshold = kThresholdBits, kReluUpperBound = kUpperBoundBits;
  static constexpr bool kBounded = kThresholdBits != 0 || kUpperBoundBits != kInfinityBits;
};

// Activations ---------------------------------------------------------------------------------------

// Strict activations are float64 additions, multiplications and divisions in a fixed order, each rounded to nearest,
// without contraction. The host does the same steps, so the bits agree everywhere.
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
    if (v != v) return v;
    double d = v, bounded = v > 120.0f ? 120.0 : d;
    return __double2float_rn(__ddiv_rn(d, __dadd_rn(1.0, exponential(-bounded))));
  }

  static __device__ __noinline__ float gelu(float v) {
    if (v < -15.0f) return -0.0f;
    if (!(v <= 15.0f)) return v;
    double d = v, tail = __dmul_rn(0.5, erfc(__dmul_rn(fabs(d), S24_SQRT_HALF)));
    return __double2float_rn(__dmul_rn(d, v < 0.0f ? tail : __dadd_rn(1.0, -tail)));
  }

  // v / (1 + exp(-2u)), with u = sqrt(2 / pi) * (v + 0.044715 v^3).
  static __device__ __noinline__ float gelu_tanh(float v) {
    if (v < -11.0f) return -0.0f;
    if (!(v <= 11.0f)) return v;
    double d = v, slope = __dadd_rn(S24_GELU_TANH_LINEAR, __dmul_rn(S24_GELU_TANH_CUBIC, __dmul_rn(d, d)));
    return __double2float_rn(__ddiv_rn(d, __dadd_rn(1.0, exponential(-__dmul_rn(d, slope)))));
  }
};

// Fast activations use float32. CUDA's division and expf would take several times the instructions of `sigmoid`, while
// the tensor cores wait.
struct FastMath {
  // 1 / (1 + exp(-z)). The exponent of 2 is rounded, so the relative error grows with |z| where exp(-z) counts. Where
  // the result would be subnormal, or exp(-z) overflows, it is 0.
  static __device__ __forceinline__ float sigmoid(float z) {
    const float e = exp2_approximate(__fmul_rn(z, -(float)S24_LOG2E));
    return reciprocal_approximate(__fadd_rn(1.0f, e));
  }

  // At the least value that an activation computes with, sigmoid is 0 and the result -0, as below it. A comparison of
  // the argument would become a branch, and no two elements would be computed at once.
  static __device__ __forceinline__ float silu(float v) {
    v = at_least(v, -120.0f);
    return __fmul_rn(v, sigmoid(v));
  }

  // max(v, 0) - z * Phi(-z), with z = |v|. From VANISHES on, the tail is less than half of the least subnormal. Nowhere
  // does the root of exp(-z^2 / 2) become 0.
  static __device__ __forceinline__ float gelu(float v) {
    const float numerator[] = {S24_GELU_NUMERATOR}, denominator[] = {S24_GELU_DENOMINATOR};
    const float z = fminf(fabsf(v), (float)S24_GELU_VANISHES);
    const float root = exp2_approximate(__fmul_rn(-z, __fmul_rn(z, (float)(S24_LOG2E / 4))));
    const float size = __fmul_rn(z, polynomial(numerator, z));
    const float inverse = reciprocal_approximate(polynomial(denominator, z));
    return __fmaf_rn(-__fmul_rn(__fmul_rn(size, inverse), root), root, at_least(v, -0.0f));
  }

  static __device__ __forceinline__ float gelu_tanh(float v) {
    v = at_least(v, -11.0f);
    const float slope = __fmaf_rn((float)S24_GELU_TANH_CUBIC, __fmul_rn(v, v), (float)S24_GELU_TANH_LINEAR);
    return __fmul_rn(v, sigmoid(__fmul_rn(v, slope)));
  }

 private:
  template <int kCount> static __device__ __forceinline__ float polynomial(const float (&c)[kCount], float x) {
    float p = c[kCount - 1];
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) p = __fmaf_rn(p, x, c[i]);
    return p;
  }
  // The greater of the two, of zeros +0; NaN stays NaN.
  static __device__ __forceinline__ float at_least(float v, float least) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(v), "f"(least));
    return y;
  }
  // Within a relative 2^-22 of 2^x, and of 1 / x for normal x and 1 / x (PTX ISA, ex2.approx and rcp.approx). Subnormal
  // powers are 0.
  static __device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

// No activation, for the row that a gate multiplies.
struct NoMath {
  static __device__ float silu(float v) { return v; }
  static __device__ float gelu(float v) { return v; }
  static __device__ float gelu_tanh(float v) { return v; }
};

// Epilogues -----------------------------------------------------------------------------------------

// The bias of row `index` of W. A caller without a bias takes 0 instead.
template <class Config> __device__ __forceinline__ float bias_at(const void* bias, i64 index) {
  return Config::Bias::to_float(((const typename Config::Bias::Bits*)bias)[index]);
}

// The element of C at `index`.
template <class Config> __device__ __forceinline__ float c_at(const void* c, i64 index) {
  return Config::C::to_float(((const typename Config::C::Bits*)c)[index]);
}

// A scale of X or W. kKind is 0 where there are none, 1 for one per tensor, 2 for one per row.
template <int kKind> __device__ __forceinline__ float scale_at(const float* scales, i64 index) {
  return kKind == 0 ? 1.0f : scales[kKind == 1 ? 0 : index];
}

// alpha * acc + addend + bias. The addend is beta * C, rounded.
template <class Config>
__device__ __forceinline__ float before_activation(float acc, float alpha, float bias, float addend = 0.0f) {
  float v = __fmul_rn(alpha, acc);
  if constexpr (Config::kHasC) v = __fadd_rn(v, addend);
  if constexpr (Config::kEpilogue != EpilogueKind::IDENTITY) v = __fadd_rn(v, bias);
  return v;
}

// The activation, for a gated epilogue the gate's. NaN passes through every activation.
template <class Config, class Math> __device__ __forceinline__ float activation(float v) {
  constexpr EpilogueKind kKind = Config::kEpilogue;
  if constexpr (kKind == EpilogueKind::BIAS_RELU && Config::kBounded) {
    const float most = __uint_as_float(Config::kReluUpperBound);
    v = v <= __uint_as_float(Config::kReluThreshold) ? 0.0f : v > most ? most : v;
  } else if constexpr (kKind == EpilogueKind::BIAS_RELU || kKind == EpilogueKind::BIAS_RELU2) {
    v = v < 0.0f ? 0.0f : v;
  }
  if constexpr (kKind == EpilogueKind::BIAS_RELU2) v = __fmul_rn(v, v);
  if constexpr (kKind == EpilogueKind::BIAS_GELU || kKind == EpilogueKind::BIAS_GEGLU) v = Math::gelu(v);
  if constexpr (kKind == EpilogueKind::BIAS_GELU_TANH || kKind == EpilogueKind::BIAS_GEGLU_TANH) v = Math::gelu_tanh(v);
  if constexpr (kKind == EpilogueKind::BIAS_SILU || kKind == EpilogueKind::BIAS_SWIGLU) v = Math::silu(v);
  return v;
}

template <class Config, class Math>
__device__ __forceinline__ float activated(float acc, float alpha, float bias, float addend = 0.0f) {
  return activation<Config, Math>(before_activation<Config>(acc, alpha, bias, addend));
}

// Activates the first kActivated values of each row.
template <class Config, int kActivated, int kRows> __device__ __forceinline__ void activate(float (&v)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows * kActivated; ++i) {
    float& value = v[i / kActivated][i % kActivated];
    value = activation<Config, FastMath>(value);
  }
}

// `activated` with canonical NaNs. Kernels that convert to 16 bits can omit this: the conversion does it.
template <class Config, class Math>
__device__ __forceinline__ float epilogue(float acc, float alpha, float bias, float addend = 0.0f) {
  return canonical_nan(activated<Config, Math>(acc, alpha, bias, addend));
}

// The result of a gated epilogue: the activated gate times the other factor.
__device__ __forceinline__ float gated_epilogue(float gate, float up) { return canonical_nan(__fmul_rn(gate, up)); }

// A thread's scale of fp8 results, and the largest magnitudes of those that it has made of two rows of W, before the
// scale. Other results have neither.
template <class Config, bool kFp8 = is_fp8(Config::kOut)> struct ResultScale {
  __device__ __forceinline__ void begin_scale(const float*) {}
  __device__ __forceinline__ float scaled(float v, bool, int = 0) { return v; }
  __device__ __forceinline__ void raise(int*, bool = true, bool = false) {}
};
template <class Config> struct ResultScale<Config, true> {
  float scale, most[2];

  // A null pointer stands for the scale 1.
  __device__ __forceinline__ void begin_scale(const float* scale_y) {
    scale = scale_y ? *scale_y : 1.0f;
    most[0] = most[1] = 0.0f;
  }

  // The scaled result of a row. Only one `inside` of Y counts as made.
  __device__ __forceinline__ float scaled(float v, bool inside, int row = 0) {
    asm("{\n\t.reg .pred p;\n\t.reg .f32 size;\n\tsetp.ne.b32 p, %2, 0;\n\tabs.f32 size, %1;\n\t"
        "@p max.NaN.f32 %0, %0, size;\n\t}"
        : "+f"(most[row])
        : "f"(v), "r"((int)inside));
    return __fmul_rn(v, scale);
  }

  // Raises the maximum in memory, if there is one, to that of the warp, all of whose threads call it and say which of
  // their rows lie inside of W. As signed integers, the bits of magnitudes have the order of the magnitudes, and the
  // bits of NaN exceed all others.
  __device__ __forceinline__ void raise(int* amax, bool first = true, bool second = false) {
    if (!amax) return;
    int found = 0;
    if (first) found = __float_as_int(canonical_nan(most[0]));
    if (second) found = max(found, __float_as_int(canonical_nan(most[1])));
    found = __reduce_max_sync(~0u, found);
    if (threadIdx.x % 32 == 0) atomicMax(amax, found);
  }
};

// The row of W whose sum becomes a result. For a gated epilogue it is the gate's; the other factor's row is kGateRows
// further.
template <class Config, class Index> __device__ __forceinline__ Index row_of_output(Index result) {
  return Config::kGated ? result + (result & -Config::kGateRows) : result;
}

// The inverse of row_of_output. A gate row is 16 * i + j with j < kGateRows, and its result is 8 * i + j.
template <class Config, class Index> __device__ __forceinline__ Index output_of_row(Index row) {
  return Config::kGated ? (row + row % Config::kGateRows) / 2 : row;
}
