// How a cluster of blocksparse/blocks_wgmma.cu adds the sums of a panel's slices: from +0, in the order of the slices.
#pragma once
#include "blocksparse/blocks_wgmma/slice_sums.cuh"
#include "common/epilogue.cuh"

// The CTAs of a cluster compute the slices of one panel. Each puts its sums into shared memory, in place of its stages.
// Then each adds and stores an equal part of the tokens, for which it reads the sums of all.
struct ClusterSums {
  // Shared memory has lines as C has: a line of a row's tokens, or of a token's rows. Their distance keeps the cells
  // that a warp stores together in different banks.
  static constexpr bool kOfRows = Config::kTokensContiguous;
  static constexpr int kPitch = kOfRows ? Config::kTileN + 8 : Config::kTileM + 4;
  static constexpr int kBytes = 4 * kPitch * (kOfRows ? Config::kTileM : Config::kTileN);
  static constexpr int kAtOnce = 4;  // results of a thread whose sums are loaded together
  static_assert(Config::kClusterSlices == 1 || kBytes <= Config::kStagingAt, "the stages have room for the sums");

  const BlocksWgmmaParams& p;
  u32 base;

  __device__ __forceinline__ u32 place(int row, int token) const {
    return base + 4 * (kOfRows ? row * kPitch + token : token * kPitch + row);
  }

  template <class Sum> __device__ __forceinline__ void store(const Sum* sums, u32 warpgroup_m, u32 warpgroup_n) const {
    const int row = warpgroup_m * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int token = warpgroup_n * Config::kWarpgroupN + threadIdx.x % 4 * 2;
    named_barrier_sync(1 + Config::kWarpgroups, Config::kConsumerThreads);  // no warpgroup reads a stage any more
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i)
      store_shared(place(row + i / 2 % 2 * 8, token + i / 4 * 8 + i % 2), Quad<Sum>::bits_of(sums[i]));
    cluster_sync();
  }

  // Stores this CTA's part of the results, which are `round(sum, bias)`.
  template <class Sum, class Round> __device__ __forceinline__ void write(const WorkTile& work, Round round) const {
    const int head_rows = p.head_block_rows * Config::kBlock, rows = min(head_rows - (int)work.row(), Config::kTileM);
    const int tokens = min((int)(p.tokens - work.token), Config::kTileN), eights = (tokens + 7) / 8;
    const int begin = (int)work.slice * eights / Config::kClusterSlices * 8,
              end = min(((int)work.slice + 1) * eights / Config::kClusterSlices * 8, tokens);
    const int width = kOfRows ? end - begin : rows, count = (end - begin) * rows;  // of a line, and results in all
    auto* const out = (Config::Out::Bits*)p.out + (i64)work.matrix(p) * head_rows * p.tokens;
    for (int first = threadIdx.x; first < count; first += kAtOnce * Config::kConsumerThreads) {
      Sum sums[kAtOnce] = {};
      int row[kAtOnce], token[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = min(first + j * Config::kConsumerThreads, count - 1), line = at / width, across = at % width;
        row[j] = kOfRows ? line : across, token[j] = begin + (kOfRows ? across : line);
      }
#pragma unroll
      for (int slice = 0; slice < Config::kClusterSlices; ++slice)
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          sums[j] += Quad<Sum>::of_bits(__float_as_uint(load_cluster(cluster_address(place(row[j], token[j]), slice))));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * Config::kConsumerThreads >= count) break;
        const i64 of_head = work.row() + row[j], of_matrix = work.token + token[j];
        const float bias = p.bias ? bias_at<Config>(p.bias, (i64)work.head * head_rows + of_head) : 0.0f;
        out[kOfRows ? of_head * p.tokens + of_matrix : of_matrix * head_rows + of_head] = round(sums[j], bias);
      }
    }
    cluster_sync();  // no CTA exits while another reads its sums
  }
};
