// Y[n, m] = epilogue(acc[n, m] + beta * C[n, m]) for products whose library can't fuse the epilogue. acc holds alpha *
// product; a null acc stands for zeros (an empty reduction). Memory bound.
//
// Y's lines are its rows, or its columns, which have one bias each; acc and C lie as Y does.
//
//   role        who            what
//   every warp  256 threads    4 results of a line a thread, 256 apart; CTAs take chunks of 1024 one by one
//
//   no barriers, no shared memory; few registers
//
//   thread   | load acc, bias x 4 | epilogue | store x 4 | next chunk ..
#include "common/epilogue.cuh"
#include "gemm/params/inflate_cublas.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE, S24_C, S24_RELU_THRESHOLD,
                            S24_RELU_UPPER_BOUND, S24_X_ELEMENT> {
  static constexpr int kThreads = 256;
  static constexpr int kPerThread = 4;
  static constexpr bool kColumns = S24_COLUMNS;  // Y is column-major
};

extern "C" __global__ void __launch_bounds__(Config::kThreads) epilogue_rows(const __grid_constant__ EpilogueParams p) {
  using Out = Config::Out;
  const i64 chunk = Config::kThreads * Config::kPerThread;
  const i64 chunks = (p.inner + chunk - 1) / chunk;
  for (i64 tile = blockIdx.x; tile < p.outer * chunks; tile += gridDim.x) {
    const i64 line = tile / chunks, start = tile % chunks * chunk + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Config::kPerThread; ++i) {
      const i64 at = start + i * Config::kThreads;
      if (at >= p.inner) continue;
      const float acc = p.accumulators ? p.accumulators[line * p.inner + at] : 0.0f;
      const float bias = p.bias ? bias_at<Config>(p.bias, Config::kColumns ? line : at) : 0.0f;
      float addend = 0.0f;
      if constexpr (Config::kHasC) addend = __fmul_rn(p.beta, c_at<Config>(p.c, line * p.c_stride + at));
      ((Out::Bits*)p.out)[line * p.out_stride + at] =
          Out::from_float(epilogue<Config, FastMath>(acc, 1.0f, bias, addend));
    }
  }
}
