// The strict GEMM: each result has one float32 accumulator, which starts at +0, and one fma for each kept position of W
// in increasing order of the reduction; subnormals are kept. These rules fix every bit, so the choice of a tile changes
// none. Canonical weights are inflated on their way into shared memory.
//
//   forward  result[n, m] = sum over kept k of x[n, k] * W[m, k]     (outputs m, reduction k)
//   dgrad    result[n, k] = sum over kept m of dy[n, m] * W[m, k]    (outputs k, reduction m)
//
// With kGrouped, tokens come in groups, each multiplied by a weight of its own. A CTA finds the group of its tile.
//
// The source is x or dy. A gated epilogue makes one result of two outputs of forward, so the result is half as wide.
//
// A pruned position must not be an fma with 0, because 0 * Inf is NaN and -0 + 0 is +0. Shared memory holds a marker
// there, and the fmas with a marked weight are predicated off.
//
//   role         threads                     what it does
//   Mainloop     all threads of a CTA        loads the next step's weights and sources into registers, inflates them,
//                                            stores them to shared memory; kThreadOutputs x kThreadTokens fmas a thread
//
//   barriers     one __syncthreads per step, two stages of shared memory
//   registers    64, 32 or 4 accumulators, the loads of a step, one column of weights and sources
//
//   load     | step 1       | step 2       | ..        global -> registers, overlapped with the fmas
//   fma      | step 0       | step 1       | ..        from one stage
//   store    |        step 1|        step 2| ..        registers -> the other stage; then __syncthreads
#include "common/epilogue.cuh"
#include "gemm/batches.cuh"
#include "gemm/params/inflate_strict.cuh"
#include "gemm/token_groups.cuh"

// A tile of outputs x tokens, the outputs and tokens of one thread, and the depth of a step along the reduction.
template <int kOutputs_, int kTokens_, int kThreadOutputs_, int kThreadTokens_, int kDepth_> struct Tile {
  static constexpr int kOutputs = kOutputs_, kTokens = kTokens_, kDepth = kDepth_;
  static constexpr int kThreadOutputs = kThreadOutputs_, kThreadTokens = kThreadTokens_;
  static constexpr int kLanesOut = kOutputs / kThreadOutputs, kLanesTok = kTokens / kThreadTokens;
  static constexpr int kThreads = kLanesOut * kLanesTok;
  static constexpr int kWeightUnits = kOutputs * kDepth / 8, kSourceUnits = kTokens * kDepth / 8;
  static constexpr int kWeightLoads = (kWeightUnits + kThreads - 1) / kThreads;
  static constexpr int kSourceLoads = (kSourceUnits + kThreads - 1) / kThreads;
};

// The tiles by the backend's numbers. kCtasPerSm is the least number of CTAs per SM; 0 sets no bound on registers.
template <int kNumber> struct ChosenTile;
template <> struct ChosenTile<0> : Tile<128, 128, 8, 8, 16> {
  static constexpr int kCtasPerSm = 2;
};
template <> struct ChosenTile<1> : Tile<128, 32, 8, 4, 16> {
  static constexpr int kCtasPerSm = 4;
};
template <> struct ChosenTile<2> : Tile<32, 16, 2, 2, 64> {
  static constexpr int kCtasPerSm = 0;
};

// The compile-time configuration. Only this struct reads the macros.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE, S24_C, S24_RELU_THRESHOLD,
                            S24_RELU_UPPER_BOUND, S24_X_ELEMENT> {
  typedef ChosenTile<S24_TILE> Tile;
  static constexpr bool kDgrad = S24_DGRAD;
  static constexpr bool kGrouped = S24_GROUPED;  // groups of tokens have weights of their own
  static constexpr bool kBatched = S24_BATCHED;  // several products of one size
  // With groups, two CTAs of the largest tile would not have enough registers.
  static constexpr int kCtasPerSm = kGrouped && S24_TILE == 0 ? 1 : Tile::kCtasPerSm;
  static constexpr u32 kPruned = 0xffffffffu;  // a NaN that no kept value has, since kept NaNs are made canonical
  static_assert(!kGated || !kDgrad, "only forward has gated epilogues");
  static constexpr int kScaleX = S24_SCALE_X, kScaleW = S24_SCALE_W;  // 0: none, 1: one per tensor, 2: one per row
};
using In = Config::In;
using X = Config::X;
using Out = Config::Out;
using WorkBatch = Batch<Config::kBatched>;

