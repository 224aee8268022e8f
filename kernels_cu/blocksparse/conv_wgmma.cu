// The parts of a filter's gradient, which blocks_wgmma.cu leaves in float32, added in order. The convolution itself is
// that kernel with S24_IMAGES.
#include "common/epilogue.cuh"

struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {};

struct ConvWgmmaParams {
  const float* sums;  // [parts, cells]
  void* out;          // [cells]
  i64 cells;
  u32 parts;
  float alpha;
};
static_assert(matches_host<ConvWgmmaParams>(), "the host has another ConvWgmmaParams");

// Cells are a multiple of four.
extern "C" __global__ void __launch_bounds__(256) add_parts(const __grid_constant__ ConvWgmmaParams p) {
  using Out = Config::Out;
  const i64 step = (i64)gridDim.x * blockDim.x * 4;
  for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < p.cells; at += step) {
    float4 sum = *(const float4*)(p.sums + at);
    for (u32 part = 1; part < p.parts; ++part) {
      const float4 one = *(const float4*)(p.sums + part * p.cells + at);
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ((Out::Bits*)p.out)[at + i] = Out::from_float(canonical_nan(activated<Config, FastMath>(v[i], p.alpha, 0.0f)));
  }
}
