// Three rules that choose the kept cells of 4x4 tiles, so that at most two are in each row and in each column.
//
// Masks of the two tiles of a pair share a word. By rows: bit = column + 4 * row + 16 * tile, the order in which they
// are stored. By columns: bit = row + 4 * column + 16 * tile. The greedy and the causal rule use packed masks: byte =
// column, bit = row + 4 * tile.
#pragma once
#include "prepare/groups.cuh"

// Codes of S24_RULE.
enum class Rule { GREEDY = 0, CAUSAL = 1, OPTIMAL = 2 };

// Eight cells of a row: the groups of two tiles. Aligned to its size, up to 16 bytes.
template <int kWidth> struct __align__(kWidth * 8 < 16 ? kWidth * 8 : 16) RowOf {
  Group<kWidth> tile[2];
};

// Four rows, which are two tiles.
template <int kWidth> struct TilePair {
  RowOf<kWidth> row[4];
};

// Masks ---------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 swap_bits(u32 x, int apart, u32 mask) {
  const u32 change = (x ^ x >> apart) & mask;
  return x ^ change ^ change << apart;
}

// Transposes both 4x4 bit matrices: by rows <-> by columns.
__device__ __forceinline__ u32 transpose_mask(u32 mask) {
  return swap_bits(swap_bits(mask, 3, 0x0a0a0a0au), 6, 0x00cc00ccu);
}

// Converts a packed mask to one by columns.
__device__ __forceinline__ u32 by_columns(u32 lanes) {
  const u32 left = lanes & 0x0f0f0f0fu, right = lanes >> 4 & 0x0f0f0f0fu;
  return prmt(left | left >> 4, right | right >> 4, 0x6420);
}

// Ranking --------------------------------------------------------------------------------------------

// Ranks of a pair's cells, as packed masks. A bit says that the cell's neighbour at distance d (the index XOR d) in the
// same row, or column, ranks before it.
struct Order {
  u32 row[3], column[3];
};

__device__ __forceinline__ u32 cell_bits(int row, int tile) { return 0x01010101u << (row + 4 * tile); }

// Puts `wins`, bytes of ones or zeros, into the bits of `rows`. It replaces `wins & cell_bits` by a product: bytes of
// ones are 255 times a bit, 255 has an inverse, and multipliers are idle while the logic units are busy.
__device__ __forceinline__ void put_bits(u32& lanes, u32 wins, u32 rows) {
  constexpr u32 kInverse = 0xfefefeffu;
  static_assert(kInverse * 255u == 1u, "modulo 2^32");
  lanes += wins * (kInverse * rows);
}

// Compares "column i of row r is at least column i of row s" in the sign of a byte for each column.
template <bool kNarrow>
__device__ __forceinline__ u32 compare_rows(const WordKeys<kNarrow>& r, const WordKeys<kNarrow>& s) {
  u32 wins[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) wins[i] = r.at_least(r.cell[i], s.cell[i]);
  return prmt(prmt(wins[0], wins[1], 0x00fb), prmt(wins[2], wins[3], 0x00fb), 0x5410);
}

template <bool kNarrow>
__device__ __forceinline__ u32 compare_rows(const PackedKeys<kNarrow>& r, const PackedKeys<kNarrow>& s) {
  return prmt(r.at_least(r.low, s.low), r.at_least(r.high, s.high), 0xfdb9);
}

// Compares within a row at distances 1, 2, 3. Both bytes of a pair get "the lower is at least the higher".
template <bool kNarrow> __device__ __forceinline__ void compare_columns(const WordKeys<kNarrow>& k, u32 (&wins)[3]) {
  const u32* c = k.cell;
  wins[0] = prmt(k.at_least(c[0], c[1]), k.at_least(c[2], c[3]), 0xffbb);
  wins[1] = prmt(k.at_least(c[0], c[2]), k.at_least(c[1], c[3]), 0xfbfb);
  wins[2] = prmt(k.at_least(c[0], c[3]), k.at_least(c[1], c[2]), 0xbffb);
}

