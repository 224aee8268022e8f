// Wrappers of single PTX instructions: cp.async, ldmatrix, sparse mma, clusters, loads and stores by address.
#pragma once
#include "common/element.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// 16 bytes, global to shared, past L1. With keep == false the destination is zeroed and nothing is read.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, bool keep) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(keep ? 16 : 0));
}
// cp_async_16 through L1, which serves two pieces of 16 bytes in one sector of 32 by a single read.
__device__ __forceinline__ void cp_async_16_cached(u32 to, const void* from, bool keep) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(keep ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ldmatrix_x4 with each matrix transposed.
__device__ __forceinline__ void ldmatrix_transposed_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

#define S24_MMA_SP(shape_types)                                                                          \
  asm volatile("mma.sp::ordered_metadata.sync.aligned." shape_types                                      \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"    \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), \
                 "r"(metadata), "n"(kSelector))

// acc += A(16x32, 2:4) * B(32x8). kSelector names the lane pair of every quad that holds the metadata.
template <ElementKind kElement, int kSelector>
__device__ __forceinline__ void mma_sp_m16n8k32(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
  static_assert(kElement == ElementKind::F16 || kElement == ElementKind::BF16,
                "mma.sp m16n8k32 multiplies 16-bit floats");
  if constexpr (kElement == ElementKind::F16) S24_MMA_SP("m16n8k32.row.col.f32.f16.f16.f32");
  else S24_MMA_SP("m16n8k32.row.col.f32.bf16.bf16.f32");
}

// acc += A(16x64, 2:4) * B(64x8) of fp8 (sm_89). All lanes hold metadata.
template <ElementKind kA, ElementKind kB>
__device__ __forceinline__ void mma_sp_m16n8k64(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
  constexpr int kSelector = 0;
  static_assert(is_fp8(kA) && is_fp8(kB));
  if constexpr (kA == ElementKind::FP8_E4M3 && kB == kA) S24_MMA_SP("m16n8k64.row.col.f32.e4m3.e4m3.f32");
  else if constexpr (kA == ElementKind::FP8_E4M3) S24_MMA_SP("m16n8k64.row.col.f32.e4m3.e5m2.f32");
  else if constexpr (kB == kA) S24_MMA_SP("m16n8k64.row.col.f32.e5m2.e5m2.f32");
  else S24_MMA_SP("m16n8k64.row.col.f32.e5m2.e4m3.f32");
}
#undef S24_MMA_SP

// Programmatic dependent launch (sm_90): a kernel may start before the previous kernels of the stream have ended. It
// waits here before it accesses what they write, and allows the next kernel to start.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependents_and_wait() {
  launch_dependent_grids();
  grid_dependency_wait();
}

// Syncs all threads of the cluster (sm_90). Writes before it are visible after it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// cluster_sync without ordering memory, which saves a fence.
__device__ __forceinline__ void cluster_sync_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The two halves of cluster_sync_relaxed.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The cluster address of what CTA `rank` of the cluster has at `address` of its shared memory.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
  u32 there = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

__device__ __forceinline__ void store_cluster(u32 address, u32 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
#endif
}
__device__ __forceinline__ float load_cluster(u32 address) {
  float v = 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address));
#endif
  return v;
}

__device__ __forceinline__ float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void load_shared_x4(float (&v)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address));
}

__device__ __forceinline__ void load_shared_words(u32 (&v)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}
__device__ __forceinline__ void load_shared_words(u32 (&v)[2], u32 address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address));
}
__device__ __forceinline__ void load_shared_words(u32 (&v)[1], u32 address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(address));
}
__device__ __forceinline__ void store_shared(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_x2(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_shared_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u8 v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"((u32)v) : "memory");
}
template <class Bits> __device__ __forceinline__ Bits load_shared_as(u32 address) {
  u32 v;
  if constexpr (sizeof(Bits) == 1) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  else if constexpr (sizeof(Bits) == 2)
    asm volatile("{\n\t.reg .u16 h;\n\tld.shared.u16 h, [%1];\n\tcvt.u32.u16 %0, h;\n\t}" : "=r"(v) : "r"(address));
  else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return (Bits)v;
}

// Release and acquire in global memory: writes before the release are visible after an acquire that reads its value.
__device__ __forceinline__ void store_release(u64* address, u64 v) {
  asm volatile("fence.acq_rel.gpu;\n\tst.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}
__device__ __forceinline__ u64 load_acquire(const u64* address) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_relaxed(const u64* address) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}
// Makes a counter one of this launch: id, whose low `kBits` bits are 0, plus a count. `seen` is what it held at any
// time in the launch. If the exchange fails, another thread has done it.
template <int kBits> __device__ __forceinline__ void begin_count(u64* counter, u64 id, u64 seen) {
  if (seen >> kBits != id >> kBits) atomicCAS(counter, seen, id);
}
// Claims the next of `count` work tiles by lane 0 of a warp, from a counter of launch `id`. `first`: this is the warp's
// first claim. Every warp claims until it gets `count` - warps or more, so there are `count` claims; the last one
// leaves the counter as a repeated launch needs it.
__device__ __forceinline__ u32 claim(u64* counter, u64 id, u32 count, bool first) {
  u32 claimed = 0;
  if (threadIdx.x % 32 == 0) {
    if (first) begin_count<24>(counter, id, load_relaxed(counter));
    claimed = (u32)atomicAdd(counter, 1ull) & 0xffffff;
    if (claimed + 1 == count) atomicExch(counter, id);
  }
  return __shfl_sync(~0u, claimed, 0);
}
__device__ __forceinline__ void acquire_release_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void store_global(void* address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Loads four numbers past L1. Where `loaded` is false they are zeros, and nothing is read.
#define S24_LOAD_OR_ZEROS(c)                                                              \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"                          \
               "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t" \
               "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"                      \
               : c(v[0]), c(v[1]), c(v[2]), c(v[3])                                       \
               : "l"(address), "r"((int)loaded)                                           \
               : "memory")
__device__ __forceinline__ void load_global_or_zeros(float* v, const void* address, bool loaded) {
  S24_LOAD_OR_ZEROS("=&f");
}
__device__ __forceinline__ void load_global_or_zeros(int* v, const void* address, bool loaded) {
  S24_LOAD_OR_ZEROS("=&r");
}
#undef S24_LOAD_OR_ZEROS