// Eight consecutive elements of the source.
struct SourceUnit {
  X::Bits v[8];
};
// The four kept values and the metadata of eight consecutive cells of W.
struct WeightUnit {
  In::Bits v[4];
  u16 codes;
};

template <class T, int kBytes> __device__ __forceinline__ void copy_aligned(T* to, const T* from) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) ((uint4*)to)[i] = __ldg((const uint4*)from + i);
  } else if constexpr (kBytes == 4) {
    *(u32*)to = __ldg((const u32*)from);
  } else {
    *(uint2*)to = __ldg((const uint2*)from);
  }
}

// Multiplies one weight with all tokens of a thread. The fmas are predicated on the weight being kept, four at a time.
template <int kTokens>
__device__ __forceinline__ void fma_kept(float (&acc)[kTokens], float w, const float (&x)[kTokens]) {
  if constexpr (kTokens % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kTokens; i += 4)
      asm("{ .reg .pred kept; setp.ne.u32 kept, %4, 0xffffffff;\n\t"
          "@kept fma.rn.f32 %0, %5, %6, %0;\n\t@kept fma.rn.f32 %1, %5, %7, %1;\n\t"
          "@kept fma.rn.f32 %2, %5, %8, %2;\n\t@kept fma.rn.f32 %3, %5, %9, %3; }"
          : "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
          : "r"(__float_as_uint(w)), "f"(w), "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3]));
  } else {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      asm("{ .reg .pred kept; setp.ne.u32 kept, %1, 0xffffffff;\n\t@kept fma.rn.f32 %0, %2, %3, %0; }"
          : "+f"(acc[i])
          : "r"(__float_as_uint(w)), "f"(w), "f"(x[i]));
  }
}

