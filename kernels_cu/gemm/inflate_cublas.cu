// Y[n, m] = epilogue(acc[n, m]) for products whose library can't fuse ours. acc already holds alpha * product; a null
// acc stands for zeros (an empty reduction). Memory bound.
//
//   role        who            what
//   every warp  256 threads    4 outputs of a row a thread, 256 apart; blocks take chunks of 1024 outputs in turn
//
//   no barriers, no shared memory; few registers
//
//   thread   | load acc, bias x 4 | epilogue | store x 4 | next chunk ..
#include "common/epilogue.cuh"

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kThreads = 256;
  static constexpr int kPerThread = 4;
};

struct EpilogueParams {
  const float* acc;  // [N, M] contiguous, or null
  const void* bias;  // [M], or null
  void* out;         // [N, M], row stride out_stride
  i64 n, m, out_stride;
};
static_assert(matches_host<EpilogueParams>(), "the host has another EpilogueParams");

extern "C" __global__ void __launch_bounds__(Config::kThreads) epilogue_rows(const __grid_constant__ EpilogueParams p) {
  using Out = Config::Out;
  const i64 chunk = Config::kThreads * Config::kPerThread;
  const i64 chunks = (p.m + chunk - 1) / chunk;
  for (i64 tile = blockIdx.x; tile < p.n * chunks; tile += gridDim.x) {
    const i64 row = tile / chunks, start = tile % chunks * chunk + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Config::kPerThread; ++i) {
      const i64 column = start + i * Config::kThreads;
      if (column >= p.m) continue;
      const float acc = p.acc ? p.acc[row * p.m + column] : 0.0f;
      const float bias = p.bias ? bias_at<Config>(p.bias, column) : 0.0f;
      ((Out::Bits*)p.out)[row * p.out_stride + column] = Out::from_float(epilogue<Config, FastMath>(acc, 1.0f, bias));
    }
  }
}
