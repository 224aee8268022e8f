// Transposable 2:4: every 4x4 tile keeps at most two cells in each row and in each column. One pass gives the
// canonical forms of W and of W^T and the mask.
//
// A thread owns 8x8 cells, in two bands of two tiles; a block 128 x 128 cells. What belongs to W^T goes through
// shared memory, so that all its stores are whole sectors.
//
// Masks of the two tiles of a band share a word. By rows: bit = column + 4 * row + 16 * tile, the order in which
// they are stored. By columns: bit = row + 4 * column + 16 * tile. Inside the greedy rule, *lanes*: byte = column,
// bit = row + 4 * tile.
#include "prepare/groups.cuh"

#define S24_GREEDY 0
#define S24_CAUSAL 1
#define S24_OPTIMAL 2

constexpr int kThreads = 256;
#if S24_RULE == S24_OPTIMAL || S24_WIDTH == 4  // they take the registers they take
#define S24_BOUNDS __launch_bounds__(kThreads)
#else
#define S24_BOUNDS __launch_bounds__(kThreads, 4)
#endif
constexpr int kAcross = 16, kDown = 16;  // threads of a block
constexpr int kSide = 8;                 // cells of a thread's square
constexpr int kBlockSide = kAcross * kSide;

struct TilePruneParams {
  const u8* dense;  // [M, K]
  u8* values;       // [M, K/2]
  u16* metadata;    // [M, K/8]
  u8* values_t;     // [K, M/2]
  u16* metadata_t;  // [K, M/8]
  uint2* mask;      // [M/8, K/8]
  i64 m, k;
};

// A row of a thread's square: groups of two tiles. And eight cells' worth of kept values.
struct __align__(S24_WIDTH * 8 < 16 ? S24_WIDTH * 8 : 16) Row {
  Group tile[2];
};
#if S24_WIDTH == 4
typedef uint2 Kept;  // of one group
typedef uint4 KeptPair;
__device__ __forceinline__ KeptPair pair_of(Kept a, Kept b) { return make_uint4(a.x, a.y, b.x, b.y); }
#elif S24_WIDTH == 2
typedef u32 Kept;
typedef uint2 KeptPair;
__device__ __forceinline__ KeptPair pair_of(Kept a, Kept b) { return make_uint2(a, b); }
#else
typedef u32 Kept;
typedef u32 KeptPair;
__device__ __forceinline__ KeptPair pair_of(Kept a, Kept b) { return prmt(a, b, 0x5410); }
#endif

#if S24_WIDTH == 1
typedef uint2 RowVector;
#else
typedef uint4 RowVector;
#endif

__device__ __forceinline__ Row load_row(const Row* from) {
  constexpr int kVectors = sizeof(Row) / sizeof(RowVector);
  union {
    Row row;
    RowVector vector[kVectors];
  } u;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) u.vector[i] = __ldcs((const RowVector*)from + i);
  return u.row;
}

struct Band {
  Row row[4];
};

// Masks ---------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 swap_bits(u32 x, int apart, u32 mask) {
  const u32 change = (x ^ x >> apart) & mask;
  return x ^ change ^ change << apart;
}

// By rows <-> by columns: both 4x4 bit matrices transposed.
__device__ __forceinline__ u32 transpose_mask(u32 mask) {
  return swap_bits(swap_bits(mask, 3, 0x0a0a0a0au), 6, 0x00cc00ccu);
}

// Lanes -> by columns.
__device__ __forceinline__ u32 by_columns(u32 lanes) {
  const u32 left = lanes & 0x0f0f0f0fu, right = lanes >> 4 & 0x0f0f0f0fu;
  return prmt(left | left >> 4, right | right >> 4, 0x6420);
}

// What precedes what --------------------------------------------------------------------------------

// Bit of a lane: its neighbour at distance d (the index XOR d) in the same row, or column, ranks before it.
struct Order {
  u32 row[3], column[3];
};

__device__ __forceinline__ u32 lane_bits(int row, int tile) { return 0x01010101u << (row + 4 * tile); }

