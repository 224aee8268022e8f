// Prunes dense row-major [M, K] to 2:4, compresses it, does both at once, or applies a mask: one pass at memory speed.
//
// K is a multiple of 8, so rows never split a unit and the matrix is one flat array. Loads and stores are streaming:
// nothing is read twice, and stores do not evict what is still to be read.
//
//   role       threads    work
//   any kernel 256        kPerThread units of kCells cells a thread, 256 units apart
//
//   no barriers, no shared memory; registers hold a thread's units
//
//   thread   | load all units | rank, or read the mask: flags -> codes | store each unit |
#include "common/element.cuh"
#include "prepare/codes.cuh"
#include "prepare/params/prune.cuh"

// All compile-time constants; macros are read here alone.
struct Config : CellType<S24_WIDTH, S24_NUMBER, S24_FIRST_NAN> {
  static constexpr int kScores = S24_SCORES;  // code of the scores' element, or -1 to rank by |value|
  static constexpr int kThreads = 256;
  static constexpr int kPerThread = kWidth == 4 ? 2 : 4;  // independent units in flight
  static constexpr int kCells =
      kWidth == 1 ? 16 : 8;  // cells of a unit: at least 16 bytes, and at least a byte of the mask
  static constexpr int kGroups = kCells / 4;
  static constexpr int kVectors = kCells * kWidth / 16;
};

template <int kWidth> struct __align__(16) UnitOf {
  Group<kWidth> group[Config::kGroups];
};
using Unit = UnitOf<Config::kWidth>;

// With 8-bit elements the last unit may be half full.
__device__ __forceinline__ bool is_half(u64 at, u64 cells) {
  return Config::kWidth == 1 && (at + 1) * Config::kCells > cells;
}

__device__ __forceinline__ Unit load_unit(const void* from, u64 at, u64 cells) {
  union {
    Unit unit;
    uint4 vector[Config::kVectors];
    uint2 half;
  } u;
  if (is_half(at, cells)) {
    u.vector[0] = make_uint4(0, 0, 0, 0);
    u.half = __ldcs((const uint2*)from + 2 * at);
    return u.unit;
  }
#pragma unroll
  for (int i = 0; i < Config::kVectors; ++i) u.vector[i] = __ldcs((const uint4*)from + at * Config::kVectors + i);
  return u.unit;
}

__device__ __forceinline__ void store_unit(void* to, u64 at, u64 cells, const Unit& unit) {
  union {
    Unit unit;
    uint4 vector[Config::kVectors];
    uint2 half;
  } u;
  u.unit = unit;
  if (is_half(at, cells)) {
    ((uint2*)to)[2 * at] = u.half;
    return;
  }
#pragma unroll
  for (int i = 0; i < Config::kVectors; ++i) __stcs((uint4*)to + at * Config::kVectors + i, u.vector[i]);
}

// Masks: bit i of a unit stands for its cell i.
__device__ __forceinline__ u32 load_mask(const void* from, u64 at, u64 cells) {
  if (Config::kWidth != 1) return ((const u8*)from)[at];
  return is_half(at, cells) ? ((const u8*)from)[2 * at] : ((const u16*)from)[at];
}

__device__ __forceinline__ void store_mask(void* to, u64 at, u64 cells, u32 mask) {
  if (Config::kWidth != 1) ((u8*)to)[at] = (u8)mask;
  else if (is_half(at, cells)) ((u8*)to)[2 * at] = (u8)mask;
  else ((u16*)to)[at] = (u16)mask;
}

// Stores the kept values and the metadata of a unit, by its codes.
__device__ __forceinline__ void store_kept(const PruneParams& p, u64 at, const UnitOf<4>& unit, u32 codes) {
  const Gather<4> gather(codes);
  const uint2 a = gather(unit.group[0], 0), b = gather(unit.group[1], 1);
  __stcs((uint4*)p.values + at, make_uint4(a.x, a.y, b.x, b.y));
  __stcs((u16*)p.metadata + at, (u16)gather.codes);
}

__device__ __forceinline__ void store_kept(const PruneParams& p, u64 at, const UnitOf<2>& unit, u32 codes) {
  const Gather<2> gather(codes);
  __stcs((uint2*)p.values + at, make_uint2(gather(unit.group[0], 0), gather(unit.group[1], 1)));
  __stcs((u16*)p.metadata + at, (u16)gather.codes);
}

__device__ __forceinline__ void store_kept(const PruneParams& p, u64 at, const UnitOf<1>& unit, u32 codes) {
  const Gather<1> gather(codes);
  const u32 low = prmt(gather(unit.group[0], 0), gather(unit.group[1], 1), 0x5410);
  const u32 high = prmt(gather(unit.group[2], 2), gather(unit.group[3], 3), 0x5410);
  if (is_half(at, p.cells)) {
    ((u32*)p.values)[2 * at] = low;
    ((u16*)p.metadata)[2 * at] = (u16)gather.codes;
    return;
  }
  __stcs((uint2*)p.values + at, make_uint2(low, high));
  __stcs((u32*)p.metadata + at, gather.codes);
}

// Ranking -------------------------------------------------------------------------------------------

