// Rings of stages, which one role fills while another reads.
#pragma once
#include "common/types.cuh"

// Where a role is in a ring, and the parity of the barriers there.
template <int kStages> struct PipelineState {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};
