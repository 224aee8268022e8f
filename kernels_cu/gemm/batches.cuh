// The batch of a work tile, where a launch computes several products of one size.
#pragma once
#include "gemm/params/batches.cuh"

// A field of BatchParams: how far the batches of an operand lie apart.
typedef i64 BatchParams::* BatchStride;

// Without kBatched the struct is empty, so it adds nothing to the code of other products.
template <bool kBatched> struct Batch {
  __device__ __forceinline__ void take(const BatchParams&, u32&) {}
  __device__ __forceinline__ void take(const BatchParams&, u32&, u32&) {}
  __device__ __forceinline__ void take_token_tile(u32&, u32) {}
  __device__ __forceinline__ i64 offset(i64) const { return 0; }
  __device__ __forceinline__ void store(u32&) const {}
};

template <> struct Batch<true> {
  u32 batch = 0;

  // Takes the batch from the index of a work tile, where batches follow each other.
  __device__ __forceinline__ void take(const BatchParams& p, u32& index) {
    batch = index / p.work_tiles, index %= p.work_tiles;
  }
  // Takes the batch where only batches with weights of their own follow each other. Batches that share W are further
  // token tiles of one product, so that L2 serves W: `n_tiles` becomes the number of all of them.
  __device__ __forceinline__ void take(const BatchParams& p, u32& index, u32& n_tiles) {
    if (p.weight_rows == 0) n_tiles *= p.count;
    else take(p, index);
  }
  // Takes the batch from a token tile of those that share W. A batch has `n_tiles` of them.
  __device__ __forceinline__ void take_token_tile(u32& token_tile, u32 n_tiles) {
    batch += token_tile / n_tiles, token_tile %= n_tiles;
  }
  // The offset in an operand whose batches lie `stride` elements apart.
  __device__ __forceinline__ i64 offset(i64 stride) const { return batch * stride; }
  __device__ __forceinline__ void store(u32& to) const { to = batch; }
};
