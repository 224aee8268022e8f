// Makes the look-up tables of a layout with blocks of 64 or 128 from its bitmap, in one launch. lookup_tables.py
// defines the tables.
//
//   role         threads    work of a CTA
//   fill_tables  512        a part of one head: counts the blocks of all rows and columns of all heads, so that it
//                           depends on no other CTA; then writes the tables of its share of the head's rows and columns
//
//   barriers     __syncthreads alone
//   registers    few; shared memory has the counts of all heads and the bits of this one
//
//   CTA | count rows, columns | sum earlier heads | scan | write blocks | write columns | rank panels |
#include "blocksparse/params/tables.cuh"
#include "common/types.cuh"
#include "ptx/async.cuh"

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr int kLines = S24_PANEL_LINES;  // lines of a panel, 1 or 2; a narrow panel has one
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  static constexpr int kCells = 16;  // rows, and columns, that a thread counts at a time
};

// Counts of one side, rows or columns. A line is a block row of the first and a block column of the second. `lines` has
// the blocks of each line, and `panels` the crossing lines in which each panel keeps a block; with one line a panel
// both are one array.
struct Side {
  int* lines;
  int* panels;
};

struct Shared {
  Side rows, columns;
  int *row_starts, *column_starts, *group_starts;  // starts of this head's lines, and the last one's end
  u32 *row_cuts, *column_cuts;  // for each length of a panel, then of a narrow one: its slices, their most columns
  u32* bits;                    // bits of this head's rows
  u32 stride;                   // words from one row's bits to the next, odd: banks differ
  int* sums;                    // one for each warp

  __device__ __forceinline__ Shared(const BlockTablesParams& p, int* at) : stride(p.row_words | 1) {
    const auto take = [&at](u32 count) {
      int* const found = at;
      at += count;
      return found;
    };
    const auto side = [&take](u32 lines, u32 panels) {
      int* const found = take(lines);
      return Side{found, Config::kLines == 1 ? found : take(panels)};
    };
    rows = side(p.heads * p.block_rows, p.heads * p.row_panels_of_head);
    columns = side(p.heads * p.block_cols, p.heads * p.column_panels_of_head);
    row_starts = take(p.block_rows + 1), column_starts = take(p.block_cols + 1);
    group_starts = take(p.block_rows + 1);
    row_cuts = (u32*)take(p.block_cols + 1), column_cuts = (u32*)take(p.block_rows + 1);
    bits = (u32*)take(p.block_rows * stride);
    sums = take(Config::kWarps);
  }

  // Sets the counts and the bits to zero.
  __device__ __forceinline__ void clear(const BlockTablesParams& p) const {
    const auto zero = [](int* at, u32 count) {
      for (u32 i = threadIdx.x; i < count; i += Config::kThreads) at[i] = 0;
    };
    zero(rows.lines, p.heads * p.block_rows), zero(columns.lines, p.heads * p.block_cols);
    if (Config::kLines > 1) {
      zero(rows.panels, p.heads * p.row_panels_of_head);
      zero(columns.panels, p.heads * p.column_panels_of_head);
    }
    zero((int*)bits, p.block_rows * stride);
  }
};

// The warps that share a head.
struct Share {
  u32 head, warp, warps;
  bool first;  // whether this CTA is the head's first one

  __device__ __forceinline__ explicit Share(const BlockTablesParams& p) {
    const u32 parts = gridDim.x / p.heads, part = blockIdx.x % parts;
    head = blockIdx.x / parts, warp = part * Config::kWarps + threadIdx.x / 32, warps = parts * Config::kWarps;
    first = part == 0;
  }
};

// Sum over the CTA. All threads call it, and all get the sum.
__device__ __forceinline__ int sum_of_cta(const Shared& s, int mine) {
  mine = __reduce_add_sync(~0u, mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = mine;
  __syncthreads();
  const u32 lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < Config::kWarps ? s.sums[lane] : 0);
}

