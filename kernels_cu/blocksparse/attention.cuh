// What the kernels of attention share: what they are compiled for, channels, the order of items, copies, and a
// warpgroup's products and results.
//
// A channel is what copies and the warpgroups that it feeds, each of which has 64 rows: two that share the tiles of a
// block of 128, or one with a block of 64 of its own. A channel takes item after item: rows of its own that stay, and
// tiles of others that pass through its slots.
#pragma once
#include "blocksparse/params/attention_tables.cuh"
#include "common/pipeline_state.cuh"
#include "ptx/tma_cache_hint.cuh"
#include "ptx/wgmma_registers.cuh"

// Of a Config: kTileRows of what passes, kSlotCount of a channel.
template <int kElementCode, int kBlockRows, int kHeadSize, bool kIsCausal, bool kOfLengths, int kTileRows,
          int kSlotCount>
struct AttentionType {
  static constexpr ElementKind kElement = ElementKind(kElementCode);
  static constexpr int kBlock = kBlockRows, kHead = kHeadSize;
  static constexpr bool kCausal = kIsCausal, kLengths = kOfLengths;
  static constexpr int kTile = kTileRows, kSlots = kSlotCount;
  using In = Element<kElement>;

  static constexpr int kChannels = 128 / kBlock, kGroups = 2 / kChannels;    // warpgroups of a channel
  static constexpr int kBoxes = kHead / 64;                                  // of 128 bytes that a row has
  static constexpr int kOwnBytes = 64 * kHead * 2, kOwnBoxBytes = 64 * 128;  // of an operand of a warpgroup's rows
  static constexpr int kTileBytes = kTile * kHead * 2, kBoxBytes = kTile * 128;
  static constexpr int kSums = kHead / 2, kCells = kTile / 2;  // numbers of a thread: of 64 rows of results, of scores
  static constexpr int kThreads = 384;                         // two warpgroups that multiply and one that copies
};

// Items ----------------------------------------------------------------------------------------------

template <class Params> __device__ __forceinline__ u32 items_of(const Params& p) { return p.matrices * p.matrix_tiles; }
template <class Config> __device__ __forceinline__ u32 channels() { return gridDim.x * Config::kChannels; }

// Item `index`: matrices in bands of which L2 keeps what they share, and of a band every head's longest line, then the
// next.
struct Place {
  u32 matrix, line;  // the latter in the order

  template <class Params> __device__ __forceinline__ Place(const Params& p, u32 index) {
    const u32 in_band = p.raster_matrices * p.matrix_tiles, band = index / in_band, rest = index % in_band;
    const u32 wide = min(p.raster_matrices, p.matrices - band * p.raster_matrices);
    matrix = band * p.raster_matrices + rest % wide, line = rest / wide;
  }
};

// Of a batch's `cells` of a head, rows or keys, those that count.
template <class Config> __device__ __forceinline__ int counted(u32 cells, const int* lengths, u32 batch) {
  if constexpr (!Config::kLengths) return (int)cells;
  else return max(0, min((int)cells, lengths[batch]));
}

// Channels -------------------------------------------------------------------------------------------

// Their barriers. Channel derives from it and has barriers(): where they begin; and free(slot), behind the full ones,
// in the form that suits its registers.
template <class Config, class Channel> struct ChannelBarriers {
  static constexpr int kBarrierBytes = 16 * Config::kSlots + 16;

  __device__ __forceinline__ const Channel& self() const { return static_cast<const Channel&>(*this); }
  __device__ __forceinline__ u32 full(u32 slot) const {
    return static_cast<const Channel*>(this)->barriers() + 8 * slot;
  }
  __device__ __forceinline__ u32 item_full() const { return full(2 * Config::kSlots); }
  __device__ __forceinline__ u32 item_free() const { return full(2 * Config::kSlots + 1); }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Config::kSlots; ++i) {
      barrier_init(full(i), 1);
      barrier_init(self().free(i), 4 * Config::kGroups);
    }
    barrier_init(item_full(), 1);
    barrier_init(item_free(), 4 * Config::kGroups);
  }
};

