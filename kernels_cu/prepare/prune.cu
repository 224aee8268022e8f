// Dense row-major [M, K] to 2:4, in one pass at memory speed: prune, compress, both at once, or apply a mask.
//
// K is a multiple of 8, so rows never split a unit and the matrix is one flat array. S24_SCORES (an element
// code, or -1) ranks by the caller's scores instead of by |value|. Loads and stores are streaming: nothing is read
// twice, and what is written doesn't push out what is still to be read.
#include "prepare/groups.cuh"

constexpr int kThreads = 256;
constexpr int kPerThread = S24_WIDTH == 4 ? 2 : 4;        // independent units in flight
constexpr int kCells = S24_WIDTH == 1 ? 16 : 8;           // of a unit: at least 16 bytes, and a byte of the mask
constexpr int kGroups = kCells / 4;
constexpr int kVectors = kCells * S24_WIDTH / 16;

struct PruneParams {
  const void* dense;
  const void* scores;
  const void* mask_in;
  void* pruned;
  void* mask_out;
  void* values;
  void* metadata;
  u64* status;
  u64 cells;
  u64 row_cells;
};

struct __align__(16) Unit {
  Group group[kGroups];
};

// 8-bit elements: the last unit may be half a one.
__device__ __forceinline__ bool is_half(u64 at, u64 cells) { return S24_WIDTH == 1 && (at + 1) * kCells > cells; }

__device__ __forceinline__ Unit load_unit(const void* from, u64 at, u64 cells) {
  union {
    Unit unit;
    uint4 vector[kVectors];
    uint2 half;
  } u;
  if (is_half(at, cells)) {
    u.vector[0] = make_uint4(0, 0, 0, 0);
    u.half = __ldcs((const uint2*)from + 2 * at);
    return u.unit;
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) u.vector[i] = __ldcs((const uint4*)from + at * kVectors + i);
  return u.unit;
}

__device__ __forceinline__ void store_unit(void* to, u64 at, u64 cells, const Unit& unit) {
  union {
    Unit unit;
    uint4 vector[kVectors];
    uint2 half;
  } u;
  u.unit = unit;
  if (is_half(at, cells)) {
    ((uint2*)to)[2 * at] = u.half;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) __stcs((uint4*)to + at * kVectors + i, u.vector[i]);
}

// Masks: bit i of a unit is its cell i.
__device__ __forceinline__ u32 load_mask(const void* from, u64 at, u64 cells) {
  if (S24_WIDTH != 1) return ((const u8*)from)[at];
  return is_half(at, cells) ? ((const u8*)from)[2 * at] : ((const u16*)from)[at];
}

__device__ __forceinline__ void store_mask(void* to, u64 at, u64 cells, u32 mask) {
  if (S24_WIDTH != 1)
    ((u8*)to)[at] = (u8)mask;
  else if (is_half(at, cells))
    ((u8*)to)[2 * at] = (u8)mask;
  else
    ((u16*)to)[at] = (u16)mask;
}

// The kept values and the metadata of a unit, by its codes.
__device__ __forceinline__ void store_kept(const PruneParams& p, u64 at, const Unit& unit, u32 codes) {
  const Gather gather(codes);
#if S24_WIDTH == 4
  const uint2 a = gather(unit.group[0], 0), b = gather(unit.group[1], 1);
  __stcs((uint4*)p.values + at, make_uint4(a.x, a.y, b.x, b.y));
#elif S24_WIDTH == 2
  __stcs((uint2*)p.values + at, make_uint2(gather(unit.group[0], 0), gather(unit.group[1], 1)));
#else
  const u32 low = prmt(gather(unit.group[0], 0), gather(unit.group[1], 1), 0x5410);
  const u32 high = prmt(gather(unit.group[2], 2), gather(unit.group[3], 3), 0x5410);
  if (is_half(at, p.cells)) {
    ((u32*)p.values)[2 * at] = low;
    ((u16*)p.metadata)[2 * at] = (u16)gather.codes;
    return;
  }
  __stcs((uint2*)p.values + at, make_uint2(low, high));
  __stcs((u32*)p.metadata + at, gather.codes);
  return;
#endif
  __stcs((u16*)p.metadata + at, (u16)gather.codes);
}

// Ranking by scores ---------------------------------------------------------------------------------

#if S24_SCORES >= 0
typedef Element<S24_SCORES> Score;
constexpr int kScoreVectors = 4 * (int)sizeof(Score::Bits) / 8;  // of 8 bytes, for a group

