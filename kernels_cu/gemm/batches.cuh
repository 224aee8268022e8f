// Batches of products of one size: which batch a work tile belongs to, and where it lies in an operand. Kernels without
// batches (kBatched == false) have the code of a single product.
#pragma once
#include "gemm/params/batches.cuh"

// Takes the batch from the index of a work tile. Batches with weights of their own follow each other. Batches that share
// W are further token tiles of one product, so that L2 serves W: then `n_tiles` becomes the number of all of them, and
// the batch is that of the token tile.
__device__ __forceinline__ u32 take_batch(const BatchParams& p, u32& index, u32& n_tiles) {
  if (p.weight_rows == 0) {
    n_tiles *= p.count;
    return 0;
  }
  const u32 batch = index / p.work_tiles;
  index -= batch * p.work_tiles;
  return batch;
}

// The offset of a batch in an operand whose batches lie `stride` elements apart.
template <bool kBatched> __device__ __forceinline__ i64 batch_offset(u32 batch, i64 stride) {
  return kBatched ? batch * stride : 0;
}
