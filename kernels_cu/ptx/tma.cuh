// Wrappers of PTX instructions of sm_90: mbarriers, bulk and tensor copies, register hand-over. One each.
#pragma once
#include "ptx/async.cuh"

// mbarriers -----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Once all that this thread copied by cp_async_16 so far has come; the thread counts among the barrier's arrivals.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// `barrier` as cluster_address gives it. Orders nothing but what the copy engine and wgmma did: a release at cluster
// scope would cost a fence of all memory.
__device__ __forceinline__ void barrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// Copies, global to shared, that complete on a barrier -----------------------------------------------

// `bytes` and both addresses multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// To L2 alone. As bulk_load asks of `bytes` and `from`.
__device__ __forceinline__ void prefetch_bulk(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a 2-D tensor; what lies outside of the tensor is zero.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// The same of a 3-D tensor.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}
// To every block of the cluster in `mask`, at the same places of their shared memory.
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

// Copies, shared to global ---------------------------------------------------------------------------

// What this thread stored to shared memory so far is seen by copies that are issued after it.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A box of a 2-D tensor; what lies outside of the tensor is not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 column, u32 row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :
               : "l"(map), "r"(column), "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but this thread's last kPending groups have read their shared memory.
template <int kPending> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all that this thread had copied is in global memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// One lane of a warp, all of which is here. Of it the compiler knows that it is alone; what a thread by its number asks
// of the copy engine it would repeat for each that might be there.
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
// Named barrier `id` (1 to 15) of `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same, and whether any of them says so.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool one) {
  u32 any;
  asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %3, 0;\n\t"
               "barrier.cta.red.or.pred q, %1, %2, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"((int)one)
               : "memory");
  return any;
}
// named_barrier_sync for who doesn't wait for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
