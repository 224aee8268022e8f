// How blocksparse/blocks_wgmma.cu adds the sums of a panel's slices: from +0, in the order of the slices.
#pragma once
#include "blocksparse/blocks_wgmma/tile_scheduler.cuh"

// The sums of a thread in the workspace: quads of four, one for each 8 tokens, whose threads lie side by side.
template <class Sum> struct Quad {
  Sum values[4];

  static __device__ __forceinline__ Quad load(const uint4* from) {
    const uint4 bits = __ldcg(from);
    return {of_bits(bits.x), of_bits(bits.y), of_bits(bits.z), of_bits(bits.w)};
  }
  static __device__ __forceinline__ void store(uint4* to, const Sum* sums) {
    __stcg(to, make_uint4(bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3])));
  }
  static __device__ __forceinline__ Sum of_bits(u32 bits) {
    if constexpr (Sum(0.5f) != 0) return __uint_as_float(bits);
    else return (Sum)bits;
  }
  static __device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
  static __device__ __forceinline__ u32 bits_of(int sum) { return (u32)sum; }
};
constexpr int kQuads = Config::kWarpgroupN / 8, kQuadThreads = 128;

// CTAs of their own compute the slices of a panel. Each consumer warpgroup stores its sums of 64 rows x kWarpgroupN.
// The one that arrives last adds those of all slices; which one it is changes no bit.
struct SlicesApart {
  const BlocksWgmmaParams& p;
  int barrier;
  u32 warpgroup_m, token;

  // Index of 64 rows of the panel's first slice in a batch element; the next slice's rows are `stride` further.
  __device__ __forceinline__ i64 tile(const WorkTile& work) const {
    return ((i64)work.in_partials * Config::kWarpgroupsM + warpgroup_m) * p.batch + work.batch;
  }
  __device__ __forceinline__ u32 stride() const { return Config::kWarpgroupsM * p.batch; }
  __device__ __forceinline__ i64 quads_of_tile() const { return (i64)((p.tokens + 7) / 8) * kQuadThreads; }
  __device__ __forceinline__ uint4* quads(const WorkTile& work, u32 slice) const {
    return (uint4*)p.partials + (tile(work) + (i64)slice * stride()) * quads_of_tile() + token / 8 * kQuadThreads +
           threadIdx.x % 128;
  }

  __device__ __forceinline__ u64* arrivals(const WorkTile& work) const {
    return p.arrivals + tile(work) * ((p.tokens + 63) / 64) + token / 64;
  }
  // The value of the counter of arrivals. It is loaded before the mainloop, so that no arrival waits for it.
  __device__ __forceinline__ u64 seen(const WorkTile& work) const {
    return work.slices > 1 && threadIdx.x % 128 == 0 && token < p.tokens ? load_relaxed(arrivals(work)) : 0;
  }

  // Stores the sums of one slice. Returns whether the sums of all slices are there. `seen`: the counter's value.
  template <class Sum> __device__ __forceinline__ bool store(const Sum* sums, const WorkTile& work, u64 seen) const {
    if (token >= p.tokens) return false;
    if (threadIdx.x % 128 == 0) begin_count<16>(arrivals(work), p.launch_id, seen);
    uint4* const to = quads(work, work.slice);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      if (token + 8 * quad < p.tokens) Quad<Sum>::store(to + quad * kQuadThreads, sums + 4 * quad);
    named_barrier_sync(barrier, 128);
    bool last = false;
    if (threadIdx.x % 128 == 0) {
      acquire_release_fence();
      last = ((u32)atomicAdd(arrivals(work), 1ull) & 0xffff) + 1 == work.slices;
      if (last) {
        acquire_release_fence();
        atomicExch(arrivals(work), p.launch_id);  // a launch that is repeated with the same id counts anew
      }
    }
    return named_barrier_or(barrier, 128, last);
  }

  // The sums of all slices, `kCount` a step of the epilogue.
  template <class Sum> struct SumsOfSteps {
    static constexpr int kCount = Config::kStepColumns / 2, kStepQuads = kCount / 4;

    const uint4* from;
    i64 stride;
    u32 slices;
    int quads;  // of tokens that exist
    mutable Sum sums[kCount];

    __device__ __forceinline__ const Sum* operator()(int first) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = 0;
      const uint4* at = from + first / 4 * kQuadThreads;
#pragma unroll 3
      for (u32 slice = 0; slice < slices; ++slice, at += stride)
#pragma unroll
        for (int quad = 0; quad < kStepQuads; ++quad) {
          Quad<Sum> one = {};
          if (first / 4 + quad < quads) one = Quad<Sum>::load(at + quad * kQuadThreads);
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[4 * quad + i] += one.values[i];
        }
      return sums;
    }
  };
  template <class Sum> __device__ __forceinline__ SumsOfSteps<Sum> sums_of(const WorkTile& work) const {
    return {quads(work, 0), stride() * quads_of_tile(), work.slices, (int)(p.tokens - token + 7) / 8, {}};
  }
};

// One CTA computes the slices of a panel one after the other. The sums of those before stay in registers if they are
// few. Otherwise they wait in the CTA's part of the workspace, where each thread reads what it wrote.
template <class Sum> struct SlicesSequential {
  static constexpr bool kStay = Config::kAccumulators <= 64;
  static constexpr int kChunk = kQuads < 16 ? kQuads : 16;  // quads that are loaded together

  const BlocksWgmmaParams& p;
  u32 warpgroup;
  Sum held[kStay ? Config::kAccumulators : 1];

  // Adds the sums of one slice to those of the slices before it. `sums` then has the total so far.
  __device__ __forceinline__ void add(Sum* sums, const WorkTile& work) {
    uint4* const at = (uint4*)p.partials + ((i64)blockIdx.x * Config::kWarpgroups + warpgroup) * kQuads * kQuadThreads +
                      threadIdx.x % 128;
    const bool is_first = work.slice == 0, has_more = work.slice + 1 < work.slices;
#pragma unroll
    for (int begin = 0; begin < kQuads; begin += kChunk) {
      Quad<Sum> before[kChunk] = {};
      if (!kStay && !is_first) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) before[i] = Quad<Sum>::load(at + (begin + i) * kQuadThreads);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        Sum* const mine = sums + 4 * (begin + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kStay) {
            Sum& total = held[4 * (begin + i) + j];
            mine[j] = total = (is_first ? 0 : total) + mine[j];
          } else {
            mine[j] = before[i].values[j] + mine[j];
          }
        }
        if (!kStay && has_more) Quad<Sum>::store(at + (begin + i) * kQuadThreads, mine);
      }
    }
  }
};
