// Canonical 2:4 weights of 16-bit elements to tiles of 64 x 128 and back, of 8-bit ones to tiles of 64 x 256;
// sparse24_plans/packing.py defines the tiles' bytes. A block moves one tile; memory bound.
#include "prepare/groups.cuh"

constexpr int kThreads = 256;
constexpr int kTileRows = 64, kTileColumns = 256 / S24_WIDTH;
constexpr int kChunks = 8;                                     // of 16 bytes in a row's values
constexpr int kValueBytes = kTileRows * kChunks * 16;
constexpr int kTileBytes = kValueBytes + kTileRows * kTileColumns / 8;
constexpr int kFragments = kTileRows / 16 * 32;                // a lane's words of metadata each
constexpr int kWords = 4 / S24_WIDTH;                          // of a lane
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
  i64 row, column, pitch, words;  // its first cell; bytes of a row of values, 16-bit words of one of metadata
  u8* packed;

  __device__ explicit Tile(const PackParams& p) {
    const i64 across = (p.k + kTileColumns - 1) / kTileColumns, down = blockIdx.x / across;
    row = down * kTileRows;
    column = (blockIdx.x - down * across) * kTileColumns;
    pitch = p.k / 2 * S24_WIDTH;
    words = p.k / 8;
    packed = p.packed + (u64)blockIdx.x * kTileBytes;
  }
};

// Chunk c of row r of a tile: its bytes in the canonical values, and how many of the 16 there are.
struct Chunk {
  i64 offset, bytes;

  __device__ Chunk(const PackParams& p, const Tile& tile, int r, int c) {
    const i64 at = (tile.column / 2) * S24_WIDTH + 16 * c;
    offset = (tile.row + r) * tile.pitch + at;
    bytes = tile.row + r < p.m ? tile.pitch - at : 0;
  }
};

// The row, and the 16-bit word in it, of half h of word j of a lane.
__device__ __forceinline__ i64 row_of(const Tile& tile, int w, int g, int t, int h) {
  return tile.row + 16 * w + g + 8 * (S24_WIDTH == 2 ? h : t & 1);
}
__device__ __forceinline__ i64 word_of(const Tile& tile, int t, int j, int h) {
  return tile.column / 8 + (S24_WIDTH == 2 ? 2 * (4 * j + t) : 8 * j + 4 * (t >> 1) + 2 * h);
}

// Where chunk c of row r lies: the 128-byte swizzle.
__device__ __forceinline__ u8* swizzled(const Tile& tile, int r, int c) {
  return tile.packed + (r * kChunks + (c ^ (r & 7))) * 16;
}

extern "C" __global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams p) {
  const Tile tile(p);
#pragma unroll
  for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
    const Chunk chunk(p, tile, r, c);
    const u32* from = (const u32*)(p.values + chunk.offset);
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (tile.pitch % 16 == 0) {
      if (chunk.bytes > 0) bytes = __ldcs((const uint4*)from);
    } else {
      if (chunk.bytes > 0) bytes.x = __ldcs(from);
      if (chunk.bytes > 4) bytes.y = __ldcs(from + 1);
      if (chunk.bytes > 8) bytes.z = __ldcs(from + 2);
      if (chunk.bytes > 12) bytes.w = __ldcs(from + 3);
    }
    __stcs((uint4*)swizzled(tile, r, c), bytes);
  }
  if (threadIdx.x >= kFragments) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32* to = (u32*)(tile.packed + kValueBytes) + threadIdx.x * kWords;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = row_of(tile, w, g, t, h), at = word_of(tile, t, j, h);
      const u16* from = p.metadata + row * tile.words + at;
      const bool inside = row < p.m;
      const u32 low = inside && at < tile.words ? __ldcs(from) : kPadCodes;
      const u32 high = inside && at + 1 < tile.words ? __ldcs(from + 1) : kPadCodes;
      half[h] = to_nibbles(low | high << 16);
    }
    to[j] = half[0] | half[1] << 16;
  }
}

// Padding is dropped unread; the first group whose nibble isn't a code is reported.
extern "C" __global__ void __launch_bounds__(kThreads) unpack(const __grid_constant__ PackParams p) {
  const Tile tile(p);
#pragma unroll
  for (int i = 0; i < kTileRows * kChunks / kThreads; ++i) {
    const int at = i * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
    const Chunk chunk(p, tile, r, c);
    if (chunk.bytes <= 0) continue;
    const uint4 bytes = __ldcs((const uint4*)swizzled(tile, r, c));
    u32* to = (u32*)(p.values + chunk.offset);
    if (tile.pitch % 16 == 0) {
      __stcs((uint4*)to, bytes);
    } else {
      to[0] = bytes.x;
      if (chunk.bytes > 4) to[1] = bytes.y;
      if (chunk.bytes > 8) to[2] = bytes.z;
      if (chunk.bytes > 12) to[3] = bytes.w;
    }
  }
  if (threadIdx.x >= kFragments) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32* from = (const u32*)(tile.packed + kValueBytes) + threadIdx.x * kWords;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const u32 word = __ldcs(from + j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = row_of(tile, w, g, t, h), at = word_of(tile, t, j, h);
      if (row >= p.m) continue;
      const u32 codes = to_codes(word >> (16 * h) & 0xffff);
      u16* to = p.metadata + row * tile.words + at;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i / 2 >= tile.words) continue;
        if (i % 2 == 0) to[i / 2] = (u16)(codes >> (8 * i));
        const u32 code = codes >> (8 * i) & 15;
        if ((code & 3) >= code >> 2) report(p.status, (row * tile.words + at) * 2 + i, code);
      }
    }
  }
}