template <bool kNarrow> __device__ __forceinline__ void compare_columns(const PackedKeys<kNarrow>& k, u32 (&wins)[3]) {
  const u32 swapped = prmt(k.high, 0, 0x1032);
  // Narrow keys need no swap for the first two cells: cell 0 moves up, and ones below prevent a borrow.
  const u32 first = kNarrow ? (k.low * 0x10000u + 0x8000ffffu) - k.low : k.at_least(k.low << 16, k.low);
  wins[0] = prmt(first, k.at_least(k.high, swapped), 0xddbb);
  wins[1] = prmt(k.at_least(k.low, k.high), 0, 0xb9b9);
  wins[2] = prmt(k.at_least(k.low, swapped), 0, 0x9bb9);
}

template <class Cell>
__device__ __forceinline__ void add_tile(Order& order, const TilePair<Cell::kWidth>& pair, int tile) {
  decltype(keys_of<Cell>(pair.row[0].tile[0])) key[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) key[r] = keys_of<Cell>(pair.row[r].tile[tile]);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    u32 wins[3];
    compare_columns(key[r], wins);
#pragma unroll
    for (int d = 0; d < 3; ++d) put_bits(order.row[d], wins[d], 1u << (r + 4 * tile));
#pragma unroll
    for (int s = r + 1; s < 4; ++s)
      put_bits(order.column[(r ^ s) - 1], compare_rows(key[r], key[s]), (1u << r | 1u << s) << (4 * tile));
  }
}

template <class Cell> __device__ __forceinline__ Order order_of(const TilePair<Cell::kWidth>& pair) {
  Order order = {};
  add_tile<Cell>(order, pair, 0);
  add_tile<Cell>(order, pair, 1);
  // So far a bit says that the lower index of a pair wins. It is inverted for the lower cells themselves.
  order.row[0] ^= 0x00ff00ffu, order.row[1] ^= 0x0000ffffu, order.row[2] ^= 0x0000ffffu;
  order.column[0] ^= 0x55555555u, order.column[1] ^= 0x33333333u, order.column[2] ^= 0x33333333u;
  return order;
}

// Returns the neighbours at distance d + 1 that rank before a cell.
__device__ __forceinline__ u32 before_in_row(const Order& order, u32 lanes, int d) {
  return prmt(lanes, 0, d == 0 ? 0x2301 : d == 1 ? 0x1032 : 0x0123) & order.row[d];
}
__device__ __forceinline__ u32 swap_neighbours(u32 lanes, int d) {
  return d == 0 ? (lanes >> 1 & 0x55555555u) | (lanes << 1 & 0xaaaaaaaau)
                : (lanes >> 2 & 0x33333333u) | (lanes << 2 & 0xccccccccu);
}

// Rules ---------------------------------------------------------------------------------------------

// The greedy rule (largest first, if its row and its column have room) is the stable matching of rows and columns with
// two places each, because both rank a cell alike. Every row proposes its first two open cells, and every column
// refuses all but its first two proposals, until no column refuses.
__device__ __forceinline__ u32 greedy(const Order& order) {
  u32 open = 0xffffffffu, proposed = ~majority(order.row[0], order.row[1], order.row[2]);
  while (true) {
    const u32 one = swap_neighbours(proposed, 0), two = swap_neighbours(proposed, 1);
    const u32 refused =
        proposed & majority(one & order.column[0], two & order.column[1], swap_neighbours(one, 1) & order.column[2]);
    if (!__any_sync(0xffffffffu, refused)) return proposed;
    open &= ~refused;
    proposed =
        open & ~majority(before_in_row(order, open, 0), before_in_row(order, open, 1), before_in_row(order, open, 2));
  }
}

