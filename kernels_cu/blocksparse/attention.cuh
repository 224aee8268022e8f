// Shared by the attention kernels: their compile-time constants, pipeline groups, the order of work tiles, TMA loads,
// and a warpgroup's products and results.
//
// A pipeline group is a producer and the consumer warpgroups that it feeds. Each of these has 64 rows: two share the
// tiles of a block of 128, or one has a block of 64 of its own. A pipeline group computes work tile after work tile:
// stationary rows of its own, and tiles of other rows that stream through its stages.
#pragma once
#include "blocksparse/params/attention_tables.cuh"
#include "common/philox.cuh"
#include "common/pipeline_state.cuh"
#include "ptx/tma_cache_hint.cuh"
#include "ptx/wgmma_registers.cuh"

// Base of a Config: kTileRows is the rows of a streamed tile, kStageCount the stages of a pipeline group, and
// kGroupCount the pipeline groups of a CTA. TMA pads a head size that is not a multiple of 32 with columns of zeros.
template <int kElementCode, int kBlockRows, int kHeadSize, bool kIsCausal, bool kOfLengths, bool kDrops, int kTileRows,
          int kStageCount, int kGroupCount>
struct AttentionType {
  static constexpr ElementKind kElement = ElementKind(kElementCode);
  static constexpr int kBlock = kBlockRows, kHead = kHeadSize;
  static constexpr bool kCausal = kIsCausal, kLengths = kOfLengths, kDropout = kDrops;
  static constexpr int kTile = kTileRows, kPipelineStages = kStageCount;
  using In = Element<kElement>;

  static constexpr int kPipelineGroups = kGroupCount,
                       kGroupWarpgroups = kBlock / 64;                        // warpgroups of a pipeline group
  static constexpr int kBoxes = (kHead + 63) / 64, kRowBytes = kBoxes * 128;  // boxes of 128 bytes in a row
  static constexpr int kStationaryBytes = 64 * kRowBytes,
                       kStationaryBoxBytes = 64 * 128;  // bytes of a stationary operand of one warpgroup
  static constexpr int kTileBytes = kTile * kRowBytes, kBoxBytes = kTile * 128;
  static constexpr int kResultColumns = (kHead + 31) / 32 * 32;
  static constexpr int kAccumulators = kResultColumns / 2,
                       kCells =
                           kTile / 2;   // accumulators of a thread for 64 rows of results, and for 64 rows of scores
  static constexpr int kThreads = 384;  // two consumer warpgroups and a producer warpgroup
};

// Work tiles ----------------------------------------------------------------------------------------------

template <class Params> __device__ __forceinline__ u32 work_tile_count(const Params& p) {
  return p.matrices * p.matrix_tiles;
}
template <class Config> __device__ __forceinline__ u32 pipeline_groups() { return gridDim.x * Config::kPipelineGroups; }

// Position of work tile `index`: matrices run in raster groups whose shared operands stay in L2. Within a raster group
// every head's longest line comes first, then the next. A line is a block row, or a block column.
struct RasterPosition {
  u32 matrix, line;  // index of the line in the order

  template <class Params> __device__ __forceinline__ RasterPosition(const Params& p, u32 index) {
    const u32 per_group = p.raster_matrices * p.matrix_tiles, raster_group = index / per_group,
              rest = index % per_group;
    const u32 group_width = min(p.raster_matrices, p.matrices - raster_group * p.raster_matrices);
    matrix = raster_group * p.raster_matrices + rest % group_width, line = rest / group_width;
  }
};

// Number of valid rows or keys of a head in this batch element, at most `cells`.
template <class Config> __device__ __forceinline__ int valid_cells(u32 cells, const int* lengths, u32 batch) {
  if constexpr (!Config::kLengths) return (int)cells;
  else return max(0, min((int)cells, lengths[batch]));
}

// Pipeline groups -------------------------------------------------------------------------------------------

// The barriers of a pipeline group. PipelineGroup derives from it and has barriers(), the address of the first one, and
// empty(stage), whose form suits its registers; the empty barriers lie behind the full ones.
template <class Config, class PipelineGroup> struct PipelineBarriers {
  static constexpr int kBarrierBytes = 16 * Config::kPipelineStages + 16;

  __device__ __forceinline__ const PipelineGroup& self() const { return static_cast<const PipelineGroup&>(*this); }
  __device__ __forceinline__ u32 full(u32 stage) const {
    return static_cast<const PipelineGroup*>(this)->barriers() + 8 * stage;
  }
  __device__ __forceinline__ u32 work_full() const { return full(2 * Config::kPipelineStages); }
  __device__ __forceinline__ u32 work_empty() const { return full(2 * Config::kPipelineStages + 1); }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kPipelineStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(self().empty(i), 4 * Config::kGroupWarpgroups);
    }
    barrier_init(work_full(), 1);
    barrier_init(work_empty(), 4 * Config::kGroupWarpgroups);
  }
};