// Orders as the score does, signed: NaN above all, -0 and +0 alike.
__device__ __forceinline__ u32 score_key(float score) {
  const u32 bits = __float_as_uint(score + 0.0f);
  return score == score ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0xffffffffu;
}

__device__ __forceinline__ u32 rank_scores(const void* scores, u64 group) {
  union {
    uint2 vector[kScoreVectors];
    Score::Bits bits[4];
  } u;
#pragma unroll
  for (int i = 0; i < kScoreVectors; ++i)
    u.vector[i] = __ldcs((const uint2*)scores + group * kScoreVectors + i);
  u32 key[4], wins[6];
#pragma unroll
  for (int i = 0; i < 4; ++i) key[i] = score_key(Score::to_float(u.bits[i]));
#pragma unroll
  for (int i = 0, at = 0; i < 3; ++i)
#pragma unroll
    for (int j = i + 1; j < 4; ++j) wins[at++] = key[i] >= key[j] ? 0xffffffffu : 0u;
  return two_largest(wins[0], wins[1], wins[2], wins[3], wins[4], wins[5]);
}
#endif

__device__ __forceinline__ u32 kept_cells(const PruneParams& p, const Group& g, u64 group) {
#if S24_SCORES >= 0
  return 4 * group < p.cells ? rank_scores(p.scores, group) : 0;
#else
  return two_largest(keys_of(g));
#endif
}

// Kernels -------------------------------------------------------------------------------------------

// Calls body(unit, its number) for every unit of the thread, all loads first.
template <class Body> __device__ __forceinline__ void for_units(const PruneParams& p, Body body) {
  const u64 first = (u64)blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  const u64 units = (p.cells + kCells - 1) / kCells;
  Unit unit[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (first + i * kThreads < units) unit[i] = load_unit(p.dense, first + i * kThreads, p.cells);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (first + i * kThreads < units) body(unit[i], first + i * kThreads);
}

// Either result may be null.
extern "C" __global__ void __launch_bounds__(kThreads) prune(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const u32 flags = kept_cells(p, unit.group[i], at * kGroups + i);
      mask |= nibble(flags) << (4 * i);
      unit.group[i] = only(unit.group[i], flags);
    }
    if (p.pruned) store_unit(p.pruned, at, p.cells, unit);
    if (p.mask_out) store_mask(p.mask_out, at, p.cells, mask);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads) prune_compress(const __grid_constant__ PruneParams p) {
  for_units(p, [&](const Unit& unit, u64 at) {
    u32 masks = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) masks |= nibble(kept_cells(p, unit.group[i], at * kGroups + i)) << (4 * i);
    store_kept(p, at, unit, codes_of(masks));
  });
}

// Keeps the first two non-zeros of a group, and reports the first group that has more.
extern "C" __global__ void __launch_bounds__(kThreads) compress(const __grid_constant__ PruneParams p) {
  for_units(p, [&](const Unit& unit, u64 at) {
    u32 masks = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) masks |= nibble(nonzero(unit.group[i])) << (4 * i);
    const u32 codes = codes_of(masks);
    store_kept(p, at, unit, codes);
    if (codes & kTooMany * 0x01010101u) {
      const int i = (__ffs(codes & kTooMany * 0x01010101u) - 1) / 8;
      report(p.status, at * kGroups + i, __popc(masks >> (4 * i) & 15));
    }
  });
}

// A mask of rows: one bit a cell, 8 to a byte, the first in bit 0.
extern "C" __global__ void __launch_bounds__(kThreads) mask_by_rows(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
    const u32 mask = load_mask(p.mask_in, at, p.cells);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) unit.group[i] = only(unit.group[i], flags_of(mask >> (4 * i) & 15));
    store_unit(p.pruned, at, p.cells, unit);
  });
}

// A mask of tiles: a 64-bit word for 8x8 cells, four 4x4 quadrants of 16 bits, bit = column + 4 * row.
extern "C" __global__ void __launch_bounds__(kThreads) mask_by_tiles(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const u64 cell = at * kCells + 4 * i;
      if (cell >= p.cells) break;
      const u64 row = cell / p.row_cells, column = cell - row * p.row_cells;
      const u64 tile = (row / 8) * (p.row_cells / 8) + column / 8;
      const u16 quadrant = ((const u16*)p.mask_in)[4 * tile + row / 4 % 2 * 2 + column / 4 % 2];
      unit.group[i] = only(unit.group[i], flags_of(quadrant >> (4 * (row % 4)) & 15));
    }
    store_unit(p.pruned, at, p.cells, unit);
  });
}