// The cells of a row from `column` on, a byte each: 1 where a block is kept, and 0 past the row's end.
struct Cells {
  u32 words[4] = {};

  template <bool kAligned> __device__ __forceinline__ void load(const BlockTablesParams& p, const u8* row, u32 column) {
    if constexpr (kAligned) {
      const uint4 all = *(const uint4*)(row + column);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else {
#pragma unroll
      for (u32 i = 0; i < Config::kCells; ++i)
        if (column + i < p.block_cols) words[i / 4] |= (u32)row[column + i] << i % 4 * 8;
    }
  }
  // Bytes that are not 0 become 1.
  __device__ __forceinline__ void flag() {
#pragma unroll
    for (u32& word : words) word = (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) >> 7 & 0x01010101;
  }
  // One bit for each cell. The product moves the bits of four bytes to the top, and none of them meets another.
  __device__ __forceinline__ u32 bits() const {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= words[i] * 0x10204080 >> 28 << 4 * i;
    return found;
  }
};

// A thread takes some rows of some columns of a head. Stores the bits of this CTA's head. kAligned: every 16 cells are
// one load, and a thread has eight rows in flight.
template <bool kAligned>
__device__ __forceinline__ void count_blocks(const BlockTablesParams& p, const Shared& s, u32 own) {
  constexpr u32 kCells = Config::kCells, kLines = Config::kLines, kLoads = kAligned ? 8 : 2;
  const u32 across = (p.block_cols + kCells - 1) / kCells, down = (p.block_rows + kCells - 1) / kCells;
  for (u32 item = threadIdx.x; item < p.heads * down * across; item += Config::kThreads) {
    const u32 column = item % across * kCells, first = item / across % down * kCells, head = item / across / down;
    const u8* const from = p.bitmap + (i64)head * p.block_rows * p.block_cols;
    u32 kept[4] = {}, either[4] = {};  // sums of columns, a byte each, and of pairs of columns, two bytes each
#pragma unroll 1
    for (u32 row = first; row < min(first + kCells, p.block_rows); row += kLoads) {
      Cells cells[kLoads];
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i)
        if (row + i < p.block_rows) cells[i].template load<kAligned>(p, from + (i64)(row + i) * p.block_cols, column);
      u32 before = 0;
#pragma unroll
      for (u32 i = 0; i < kLoads; ++i) {
        cells[i].flag();
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          kept[word] += cells[i].words[word];
          if (kLines == 2) either[word] += (cells[i].words[word] | cells[i].words[word] >> 8) & 0x00010001;
        }
        const u32 bits = cells[i].bits(), line = row + i;
        if (bits) atomicAdd(&s.rows.lines[head * p.block_rows + line], __popc(bits));
        if (bits && head == own) atomicOr(&s.bits[line * s.stride + column / 32], bits << column % 32);
        if (kLines == 2 && i % 2 == 1 && (before | bits))
          atomicAdd(&s.rows.panels[head * p.row_panels_of_head + line / 2], __popc(before | bits));
        before = bits;
      }
    }
#pragma unroll
    for (u32 i = 0; i < kCells; ++i)
      if (const u32 sum = kept[i / 4] >> i % 4 * 8 & 0xff)
        atomicAdd(&s.columns.lines[head * p.block_cols + column + i], (int)sum);
    if (kLines == 2) {
#pragma unroll
      for (u32 i = 0; i < kCells / 2; ++i)
        if (const u32 sum = either[i / 2] >> i % 2 * 16 & 0xffff)
          atomicAdd(&s.columns.panels[head * p.column_panels_of_head + column / 2 + i], (int)sum);
    }
  }
}

// A warp's exclusive scan of value(0), value(1), .. that starts at `before`; starts[count] is the sum.
template <class Value> __device__ __forceinline__ void scan(int* starts, u32 count, int before, Value value) {
  const u32 lane = threadIdx.x % 32;
  for (u32 first = 0; first < count; first += 32) {
    const int mine = first + lane < count ? value(first + lane) : 0;
    int sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (first + lane < count) starts[first + lane] = before + sum - mine;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) starts[count] = before;
}

