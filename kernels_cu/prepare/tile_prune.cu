// Transposable 2:4: every 4x4 tile keeps at most two cells in each row and in each column. One pass gives the canonical
// forms of W and of W^T and the mask. Memory bound, except for the optimal rule.
//
// A thread owns a square of 8x8 cells, which is two pairs of tiles; a CTA owns 128 x 128 cells. The output for W^T goes
// through shared memory, so that all its stores are whole sectors.
//
//   role       threads    work
//   tile_prune 256        a square: masks of both pairs, W's values and metadata; then a part of W^T's stores
//
//   barriers   one __syncthreads, between the squares and the stores of W^T
//   registers  a square's cells and masks; at most 64 where four CTAs are to share an SM
//
//   thread   | load 8 rows | pair 0: rule, codes, W, W^T to shared | pair 1: the same | sync | store W^T |
#include "prepare/codes.cuh"
#include "prepare/params/tile_prune.cuh"
#include "prepare/tile_rules.cuh"

// All compile-time constants; macros are read here alone.
struct Config : CellType<S24_WIDTH, S24_NUMBER, S24_FIRST_NAN, S24_SIGNED> {
  static constexpr Rule kRule = Rule(S24_RULE);
  // The format of a float element for the optimal rule; all 0 otherwise.
  static constexpr int kMantissaBits = S24_MANTISSA_BITS, kExponentBias = S24_EXPONENT_BIAS;
  static constexpr bool kHasInf = S24_HAS_INF;

  static constexpr int kThreads = 256;
  static constexpr int kCtasPerSm = kRule == Rule::OPTIMAL || kWidth == 4 ? 0 : 4;  // 0: no limit
  static constexpr int kAcross = 16, kDown = 16;                                    // threads of a CTA, across and down
  static constexpr int kSide = 8;                                                   // side of a thread's square
  static constexpr int kCtaSide = kAcross * kSide;
};

// Vector types that move a row's cells and kept values.
template <int kWidth> struct MovesOf;

template <> struct MovesOf<4> {
  using RowVector = uint4;
  using KeptPair = uint4;
  static __device__ __forceinline__ KeptPair pair(uint2 a, uint2 b) { return make_uint4(a.x, a.y, b.x, b.y); }
};

template <> struct MovesOf<2> {
  using RowVector = uint4;
  using KeptPair = uint2;
  static __device__ __forceinline__ KeptPair pair(u32 a, u32 b) { return make_uint2(a, b); }
};

template <> struct MovesOf<1> {
  using RowVector = uint2;
  using KeptPair = u32;
  static __device__ __forceinline__ KeptPair pair(u32 a, u32 b) { return prmt(a, b, 0x5410); }
};

using Row = RowOf<Config::kWidth>;
using Square = TilePair<Config::kWidth>[2];
using Moves = MovesOf<Config::kWidth>;
using Kept = Gather<Config::kWidth>::Kept;  // kept values of one group
using KeptPair = Moves::KeptPair;

__device__ __forceinline__ Row load_row(const Row* from) {
  constexpr int kVectors = sizeof(Row) / sizeof(Moves::RowVector);
  union {
    Row row;
    Moves::RowVector vector[kVectors];
  } u;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) u.vector[i] = __ldcs((const Moves::RowVector*)from + i);
  return u.row;
}

// Kept values ---------------------------------------------------------------------------------------

// Returns column c of a tile as a group.
__device__ __forceinline__ Group<4> column_of(const TilePair<4>& pair, int tile, int c) {
  const Group<4>*r0 = &pair.row[0].tile[tile], *r1 = &pair.row[1].tile[tile];
  const Group<4>*r2 = &pair.row[2].tile[tile], *r3 = &pair.row[3].tile[tile];
  return {{r0->word[c], r1->word[c], r2->word[c], r3->word[c]}};
}

