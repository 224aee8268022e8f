// Canonical 2:4 weights of 16-bit elements to tiles of 64 x 128 and back; sparse24_plans/packing.py defines the
// tiles' bytes. A block moves one tile; memory bound.
#include "groups.cuh"

constexpr int kThreads = 256;
constexpr int kTileRows = 64, kTileColumns = 128;
constexpr int kChunks = 8;                                     // of 16 bytes in a row's values
constexpr int kValueBytes = kTileRows * kChunks * 16;
constexpr int kTileBytes = kValueBytes + kTileRows * kTileColumns / 8;
constexpr int kFragments = kTileRows / 16 * 32;                // a lane's two words of metadata each
constexpr u16 kPadCodes = 0x0404;

struct PackParams {
  u8* values;
  u16* metadata;
  u8* packed;
  u64* status;
  i64 m, k;
};

// Two codes, a byte each -> a byte; four -> a uint16, lowest nibble first; and back.
__device__ __forceinline__ u32 to_nibbles(u32 codes) {
  const u32 pairs = codes | codes >> 4;
  return prmt(pairs, 0, 0x4420);
}
__device__ __forceinline__ u32 to_codes(u32 nibbles) {
  const u32 bytes = prmt(nibbles, 0, 0x4140);
  return (bytes | bytes << 4) & 0x0f0f0f0fu;
}

struct Tile {
  i64 row, column, groups;  // its first cell; 16-bit words in a row of metadata
  u8* packed;

  __device__ explicit Tile(const PackParams& p) {
    const i64 across = (p.k + kTileColumns - 1) / kTileColumns, down = blockIdx.x / across;
    row = down * kTileRows;
    column = (blockIdx.x - down * across) * kTileColumns;
    groups = p.k / 8;
    packed = p.packed + (u64)blockIdx.x * kTileBytes;
  }
};

// Where chunk c of row r lies: the 128-byte swizzle.
__device__ __forceinline__ u8* swizzled(const Tile& tile, int r, int c) {
  return tile.packed + (r * kChunks + (c ^ (r & 7))) * 16;
}

extern "C" __global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams p) {
  const Tile tile(p);
#pragma unroll
  for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
    const i64 row = tile.row + r, left = p.k - (tile.column + 16 * c);  // cells that the chunk can cover
    const uint2* from = (const uint2*)(p.values + row * p.k + tile.column + 16 * c);
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (row < p.m && left > 0) {
      if (p.k % 16 == 0) {
        chunk = __ldcs((const uint4*)from);
      } else {
        const uint2 low = __ldcs(from), high = left > 8 ? __ldcs(from + 1) : make_uint2(0, 0);
        chunk = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
    __stcs((uint4*)swizzled(tile, r, c), chunk);
  }
  if (threadIdx.x >= kFragments) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32 word[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = tile.row + 16 * w + g + 8 * h, at = tile.column / 8 + 2 * (4 * j + t);
      const u16* from = p.metadata + row * tile.groups + at;
      const bool inside = row < p.m;
      const u32 low = inside && at < tile.groups ? __ldcs(from) : kPadCodes;
      const u32 high = inside && at + 1 < tile.groups ? __ldcs(from + 1) : kPadCodes;
      half[h] = to_nibbles(low | high << 16);
    }
    word[j] = half[0] | half[1] << 16;
  }
  __stcs((uint2*)(tile.packed + kValueBytes) + threadIdx.x, make_uint2(word[0], word[1]));
}

// Padding is dropped unread; the first group whose nibble isn't a code is reported.
extern "C" __global__ void __launch_bounds__(kThreads) unpack(const __grid_constant__ PackParams p) {
  const Tile tile(p);
#pragma unroll
  for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
    const i64 row = tile.row + r, left = p.k - (tile.column + 16 * c);
    if (row >= p.m || left <= 0) continue;
    const uint4 chunk = __ldcs((const uint4*)swizzled(tile, r, c));
    uint2* to = (uint2*)(p.values + row * p.k + tile.column + 16 * c);
    if (p.k % 16 == 0) {
      __stcs((uint4*)to, chunk);
    } else {
      to[0] = make_uint2(chunk.x, chunk.y);
      if (left > 8) to[1] = make_uint2(chunk.z, chunk.w);
    }
  }
  if (threadIdx.x >= kFragments) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint2 words = __ldcs((const uint2*)(tile.packed + kValueBytes) + threadIdx.x);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = tile.row + 16 * w + g + 8 * h, at = tile.column / 8 + 2 * (4 * j + t);
      if (row >= p.m) continue;
      const u32 codes = to_codes((j ? words.y : words.x) >> (16 * h) & 0xffff);
      u16* to = p.metadata + row * tile.groups + at;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i / 2 >= tile.groups) continue;
        if (i % 2 == 0) to[i / 2] = (u16)(codes >> (8 * i));
        const u32 code = codes >> (8 * i) & 15;
        if ((code & 3) >= code >> 2) report(p.status, (row * tile.groups + at) * 2 + i, code);
      }
    }
  }
}