// A warp takes a row: its pointer, its bits and its blocks.
__device__ __forceinline__ void write_rows(const BlockTablesParams& p, const Shared& s, const Share& share) {
  const u32 lane = threadIdx.x % 32;
  for (u32 row = share.warp; row < p.block_rows; row += share.warps) {
    const i64 line = (i64)share.head * p.block_rows + row;
    int at = s.row_starts[row];
    if (lane == 0) p.row_pointers[line] = at;
    for (u32 word = 0; word < p.row_words; ++word) {
      const u32 bits = s.bits[row * s.stride + word];
      if (lane == 0) p.row_bits[line * p.row_words + word] = bits;
      if (bits >> lane & 1) {
        const int place = at + __popc(bits & ((1u << lane) - 1));
        p.columns[place] = word * 32 + lane, p.rows[place] = (int)line;
      }
      at += __popc(bits);
    }
    for (int group = s.group_starts[row] + lane; group < s.group_starts[row + 1]; group += 32) {
      p.group_rows[group] = (int)line;
      p.group_firsts[group] = s.row_starts[row] + (group - s.group_starts[row]) * (int)p.group_size;
    }
  }
}

// A warp takes a column: its pointer, its bits and its blocks. Each lane has a row.
__device__ __forceinline__ void write_columns(const BlockTablesParams& p, const Shared& s, const Share& share) {
  const u32 lane = threadIdx.x % 32;
  for (u32 column = share.warp; column < p.block_cols; column += share.warps) {
    const i64 line = (i64)share.head * p.block_cols + column;
    int at = s.column_starts[column];
    if (lane == 0) p.column_pointers[line] = at;
    for (u32 first = 0; first < p.block_rows; first += 32) {
      const u32 row = first + lane, *const of_row = s.bits + row * s.stride;
      const u32 word = row < p.block_rows ? of_row[column / 32] : 0;
      const bool kept = word >> column % 32 & 1;
      const u32 bits = __ballot_sync(~0u, kept);
      if (kept) {
        int place = s.row_starts[row] + __popc(word & ((1u << column % 32) - 1));
        for (u32 earlier = 0; earlier < column / 32; ++earlier) place += __popc(of_row[earlier]);
        const int to = at + __popc(bits & ((1u << lane) - 1));
        p.column_rows[to] = (int)row, p.column_order[to] = place;
      }
      if (lane == 0) p.column_bits[line * p.column_words + first / 32] = bits;
      at += __popc(bits);
    }
  }
}

// Ranks `own` items from `first` on among items from `begin` to `end`, those with the largest counts first and ties in
// order; a warp takes an item. Calls `write(place, item, count)` for each.
template <class Write> __device__ __forceinline__ void rank(const Share& share, const int* counts, u32 first, u32 own,
                                                            u32 begin, u32 end, Write write) {
  const u32 lane = threadIdx.x % 32;
  for (u32 item = first + share.warp; item < first + own; item += share.warps) {
    const int mine = counts[item];
    u32 before = 0;
#pragma unroll 8
    for (u32 other = begin + lane; other < end; other += 32) before += counts[other] + (other < item) > mine;
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) write(begin + before, item, mine);
  }
}

// The tables of the panels of one side, by length, and of its lines.
struct Order {
  int *panels, *panel_counts, *narrow_panels, *narrow_counts, *lines_of_head;
};

// Ranks the panels of one side among those of all heads, and lines among those of the head. A narrow panel is a line,
// and so may a panel be.
__device__ __forceinline__ void rank_side(const Share& share, const Side& side, u32 heads, u32 lines, u32 panels,
                                          const Order& to) {
  const u32 first = share.head * lines;
  rank(share, side.lines, first, lines, 0, heads * lines, [&](u32 place, u32 item, int count) {
    to.narrow_panels[place] = (int)item, to.narrow_counts[item] = count;
    if (Config::kLines == 1) to.panels[place] = (int)item, to.panel_counts[item] = count;
  });
  if (Config::kLines > 1)
    rank(share, side.panels, share.head * panels, panels, 0, heads * panels,
         [&](u32 place, u32 item, int count) { to.panels[place] = (int)item, to.panel_counts[item] = count; });
  rank(share, side.lines, first, lines, first, first + lines,
       [&](u32 place, u32 item, int) { to.lines_of_head[place] = (int)item; });
}