__device__ __forceinline__ Group<2> column_of(const TilePair<2>& pair, int tile, int c) {
  const Group<2>*r0 = &pair.row[0].tile[tile], *r1 = &pair.row[1].tile[tile];
  const Group<2>*r2 = &pair.row[2].tile[tile], *r3 = &pair.row[3].tile[tile];
  const u32 halves = c % 2 ? 0x7632 : 0x5410;
  return {{prmt(r0->word[c / 2], r1->word[c / 2], halves), prmt(r2->word[c / 2], r3->word[c / 2], halves)}};
}

__device__ __forceinline__ Group<1> column_of(const TilePair<1>& pair, int tile, int c) {
  const Group<1>*r0 = &pair.row[0].tile[tile], *r1 = &pair.row[1].tile[tile];
  const Group<1>*r2 = &pair.row[2].tile[tile], *r3 = &pair.row[3].tile[tile];
  const u32 bytes = c | (4 + c) << 4;
  return {{prmt(prmt(r0->word[0], r1->word[0], bytes), prmt(r2->word[0], r3->word[0], bytes), 0x5410)}};
}

// Returns the kept values of group i with +0 in spare slots, whose marks are in the signs of the bytes.
__device__ __forceinline__ uint2 without_spares(uint2 kept, u32 first, u32 second, int i, Group<4>) {
  kept.x &= ~prmt(first, 0, 0x8888 + 0x1111 * i);
  kept.y &= ~prmt(second, 0, 0x8888 + 0x1111 * i);
  return kept;
}
__device__ __forceinline__ u32 without_spares(u32 kept, u32 first, u32 second, int i, Group<2>) {
  return kept & ~prmt(first, second, 0xcc88 + 0x1111 * i);
}
__device__ __forceinline__ u32 without_spares(u32 kept, u32 first, u32 second, int i, Group<1>) {
  return kept & ~prmt(first, second, 0x00c8 + 0x0011 * i);
}

// Gathers kept values; spare slots, which the codes mark, get +0.
struct GatherMarked : Gather<Config::kWidth> {
  u32 spare_first, spare_second;  // in the bytes' signs

  __device__ __forceinline__ explicit GatherMarked(u32 marked)
      : Gather(marked), spare_first(marked << 1), spare_second(marked << 2) {}

  __device__ __forceinline__ Kept marked(const Group<Config::kWidth>& g, int i) const {
    return without_spares((*this)(g, i), spare_first, spare_second, i, g);
  }
};

// The kernel ----------------------------------------------------------------------------------------

struct Shared {
  KeptPair values[Config::kCtaSide][Config::kDown];  // of W^T; the slot of thread row y is y ^ (column / 8)
  u16 metadata[Config::kDown][Config::kCtaSide];
};

// Returns the address `rows` rows of `pitch` below. A pitch of 32 bits makes this one multiplication instead of two
// long additions.
template <class T> __device__ __forceinline__ T* below(T* from, u32 pitch, int rows) {
  return (T*)((u64)from + (u64)pitch * (u32)(rows * (int)sizeof(T)));
}

