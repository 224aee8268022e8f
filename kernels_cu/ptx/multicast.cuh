// Wrappers of PTX instructions of sm_90: bulk copies to every block of a cluster.
#pragma once
#include "ptx/tma.cuh"

// `bytes` to every block of the cluster in `mask`, at the same places of their shared memory; of each, `barrier` there
// is told. `bytes` and both addresses multiples of 16.
__device__ __forceinline__ void bulk_load_multicast(u32 to, const void* from, u32 bytes, u32 barrier, u16 mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
               "[%3], %4;"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
               : "memory");
}