// For each length of a panel up to `most` columns, writes its number of slices and, above bit 16, the columns of the
// longest one.
__device__ __forceinline__ void write_cuts(u32* cuts, u32 most, u32 longest, u32 uncut) {
  for (u32 length = threadIdx.x; length <= most; length += Config::kThreads) {
    const u32 count = length <= uncut ? 1 : (length + longest - 1) / longest;
    cuts[length] = count | (length + count - 1) / count << 16;
  }
}

// The tables of the slices of one side's panels. Narrow panels have no table `of_panels`.
struct Slices {
  int *table, *total, *of_panels, *long_panels;
  u32 room;
};

// Writes the slices of panels, the longest first and ties in order; a warp takes a panel. A head has `own` panels.
__device__ __forceinline__ void write_slices(const Share& share, const int* lengths, const u32* cuts, u32 own,
                                             u32 panels, const Slices& to) {
  const u32 lane = threadIdx.x % 32, first = share.head * own;
  for (u32 panel = first + share.warp; panel < first + own; panel += share.warps) {
    const u32 length = lengths[panel], count = cuts[length] & 0xffff, columns = cuts[length] >> 16;
    u32 before = 0, panels_before = 0, in_partials = 0, long_panels = 0;
#pragma unroll 4
    for (u32 other = lane; other < panels; other += 32) {
      const u32 theirs = cuts[lengths[other]], slices = theirs & 0xffff;
      if ((theirs >> 16) + (other < panel) > columns) before += slices, ++panels_before;
      if (other < panel && slices > 1) in_partials += slices;
      long_panels += slices > 1;
    }
    before = __reduce_add_sync(~0u, before), in_partials = __reduce_add_sync(~0u, in_partials);
    long_panels = __reduce_add_sync(~0u, long_panels);
    if (lane == 0 && to.of_panels) to.of_panels[panel] = (int)count;
    for (u32 slice = lane; slice < count; slice += 32) {
      const u32 begin = (u32)((u64)slice * length / count), end = (u32)((u64)(slice + 1) * length / count);
      int* const at = to.table + 5 * (i64)(before + slice);
      at[0] = (int)panel, at[1] = (int)begin, at[2] = (int)(end - begin);
      at[3] = (int)(slice | count << 16), at[4] = (int)in_partials;
    }
    if (__reduce_add_sync(~0u, panels_before) + 1 == panels) {  // the last of all: nothing comes behind its slices
      if (lane == 0) *to.total = (int)(before + count), *to.long_panels = (int)long_panels;
      for (u32 at = 5 * (before + count) + lane; at < 5 * to.room; at += 32) to.table[at] = 0;
    }
  }
}