// Stores the CTA's part of W^T: 128 rows, with a pair of groups for each thread row of the CTA.
__device__ __forceinline__ void store_transposed(const TilePruneParams& p, const Shared& shared, i64 row, i64 column) {
  {
    constexpr int kStep = Config::kThreads / Config::kDown,
                  kStores = Config::kCtaSide / kStep;  // columns between a thread's stores
    const int first = threadIdx.x / Config::kDown, y = threadIdx.x % Config::kDown;
    KeptPair kept[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const int c = first + i * kStep;
      kept[i] = shared.values[c][y ^ (c / Config::kSide)];
    }
    KeptPair* to = (KeptPair*)p.values_t + ((column + first) * p.m + row) / Config::kSide + y;
    const u32 pitch = (u32)(p.m / Config::kSide);
    const int columns = row + Config::kSide * y < p.m ? (int)min(p.k - column, (i64)Config::kCtaSide) - first : 0;
#pragma unroll
    for (int i = 0; i < kStores; ++i)
      if (i * kStep < columns) __stcs(below(to, pitch, i * kStep), kept[i]);
  }
  const int c = threadIdx.x / 2, first = threadIdx.x % 2 * (Config::kDown / 2);
  if (column + c >= p.k) return;
  u16* to = p.metadata_t + (column + c) * (p.m / 8) + row / 8 + first;
  if (p.m % 64 == 0) {
    if (row + Config::kSide * first >= p.m) return;
    u32 word[Config::kDown / 4];
#pragma unroll
    for (int y = 0; y < Config::kDown / 2; y += 2)
      word[y / 2] = shared.metadata[first + y][c] | (u32)shared.metadata[first + y + 1][c] << 16;
    __stcs((uint4*)to, make_uint4(word[0], word[1], word[2], word[3]));
    return;
  }
#pragma unroll 1
  for (int y = 0; y < Config::kDown / 2; ++y)
    if (row + Config::kSide * (first + y) < p.m) to[y] = shared.metadata[first + y][c];
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    tile_prune(const __grid_constant__ TilePruneParams p) {
  __shared__ Shared shared;
  const u32 across = (u32)((p.k + Config::kCtaSide - 1) / Config::kCtaSide), down = blockIdx.x / across;
  const i64 block_row = (i64)down * Config::kCtaSide,
            block_column = (i64)(blockIdx.x - down * across) * Config::kCtaSide;
  const int x = threadIdx.x % Config::kAcross, y = threadIdx.x / Config::kAcross;
  const i64 row = block_row + Config::kSide * y, column = block_column + Config::kSide * x;
  const bool inside = row < p.m && column < p.k;

  const i64 square = (row * p.k + column) / Config::kSide;
  const u32 pitch = (u32)(p.k / Config::kSide);
  const Row* from = (const Row*)p.dense + square;
  Square pair;
#pragma unroll
  for (int r = 0; r < 8; ++r) pair[r / 4].row[r % 4] = inside ? load_row(below(from, pitch, r)) : Row{};
  KeptPair* values = (KeptPair*)p.values + square;
  u16* metadata = p.metadata + square;
  Kept upper[Config::kSide];
  u32 codes_t[2][2], masks[2];  // by pair and tile: codes of four columns
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    u32 columns;
    choose<Config>(pair[b], masks[b], columns);
    const GatherMarked left(codes_of(masks[b])), right(codes_of(masks[b] >> 16));
    KeptPair kept[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      kept[r] = Moves::pair(left.marked(pair[b].row[r].tile[0], r), right.marked(pair[b].row[r].tile[1], r));
    if (inside) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        __stcs(below(values, pitch, 4 * b + r), kept[r]);
        __stcs(below(metadata, pitch, 4 * b + r), (u16)prmt(left.codes, right.codes, r | (4 + r) << 4));
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const GatherMarked gather(codes_of(columns >> (16 * t)));
      codes_t[b][t] = gather.codes;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const Kept one = gather.marked(column_of(pair[b], t, c), c);
        if (b == 0) upper[4 * t + c] = one;
        else shared.values[Config::kSide * x + 4 * t + c][y ^ x] = Moves::pair(upper[4 * t + c], one);
      }
    }
  }
  if (inside) __stcs(p.mask + row / Config::kSide * pitch + column / Config::kSide, make_uint2(masks[0], masks[1]));
  uint4 pairs;  // a column's codes of both pairs, for eight columns
  pairs.x = prmt(codes_t[0][0], codes_t[1][0], 0x5140), pairs.y = prmt(codes_t[0][0], codes_t[1][0], 0x7362);
  pairs.z = prmt(codes_t[0][1], codes_t[1][1], 0x5140), pairs.w = prmt(codes_t[0][1], codes_t[1][1], 0x7362);
  *(uint4*)&shared.metadata[y][Config::kSide * x] = pairs;
  __syncthreads();
  store_transposed(p, shared, block_row, block_column);
}
