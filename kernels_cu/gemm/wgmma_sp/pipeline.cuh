// The barriers of the two pipelines of gemm/wgmma_sp.cu. Each stage of W and of X has a full barrier, which completes
// once the stage is loaded, and an empty barrier, which completes once all consumers have read it. With kJointStages
// those of W serve X, too.
#pragma once
#include "common/pipeline_state.cuh"
#include "gemm/wgmma_sp/config.cuh"

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 weight_full(u32 stage) const { return at + 8 * stage; }
  __device__ __forceinline__ u32 weight_empty(u32 stage) const { return at + 8 * (Config::kWeightStages + stage); }
  __device__ __forceinline__ u32 x_full(u32 stage) const { return at + 8 * (2 * Config::kWeightStages + stage); }
  __device__ __forceinline__ u32 x_empty(u32 stage) const {
    return at + 8 * (2 * Config::kWeightStages + Config::kXStages + stage);
  }
  // Completes once cp.async has loaded the stage, before the proxy fence that wgmma needs.
  __device__ __forceinline__ u32 x_copied(u32 stage) const {
    return at + 8 * (2 * Config::kWeightStages + 2 * Config::kXStages + stage);
  }
  // Completes once this CTA has received the sums of its share.
  __device__ __forceinline__ u32 share_full() const { return at + Config::kShareBarrierAt - Config::kBarrierAt; }
  // C is loaded into a staging buffer of a warpgroup, or the buffer is free for it.
  __device__ __forceinline__ u32 c_full(u32 warpgroup, u32 buffer) const {
    return x_copied(0) + 8 * (warpgroup * Config::kStagingBuffers + buffer);
  }
  __device__ __forceinline__ u32 c_empty(u32 warpgroup, u32 buffer) const {
    return c_full(Config::kWarpgroups + warpgroup, buffer);
  }
};

// Returns 0, which the compiler must not know. A value that is combined with it by ^ or + stays what it is, but then
// depends on whatever the zero was masked with. Three places need that: a copy of accumulators that the compiler
// would otherwise merge with the originals and spill (mainloop_sparse.cuh), metadata that it would load straight into
// the registers of wgmma (quantized_half.cuh), and an arrival that must wait for loads from shared memory although it
// uses none of their values (mainloop_split_registers.cuh).
__device__ __forceinline__ u32 opaque_zero(const WgmmaSpParams& p) { return p.opaque_zero; }
