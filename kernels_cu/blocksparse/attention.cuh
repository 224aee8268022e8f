// What the kernels of attention share.
#pragma once
#include "ptx/tensors.cuh"
#include "ptx/wgmma_registers.cuh"

// A box of a 3-D tensor, of which L2 keeps what it likes: items beside each other share what they read.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4}], [%5];"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
               : "memory");
}

// A word of shared memory that is the same for all of a warp, which the shuffle tells the compiler.
__device__ __forceinline__ u32 uniform(u32 at) { return __shfl_sync(~0u, load_shared_as<u32>(at), 0); }

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A row's 32 columns from `words`, one of each 8: lane t of a quad gets the t-th 8 of them whole.
__device__ __forceinline__ void turn_quad(u32 (&words)[4]) {
  const u32 t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 other = __shfl_xor_sync(~0u, t & bit ? words[i] : words[i | bit], bit);
      if (t & bit) words[i] = other;
      else words[i | bit] = other;
    }
}

// Zeros for the 16-bit elements of rows `from` to kRows of a tile in boxes of 64 columns, by one warpgroup, which meets
// at the named barrier: what lies there may be NaN.
template <int kRows, int kBoxes> __device__ __forceinline__ void clear_rows(u32 tile, int from, int barrier) {
  for (int chunk = from * 8 + threadIdx.x % 128; chunk < kRows * 8; chunk += 128)
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * kRows * 128 + chunk * 16), "r"(0)
                   : "memory");
  async_proxy_fence();
  threads_meet(barrier, 128);
}