// `wins`, bytes of ones or zeros, put into the bits of `rows`. What `wins & lane_bits` would add, by a product:
// bytes of ones are 255 times a bit, 255 has an inverse, and multipliers idle while the logic units don't.
__device__ __forceinline__ void put_lanes(u32& lanes, u32 wins, u32 rows) {
  constexpr u32 kInverse = 0xfefefeffu;
  static_assert(kInverse * 255u == 1u, "modulo 2^32");
  lanes += wins * (kInverse * rows);
}

// Sign of the comparisons "column i of row r is at least column i of row s", a byte a column.
__device__ __forceinline__ u32 compare_rows(const Keys& r, const Keys& s) {
#if S24_WIDTH == 4
  u32 wins[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) wins[i] = at_least(r.cell[i], s.cell[i]);
  return prmt(prmt(wins[0], wins[1], 0x00fb), prmt(wins[2], wins[3], 0x00fb), 0x5410);
#else
  return prmt(at_least(r.low, s.low), at_least(r.high, s.high), 0xfdb9);
#endif
}

// Comparisons within a row at distances 1, 2, 3: in both bytes of a pair, "the lower is at least the higher".
__device__ __forceinline__ void compare_columns(const Keys& k, u32 (&wins)[3]) {
#if S24_WIDTH == 4
  const u32* c = k.cell;
  wins[0] = prmt(at_least(c[0], c[1]), at_least(c[2], c[3]), 0xffbb);
  wins[1] = prmt(at_least(c[0], c[2]), at_least(c[1], c[3]), 0xfbfb);
  wins[2] = prmt(at_least(c[0], c[3]), at_least(c[1], c[2]), 0xbffb);
#else
  const u32 turned = prmt(k.high, 0, 0x1032);
  // Of narrow keys, the first two without turning them: cell 0 moved up, and ones below that nothing is borrowed.
  const u32 first = kNarrowKeys ? (k.low * 0x10000u + 0x8000ffffu) - k.low : at_least(k.low << 16, k.low);
  wins[0] = prmt(first, at_least(k.high, turned), 0xddbb);
  wins[1] = prmt(at_least(k.low, k.high), 0, 0xb9b9);
  wins[2] = prmt(at_least(k.low, turned), 0, 0x9bb9);
#endif
}

__device__ __forceinline__ void add_tile(Order& order, const Band& band, int tile) {
  Keys key[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) key[r] = keys_of(band.row[r].tile[tile]);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    u32 wins[3];
    compare_columns(key[r], wins);
#pragma unroll
    for (int d = 0; d < 3; ++d) put_lanes(order.row[d], wins[d], 1u << (r + 4 * tile));
#pragma unroll
    for (int s = r + 1; s < 4; ++s)
      put_lanes(order.column[(r ^ s) - 1], compare_rows(key[r], key[s]), (1u << r | 1u << s) << (4 * tile));
  }
}

__device__ __forceinline__ Order order_of(const Band& band) {
  Order order = {};
  add_tile(order, band, 0);
  add_tile(order, band, 1);
  // So far a bit says that the lower index of the pair wins: turn it round for the lower ones themselves.
  order.row[0] ^= 0x00ff00ffu, order.row[1] ^= 0x0000ffffu, order.row[2] ^= 0x0000ffffu;
  order.column[0] ^= 0x55555555u, order.column[1] ^= 0x33333333u, order.column[2] ^= 0x33333333u;
  return order;
}

// Neighbours of a lane at distance d + 1, where they rank before it.
__device__ __forceinline__ u32 before_in_row(const Order& order, u32 lanes, int d) {
  return prmt(lanes, 0, d == 0 ? 0x2301 : d == 1 ? 0x1032 : 0x0123) & order.row[d];
}
__device__ __forceinline__ u32 swap_neighbours(u32 lanes, int d) {
  return d == 0 ? (lanes >> 1 & 0x55555555u) | (lanes << 1 & 0xaaaaaaaau)
                : (lanes >> 2 & 0x33333333u) | (lanes << 2 & 0xccccccccu);
}

// Rules ---------------------------------------------------------------------------------------------

