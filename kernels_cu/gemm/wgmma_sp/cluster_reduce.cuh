// The epilogue of gemm/wgmma_sp.cu with split-K: the CTAs of a cluster reduce their sums through distributed shared
// memory and store the results.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/dot_in_float64.cuh"

// Stores a warpgroup's accumulators in the CTA's reduction buffer. `m_tile` is the warpgroup's first m64 tile in the
// CTA.
__device__ __forceinline__ void stage_accumulators(const Accumulators& sums, u32 base, u32 m_tile) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      if constexpr (Config::kYColumnMajor) {
        if (i % 2) continue;
        const u32 row = (m_tile + r) * Tile::kRows + 16 * warp + lane / 4 + i / 2 % 2 * 8;
        store_shared_x2(base + Buffer::offset(i / 4 * 8 + lane % 4 * 2, row), bits_of(sums[r][i]),
                        bits_of(sums[r][i + 1]));
        continue;
      }
      const u32 at = (i / 4 * 8 + lane % 4 * 2 + i % 2) * Buffer::kPitch + (m_tile + r) * Tile::kRows + 16 * warp +
                     lane / 4 + i / 2 % 2 * 8;
      store_shared(base + at * 4, bits_of(sums[r][i]));
    }
}

// The CTAs that sum slices of the same rows each reduce a part of the rows' results, in the order of the slices. A
// thread makes four adjacent results of a line of Y, which is a token's row or, for a column-major Y, an output's
// column.
struct ClusterReduce {
  const WgmmaSpParams& p;
  WorkTile work;
  u32 from[Config::kSplitK];  // cluster addresses of the slices' reduction buffers
  int output0;                // the first output of this CTA's part

  static constexpr bool kColumns = Config::kYColumnMajor;                      // a line of Y is a column
  static constexpr int kCtaOutputs = Config::kMTiles * Config::kMTileOutputs;  // results per token
  static constexpr int kOutputQuads = (kCtaOutputs / 4 + Config::kSplitK - 1) / Config::kSplitK;
  static constexpr int kOwnOutputs =
      kColumns ? (kCtaOutputs + Config::kSplitK - 1) / Config::kSplitK : 4 * kOutputQuads;
  static constexpr int kLineQuads = kColumns ? Config::kTileN / 4 : kOutputQuads;
  static constexpr int kCount = kLineQuads * (kColumns ? kOwnOutputs : Config::kTileN);
  static constexpr int kThreads = Config::kConsumerThreads;
  static constexpr int kLoads = (Config::kReallocRegisters || Config::kWarpgroups == 1 ? 12 : 4) / Config::kSplitK /
                                Config::kCtasPerSm / Config::kRowsPerOutput;
  static constexpr int kAhead = kLoads > 0 ? kLoads : 1;  // loads in flight, limited by registers

  __device__ __forceinline__ ClusterReduce(const WgmmaSpParams& p, WorkTile work, u32 base, u32 m_rank, u32 slice)
      : p(p), work(work), output0(slice * kOwnOutputs) {
#pragma unroll
    for (int s = 0; s < Config::kSplitK; ++s) from[s] = cluster_address(base, m_rank + Config::kClusterM * s);
  }

  // The token and the output of the first of the i-th four results.
  __device__ __forceinline__ int token_of(int i) const { return kColumns ? i % kLineQuads * 4 : i / kLineQuads; }
  __device__ __forceinline__ int output_of(int i) const {
    return output0 + (kColumns ? i / kLineQuads : i % kLineQuads * 4);
  }

  // Only results inside of Y are loaded. A load whose value no store needs could still be in flight when the CTA that
  // it reads from has exited.
  __device__ __forceinline__ bool inside(int token, int output) const {
    return work.token + token < p.n && output < kCtaOutputs &&
           work.row_tile * Config::kMTileOutputs + output < outputs_per_token(p);
  }

  // The reduced sum of the j-th of four results.
  static __device__ __forceinline__ Accumulator reduced(u32 (&v)[Config::kSplitK][4], int j) {
    Accumulator slices[Config::kSplitK];
#pragma unroll
    for (int s = 0; s < Config::kSplitK; ++s) slices[s] = accumulator_of(v[s][j]);
    reduce_in_order(slices);
    return slices[0];
  }

  // The result before its activation, from the sum of the row of W behind `output`. The row of a gated epilogue's other
  // factor is `offset` further.
  __device__ __forceinline__ float value(Accumulator total, float scale_x, i64 output, int offset = 0,
                                         float c = 0.0f) const {
    const bool inside = kColumns || output < outputs_per_token(p);
    const i64 row = row_of_output<Config>(output) + offset;
    const float bias = p.bias && inside ? bias_at<Config>(p.bias, row) : 0.0f;
    const float scale_w = inside ? scale_at<Config::kScaleW>(p.scale_w, row) : 1.0f;
    return unactivated(total, p, scale_x, scale_w, bias, c);
  }

  __device__ __forceinline__ void store(u32 (&v)[Config::kRowsPerOutput][Config::kSplitK][4], const float (&c)[4],
                                        int token, int output) const {
    const i64 n = work.token + token, m = work.row_tile * Config::kMTileOutputs + output;
    Accumulator totals[4];
    float first[1][4], up[4];
    const float scale_x = scale_at<Config::kScaleX>(p.scale_x, n);
    u32 nans = 0;  // one bit for each float32 result that must be recomputed
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      totals[j] = reduced(v[0], j);
      if constexpr (Config::kSplitTerms > 0) nans |= (u32)(totals[j] != totals[j]) << j;
      first[0][j] = value(totals[j], scale_x, kColumns ? m : m + j, 0, c[j]);
      if constexpr (Config::kGated) {
        const Accumulator other = reduced(v[1], j);
        if constexpr (Config::kSplitTerms > 0) nans |= (u32)(other != other) << j;
        up[j] = value(other, scale_x, kColumns ? m : m + j, Config::kGateRows);
      }
    }
    activate<Config, 4>(first);
    Config::Out::Bits out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (Config::kGated) out[j] = rounded<Config::Out>(__fmul_rn(first[0][j], up[j]));
      else out[j] = rounded<Config::Out>(totals[j], first[0][j]);
    }
    Config::Out::Bits* to = (Config::Out::Bits*)p.y + y_offset(p, n, m);
    if (p.y_aligned && (kColumns ? n + 4 <= p.n : m + 4 <= outputs_per_token(p))) {
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
    if constexpr (Config::kSplitTerms > 0) {
      for (; nans; nans &= nans - 1) {
        const int j = __ffs(nans) - 1;
        if (m + j >= outputs_per_token(p)) break;
        const float addend = j < 2 ? (j ? c[1] : c[0]) : j == 2 ? c[2] : c[3];  // indexing would move c to the stack
        to[j] = rounded<Config::Out>(finished_again(p, n, row_of_output<Config>(m + j), addend));
      }
    }
  }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int first = threadIdx.x; first < kCount; first += kThreads * kAhead) {
      u32 v[kAhead][Config::kRowsPerOutput][Config::kSplitK][4];
      float c[kAhead][4];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kThreads, token = token_of(i), output = output_of(i);
        if (i >= kCount || !inside(token, output)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          c[a][j] = c_of(p, work.token + token + (kColumns ? j : 0),
                         work.row_tile * Config::kMTileOutputs + output + (kColumns ? 0 : j));
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
        if (i < kCount && inside(token, output)) store(v[a], c[a], token, output);
      }
    }
  }
};
