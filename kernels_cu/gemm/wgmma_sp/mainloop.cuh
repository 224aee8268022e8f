// The pipeline that all mainloops of a consumer warpgroup of gemm/wgmma_sp.cu share. A mainloop derives from it and has
//   multiply(accumulators, scheduler, slice)   sums the K tiles of a work tile
//   finish(accumulators, scheduler)            adds what earlier groups of K tiles left in the workspace
// mainloop_sparse.cuh multiplies elements of 16 and 8 bits; mainloop_presplit.cuh and mainloop_split_registers.cuh
// multiply float32 in two and three bf16 terms.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/stream_k_fixup.cuh"

struct ConsumerPipeline {
  const WgmmaSpParams& p;
  PipelineState<Config::kWeightStages> weight;
  PipelineState<Config::kXStages> x;
  u32 base, warpgroup;
  u32 x_empty;  // the empty barriers of X in the CTA of the cluster that this lane arrives at
  Barriers barriers;

  static constexpr int kPingPongBarrier = 8;

  // Completes the initialisation of the aggregate.
  __device__ __forceinline__ void begin(u32 slice) {
    if constexpr (Config::kXMulticast > 1)
      x_empty = cluster_address(barriers.x_empty(0), threadIdx.x % 32 % Config::kClusterM + Config::kClusterM * slice);
    // Warpgroup 0 multiplies first.
    if (Config::kPingPong && warpgroup == 1) named_barrier_arrive(kPingPongBarrier, Config::kConsumerThreads);
  }

  // Each warp arrives at the empty barriers. `zero` is 0, and the arrival waits for whatever it depends on.
  __device__ __forceinline__ void release_weight(u32 stage, u32 zero = 0) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.weight_empty(stage) + zero);
  }
  __device__ __forceinline__ void release_x(u32 stage) const {
    if (threadIdx.x % 32 >= Config::kXMulticast) return;
    if constexpr (Config::kXMulticast == 1) barrier_arrive(x_empty + 8 * stage);
    else barrier_arrive_cluster(x_empty + 8 * stage);
  }

  // Waits for kBoxes boxes of X in K-major order, from the current stage on, and gives their descriptors.
  template <int kBoxes> __device__ __forceinline__ void wait_for_boxes(u64 (&boxes)[kBoxes]) const {
    PipelineState<Config::kXStages> box = x;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i, box.next()) {
      barrier_wait(barriers.x_full(box.stage), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kXAt + box.stage * Config::kXStageBytes);
    }
  }

  static __device__ __forceinline__ void fence(Accumulators& accumulators) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) wgmma_fence_operand(accumulators[r]);
  }
  static __device__ __forceinline__ void clear(Accumulators& accumulators) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) accumulators[r][i] = 0;
      wgmma_fence_operand(accumulators[r]);
    }
  }
  static __device__ __forceinline__ void add(Accumulators& totals, const Accumulators& sums) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) totals[r][i] += sums[r][i];
  }
  // Starts a work tile from the partial sums of the previous cluster, or from zeros.
  __device__ __forceinline__ void start(Accumulators& accumulators, const TileScheduler& scheduler) const {
    if constexpr (Config::kStreamK) StreamKFixup{p}.load_partials(accumulators, warpgroup, scheduler.loads_partials());
    else clear(accumulators);
  }
};
