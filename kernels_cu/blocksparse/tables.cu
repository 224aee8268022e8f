// Makes the look-up tables of a layout with blocks of 64 or 128 from its bitmap, in one launch. lookup_tables.py
// defines the tables.
//
//   role         threads    work of a CTA
//   fill_tables  1024       one head: counts the blocks of all rows and columns of all heads, so that it depends on no
//                           other CTA; then writes the tables of its own rows and columns
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
  static constexpr int kLines = S24_PANEL_LINES;  // block rows of a panel, 1 or 2; a narrow panel has one
  static constexpr int kThreads = 1024, kWarps = kThreads / 32;
};

// Counts of one side: blocks of each line of all heads, and lines across in which each panel keeps a block.
struct Side {
  int* lines;
  int* panels;
};

struct Shared {
  Side rows, columns;
  int *row_starts, *column_starts, *group_starts;  // starts of this head's lines, and the last one's end
  u32* bits;                                       // bits of this head's rows
  int* sums;                                       // one for each warp

  __device__ __forceinline__ Shared(const BlockTablesParams& p, int* at) {
    const auto take = [&at](u32 count) {
      int* const found = at;
      at += count;
      return found;
    };
    rows = {take(p.heads * p.block_rows), take(p.heads * p.row_panels_of_head)};
    columns = {take(p.heads * p.block_cols), take(p.heads * p.column_panels_of_head)};
    row_starts = take(p.block_rows + 1), column_starts = take(p.block_cols + 1);
    group_starts = take(p.block_rows + 1);
    bits = (u32*)take(p.block_rows * p.row_words);
    sums = take(Config::kWarps);
  }
};