template <class T> struct Mainloop : WorkBatch {
  float* weights;  // [2][depth][outputs]
  float* sources;  // [2][depth][tokens]
  const StrictParams& p;
  i64 out0, tok0;
  WeightUnit w[T::kWeightLoads];
  SourceUnit s[T::kSourceLoads];

  // The row of W and the first column of unit u of the weight tile.
  __device__ __forceinline__ void weight_cell(int u, i64 step, i64& row, i64& column) const {
    if constexpr (Config::kDgrad) {
      row = step + u / (T::kOutputs / 8);
      column = out0 + u % (T::kOutputs / 8) * 8;
    } else {
      row = out0 + u % T::kOutputs;
      column = step + u / T::kOutputs * 8;
    }
  }

  __device__ __forceinline__ void load(i64 step) {
#pragma unroll
    for (int i = 0; i < T::kWeightLoads; ++i) {
      const int u = threadIdx.x + i * T::kThreads;
      i64 row, column;
      weight_cell(u, step, row, column);
      w[i].codes = 0xffff;  // cells outside of W count as pruned
      if (u < T::kWeightUnits && row < p.m && column < p.k) {
        row += this->offset(p.batches.weight_rows);
        copy_aligned<In::Bits, 4 * sizeof(In::Bits)>(w[i].v, (const In::Bits*)p.values + (row * p.k + column) / 2);
        w[i].codes = __ldg(p.metadata + (row * p.k + column) / 8);
      }
    }
    const i64 reduction = Config::kDgrad ? p.m : p.k;
#pragma unroll
    for (int i = 0; i < T::kSourceLoads; ++i) {
      const int u = threadIdx.x + i * T::kThreads;
      const i64 token = tok0 + u % T::kTokens, at = step + u / T::kTokens * 8;
      const X::Bits* from = (const X::Bits*)p.x + token * p.x_stride + at + this->offset(p.batches.x);
      const bool inside = u < T::kSourceUnits && token < p.n;
      if (inside && at + 8 <= reduction && ((u64)from & 15) == 0) {
        copy_aligned<X::Bits, 8 * sizeof(X::Bits)>(s[i].v, from);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) s[i].v[j] = inside && at + j < reduction ? from[j] : (X::Bits)0;
      }
    }
  }

  __device__ __forceinline__ void store(int stage) {
    float* const wt = weights + stage * T::kDepth * T::kOutputs;
    float* const st = sources + stage * T::kDepth * T::kTokens;
#pragma unroll
    for (int i = 0; i < T::kWeightLoads; ++i) {
      const int u = threadIdx.x + i * T::kThreads;
      if (u >= T::kWeightUnits) continue;
      float cell[8];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const u32 code = w[i].codes >> (8 * g) & 0xff;
        const float first = canonical_nan(In::to_float(w[i].v[2 * g]));
        const float second = canonical_nan(In::to_float(w[i].v[2 * g + 1]));
        const float pruned = __uint_as_float(Config::kPruned);
        const u32 a = code == 0xff ? 4 : code & 3, b = code == 0xff ? 4 : code >> 2;
#pragma unroll
        for (int c = 0; c < 4; ++c) cell[4 * g + c] = a == c ? first : b == c ? second : pruned;
      }
      if constexpr (Config::kDgrad) {
        float4* to = (float4*)(wt + u / (T::kOutputs / 8) * T::kOutputs + u % (T::kOutputs / 8) * 8);
        to[0] = make_float4(cell[0], cell[1], cell[2], cell[3]);
        to[1] = make_float4(cell[4], cell[5], cell[6], cell[7]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) wt[(u / T::kOutputs * 8 + j) * T::kOutputs + u % T::kOutputs] = cell[j];
      }
    }
#pragma unroll
    for (int i = 0; i < T::kSourceLoads; ++i) {
      const int u = threadIdx.x + i * T::kThreads;
      if (u >= T::kSourceUnits) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) st[(u / T::kTokens * 8 + j) * T::kTokens + u % T::kTokens] = X::to_float(s[i].v[j]);
    }
  }
};

// The index in the tile of a thread's i-th output (or token). Runs of up to four, one vector load each, are spread over
// the tile.
template <int kCount, int kLanes> __device__ __forceinline__ int spread(int lane, int i) {
  constexpr int kRun = kCount < 4 ? kCount : 4;
  return i / kRun * (kLanes * kRun) + lane * kRun + i % kRun;
}

template <int kCount, int kLanes>
__device__ __forceinline__ void read_runs(float (&to)[kCount], const float* from, int lane) {
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *(const float4*)(from + spread<kCount, kLanes>(lane, i));
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = from[spread<kCount, kLanes>(lane, i)];
  }
}

// A sum times the scales of its token and its row of W. Outside of Y there are no scales.
__device__ __forceinline__ float scaled_sum(float sum, const StrictParams& p, WorkBatch batch, i64 token, i64 row) {
  if constexpr (Config::kScaleX > 0)
    sum = token < p.n ? __fmul_rn(sum, scale_at<Config::kScaleX>(p.scale_x + batch.offset(p.batches.scale_x), token))
                      : sum;
  if constexpr (Config::kScaleW > 0)
    sum = row < p.m ? __fmul_rn(sum, scale_at<Config::kScaleW>(p.scale_w + batch.offset(p.batches.scale_w), row)) : sum;
  return sum;
}

