// Wrapper of the PTX instruction of sm_90 that loads the same bytes into several CTAs of a cluster.
#pragma once
#include "ptx/tma.cuh"

// Loads `bytes` into every CTA of the cluster in `mask`, at the same shared memory address, and completes on each CTA's
// own `barrier`. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load_multicast(u32 to, const void* from, u32 bytes, u32 barrier, u16 mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
               "[%3], %4;"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
               : "memory");
}