// Sum over the CTA. All threads call it, and all get the sum.
__device__ __forceinline__ int sum_of_cta(const Shared& s, int mine) {
  mine = __reduce_add_sync(~0u, mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = mine;
  __syncthreads();
  return __reduce_add_sync(~0u, s.sums[threadIdx.x % 32]);
}

// A warp takes a row panel; each lane a column. Stores the bits of this head's rows.
__device__ __forceinline__ void count_rows(const BlockTablesParams& p, const Shared& s, u32 own) {
  const u32 lane = threadIdx.x % 32;
  for (u32 panel = threadIdx.x / 32; panel < p.heads * p.row_panels_of_head; panel += Config::kWarps) {
    const u32 head = panel / p.row_panels_of_head, first = panel % p.row_panels_of_head * Config::kLines;
    const u8* const from = p.bitmap + ((i64)head * p.block_rows + first) * p.block_cols;
    int counts[Config::kLines] = {}, either = 0;
    for (u32 word = 0; word < p.row_words; ++word) {
      const u32 column = word * 32 + lane;
      u32 any = 0;
#pragma unroll
      for (int line = 0; line < Config::kLines; ++line) {
        const bool there = first + line < p.block_rows && column < p.block_cols;
        const u32 bits = __ballot_sync(~0u, there && from[(i64)line * p.block_cols + column]);
        counts[line] += __popc(bits), any |= bits;
        if (head == own && lane == 0 && first + line < p.block_rows) s.bits[(first + line) * p.row_words + word] = bits;
      }
      either += __popc(any);
    }
    if (lane == 0) {
      s.rows.panels[panel] = either;
#pragma unroll
      for (int line = 0; line < Config::kLines; ++line)
        if (first + line < p.block_rows) s.rows.lines[head * p.block_rows + first + line] = counts[line];
    }
  }
}

// A thread takes a column panel.
__device__ __forceinline__ void count_columns(const BlockTablesParams& p, const Shared& s) {
  for (u32 panel = threadIdx.x; panel < p.heads * p.column_panels_of_head; panel += Config::kThreads) {
    const u32 head = panel / p.column_panels_of_head, first = panel % p.column_panels_of_head * Config::kLines;
    const u8* const from = p.bitmap + (i64)head * p.block_rows * p.block_cols + first;
    int counts[Config::kLines] = {}, either = 0;
#pragma unroll(8 / Config::kLines)  // eight loads in flight
    for (u32 row = 0; row < p.block_rows; ++row) {
      bool any = false;
#pragma unroll
      for (int line = 0; line < Config::kLines; ++line) {
        const bool kept = first + line < p.block_cols && from[(i64)row * p.block_cols + line];
        counts[line] += kept, any |= kept;
      }
      either += any;
    }
    s.columns.panels[panel] = either;
#pragma unroll
    for (int line = 0; line < Config::kLines; ++line)
      if (first + line < p.block_cols) s.columns.lines[head * p.block_cols + first + line] = counts[line];
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

// A warp takes a row of this head: its pointer, its bits and its blocks.
__device__ __forceinline__ void write_rows(const BlockTablesParams& p, const Shared& s, u32 own) {
  const u32 lane = threadIdx.x % 32;
  for (u32 row = threadIdx.x / 32; row < p.block_rows; row += Config::kWarps) {
    const i64 line = (i64)own * p.block_rows + row;
    int at = s.row_starts[row];
    if (lane == 0) p.row_pointers[line] = at;
    for (u32 word = 0; word < p.row_words; ++word) {
      const u32 bits = s.bits[row * p.row_words + word];
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

// A thread takes a column of this head: its pointer, its bits and its blocks.
__device__ __forceinline__ void write_columns(const BlockTablesParams& p, const Shared& s, u32 own) {
  for (u32 column = threadIdx.x; column < p.block_cols; column += Config::kThreads) {
    const i64 line = (i64)own * p.block_cols + column;
    int at = s.column_starts[column];
    p.column_pointers[line] = at;
    u32 bits = 0;
    for (u32 row = 0; row < p.block_rows; ++row) {
      const u32* const of_row = s.bits + row * p.row_words;
      if (of_row[column / 32] >> column % 32 & 1) {
        int place = s.row_starts[row] + __popc(of_row[column / 32] & ((1u << column % 32) - 1));
        for (u32 word = 0; word < column / 32; ++word) place += __popc(of_row[word]);
        p.column_rows[at] = row, p.column_order[at] = place;
        ++at, bits |= 1u << row % 32;
      }
      if (row % 32 == 31 || row + 1 == p.block_rows) p.column_bits[line * p.column_words + row / 32] = bits, bits = 0;
    }
  }
}

// Ranks `own` items from `first` on among items from `begin` to `end`, those with the largest counts first and ties in
// order; a warp takes an item. Writes the items in this order, and their counts.
__device__ __forceinline__ void rank(const int* counts, u32 first, u32 own, u32 begin, u32 end, int* order, int* out) {
  const u32 lane = threadIdx.x % 32;
  for (u32 item = first + threadIdx.x / 32; item < first + own; item += Config::kWarps) {
    const int mine = counts[item];
    u32 before = 0;
    for (u32 other = begin + lane; other < end; other += 32)
      before += counts[other] > mine || (counts[other] == mine && other < item);
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) {
      order[begin + before] = (int)item;
      if (out) out[item] = mine;
    }
  }
}

// The slices of one side's panels.
struct Slices {
  int *table, *total, *of_panels, *long_panels;
  u32 longest, uncut, room;

  // Number of slices of a panel, and the columns of its longest one.
  __device__ __forceinline__ u32 count(u32 length) const {
    return length <= uncut ? 1 : (length + longest - 1) / longest;
  }
  __device__ __forceinline__ u32 columns(u32 length) const { return (length + count(length) - 1) / count(length); }
};

// Writes the slices of panels, the longest first and ties in order; a warp takes a panel.
__device__ __forceinline__ void write_slices(const int* lengths, u32 first, u32 own, u32 panels, const Slices& to) {
  const u32 lane = threadIdx.x % 32;
  for (u32 panel = first + threadIdx.x / 32; panel < first + own; panel += Config::kWarps) {
    const u32 length = lengths[panel], columns = to.columns(length), count = to.count(length);
    u32 before = 0, panels_before = 0, in_partials = 0, long_panels = 0;
    for (u32 other = lane; other < panels; other += 32) {
      const u32 theirs = lengths[other], longest = to.columns(theirs), slices = to.count(theirs);
      if (longest > columns || (longest == columns && other < panel)) before += slices, ++panels_before;
      if (other < panel && slices > 1) in_partials += slices;
      long_panels += slices > 1;
    }
    before = __reduce_add_sync(~0u, before), in_partials = __reduce_add_sync(~0u, in_partials);
    long_panels = __reduce_add_sync(~0u, long_panels);
    if (lane == 0) to.of_panels[panel] = (int)count;
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

// Makes the layout one without blocks, if the bitmap keeps another number of blocks than the tables have.
__device__ __forceinline__ void clear(const BlockTablesParams& p, const Shared& s) {
  const auto zero = [](int* at, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += Config::kThreads) at[i] = 0;
  };
  zero(s.rows.lines, p.heads * p.block_rows), zero(s.rows.panels, p.heads * p.row_panels_of_head);
  zero(s.columns.lines, p.heads * p.block_cols), zero(s.columns.panels, p.heads * p.column_panels_of_head);
  zero((int*)s.bits, p.block_rows * p.row_words);
}

// Writes what no head has: the ends of pointers, groups past the last one and, without blocks, the tables of blocks.
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
  const u32 own = blockIdx.x, lines = p.heads * p.block_rows, before = own * p.block_rows;
  grid_dependency_wait();
  count_rows(p, s, own), count_columns(p, s);
  __syncthreads();
  int total = 0, earlier = 0, groups = 0;
  for (u32 line = threadIdx.x; line < lines; line += Config::kThreads) {
    const int count = s.rows.lines[line];
    total += count;
    if (line < before) earlier += count, groups += (count + (int)p.group_size - 1) / (int)p.group_size;
  }
  total = sum_of_cta(s, total), earlier = sum_of_cta(s, earlier), groups = sum_of_cta(s, groups);
  if (total != (int)p.blocks) {
    total = earlier = groups = 0;
    clear(p, s);
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
  write_rows(p, s, own), write_columns(p, s, own);
  const u32 row_panels = p.row_panels_of_head, column_panels = p.column_panels_of_head;
  const u32 columns = p.heads * p.block_cols;
  rank(s.rows.panels, own * row_panels, row_panels, 0, p.heads * row_panels, p.row_panels, p.row_panel_columns);
  rank(s.columns.panels, own * column_panels, column_panels, 0, p.heads * column_panels, p.column_panels,
       p.column_panel_rows);
  write_slices(s.rows.panels, own * row_panels, row_panels, p.heads * row_panels,
               {p.row_slices, p.row_slice_count, p.row_panel_slices, p.row_long_panels, p.slice_columns,
                p.uncut_columns, p.row_slice_room});
  write_slices(s.columns.panels, own * column_panels, column_panels, p.heads * column_panels,
               {p.column_slices, p.column_slice_count, p.column_panel_slices, p.column_long_panels, p.slice_rows,
                p.uncut_rows, p.column_slice_room});
  rank(s.rows.lines, before, p.block_rows, 0, lines, p.row_narrow_panels, p.row_narrow_panel_columns);
  rank(s.columns.lines, own * p.block_cols, p.block_cols, 0, columns, p.column_narrow_panels,
       p.column_narrow_panel_rows);
  rank(s.rows.lines, before, p.block_rows, before, before + p.block_rows, p.rows_by_length, nullptr);
  rank(s.columns.lines, own * p.block_cols, p.block_cols, own * p.block_cols, (own + 1) * p.block_cols,
       p.columns_by_length, nullptr);
  if (own + 1 == p.heads) write_ends(p, s, total);
}
