// Wrappers of single PTX instructions of sm_90: mbarriers, TMA, named barriers, setmaxnreg.
#pragma once
#include "ptx/async.cuh"

// mbarriers -----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once all earlier cp.async of this thread have completed. The thread counts among the barrier's arrivals.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of another CTA; cluster_address gives its address. The arrival orders only accesses of TMA and
// wgmma: a release at cluster scope would cost a fence of all memory.
__device__ __forceinline__ void barrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of a CTA of the cluster, which sees what this thread has written before.
__device__ __forceinline__ void barrier_arrive_release_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile("{\n\t.reg .pred p;\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
               "selp.u32 %0, 1, 0, p;\n\t}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// barrier_wait for data that other CTAs of the cluster have sent.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile("{\n\t.reg .pred p;\n\t"
               "WAIT_%=:\n\t"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
               "@!p bra WAIT_%=;\n\t}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
// Copies shared memory to that of a CTA of the cluster, where the copy completes on a barrier. cluster_address gives
// the addresses there. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_send(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Loads, global to shared, that complete on a barrier ------------------------------------------------

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Prefetches to L2. `bytes` and `from` are multiples of 16.
__device__ __forceinline__ void prefetch_bulk(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Prefetches a box of a 2-D tensor to L2.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map, u32 column, u32 row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box of a 2-D tensor. Elements outside of the tensor are zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Loads a box of a 3-D tensor. Elements outside of the tensor are zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}
// Loads a box into every CTA of the cluster in `mask`, at the same shared memory address.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier,
                                                   u16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3}], [%4], %5;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
               : "memory");
}
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix,
                                                   u32 barrier, u16 mask) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "h"(mask)
               : "memory");
}

// Stores, shared to global ---------------------------------------------------------------------------

// Makes this thread's earlier stores to shared memory visible to later TMA and wgmma.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Stores a box of a 2-D tensor. Elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 column, u32 row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :
               : "l"(map), "r"(column), "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but this thread's last kPending groups of stores have read their shared memory.
template <int kPending> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of this thread's stores have been written to global memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Whether this lane is the one that was elected; all lanes of the warp call it. The compiler knows that only one lane
// is elected. For a thread selected by its number it repeats each TMA instruction in a loop over the possible threads.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
  return elected;
}

// Warpgroups ----------------------------------------------------------------------------------------

template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Syncs at named barrier `id` (1 to 15), which `threads` threads take part in.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Named barrier with an OR reduction: returns whether `one` is true in any thread.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool one) {
  u32 any;
  asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %3, 0;\n\t"
               "barrier.cta.red.or.pred q, %1, %2, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"((int)one)
               : "memory");
  return any;
}
// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
