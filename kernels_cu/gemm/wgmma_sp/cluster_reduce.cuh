// The epilogue of gemm/wgmma_sp.cu with split-K. The CTAs of a cluster send each other their sums. Each then reduces
// those of its share of the rows and stores the results.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/dot_in_float64.cuh"

using SharePart = Config::SharePart;

// The bytes that the CTA of a slice receives from each other slice. The last CTAs may have no share.
__device__ __forceinline__ u32 received_bytes(u32 slice) {
  return slice * Config::kShareOutputs < Config::kCtaOutputs ? SharePart::kBytes : 0;
}

// Stores a warpgroup's accumulators in parts, each for the CTA in whose share its rows are, and sends them. `m_tile` is
// the warpgroup's first m64 tile in the CTA.
__device__ __forceinline__ void send_to_shares(const Accumulators& sums, u32 base, Barriers barriers, u32 m_tile,
                                               u32 m_rank, u32 slice) {
  const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const u32 own = base + Config::kShareAt + slice * SharePart::kBytes, outgoing = base + Config::kOutgoingAt;
  const auto part_for = [&](u32 owner) {
    return owner == slice ? own : outgoing + (owner - (owner > slice)) * SharePart::kBytes;
  };
#pragma unroll
  for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // a thread has sums of two rows, of which a gated epilogue makes one result
      const u32 row = (m_tile + r) * Tile::kRows + 16 * warp + lane / 4;
      const u32 output = Config::kGated ? output_of_row<Config>(row) : row + 8 * h;
      const u32 line = output % Config::kShareOutputs + (Config::kGated ? h * Config::kShareOutputs : 0);
      const u32 to = part_for(output / Config::kShareOutputs) + SharePart::offset(lane % 4 * 2, line);
#pragma unroll
      for (int i = 2 * h; i < Config::kAccumulators; i += 4) {
        const u32 at = to + SharePart::offset(i / 4 * 8, 0);
        if constexpr (Config::kYColumnMajor) {
          store_shared_x2(at, bits_of(sums[r][i]), bits_of(sums[r][i + 1]));
        } else {
          store_shared(at, bits_of(sums[r][i]));
          store_shared(at + SharePart::offset(1, 0), bits_of(sums[r][i + 1]));
        }
      }
    }
  async_proxy_fence();
  named_barrier_sync(1, Config::kConsumerThreads);
  const u32 owner = threadIdx.x;
  if (owner < Config::kSplitK && owner != slice && received_bytes(owner) > 0) {
    const u32 rank = m_rank + Config::kClusterM * owner;
    bulk_send(cluster_address(own, rank), part_for(owner), SharePart::kBytes,
              cluster_address(barriers.share_full(), rank));
  }
}

// A CTA reduces its share of the rows' results, in the order of the slices. A thread makes four adjacent results of a
// line of Y, which is a token's row or, for a column-major Y, an output's column.
struct ClusterReduce : ResultScale<Config> {
  static constexpr bool kColumns = Config::kYColumnMajor;  // a line of Y is a column

  const WgmmaSpParams& p;
  WorkTile work;
  u32 share;    // the address of the sums of this CTA's share
  int output0;  // the first output of the share

  // The epilogue's operands for the thread's next four results, which have kRows rows of W, or pairs of rows.
  static constexpr int kRows = kColumns ? 1 : 4;
  float scale_w[Config::kRowsPerOutput][kRows];
  Config::Bias::Bits bias[Config::kRowsPerOutput][kRows];
  struct OfTokens {
    float scale_x;
    u32 c[4];
  } of_tokens;

  static constexpr int kLineQuads = (kColumns ? Config::kTileN : Config::kShareOutputs) / 4;
  static constexpr int kCount = kLineQuads * (kColumns ? Config::kShareOutputs : Config::kTileN);
  // Whether all results of a thread are of the same rows of W.
  static constexpr bool kSameRows = !kColumns && Config::kConsumerThreads % kLineQuads == 0;

  __device__ __forceinline__ ClusterReduce(const WgmmaSpParams& p, WorkTile work, u32 base, u32 slice)
      : p(p), work(work), share(base + Config::kShareAt), output0(slice * Config::kShareOutputs) {
    this->begin_scale(p.scale_y);
  }

  // The token and the output of the first of the i-th four results.
  __device__ __forceinline__ int token_of(int i) const { return kColumns ? i % kLineQuads * 4 : i / kLineQuads; }
  __device__ __forceinline__ int output_of(int i) const {
    return output0 + (kColumns ? i / kLineQuads : i % kLineQuads * 4);
  }