// Arrives at an empty barrier for a warp that no longer reads what the barrier guards.
__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Loads ---------------------------------------------------------------------------------------------

// Loads a box of a 3-D tensor with L2's default policy: concurrent work tiles share what they read.
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4}], [%5];"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
               : "memory");
}
// Loads whole rows, in boxes that lie kBoxBytes apart.
template <class Config, int kBoxBytes>
__device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, u32 row, u32 matrix, u32 barrier) {
#pragma unroll
  for (int box = 0; box < Config::kBoxes; ++box) load_box(to + box * kBoxBytes, map, box * 64, row, matrix, barrier);
}

// Shared memory --------------------------------------------------------------------------------------

// A word that is uniform in a warp. The shuffle tells the compiler so, which then computes with it once a warp.
__device__ __forceinline__ u32 uniform_word(u32 word) { return __shfl_sync(~0u, word, 0); }
__device__ __forceinline__ u32 uniform(u32 at) { return uniform_word(load_shared_as<u32>(at)); }

// Zeroes rows `from` to kRows of a tile of 16-bit elements in boxes of 64 columns, because they may hold NaN. One
// warpgroup calls it and syncs at the named barrier.
template <int kRows, int kBoxes> __device__ __forceinline__ void clear_rows(u32 tile, int from, int barrier) {
  for (int chunk = from * 8 + threadIdx.x % 128; chunk < kRows * 8; chunk += 128)
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * kRows * 128 + chunk * 16), "r"(0)
                   : "memory");
  async_proxy_fence();
  named_barrier_sync(barrier, 128);
}

// Products -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// First of the two rows that a thread has of a warpgroup's 64 rows from `start` on; its other row is 8 further. Of
// every 8 columns a thread has two, from first_column on.
__device__ __forceinline__ int first_row(u32 start) {
  return (int)(start + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
}
__device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 2; }

// Moves a descriptor's address, which takes the low word alone: the compiler would carry into the high one.
__device__ __forceinline__ u64 moved(u64 descriptor, u32 by) {
  return descriptor >> 32 << 32 | (u32)((u32)descriptor + by);
}

// A warpgroup's products of operands in shared memory: descriptors of its stationary rows and of a streamed tile.
template <class Config> struct WarpgroupProducts {
  static constexpr int kCells = Config::kCells;
  using Stationary = DenseOperand<Major::K, 128, Config::kStationaryBoxBytes>;
  using Tile = DenseOperand<Major::K, 128, Config::kBoxBytes>;
  using Summed = DenseOperand<Major::MN, 128, Config::kBoxBytes>;

  // Returns a function from a step of 16 columns to its descriptor, for the stationary rows that `own` describes.
  static __device__ __forceinline__ auto rows(u64 own) {
    return [own](int k) { return moved(own, k / 4 * (Config::kStationaryBoxBytes >> 4) + k % 4 * Stationary::kStep); };
  }
  // cells = A (kSign * tile)^T, where a(k) is step k of A: its descriptor, or a fragment in registers.
  template <int kSign, class A>
  static __device__ __forceinline__ void issue_cells(float (&cells)[kCells], const A& a, u64 tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < (Config::kHead + 15) / 16; ++k) {
      const u64 b = moved(tile, k / 4 * (Config::kBoxBytes >> 4) + k % 4 * Tile::kStep);
      if (k == 0) wgmma_signed<Config::kElement, 0, kSign>(cells, a(k), b);
      else wgmma_signed<Config::kElement, 1, kSign>(cells, a(k), b);
    }
    wgmma_commit();
  }
  // sums += A * tile, for the step of 16 rows of the tile that `b` describes
  template <int kFrom = 0>
  static __device__ __forceinline__ void add(float (&sums)[Config::kAccumulators], const u32 (&a)[4], u64 b) {
    constexpr int kLeft = Config::kAccumulators - kFrom, kCount = kLeft >= 64 ? 64 : kLeft >= 32 ? 32 : 16;
    wgmma_registers<Config::kElement, 1>(*(float (*)[kCount])(sums + kFrom), a,
                                         moved(b, kFrom / 32 * (Config::kBoxBytes >> 4)));
    if constexpr (kLeft > kCount) add<kFrom + kCount>(sums, a, b);
  }
  // sums += factors * tile
  static __device__ __forceinline__ void issue_sums(float (&sums)[Config::kAccumulators],
                                                    const u32 (&factors)[kCells / 2], u64 tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kTile / 16; ++k) {
      const u32 a[4] = {factors[4 * k], factors[4 * k + 1], factors[4 * k + 2], factors[4 * k + 3]};
      add(sums, a, moved(tile, k * Summed::kStep));
    }
    wgmma_commit();
  }
  static __device__ __forceinline__ void round(u32 (&factors)[kCells / 2], const float (&cells)[kCells]) {
#pragma unroll
    for (int i = 0; i < kCells / 2; ++i) factors[i] = Config::In::pair(cells[2 * i], cells[2 * i + 1]);
  }
};