// Stores the results of a gated epilogue. Another thread of the warp has the gate's other factor, kGateRows outputs
// further.
template <class T> __device__ __forceinline__ void store_gated(const float (&acc)[T::kThreadOutputs][T::kThreadTokens],
                                                               i64 out0, i64 tok0, WorkBatch batch,
                                                               const StrictParams& p, ResultScale<Config>& fp8) {
  constexpr int kRun = T::kThreadOutputs < 4 ? T::kThreadOutputs : 4, kApart = Config::kGateRows / kRun;
  static_assert(32 % T::kLanesOut == 0 && T::kLanesOut % (2 * kApart) == 0, "one warp has a gate and its other factor");
  const int lane_out = threadIdx.x % T::kLanesOut, lane_tok = threadIdx.x / T::kLanesOut;
#pragma unroll
  for (int o = 0; o < T::kThreadOutputs; ++o) {
    const i64 output = out0 + spread<T::kThreadOutputs, T::kLanesOut>(lane_out, o);
    const float bias = p.bias && output < p.m ? bias_at<Config>(p.bias, output + batch.offset(p.batches.bias)) : 0.0f;
#pragma unroll
    for (int t = 0; t < T::kThreadTokens; ++t) {
      const i64 token = tok0 + spread<T::kThreadTokens, T::kLanesTok>(lane_tok, t);
      const float sum = scaled_sum(acc[o][t], p, batch, token, output);
      const float up = __shfl_down_sync(0xffffffffu, activated<Config, NoMath>(sum, p.alpha, bias), kApart);
      if (lane_out % (2 * kApart) >= kApart || token >= p.n || output >= p.m) continue;
      const i64 result = output_of_row<Config>(output);
      ((Out::Bits*)p.y)[token * p.y_stride + result + batch.offset(p.batches.y)] =
          Out::from_float(fp8.scaled(gated_epilogue(activated<Config, StrictMath>(sum, p.alpha, bias), up), true));
    }
  }
}

// beta * C of a result; 0 without C.
__device__ __forceinline__ float addend_of(const StrictParams& p, WorkBatch batch, i64 token, i64 output) {
  if constexpr (Config::kHasC)
    return __fmul_rn(p.beta, c_at<Config>(p.c, token * p.c_stride + output + batch.offset(p.batches.c)));
  else return 0.0f;
}

template <class T> __device__ __forceinline__ void compute_tile(const StrictParams& p, i64 first_token) {
  __shared__ __align__(16) float weights[2 * T::kDepth * T::kOutputs];
  __shared__ __align__(16) float sources[2 * T::kDepth * T::kTokens];
  const i64 outputs = Config::kDgrad ? p.k : p.m, reduction = Config::kDgrad ? p.m : p.k;
  const i64 out_tiles = (outputs + T::kOutputs - 1) / T::kOutputs;
  u32 tile = blockIdx.x;
  WorkBatch batch;
  batch.take(p.batches, tile);
  const i64 out0 = tile % out_tiles * T::kOutputs;
  const i64 tok0 = Config::kGrouped ? first_token : tile / out_tiles * T::kTokens;
  const int lane_out = threadIdx.x % T::kLanesOut, lane_tok = threadIdx.x / T::kLanesOut;

  float acc[T::kThreadOutputs][T::kThreadTokens];
#pragma unroll
  for (int o = 0; o < T::kThreadOutputs; ++o)
#pragma unroll
    for (int t = 0; t < T::kThreadTokens; ++t) acc[o][t] = 0.0f;

  Mainloop<T> loop{batch, weights, sources, p, out0, tok0};
  if (reduction > 0) {
    loop.load(0);
    loop.store(0);
  }
  __syncthreads();
  int stage = 0;
  for (i64 step = 0; step < reduction; step += T::kDepth) {
    const bool more = step + T::kDepth < reduction;
    if (more) loop.load(step + T::kDepth);
#pragma unroll
    for (int d = 0; d < T::kDepth; ++d) {
      float w[T::kThreadOutputs], x[T::kThreadTokens];
      read_runs<T::kThreadOutputs, T::kLanesOut>(w, weights + (stage * T::kDepth + d) * T::kOutputs, lane_out);
      read_runs<T::kThreadTokens, T::kLanesTok>(x, sources + (stage * T::kDepth + d) * T::kTokens, lane_tok);
#pragma unroll
      for (int o = 0; o < T::kThreadOutputs; ++o) fma_kept(acc[o], w[o], x);
    }
    stage ^= 1;
    if (more) loop.store(stage);
    __syncthreads();
  }

  ResultScale<Config> fp8;
  fp8.begin_scale(p.scale_y);
  if constexpr (Config::kGated) {
    store_gated<T>(acc, out0, tok0, batch, p, fp8);
  } else {
#pragma unroll
    for (int t = 0; t < T::kThreadTokens; ++t) {
      const i64 token = tok0 + spread<T::kThreadTokens, T::kLanesTok>(lane_tok, t);
      if (token >= p.n) continue;
#pragma unroll
      for (int o = 0; o < T::kThreadOutputs; ++o) {
        const i64 output = out0 + spread<T::kThreadOutputs, T::kLanesOut>(lane_out, o);
        if (output >= outputs) continue;
        const float bias = p.bias ? bias_at<Config>(p.bias, output + batch.offset(p.batches.bias)) : 0.0f;
        const float v = epilogue<Config, StrictMath>(scaled_sum(acc[o][t], p, batch, token, output), p.alpha, bias,
                                                     addend_of(p, batch, token, output));
        ((Out::Bits*)p.y)[token * p.y_stride + output + batch.offset(p.batches.y)] =
            Out::from_float(fp8.scaled(v, true));
      }
    }
  }
  fp8.raise(p.amax);
}