// The greedy rule (largest first, where its row and its column have room) is the stable matching of rows and
// columns with two places each, because both rank a cell alike. So: every row proposes its first two open cells,
// every column refuses all but its first two proposals, until no column refuses.
__device__ __forceinline__ u32 greedy(const Order& order) {
  u32 open = 0xffffffffu, proposed = ~majority(order.row[0], order.row[1], order.row[2]);
  while (true) {
    const u32 one = swap_neighbours(proposed, 0), two = swap_neighbours(proposed, 1);
    const u32 refused = proposed & majority(one & order.column[0], two & order.column[1],
                                            swap_neighbours(one, 1) & order.column[2]);
    if (!__any_sync(0xffffffffu, refused)) return proposed;
    open &= ~refused;
    proposed = open & ~majority(before_in_row(order, open, 0), before_in_row(order, open, 1),
                                before_in_row(order, open, 2));
  }
}

// Rows in turn keep their largest 1, 1, 2 and 2 among the columns that have room: a row never depends on later
// ones.
__device__ __forceinline__ u32 causal(const Order& order) {
  u32 kept = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const u32 own = lane_bits(r, 0) | lane_bits(r, 1);
    const u32 full = r < 2    ? 0
                     : r == 2 ? kept << 1 & kept << 2
                              : majority(kept << 1, kept << 2, kept << 3);
    const u32 open = own & ~full;
    const u32 one = before_in_row(order, open, 0), two = before_in_row(order, open, 1);
    const u32 three = before_in_row(order, open, 2);
    kept |= open & ~(r < 2 ? one | two | three : majority(one, two, three));
  }
  return kept;
}

#if S24_RULE == S24_OPTIMAL

// |value| for sums. Inf and NaN get numbers beyond every sum of finite ones.
__device__ __forceinline__ double weight_of(u32 bits) {
#if S24_NUMBER == S24_SIGN_MAGNITUDE
  const double kInfinite = 0x1p200, kNan = 0x1p300;
  const u32 magnitude = bits & (0xffffffffu >> (33 - 8 * S24_WIDTH));
  if (magnitude >= S24_FIRST_NAN) return kNan;
  if (S24_HAS_INF && magnitude == S24_FIRST_NAN - 1) return kInfinite;
  // As float32 bits with the exponent's bias still the element's; the product puts it right, exactly.
  const double scale = __longlong_as_double((u64)(1023 + 127 - S24_EXPONENT_BIAS) << 52);
  return __dmul_rn((double)__uint_as_float(magnitude << (23 - S24_MANTISSA_BITS)), scale);
#elif S24_NUMBER == S24_TWOS_COMPLEMENT
  return (double)abs((int)(signed char)bits);
#else
  return (double)bits;
#endif
}

__device__ __forceinline__ double weight_of(const Group& g, int i) {
#if S24_WIDTH == 4
  return weight_of(g.word[i]);
#elif S24_WIDTH == 2
  return weight_of(g.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
#else
  return weight_of(g.word[0] >> (8 * i) & 0xffu);
#endif
}

constexpr u32 kPairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};  // masks of the positions 01 02 03 12 13 23

// The best of the 90 ways, by (row 0 + row 1) + (row 2 + row 3) in float64; the first of equals, pairs in the
// order above, the topmost row the slowest.
__device__ __forceinline__ u32 optimal(const Band& band, int tile) {
  double sum[4][6];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    double w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = weight_of(band.row[r].tile[tile], i);
#pragma unroll
    for (int i = 0, at = 0; i < 3; ++i)
#pragma unroll
      for (int j = i + 1; j < 4; ++j) sum[r][at++] = __dadd_rn(w[i], w[j]);
  }
  double best = -1.0;
  u32 pattern = 0;
#pragma unroll
  for (int a = 0; a < 6; ++a)