// Dropout ------------------------------------------------------------------------------------------------

// Decides which cells are dropped. sparse24_plans/blocksparse/dropout.py defines it: a Philox call has 16
// bits for each of 8 cells, two queries that are 8 apart times four keys, and a cell is dropped whose bits are below
// the bound. A thread has all 8 cells where rows of cells are queries, and 4 of each of two calls where they are keys.
struct Dropout {
  u32 key[2] = {0, 0};

  __device__ __forceinline__ Dropout() {}
  // `seed_offset` points to two integers of 64 bits.
  __device__ __forceinline__ Dropout(const u32* seed_offset) {
    const u32 seed[2] = {seed_offset[0], seed_offset[1]};
    u32 words[4] = {seed_offset[2], seed_offset[3], 0, 0};
    philox(words, seed);
    key[0] = uniform_word(words[0]), key[1] = uniform_word(words[1]);
  }
  __device__ __forceinline__ void call(u32 (&words)[4], u32 of_key, u32 query, u32 matrix) const {
    words[0] = of_key, words[1] = query, words[2] = matrix, words[3] = 0;
    philox(words, key);
  }

  // Calls drop(cell) for each dropped one of the thread's cells. Rows of cells are queries: `query` is the thread's
  // first one, `start` the key of the first column, and `bound` the 16 bits of the bound, shifted by 16.
  template <int kCells, class Drop> __device__ __forceinline__ void of_queries(float (&cells)[kCells], u32 matrix,
                                                                               u32 query, u32 start, u32 bound,
                                                                               Drop drop) const {
#pragma unroll
    for (int of_16 = 0; of_16 < kCells / 8; ++of_16) {
      u32 words[4];
      call(words, start + 16 * of_16 + first_column(), query, matrix);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // bit 3 of the query, then bit 3 of the key
        float* pair = cells + 8 * of_16 + i % 2 * 4 + i / 2 * 2;
        if (words[i] << 16 < bound) drop(pair[0]);
        if (words[i] < bound) drop(pair[1]);
      }
    }
  }
  // Rows of cells are keys: `key` is the thread's first one, `start` the query of the first column.
  template <int kCells, class Drop> __device__ __forceinline__ void of_keys(float (&cells)[kCells], u32 matrix,
                                                                            u32 of_key, u32 start, u32 bound,
                                                                            Drop drop) const {
    const u32 odd = of_key % 2;  // lanes of an even and the next odd key share two calls
#pragma unroll
    for (int of_16 = 0; of_16 < kCells / 8; ++of_16) {
      u32 words[4], fields[2][2];
      call(words, of_key - odd, start + 16 * of_16 + first_column() + odd, matrix);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 even_keys = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410),
                  odd_keys = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
        const u32 other = __shfl_xor_sync(~0u, odd ? even_keys : odd_keys, 4);
        fields[0][i] = odd ? other : even_keys, fields[1][i] = odd ? odd_keys : other;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // bit 3 of the query, then bit 0
        float* pair = cells + 8 * of_16 + i / 2 * 4 + i % 2;
        const u32 word = fields[i % 2][i / 2];
        if (word << 16 < bound) drop(pair[0]);
        if (word < bound) drop(pair[2]);
      }
    }
  }
};

// Results --------------------------------------------------------------------------------------------

// Transposes within a quad of lanes. Lane t holds columns 2t and 2t + 1 of each 8 of a row's 32 columns, and gets the
// t-th 8 columns whole.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4]) {
  const u32 t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 other = __shfl_xor_sync(~0u, t & bit ? words[i] : words[i | bit], bit);
      if (t & bit) words[i] = other;
      else words[i | bit] = other;
    }
}

// Writes the accumulators of the thread's first (0) or second (1) row, times `factor`, as row `line` of the results;
// zeros if the row is not valid. A whole quad calls it.
template <class Config> __device__ __forceinline__ void write_row(void* results, i64 line, int half,
                                                                  const float (&sums)[Config::kAccumulators],
                                                                  float factor, bool counts) {
  u16* to = (u16*)results + line * Config::kHead + threadIdx.x % 4 * 8;
#pragma unroll
  for (int j = 0; j < Config::kResultColumns / 32; ++j) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 16 * j + 4 * i + 2 * half;
      words[i] = counts ? Config::In::pair(sums[from] * factor, sums[from + 1] * factor) : 0;
    }
    transpose_quad(words);
    if (32 * j + 32 <= Config::kHead || 32 * j + (int)threadIdx.x % 4 * 8 < Config::kHead)
      *(uint4*)(to + 32 * j) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
