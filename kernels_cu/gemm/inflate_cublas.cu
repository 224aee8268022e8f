// Y[n,m] = epilogue(acc[n,m]) for products whose library can't fuse ours. acc already holds alpha * product;
// a null acc stands for zeros (an empty reduction).
#include "common/common.cuh"

struct EpilogueParams {
  const float* acc;  // [N, M] contiguous, or null
  const void* bias;  // [M], or null
  void* out;         // [N, M], row stride out_stride
  i64 n, m, out_stride;
};

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

extern "C" __global__ void __launch_bounds__(kThreads) epilogue_rows(const __grid_constant__ EpilogueParams p) {
  typedef Element<S24_OUT> Out;
  typedef Element<S24_BIAS> Bias;
  const i64 chunk = kThreads * kPerThread;
  const i64 chunks = (p.m + chunk - 1) / chunk;
  for (i64 tile = blockIdx.x; tile < p.n * chunks; tile += gridDim.x) {
    const i64 row = tile / chunks, start = tile % chunks * chunk + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const i64 column = start + i * kThreads;
      if (column >= p.m) continue;
      const float acc = p.acc ? p.acc[row * p.m + column] : 0.0f;
      const float bias = p.bias ? Bias::to_float(((const Bias::Bits*)p.bias)[column]) : 0.0f;
      ((Out::Bits*)p.out)[row * p.out_stride + column] = Out::from_float(epilogue<FastMath>(acc, 1.0f, bias));
    }
  }
}
