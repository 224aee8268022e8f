// Wrappers of stmatrix (sm_90), which stores 8x8 matrices of 16-bit elements from a warp's registers to shared memory,
// and of the loads that are its inverse.
#pragma once
#include "common/types.cuh"

// Stores one matrix. Lane l < 8 gives the address of row l.
__device__ __forceinline__ void stmatrix(u32 address, u32 a) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
#endif
}
// Stores one matrix transposed.
__device__ __forceinline__ void stmatrix_transposed(u32 address, u32 a) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
#endif
}

// Stores two matrices. Lane l < 16 gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x2(u32 address, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
#endif
}
// Stores two matrices, each transposed.
__device__ __forceinline__ void stmatrix_transposed_x2(u32 address, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
#endif
}

// Loads two matrices, as stmatrix_x2 stored them.
__device__ __forceinline__ void load_matrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}
// Loads two matrices, as stmatrix_transposed_x2 stored them.
__device__ __forceinline__ void load_matrix_transposed_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address));
}