#pragma unroll
    for (int b = 0; b < 6; ++b) {
      const double upper = __dadd_rn(sum[0][a], sum[1][b]);
      const u32 both = kPairs[a] & kPairs[b], any = kPairs[a] | kPairs[b];
#pragma unroll
      for (int c = 0; c < 6; ++c)
#pragma unroll
        for (int d = 0; d < 6; ++d) {
          // Columns have two cells each: those that the upper rows keep twice are kept no more, and so on.
          if ((kPairs[c] & kPairs[d]) != (15u & ~any) || (kPairs[c] | kPairs[d]) != (15u & ~both)) continue;
          const double total = __dadd_rn(upper, __dadd_rn(sum[2][c], sum[3][d]));
          if (total > best) best = total, pattern = kPairs[a] | kPairs[b] << 4 | kPairs[c] << 8 | kPairs[d] << 12;
        }
    }
  return pattern;
}

#endif

// Mask of the band, by rows.
__device__ __forceinline__ void choose(const Band& band, u32& rows, u32& columns) {
#if S24_RULE == S24_OPTIMAL
  rows = optimal(band, 0) | optimal(band, 1) << 16;
  columns = transpose_mask(rows);
#else
  const Order order = order_of(band);
  columns = by_columns(S24_RULE == S24_GREEDY ? greedy(order) : causal(order));
  rows = transpose_mask(columns);
#endif
}

// Kept values ---------------------------------------------------------------------------------------

// Column c of a tile, as a group.
__device__ __forceinline__ Group column_of(const Band& band, int tile, int c) {
  Group out;
  const Group *r0 = &band.row[0].tile[tile], *r1 = &band.row[1].tile[tile], *r2 = &band.row[2].tile[tile],
              *r3 = &band.row[3].tile[tile];
#if S24_WIDTH == 4
  out.word[0] = r0->word[c], out.word[1] = r1->word[c], out.word[2] = r2->word[c], out.word[3] = r3->word[c];
#elif S24_WIDTH == 2
  const u32 halves = c % 2 ? 0x7632 : 0x5410;
  out.word[0] = prmt(r0->word[c / 2], r1->word[c / 2], halves);
  out.word[1] = prmt(r2->word[c / 2], r3->word[c / 2], halves);
#else
  const u32 bytes = c | (4 + c) << 4;
  out.word[0] = prmt(prmt(r0->word[0], r1->word[0], bytes), prmt(r2->word[0], r3->word[0], bytes), 0x5410);
#endif
  return out;
}

// Gathers kept values; spare slots, which the codes mark, get +0.
struct GatherMarked : Gather {
  u32 spare_first, spare_second;  // in the bytes' signs

  __device__ __forceinline__ explicit GatherMarked(u32 marked)
      : Gather(marked), spare_first(marked << 1), spare_second(marked << 2) {}

  __device__ __forceinline__ Kept marked(const Group& g, int i) const {
    Kept kept = (*this)(g, i);
#if S24_WIDTH == 4
    kept.x &= ~prmt(spare_first, 0, 0x8888 + 0x1111 * i);
    kept.y &= ~prmt(spare_second, 0, 0x8888 + 0x1111 * i);
    return kept;
#elif S24_WIDTH == 2
    return kept & ~prmt(spare_first, spare_second, 0xcc88 + 0x1111 * i);
#else
    return kept & ~prmt(spare_first, spare_second, 0x00c8 + 0x0011 * i);
#endif
  }
};

// The kernel ----------------------------------------------------------------------------------------

struct Shared {
  KeptPair values[kBlockSide][kDown];  // of W^T; the slot of thread row y is y ^ (column / 8)
  u16 metadata[kDown][kBlockSide];
};

// `rows` rows of `pitch` below. A pitch of 32 bits makes it one multiplication, not two long additions.
template <class T> __device__ __forceinline__ T* below(T* from, u32 pitch, int rows) {
  return (T*)((u64)from + (u64)pitch * (u32)(rows * (int)sizeof(T)));
}