  __device__ __forceinline__ bool inside(int token, int output) const {
    return work.token + token < work.token_end(p) && output < Config::kCtaOutputs &&
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

  // Loads the operands of the i-th four results. The bias is converted where it is added: a conversion would wait for
  // it.
  __device__ __forceinline__ void load_operands(int i) {
    load_rows(i);
    load_tokens(i);
  }
  __device__ __forceinline__ void load_rows(int i) {
    const i64 m = work.row_tile * Config::kMTileOutputs + output_of(i);
    const auto biases = work.of_batch<&BatchParams::bias>(p, (const Config::Bias::Bits*)p.bias);
    const auto scales_w = work.of_batch<&BatchParams::scale_w>(p, p.scale_w);
#pragma unroll
    for (int h = 0; h < Config::kRowsPerOutput; ++h)
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const i64 row = row_of_output<Config>(min(m + j, outputs_per_token(p) - 1)) + h * Config::kGateRows;
        bias[h][j] = p.bias ? biases[work.first_row(p) + row] : 0;
        scale_w[h][j] = scale_at<Config::kScaleW>(scales_w, work.first_row(p) + row);
      }
  }
  __device__ __forceinline__ void load_tokens(int i) {
    const int token = token_of(i), output = output_of(i);
    if (i >= kCount || !inside(token, output)) return;
    const i64 n = work.token + token, m = work.row_tile * Config::kMTileOutputs + output;
    of_tokens.scale_x = scale_at<Config::kScaleX>(work.of_batch<&BatchParams::scale_x>(p, p.scale_x), n);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      of_tokens.c[j] = Config::kHasC ? c_bits_of(p, work, n + (kColumns ? j : 0), m + (kColumns ? 0 : j)) : 0;
  }

  // The j-th result before its activation, or the other factor of a gated one, from its sum.
  __device__ __forceinline__ float value(Accumulator total, const OfTokens& of, int j, int h = 0) const {
    const int row = kColumns ? 0 : j;
    return unactivated(total, p, of.scale_x, scale_w[h][row], Config::Bias::to_float(bias[h][row]), c_value(of, j));
  }
  static __device__ __forceinline__ float c_value(const OfTokens& of, int j) {
    return Config::kHasC ? Config::C::to_float((Config::C::Bits)of.c[j]) : 0.0f;
  }

  __device__ __forceinline__ void store(u32 (&v)[Config::kRowsPerOutput][Config::kSplitK][4], const OfTokens& of,
                                        int token, int output) {
    const i64 n = work.token + token, m = work.row_tile * Config::kMTileOutputs + output;
    Accumulator totals[4];
    float first[1][4], up[4];
    u32 nans = 0;  // one bit for each float32 result that must be recomputed
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      totals[j] = reduced(v[0], j);
      if constexpr (Config::kSplitTerms > 0) nans |= (u32)(totals[j] != totals[j]) << j;
      first[0][j] = value(totals[j], of, j);
      if constexpr (Config::kGated) {
        const Accumulator other = reduced(v[1], j);
        if constexpr (Config::kSplitTerms > 0) nans |= (u32)(other != other) << j;
        up[j] = value(other, of, j, 1);
      }
    }
    activate<Config, 4>(first);
    Config::Out::Bits out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& result = first[0][j];
      if constexpr (Config::kGated) result = __fmul_rn(result, up[j]);
      result = this->scaled(result, kColumns ? n + j < p.n : m + j < outputs_per_token(p));
      if constexpr (Config::kGated) out[j] = rounded<Config::Out>(result);
      else out[j] = rounded<Config::Out>(totals[j], result);
    }
    Config::Out::Bits* to = work.of_batch<&BatchParams::y>(p, (Config::Out::Bits*)p.y) + y_offset(p, n, m);
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
        // Indexing would move C to the stack.
        const float addend = j < 2 ? (j ? c_value(of, 1) : c_value(of, 0)) : j == 2 ? c_value(of, 2) : c_value(of, 3);
        to[j] = rounded<Config::Out>(finished_again(p, n, row_of_output<Config>(m + j), addend));
      }
    }
  }

  __device__ __forceinline__ void run() {
    constexpr int kUnrolled = 8 / Config::kSplitK / Config::kCtasPerSm / Config::kRowsPerOutput;
#pragma unroll kUnrolled> 0 ? kUnrolled : 1
    for (int i = threadIdx.x; i < kCount; i += Config::kConsumerThreads) {
      const int token = token_of(i), output = output_of(i);
      const OfTokens of = of_tokens;
      if (!kSameRows && i != threadIdx.x) load_rows(i);
      load_tokens(i + Config::kConsumerThreads);
      if (!inside(token, output)) continue;
      u32 v[Config::kRowsPerOutput][Config::kSplitK][4];
#pragma unroll
      for (int h = 0; h < Config::kRowsPerOutput; ++h)
#pragma unroll
        for (int s = 0; s < Config::kSplitK; ++s)
          load_shared_words(v[h][s], share + s * SharePart::kBytes +
                                         SharePart::offset(token, output - output0 + h * Config::kShareOutputs));
      store(v, of, token, output);
    }
    this->raise(p.amax);
  }
};