// Finds the group that has the slot-th tile of tokens, and makes `p` the product of this group. Returns the tile's
// first token, or -1 behind the last tile. Every warp does the same.
template <class T> __device__ __forceinline__ i64 go_to_group(StrictParams& p, i64 slot) {
  const u32 lane = threadIdx.x % 32;
  for (u32 first = 0; first < p.groups; first += 32) {
    TokenRange range{0, 0};
    if (first + lane < p.groups) range = token_range(p.group_tokens, p.group_places, p.n, first + lane);
    i64 before = (range.end - range.begin + T::kTokens - 1) / T::kTokens;  // tiles up to this lane's group
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const i64 below = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += below;
    }
    const u32 found = __ballot_sync(~0u, slot < before);
    if (found == 0) {
      slot -= __shfl_sync(~0u, before, 31);
      continue;
    }
    const int at = __ffs(found) - 1;
    const i64 begin = __shfl_sync(~0u, range.begin, at), earlier = __shfl_sync(~0u, before, at > 0 ? at - 1 : 0);
    const i64 row = (first + at) * p.m;
    p.n = __shfl_sync(~0u, range.end, at);
    p.values = (const In::Bits*)p.values + row * p.k / 2;
    p.metadata += row * p.k / 8;
    if (p.bias) p.bias = (const Config::Bias::Bits*)p.bias + row;
    if constexpr (Config::kScaleW == 2) p.scale_w += row;
    return begin + (slot - (at > 0 ? earlier : 0)) * T::kTokens;
  }
  return -1;
}

template <class T> __device__ __forceinline__ void compute_groups(const StrictParams& p) {
  const i64 outputs = Config::kDgrad ? p.k : p.m, out_tiles = (outputs + T::kOutputs - 1) / T::kOutputs;
  // Invalid offsets can give more tiles than there are slots.
  for (i64 slot = blockIdx.x / out_tiles;; slot += gridDim.x / out_tiles) {
    StrictParams group = p;
    const i64 token = go_to_group<T>(group, slot);
    if (token < 0) return;
    compute_tile<T>(group, token);
  }
}

extern "C" __global__ void __launch_bounds__(Config::Tile::kThreads, Config::kCtasPerSm)
    gemm_strict(const __grid_constant__ StrictParams p) {
  if constexpr (Config::kGrouped) compute_groups<Config::Tile>(p);
  else compute_tile<Config::Tile>(p, 0);
}
