// Wrapper of the PTX instruction of sm_90 that loads pixels of images: TMA in im2col mode.
#pragma once
#include "ptx/tma.cuh"

// Loads some channels of consecutive pixels, in the order that the map defines. The pixels start at (w, h) of an image,
// and each is moved by (offset_w, offset_h). Pixels outside of the image are zero.
__device__ __forceinline__ void tma_load_im2col(u32 to, const TensorMap* map, u32 channel, int w, int h, u32 image,
                                                u16 offset_w, u16 offset_h, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;"
               :
               : "r"(to), "l"(map), "r"(channel), "r"(w), "r"(h), "r"(image), "r"(barrier), "h"(offset_w),
                 "h"(offset_h), "l"(policy)
               : "memory");
}