// Flags the cells of group `index` with the two largest scores.
template <int kScores> struct Ranking {
  using Score = Element<ElementKind(kScores)>;
  static constexpr int kVectors = 4 * (int)sizeof(typename Score::Bits) / 8;  // vectors of 8 bytes for a group

  // Returns a key that orders as the signed score does: NaN above all, -0 and +0 alike.
  static __device__ __forceinline__ u32 key(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);
    return score == score ? bits ^ ((u32)((int)bits >> 31) | 0x80000000u) : 0xffffffffu;
  }

  static __device__ __forceinline__ u32 rank(const void* scores, u64 index) {
    union {
      uint2 vector[kVectors];
      typename Score::Bits bits[4];
    } u;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) u.vector[i] = __ldcs((const uint2*)scores + index * kVectors + i);
    u32 keys[4], wins[6];
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[i] = key(Score::to_float(u.bits[i]));
#pragma unroll
    for (int i = 0, at = 0; i < 3; ++i)
#pragma unroll
      for (int j = i + 1; j < 4; ++j) wins[at++] = keys[i] >= keys[j] ? 0xffffffffu : 0u;
    return two_largest(wins[0], wins[1], wins[2], wins[3], wins[4], wins[5]);
  }

  static __device__ __forceinline__ u32 kept(const PruneParams& p, const Group<Config::kWidth>& g, u64 index) {
    return 4 * index < p.cells ? rank(p.scores, index) : 0;
  }
};

// Flags the two cells with the largest |value|.
template <> struct Ranking<-1> {
  static __device__ __forceinline__ u32 kept(const PruneParams& p, const Group<Config::kWidth>& g, u64 index) {
    return two_largest(keys_of<Config>(g));
  }
};
using Rank = Ranking<Config::kScores>;

// Kernels -------------------------------------------------------------------------------------------

// Calls body(unit, its index) for every unit of the thread, after all loads.
template <class Body> __device__ __forceinline__ void for_units(const PruneParams& p, Body body) {
  const u64 first = (u64)blockIdx.x * (Config::kThreads * Config::kPerThread) + threadIdx.x;
  const u64 units = (p.cells + Config::kCells - 1) / Config::kCells;
  Unit unit[Config::kPerThread];
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i)
    if (first + i * Config::kThreads < units) unit[i] = load_unit(p.dense, first + i * Config::kThreads, p.cells);
#pragma unroll
  for (int i = 0; i < Config::kPerThread; ++i)
    if (first + i * Config::kThreads < units) body(unit[i], first + i * Config::kThreads);
}

// Writes the pruned matrix and the mask; either may be null.
extern "C" __global__ void __launch_bounds__(Config::kThreads) prune(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      const u32 flags = Rank::kept(p, unit.group[i], at * Config::kGroups + i);
      mask |= nibble(flags) << (4 * i);
      unit.group[i] = only(unit.group[i], flags);
    }
    if (p.pruned) store_unit(p.pruned, at, p.cells, unit);
    if (p.mask_out) store_mask(p.mask_out, at, p.cells, mask);
  });
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) prune_compress(const __grid_constant__ PruneParams p) {
  for_units(p, [&](const Unit& unit, u64 at) {
    u32 masks = 0;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i)
      masks |= nibble(Rank::kept(p, unit.group[i], at * Config::kGroups + i)) << (4 * i);
    store_kept(p, at, unit, codes_of(masks));
  });
}

// Keeps the first two non-zeros of a group, and reports the first group that has more.
extern "C" __global__ void __launch_bounds__(Config::kThreads) compress(const __grid_constant__ PruneParams p) {
  for_units(p, [&](const Unit& unit, u64 at) {
    u32 masks = 0;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) masks |= nibble(nonzero<Config>(unit.group[i])) << (4 * i);
    const u32 codes = codes_of(masks);
    store_kept(p, at, unit, codes);
    if (codes & kTooMany * 0x01010101u) {
      const int i = (__ffs(codes & kTooMany * 0x01010101u) - 1) / 8;
      report(p.status, at * Config::kGroups + i, __popc(masks >> (4 * i) & 15));
    }
  });
}

// Applies a mask of rows: one bit a cell, 8 to a byte, the first in bit 0.
extern "C" __global__ void __launch_bounds__(Config::kThreads) mask_by_rows(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
    const u32 mask = load_mask(p.mask_in, at, p.cells);
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) unit.group[i] = only(unit.group[i], flags_of(mask >> (4 * i) & 15));
    store_unit(p.pruned, at, p.cells, unit);
  });
}

// Applies a mask of tiles: a 64-bit word for 8x8 cells, four 4x4 quadrants of 16 bits, bit = column + 4 * row.
extern "C" __global__ void __launch_bounds__(Config::kThreads) mask_by_tiles(const __grid_constant__ PruneParams p) {
  for_units(p, [&](Unit& unit, u64 at) {
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      const u64 cell = at * Config::kCells + 4 * i;
      if (cell >= p.cells) break;
      const u64 row = cell / p.row_cells, column = cell - row * p.row_cells;
      const u64 tile = (row / 8) * (p.row_cells / 8) + column / 8;
      const u16 quadrant = ((const u16*)p.mask_in)[4 * tile + row / 4 % 2 * 2 + column / 4 % 2];
      unit.group[i] = only(unit.group[i], flags_of(quadrant >> (4 * (row % 4)) & 15));
    }
    store_unit(p.pruned, at, p.cells, unit);
  });
}
