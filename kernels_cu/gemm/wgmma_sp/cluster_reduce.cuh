// The role of gemm/wgmma_sp.cu that stores results where K is sliced along the cluster.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"
#ifdef S24_F32_SPLIT
#include "gemm/wgmma_sp/split_products.cuh"
#endif

// A warpgroup's sums to where the blocks of its cluster find them; `row_tile`: its first, in the block.
__device__ __forceinline__ void store_sums(const Sums (&sums)[Config::kRowBlocks], u32 base, u32 row_tile) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Config::kRowBlocks; ++r)
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      if constexpr (Config::kColumnsY) {
        if (i % 2) continue;
        const u32 row = (row_tile + r) * Tile::kRows + 16 * warp + lane / 4 + i / 2 % 2 * 8;
        store_shared_x2(base + Area::offset(i / 4 * 8 + lane % 4 * 2, row), bits_of(sums[r][i]),
                        bits_of(sums[r][i + 1]));
        continue;
      }
      const u32 at = (i / 4 * 8 + lane % 4 * 2 + i % 2) * Area::kPitch + (row_tile + r) * Tile::kRows + 16 * warp +
                     lane / 4 + i / 2 % 2 * 8;
      store_shared(base + at * 4, bits_of(sums[r][i]));
    }
}

// The blocks of a cluster that sum slices of the same rows fold them, each its share of the results: four at a time of
// a line of Y, which is a token's row, or a column.
struct Folder {
  const WgmmaSpParams& p;
  Item item;
  u32 from[Config::kSlices];
  int output0;

  static constexpr bool kColumns = Config::kColumnsY;
  static constexpr int kOutputs = Config::kRowTiles * Config::kOutputs;  // of a block
  static constexpr int kOutputQuads = (kOutputs / 4 + Config::kSlices - 1) / Config::kSlices;
  static constexpr int kShareOutputs = kColumns ? (kOutputs + Config::kSlices - 1) / Config::kSlices : 4 * kOutputQuads;
  static constexpr int kQuads = kColumns ? Config::kTokens / 4 : kOutputQuads,  // of a line
      kCount = kQuads * (kColumns ? kShareOutputs : Config::kTokens);
  static constexpr int kFolders = Config::kMultiplying;
  static constexpr int kLoads = (Config::kTrade || Config::kWarpgroups == 1 ? 12 : 4) / Config::kSlices /
                                Config::kBlocksPerSm / Config::kRowsPerOutput;
  static constexpr int kAhead = kLoads > 0 ? kLoads : 1;  // in flight, as far as there are registers

  __device__ __forceinline__ Folder(const WgmmaSpParams& p, Item item, u32 base, u32 share, u32 slice)
      : p(p), item(item), output0(slice * kShareOutputs) {
#pragma unroll
    for (int s = 0; s < Config::kSlices; ++s) from[s] = cluster_address(base, share + Config::kShare * s);
  }

  // Of the i-th four results the first's token and output.
  __device__ __forceinline__ int token_of(int i) const { return kColumns ? i % kQuads * 4 : i / kQuads; }
  __device__ __forceinline__ int output_of(int i) const { return output0 + (kColumns ? i / kQuads : i % kQuads * 4); }

  // Nothing else is loaded: a load that no store waits for could still be on its way when its block has left.
  __device__ __forceinline__ bool inside(int token, int output) const {
    return item.token + token < p.n && output < kOutputs && item.row_tile * Config::kOutputs + output < outputs_of(p);
  }

  // The j-th of four sums of a row of W.
  static __device__ __forceinline__ Sum folded(u32 (&v)[Config::kSlices][4], int j) {
    Sum slices[Config::kSlices];
#pragma unroll
    for (int s = 0; s < Config::kSlices; ++s) slices[s] = sum_of(v[s][j]);
    fold(slices);
    return slices[0];
  }

  // What becomes of the sum of a row of W behind `output`: the first, or of a gated one the other.
  template <class Math>
  __device__ __forceinline__ float value(Sum total, float scale_x, i64 output, int apart = 0) const {
    const bool inside = kColumns || output < outputs_of(p);
    const i64 row = row_of_output<Config>(output) + apart;
    const float bias = p.bias && inside ? bias_at<Config>(p.bias, row) : 0.0f;
    const float scale_w = inside ? scale_at<Config::kScaleW>(p.scale_w, row) : 1.0f;
    return finished<Math>(total, p, scale_x, scale_w, bias);
  }

  __device__ __forceinline__ void store(u32 (&v)[Config::kRowsPerOutput][Config::kSlices][4], int token,
                                        int output) const {
    const i64 n = item.token + token, m = item.row_tile * Config::kOutputs + output;
    Config::Out::Bits out[4];
    const float scale_x = scale_at<Config::kScaleX>(p.scale_x, n);
    u32 nans = 0;  // of float32: which sums
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Sum total = folded(v[0], j);
      if constexpr (Config::kXParts) nans |= (u32)(total != total) << j;
      const float first = value<FastMath>(total, scale_x, kColumns ? m : m + j);
      if constexpr (Config::kGated) {
        const float up = value<NoMath>(folded(v[1], j), scale_x, kColumns ? m : m + j, Config::kGateRows);
        out[j] = rounded<Config::Out>(__fmul_rn(first, up));
      } else {
        out[j] = rounded<Config::Out>(total, first);
      }
    }
    Config::Out::Bits* to = (Config::Out::Bits*)p.y + place(p, n, m);
    if (p.y_aligned && (kColumns ? n + 4 <= p.n : m + 4 <= outputs_of(p))) {
      if constexpr (sizeof(Config::Out::Bits) == 1)
        *(u32*)to = out[0] | (u32)out[1] << 8 | (u32)out[2] << 16 | (u32)out[3] << 24;
      else if constexpr (sizeof(Config::Out::Bits) == 2)
        *(uint2*)to = make_uint2(out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
      else *(uint4*)to = make_uint4(out[0], out[1], out[2], out[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (kColumns ? n + j < p.n : m + j < outputs_of(p)) to[j] = out[j];
    }
#ifdef S24_F32_SPLIT
    for (; nans; nans &= nans - 1) {
      const int j = __ffs(nans) - 1;
      if (m + j >= p.m) break;
      const float sum = sum_in_order(p, n, m + j), bias = p.bias ? bias_at<Config>(p.bias, m + j) : 0.0f;
      to[j] = rounded<Config::Out>(sum, finished(sum, p, 1.0f, 1.0f, bias));
    }
#endif
  }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int first = threadIdx.x; first < kCount; first += kFolders * kAhead) {
      u32 v[kAhead][Config::kRowsPerOutput][Config::kSlices][4];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kFolders, token = token_of(i), output = output_of(i);
        if (i >= kCount || !inside(token, output)) continue;
#pragma unroll
        for (int h = 0; h < Config::kRowsPerOutput; ++h)
#pragma unroll
          for (int s = 0; s < Config::kSlices; ++s)
            load_cluster_x4(v[a][h][s],
                            from[s] + Area::offset(token, row_of_output<Config>(output) + h * Config::kGateRows));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * kFolders;
        const int token = token_of(i), output = output_of(i);
        if (i < kCount && inside(token, output)) store(v[a], token, output);
      }
    }
  }
};
