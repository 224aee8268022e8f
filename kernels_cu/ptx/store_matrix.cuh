// One 8x8 matrix of 16-bit elements from a warp's registers to shared memory. Two of them: ptx/async.cuh.
#pragma once
#include "common/types.cuh"

// Lane l, below 8, gives the address of row l.
__device__ __forceinline__ void store_matrix(u32 address, u32 a) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
#endif
}
// The same, transposed.
__device__ __forceinline__ void store_matrix_transposed(u32 address, u32 a) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
#endif
}
