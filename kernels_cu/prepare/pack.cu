// Packs canonical 2:4 weights into tiles and unpacks them: tiles of 64 x 128 for 16-bit elements, 64 x 256 for 8-bit
// ones, 64 x 64 for 32-bit ones. A CTA moves one tile. Memory bound.
//
// role       threads     work
// values     256         two chunks of 16 bytes a thread, canonical <-> swizzled (32 bits: <-> fragment order, 8 bytes
//                        at a time)
// metadata   0 to 127    one lane's words of one fragment each, canonical <-> fragment order
//
// no barriers, no shared memory; few registers
//
// thread   | values: load, store x 2 | metadata: load, nibbles <-> codes, store |
#include "common/weight_tile.cuh"
#include "prepare/codes.cuh"
#include "prepare/params/pack.cuh"

// All compile-time constants; macros are read here alone.
struct Config : CellType<S24_WIDTH, S24_NUMBER, S24_FIRST_NAN> {
  using Tile = WeightTile<kWidth>;
  static constexpr int kThreads = 256;
  static constexpr int kChunks = Tile::kRowBytes / 16;  // chunks of a row's values
  static constexpr int kLanes = Tile::kFragments * 32;  // threads that move metadata
  static constexpr u16 kPadCodes = 0x0404;
};
using Tile = Config::Tile;

// Converts between codes (a byte each) and nibbles, lowest first.
__device__ __forceinline__ u32 to_nibbles(u32 codes) {
  const u32 pairs = codes | codes >> 4;
  return prmt(pairs, 0, 0x4420);
}
__device__ __forceinline__ u32 to_codes(u32 nibbles) {
  const u32 bytes = prmt(nibbles, 0, 0x4140);
  return (bytes | bytes << 4) & 0x0f0f0f0fu;
}

// The tile of a CTA.
struct BlockTile {
  i64 row, column, pitch, words;  // its first cell; bytes of a row of values; 16-bit words of a row of metadata
  u8* packed;

  __device__ explicit BlockTile(const PackParams& p) {
    const i64 across = (p.k + Tile::kColumns - 1) / Tile::kColumns, down = blockIdx.x / across;
    row = down * Tile::kRows;
    column = (blockIdx.x - down * across) * Tile::kColumns;
    pitch = p.k / 2 * Config::kWidth;
    words = p.k / 8;
    packed = p.packed + (u64)blockIdx.x * Tile::kBytes;
  }
};

// Chunk c of row r of a tile: its offset in the canonical values, and how many of its bytes exist.
struct Chunk {
  i64 offset, bytes;

  __device__ Chunk(const PackParams& p, const BlockTile& tile, int r, int c) {
    const i64 at = (tile.column / 2) * Config::kWidth + 16 * c;
    offset = (tile.row + r) * tile.pitch + at;
    bytes = tile.row + r < p.m ? tile.pitch - at : 0;
  }
};

// Row and 16-bit word in the canonical metadata of half h of a lane's word j.
__device__ __forceinline__ i64 row_of(const BlockTile& tile, int w, int g, int t, int h) {
  return tile.row + 16 * w + g + 8 * (Config::kWidth == 1 ? t & 1 : h);
}
__device__ __forceinline__ i64 word_of(const BlockTile& tile, int t, int j, int h) {
  return tile.column / 8 + (Config::kWidth == 1 ? 8 * j + 4 * (t >> 1) + 2 * h : 2 * (4 * j + t));
}

// Address of chunk c of row r under the 128-byte swizzle.
__device__ __forceinline__ u8* swizzled(const BlockTile& tile, int r, int c) {
  return tile.packed + (r * Config::kChunks + (c ^ (r & 7))) * 16;
}

// Address of half a chunk of 32-bit elements: [step][columns 0-7, 8-15][warp][lane][row, row + 8][pair].
__device__ __forceinline__ uint2* fragment(const BlockTile& tile, int r, int c, int half) {
  const int kept = 4 * c + 2 * half, lane = r % 8 * 4 + kept % 8 / 2;
  return (uint2*)(tile.packed + (kept / 8 * 128 + r / 16 * 32 + lane) * 16 + r % 16 / 8 * 8);
}

__device__ __forceinline__ void store_chunk(const BlockTile& tile, int r, int c, uint4 bytes) {
  if constexpr (Config::kWidth == 4) {
    __stcs(fragment(tile, r, c, 0), make_uint2(bytes.x, bytes.y));
    __stcs(fragment(tile, r, c, 1), make_uint2(bytes.z, bytes.w));
  } else {
    __stcs((uint4*)swizzled(tile, r, c), bytes);
  }
}
__device__ __forceinline__ uint4 load_chunk(const BlockTile& tile, int r, int c) {
  if constexpr (Config::kWidth == 4) {
    const uint2 low = __ldcs(fragment(tile, r, c, 0)), high = __ldcs(fragment(tile, r, c, 1));
    return make_uint4(low.x, low.y, high.x, high.y);
  } else {
    return __ldcs((const uint4*)swizzled(tile, r, c));
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) pack(const __grid_constant__ PackParams p) {
  const BlockTile tile(p);
#pragma unroll
  for (int i = 0; i < Tile::kRows * Config::kChunks / Config::kThreads; ++i) {
    const int at = i * Config::kThreads + threadIdx.x, r = at / Config::kChunks, c = at % Config::kChunks;
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
    store_chunk(tile, r, c, bytes);
  }
  if (threadIdx.x >= Config::kLanes) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  u32* to = (u32*)(tile.packed + Tile::kValueBytes) + threadIdx.x * Tile::kWords;
#pragma unroll
  for (int j = 0; j < Tile::kWords; ++j) {
    u32 half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = row_of(tile, w, g, t, h), at = word_of(tile, t, j, h);
      const u16* from = p.metadata + row * tile.words + at;
      const bool inside = row < p.m;
      const u32 low = inside && at < tile.words ? __ldcs(from) : Config::kPadCodes;
      const u32 high = inside && at + 1 < tile.words ? __ldcs(from + 1) : Config::kPadCodes;
      half[h] = to_nibbles(low | high << 16);
    }
    to[j] = half[0] | half[1] << 16;
  }
}

// Skips padding, and reports the first group whose nibble is not a code.
extern "C" __global__ void __launch_bounds__(Config::kThreads) unpack(const __grid_constant__ PackParams p) {
  const BlockTile tile(p);
#pragma unroll
  for (int i = 0; i < Tile::kRows * Config::kChunks / Config::kThreads; ++i) {
    const int at = i * Config::kThreads + threadIdx.x, r = at / Config::kChunks, c = at % Config::kChunks;
    const Chunk chunk(p, tile, r, c);
    if (chunk.bytes <= 0) continue;
    const uint4 bytes = load_chunk(tile, r, c);
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
  if (threadIdx.x >= Config::kLanes) return;
  const int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32* from = (const u32*)(tile.packed + Tile::kValueBytes) + threadIdx.x * Tile::kWords;
#pragma unroll
  for (int j = 0; j < Tile::kWords; ++j) {
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
