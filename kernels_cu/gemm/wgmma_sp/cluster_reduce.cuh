// The role of gemm/wgmma_sp.cu that stores results where K is sliced along the cluster.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"
#ifdef S24_F32_SPLIT
#include "gemm/wgmma_sp/split_products.cuh"
#endif

// A warpgroup's sums to where the blocks of its cluster find them; `row_tile`: its first, in the block.
__device__ __forceinline__ void stage_accumulators(const AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 base,
                                                   u32 row_tile) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      if constexpr (Config::kYColumnMajor) {
        if (i % 2) continue;
        const u32 row = (row_tile + r) * Tile::kRows + 16 * warp + lane / 4 + i / 2 % 2 * 8;
        store_shared_x2(base + Buffer::offset(i / 4 * 8 + lane % 4 * 2, row), bits_of(sums[r][i]),
                        bits_of(sums[r][i + 1]));
        continue;
      }
      const u32 at = (i / 4 * 8 + lane % 4 * 2 + i % 2) * Buffer::kPitch + (row_tile + r) * Tile::kRows + 16 * warp +
                     lane / 4 + i / 2 % 2 * 8;
      store_shared(base + at * 4, bits_of(sums[r][i]));
    }
}

// The blocks of a cluster that sum slices of the same rows reduce_in_order them, each its m_rank of the results: four at a time of
// a line of Y, which is a token's row, or a column.
struct ClusterReduce {
  const WgmmaSpParams& p;
  WorkTile work;
  u32 from[Config::kSplitK];
  int output0;

  static constexpr bool kColumns = Config::kYColumnMajor;
  static constexpr int kMTileOutputs = Config::kMTiles * Config::kMTileOutputs;  // of a block
  static constexpr int kOutputQuads = (kMTileOutputs / 4 + Config::kSplitK - 1) / Config::kSplitK;
  static constexpr int kOwnOutputs =
      kColumns ? (kMTileOutputs + Config::kSplitK - 1) / Config::kSplitK : 4 * kOutputQuads;
  static constexpr int kQuads = kColumns ? Config::kTileN / 4 : kOutputQuads,  // of a line
      kCount = kQuads * (kColumns ? kOwnOutputs : Config::kTileN);
  static constexpr int kThreads = Config::kConsumerThreads;
  static constexpr int kLoads = (Config::kReallocRegisters || Config::kWarpgroups == 1 ? 12 : 4) / Config::kSplitK /
                                Config::kCtasPerSm / Config::kRowsPerOutput;
  static constexpr int kAhead = kLoads > 0 ? kLoads : 1;  // in flight, as far as there are registers

  __device__ __forceinline__ ClusterReduce(const WgmmaSpParams& p, WorkTile work, u32 base, u32 m_rank, u32 slice)
      : p(p), work(work), output0(slice * kOwnOutputs) {
#pragma unroll
    for (int s = 0; s < Config::kSplitK; ++s) from[s] = cluster_address(base, m_rank + Config::kClusterM * s);
  }

  // Of the i-th four results the first's token and output.
  __device__ __forceinline__ int token_of(int i) const { return kColumns ? i % kQuads * 4 : i / kQuads; }
  __device__ __forceinline__ int output_of(int i) const { return output0 + (kColumns ? i / kQuads : i % kQuads * 4); }

  // Nothing else is loaded: a load that no store waits for could still be on its way when its block has left.
  __device__ __forceinline__ bool inside(int token, int output) const {
    return work.token + token < p.n && output < kMTileOutputs &&
           work.row_tile * Config::kMTileOutputs + output < outputs_per_token(p);
  }

  // The j-th of four sums of a row of W.
  static __device__ __forceinline__ Accumulator reduced(u32 (&v)[Config::kSplitK][4], int j) {
    Accumulator slices[Config::kSplitK];
#pragma unroll
    for (int s = 0; s < Config::kSplitK; ++s) slices[s] = accumulator_of(v[s][j]);
    reduce_in_order(slices);
    return slices[0];
  }

  // What becomes of the sum of a row of W behind `output`: the first, or of a gated one the other.
  template <class Math>
  __device__ __forceinline__ float value(Accumulator total, float scale_x, i64 output, int apart = 0) const {
    const bool inside = kColumns || output < outputs_per_token(p);
    const i64 row = row_of_output<Config>(output) + apart;
    const float bias = p.bias && inside ? bias_at<Config>(p.bias, row) : 0.0f;
    const float scale_w = inside ? scale_at<Config::kScaleW>(p.scale_w, row) : 1.0f;
    return finished<Math>(total, p, scale_x, scale_w, bias);
  }

  __device__ __forceinline__ void store(u32 (&v)[Config::kRowsPerOutput][Config::kSplitK][4], int token,
                                        int output) const {
    const i64 n = work.token + token, m = work.row_tile * Config::kMTileOutputs + output;
    Config::Out::Bits out[4];
    const float scale_x = scale_at<Config::kScaleX>(p.scale_x, n);
    u32 nans = 0;  // of float32: which sums
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Accumulator total = reduced(v[0], j);
      if constexpr (Config::kSplitTerms) nans |= (u32)(total != total) << j;
      const float first = value<FastMath>(total, scale_x, kColumns ? m : m + j);
      if constexpr (Config::kGated) {
        const float up = value<NoMath>(reduced(v[1], j), scale_x, kColumns ? m : m + j, Config::kGateRows);
        out[j] = rounded<Config::Out>(__fmul_rn(first, up));
      } else {
        out[j] = rounded<Config::Out>(total, first);
      }
    }
    Config::Out::Bits* to = (Config::Out::Bits*)p.y + y_offset(p, n, m);
    if (p.aligned && (kColumns ? n + 4 <= p.n : m + 4 <= outputs_per_token(p))) {
      if constexpr (sizeof(Config::Out::Bits) == 1)
        *(u32*)to = out[0] | (u32)out[1] << 8 | (u32)out[2] << 16 | (u32)out[3] << 24;
      else if constexpr (sizeof(Config::Out::Bits) == 2)
        *(uint2*)to = make_uint2(out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
      else *(uint4*)to = make_uint4(out[0], out[1], out[2], out[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (kColumns ? n + j < p.n : m + j < outputs_per_token(p)) to[j] = out[j];
    }
#ifdef S24_F32_SPLIT
    for (; nans; nans &= nans - 1) {
      const int j = __ffs(nans) - 1;
      if (m + j >= p.m) break;
      const float sum = dot_in_float64(p, n, m + j), bias = p.bias ? bias_at<Config>(p.bias, m + j) : 0.0f;
      to[j] = rounded<Config::Out>(sum, finished(sum, p, 1.0f, 1.0f, bias));
    }
#endif
  }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int first = threadIdx.x; first < kCount; first += kThreads * kAhead) {
      u32 v[kAhead][Config::kRowsPerOutput][Config::kSplitK][4];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kThreads, token = token_of(i), output = output_of(i);
        if (i >= kCount || !inside(token, output)) continue;
#pragma unroll
        for (int h = 0; h < Config::kRowsPerOutput; ++h)
#pragma unroll
          for (int s = 0; s < Config::kSplitK; ++s)
            load_cluster_x4(v[a][h][s],
                            from[s] + Buffer::offset(token, row_of_output<Config>(output) + h * Config::kGateRows));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kThreads;
        const int token = token_of(i), output = output_of(i);
        if (i < kCount && inside(token, output)) store(v[a], token, output);
      }
    }
  }
};