// For a warp: it has no more use of what the barrier guards.
__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Copies ---------------------------------------------------------------------------------------------

// A box of a 3-D tensor, of which L2 keeps what it likes: items beside each other share what they read.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 matrix, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
               "%4}], [%5];"
               :
               : "r"(to), "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
               : "memory");
}
// Whole rows, in boxes that lie kBoxBytes apart.
template <class Config, int kBoxBytes>
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, u32 row, u32 matrix, u32 barrier) {
#pragma unroll
  for (int box = 0; box < Config::kBoxes; ++box) copy_box(to + box * kBoxBytes, map, box * 64, row, matrix, barrier);
}

// Shared memory --------------------------------------------------------------------------------------

// A word that is the same for all of a warp, which the shuffle tells the compiler.
__device__ __forceinline__ u32 uniform(u32 at) { return __shfl_sync(~0u, load_shared_as<u32>(at), 0); }

// Zeros for the 16-bit elements of rows `from` to kRows of a tile in boxes of 64 columns, by one warpgroup, which meets
// at the named barrier: what lies there may be NaN.
template <int kRows, int kBoxes> __device__ __forceinline__ void clear_rows(u32 tile, int from, int barrier) {
  for (int chunk = from * 8 + threadIdx.x % 128; chunk < kRows * 8; chunk += 128)
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * kRows * 128 + chunk * 16), "r"(0)
                   : "memory");
  async_proxy_fence();
  named_barrier_sync(barrier, 128);
}

// Sums -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a warpgroup's 64 rows, which begin at `start`, a thread has two: this one and that 8 further. Of 8 columns it has
// two, from first_column on.
__device__ __forceinline__ int first_row(u32 start) {
  return (int)(start + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
}
__device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 2; }

// A warpgroup's products, of what lies in shared memory: descriptors of its own rows and of a tile.
template <class Config> struct WarpgroupProducts {
  static constexpr int kCells = Config::kCells;
  using Own = DenseOperand<Major::K, 128, Config::kOwnBoxBytes>;
  using Tile = DenseOperand<Major::K, 128, Config::kBoxBytes>;
  using Summed = DenseOperand<Major::MN, 128, Config::kBoxBytes>;

  // cells = own (kSign * tile)^T
  template <int kSign> static __device__ __forceinline__ void issue_cells(float (&cells)[kCells], u64 own, u64 tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kHead / 16; ++k) {
      const u64 left = own + k / 4 * (Config::kOwnBoxBytes >> 4) + k % 4 * Own::kStep;
      const u64 right = tile + k / 4 * (Config::kBoxBytes >> 4) + k % 4 * Tile::kStep;
      if (k == 0) wgmma_signed<Config::kElement, 0, kSign>(cells, left, right);
      else wgmma_signed<Config::kElement, 1, kSign>(cells, left, right);
    }
    wgmma_commit();
  }
  static __device__ __forceinline__ void round(u32 (&factors)[kCells / 2], const float (&cells)[kCells]) {
#pragma unroll
    for (int i = 0; i < kCells / 2; ++i) factors[i] = Config::In::pair(cells[2 * i], cells[2 * i + 1]);
  }
};

// Results --------------------------------------------------------------------------------------------

// A row's 32 columns from `words`, one of each 8: lane t of a quad gets the t-th 8 of them whole.
__device__ __forceinline__ void turn_quad(u32 (&words)[4]) {
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

// The sums of the first (0) or second (1) of the thread's rows, times `factor`, as row `line` of the results: zeros
// where it doesn't count. By a whole quad.
template <class Config> __device__ __forceinline__ void write_row(void* results, i64 line, int half,
                                                                  const float (&sums)[Config::kSums], float factor,
                                                                  bool counts) {
  u16* to = (u16*)results + line * Config::kHead + threadIdx.x % 4 * 8;
#pragma unroll
  for (int j = 0; j < Config::kHead / 32; ++j) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 16 * j + 4 * i + 2 * half;
      words[i] = counts ? Config::In::pair(sums[from] * factor, sums[from + 1] * factor) : 0;
    }
    turn_quad(words);
    *(uint4*)(to + 32 * j) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