// The causal rule: one row after the other keeps its largest 1, 1, 2 and 2 cells among the columns that have room. A
// row never depends on later ones.
__device__ __forceinline__ u32 causal(const Order& order) {
  u32 kept = 0;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const u32 own = cell_bits(r, 0) | cell_bits(r, 1);
    const u32 full = r < 2 ? 0 : r == 2 ? kept << 1 & kept << 2 : majority(kept << 1, kept << 2, kept << 3);
    const u32 open = own & ~full;
    const u32 one = before_in_row(order, open, 0), two = before_in_row(order, open, 1);
    const u32 three = before_in_row(order, open, 2);
    kept |= open & ~(r < 2 ? one | two | three : majority(one, two, three));
  }
  return kept;
}

// The optimal rule ------------------------------------------------------------------------------------

// Returns |value| for sums. For a float, Cell has kMantissaBits, kExponentBias and kHasInf. Inf and NaN get numbers
// beyond every sum of finite ones.
template <class Cell> __device__ __forceinline__ double weight_of(u32 bits) {
  if constexpr (Cell::kNumber == Number::SIGN_MAGNITUDE) {
    const double kInfinite = 0x1p200, kNan = 0x1p300;
    const u32 magnitude = bits & (0xffffffffu >> (33 - 8 * Cell::kWidth));
    if (magnitude >= Cell::kFirstNan) return kNan;
    if (Cell::kHasInf && magnitude == Cell::kFirstNan - 1) return kInfinite;
    // The bits of a float32 whose exponent still has the element's bias; the product corrects it exactly.
    const double scale = __longlong_as_double((u64)(1023 + 127 - Cell::kExponentBias) << 52);
    return __dmul_rn((double)__uint_as_float(magnitude << (23 - Cell::kMantissaBits)), scale);
  } else if constexpr (Cell::kNumber == Number::TWOS_COMPLEMENT) {
    return (double)abs((int)(signed char)bits);
  } else {
    return (double)bits;
  }
}

// Returns the bits of cell i.
__device__ __forceinline__ u32 cell_of(const Group<4>& g, int i) { return g.word[i]; }
__device__ __forceinline__ u32 cell_of(const Group<2>& g, int i) { return g.word[i / 2] >> (16 * (i % 2)) & 0xffffu; }
__device__ __forceinline__ u32 cell_of(const Group<1>& g, int i) { return g.word[0] >> (8 * i) & 0xffu; }

constexpr u32 kPairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};  // masks of the positions 01 02 03 12 13 23

// Returns the best of the 90 patterns by (row 0 + row 1) + (row 2 + row 3) in float64. The first of equals wins, with
// pairs in the order above and the topmost row the slowest.
template <class Cell> __device__ __forceinline__ u32 optimal(const TilePair<Cell::kWidth>& pair, int tile) {
  double sum[4][6];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    double w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = weight_of<Cell>(cell_of(pair.row[r].tile[tile], i));
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
          // Each column keeps two cells, so columns that the upper rows keep twice are full, and columns that they skip
          // are kept twice by the lower rows.
          if ((kPairs[c] & kPairs[d]) != (15u & ~any) || (kPairs[c] | kPairs[d]) != (15u & ~both)) continue;
          const double total = __dadd_rn(upper, __dadd_rn(sum[2][c], sum[3][d]));
          if (total > best) best = total, pattern = kPairs[a] | kPairs[b] << 4 | kPairs[c] << 8 | kPairs[d] << 12;
        }
    }
  return pattern;
}

// Chooses the masks of a pair of tiles. Config is a CellType with kRule.
template <class Config>
__device__ __forceinline__ void choose(const TilePair<Config::kWidth>& pair, u32& rows, u32& columns) {
  if constexpr (Config::kRule == Rule::OPTIMAL) {
    rows = optimal<Config>(pair, 0) | optimal<Config>(pair, 1) << 16;
    columns = transpose_mask(rows);
  } else {
    const Order order = order_of<Config>(pair);
    columns = by_columns(Config::kRule == Rule::GREEDY ? greedy(order) : causal(order));
    rows = transpose_mask(columns);
  }
}