// Writes what belongs to no head: the ends of pointers, groups past the last one, and without blocks the tables of
// blocks.
__device__ __forceinline__ void write_ends(const BlockTablesParams& p, const Shared& s, int total) {
  if (threadIdx.x == 0) {
    p.row_pointers[(i64)p.heads * p.block_rows] = total;
    p.column_pointers[(i64)p.heads * p.block_cols] = total;
  }
  for (u32 group = s.group_starts[p.block_rows] + threadIdx.x; group < p.groups; group += Config::kThreads)
    p.group_rows[group] = -1, p.group_firsts[group] = 0;
  for (u32 block = total + threadIdx.x; block < p.blocks; block += Config::kThreads)
    p.columns[block] = 0, p.rows[block] = 0, p.column_rows[block] = 0, p.column_order[block] = 0;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    fill_tables(const __grid_constant__ BlockTablesParams p) {
  extern __shared__ int shared[];
  const Shared s(p, shared);
  const Share share(p);
  const u32 own = share.head, lines = p.heads * p.block_rows, before = own * p.block_rows;
  s.clear(p);
  write_cuts(s.row_cuts, p.block_cols, p.slice_columns, p.uncut_columns);
  write_cuts(s.column_cuts, p.block_rows, p.slice_rows, p.uncut_rows);
  grid_dependency_wait();
  __syncthreads();
  if (p.block_cols % Config::kCells == 0 && (u64)p.bitmap % Config::kCells == 0) count_blocks<true>(p, s, own);
  else count_blocks<false>(p, s, own);
  __syncthreads();
  int total = 0, earlier = 0, groups = 0;
  for (u32 line = threadIdx.x; line < lines; line += Config::kThreads) {
    const int count = s.rows.lines[line];
    total += count;
    if (line < before) earlier += count, groups += (count + (int)p.group_size - 1) / (int)p.group_size;
  }
  total = sum_of_cta(s, total), earlier = sum_of_cta(s, earlier), groups = sum_of_cta(s, groups);
  if (total != (int)p.blocks) {  // another number of blocks than the tables have: a layout without blocks
    total = earlier = groups = 0;
    s.clear(p);
    __syncthreads();
  }
  const u32 warp = threadIdx.x / 32;
  const int *const mine = s.rows.lines + before, *const mine_across = s.columns.lines + own * p.block_cols;
  if (warp == 0) scan(s.row_starts, p.block_rows, earlier, [&](u32 row) { return mine[row]; });
  if (warp == 1) scan(s.column_starts, p.block_cols, earlier, [&](u32 column) { return mine_across[column]; });
  if (warp == 2)
    scan(s.group_starts, p.block_rows, groups,
         [&](u32 row) { return (mine[row] + (int)p.group_size - 1) / (int)p.group_size; });
  __syncthreads();
  write_rows(p, s, share), write_columns(p, s, share);
  const u32 row_panels = p.row_panels_of_head, column_panels = p.column_panels_of_head;
  rank_side(share, s.rows, p.heads, p.block_rows, row_panels,
            {p.row_panels, p.row_panel_columns, p.row_narrow_panels, p.row_narrow_panel_columns, p.rows_by_length});
  rank_side(
      share, s.columns, p.heads, p.block_cols, column_panels,
      {p.column_panels, p.column_panel_rows, p.column_narrow_panels, p.column_narrow_panel_rows, p.columns_by_length});
  write_slices(share, s.rows.panels, s.row_cuts, row_panels, p.heads * row_panels,
               {p.row_slices, p.row_slice_count, p.row_panel_slices, p.row_long_panels, p.row_slice_room});
  write_slices(
      share, s.columns.panels, s.column_cuts, column_panels, p.heads * column_panels,
      {p.column_slices, p.column_slice_count, p.column_panel_slices, p.column_long_panels, p.column_slice_room});
  if constexpr (Config::kLines > 1) {
    __syncthreads();  // no warp reads the cuts of panels any more
    write_cuts(s.row_cuts, p.block_cols, p.narrow_slice_columns, p.narrow_uncut_columns);
    write_cuts(s.column_cuts, p.block_rows, p.narrow_slice_rows, p.narrow_uncut_rows);
    __syncthreads();
    write_slices(
        share, s.rows.lines, s.row_cuts, p.block_rows, lines,
        {p.row_narrow_slices, p.row_narrow_slice_count, nullptr, p.row_narrow_long_panels, p.row_narrow_slice_room});
    write_slices(share, s.columns.lines, s.column_cuts, p.block_cols, p.heads * p.block_cols,
                 {p.column_narrow_slices, p.column_narrow_slice_count, nullptr, p.column_narrow_long_panels,
                  p.column_narrow_slice_room});
  }
  if (own + 1 == p.heads && share.first) write_ends(p, s, total);
}
