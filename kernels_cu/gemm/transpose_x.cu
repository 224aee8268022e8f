// X in columns to rows, bit by bit: gemm/wgmma_sp.cu multiplies what comes out. For X that its copies can't read, since
// columns begin between multiples of 16 bytes, and for X of many tokens, whose columns they read slowly.
//
//   role        who            what
//   every warp  256 threads    64 columns of 64 tokens: lines of a column in, through shared memory, lines of a row out
//
//   barriers    one, between in and out
//   registers   what a thread reads before it stores: 8
//
//   thread   | load 16 elements | store to shared memory | meet | gather 8 columns of a token, twice | store
#include "common/element.cuh"
#include "gemm/params/transpose_x.cuh"
#include "ptx/async.cuh"

// Everything that is compiled in.
struct Config {
  static constexpr int kThreads = 256, kTile = 64;  // columns and tokens of a block
  static constexpr int kPitch = kTile + 1;          // of a column in shared memory: its words are in other banks
  static constexpr int kAtOnce = 8, kPieces = kTile / kAtOnce, kRounds = kTile * kPieces / kThreads;
};

// A column's tokens, 16 bytes at a time.
__device__ __forceinline__ void load_pieces(const TransposeXParams& p, u16* tile, i64 column0, i64 token0) {
  uint4 pieces[Config::kRounds];
#pragma unroll
  for (int i = 0; i < Config::kRounds; ++i) {
    const int at = i * Config::kThreads + threadIdx.x;
    const i64 column = column0 + at / Config::kPieces, token = token0 + at % Config::kPieces * Config::kAtOnce;
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (column < p.k && token + Config::kAtOnce <= p.n) pieces[i] = *(const uint4*)(p.x + column * p.x_stride + token);
    else if (column < p.k) {
      u32 words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < Config::kAtOnce; ++j)
        if (token + j < p.n) words[j / 2] |= (u32)p.x[column * p.x_stride + token + j] << j % 2 * 16;
      pieces[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kRounds; ++i) {
    const int at = i * Config::kThreads + threadIdx.x;
    u16* to = tile + at / Config::kPieces * Config::kPitch + at % Config::kPieces * Config::kAtOnce;
    const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
    for (int j = 0; j < Config::kAtOnce; ++j) to[j] = (u16)(words[j / 2] >> j % 2 * 16);
  }
}

// The same where they begin anywhere: element by element.
__device__ __forceinline__ void load_elements(const TransposeXParams& p, u16* tile, i64 column0, i64 token0) {
  constexpr int kOfThread = Config::kTile * Config::kTile / Config::kThreads;
  u16 elements[kOfThread];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int at = i * Config::kThreads + threadIdx.x;
    const i64 column = column0 + at / Config::kTile, token = token0 + at % Config::kTile;
    elements[i] = column < p.k && token < p.n ? p.x[column * p.x_stride + token] : (u16)0;
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int at = i * Config::kThreads + threadIdx.x;
    tile[at / Config::kTile * Config::kPitch + at % Config::kTile] = elements[i];
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) turn_columns(const TransposeXParams p) {
  __shared__ u16 tile[Config::kTile * Config::kPitch];
  // The product may begin once all before this pass is done, so it may read its weight without waiting.
  grid_dependency_wait();
  launch_dependent_grids();
  const i64 column0 = (i64)(blockIdx.x % p.column_tiles) * Config::kTile,
            token0 = (i64)(blockIdx.x / p.column_tiles) * Config::kTile;
  if (p.x_aligned) load_pieces(p, tile, column0, token0);
  else load_elements(p, tile, column0, token0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Config::kRounds; ++i) {
    const int at = i * Config::kThreads + threadIdx.x, piece = at % Config::kPieces;
    const i64 column = column0 + piece * Config::kAtOnce, token = token0 + at / Config::kPieces;
    if (column >= p.k || token >= p.n) continue;
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < Config::kAtOnce; ++j)
      words[j / 2] |= (u32)tile[(piece * Config::kAtOnce + j) * Config::kPitch + at / Config::kPieces] << j % 2 * 16;
    *(uint4*)(p.out + token * p.k + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
