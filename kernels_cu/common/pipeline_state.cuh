// A circular buffer of stages, which producers fill while consumers read.
#pragma once
#include "common/types.cuh"

// The position of a producer or consumer: its stage, and the parity of the stage's barriers.
template <int kStages> struct PipelineState {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};