// The block's part of W^T: 128 rows of it, a pair of groups for each thread row of the block.
__device__ __forceinline__ void store_transposed(const TilePruneParams& p, const Shared& shared, i64 row, i64 column) {
  {
    constexpr int kStep = kThreads / kDown, kStores = kBlockSide / kStep;  // columns between a thread's stores
    const int first = threadIdx.x / kDown, y = threadIdx.x % kDown;
    KeptPair kept[kStores];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const int c = first + i * kStep;
      kept[i] = shared.values[c][y ^ (c / kSide)];
    }
    KeptPair* to = (KeptPair*)p.values_t + ((column + first) * p.m + row) / kSide + y;
    const u32 pitch = (u32)(p.m / kSide);
    const int columns = row + kSide * y < p.m ? (int)min(p.k - column, (i64)kBlockSide) - first : 0;
#pragma unroll
    for (int i = 0; i < kStores; ++i)
      if (i * kStep < columns) __stcs(below(to, pitch, i * kStep), kept[i]);
  }
  const int c = threadIdx.x / 2, first = threadIdx.x % 2 * (kDown / 2);
  if (column + c >= p.k) return;
  u16* to = p.metadata_t + (column + c) * (p.m / 8) + row / 8 + first;
  if (p.m % 64 == 0) {
    if (row + kSide * first >= p.m) return;
    u32 word[kDown / 4];
#pragma unroll
    for (int y = 0; y < kDown / 2; y += 2)
      word[y / 2] = shared.metadata[first + y][c] | (u32)shared.metadata[first + y + 1][c] << 16;
    __stcs((uint4*)to, make_uint4(word[0], word[1], word[2], word[3]));
    return;
  }
#pragma unroll 1
  for (int y = 0; y < kDown / 2; ++y)
    if (row + kSide * (first + y) < p.m) to[y] = shared.metadata[first + y][c];
}

extern "C" __global__ void S24_BOUNDS tile_prune(const __grid_constant__ TilePruneParams p) {
  __shared__ Shared shared;
  const u32 across = (u32)((p.k + kBlockSide - 1) / kBlockSide), down = blockIdx.x / across;
  const i64 block_row = (i64)down * kBlockSide, block_column = (i64)(blockIdx.x - down * across) * kBlockSide;
  const int x = threadIdx.x % kAcross, y = threadIdx.x / kAcross;
  const i64 row = block_row + kSide * y, column = block_column + kSide * x;
  const bool inside = row < p.m && column < p.k;

  const i64 square = (row * p.k + column) / kSide;
  const u32 pitch = (u32)(p.k / kSide);
  const Row* from = (const Row*)p.dense + square;
  Band band[2];
#pragma unroll
  for (int r = 0; r < 8; ++r) band[r / 4].row[r % 4] = inside ? load_row(below(from, pitch, r)) : Row{};
  KeptPair* values = (KeptPair*)p.values + square;
  u16* metadata = p.metadata + square;
  Kept upper[kSide];
  u32 codes_t[2][2], masks[2];  // band, tile: codes of four columns
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    u32 columns;
    choose(band[b], masks[b], columns);
    const GatherMarked left(codes_of(masks[b])), right(codes_of(masks[b] >> 16));
    KeptPair kept[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      kept[r] = pair_of(left.marked(band[b].row[r].tile[0], r), right.marked(band[b].row[r].tile[1], r));
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
        const Kept one = gather.marked(column_of(band[b], t, c), c);
        if (b == 0)
          upper[4 * t + c] = one;
        else
          shared.values[kSide * x + 4 * t + c][y ^ x] = pair_of(upper[4 * t + c], one);
      }
    }
  }
  if (inside) __stcs(p.mask + row / kSide * pitch + column / kSide, make_uint2(masks[0], masks[1]));
  uint4 pairs;  // a column's codes of both bands, for eight columns
  pairs.x = prmt(codes_t[0][0], codes_t[1][0], 0x5140), pairs.y = prmt(codes_t[0][0], codes_t[1][0], 0x7362);
  pairs.z = prmt(codes_t[0][1], codes_t[1][1], 0x5140), pairs.w = prmt(codes_t[0][1], codes_t[1][1], 0x7362);
  *(uint4*)&shared.metadata[y][kSide * x] = pairs;
  __syncthreads();
  store_transposed(p, shared, block_row, block_column);
}
