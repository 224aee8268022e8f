// dQ, dK and dV of O = softmax(scale * Q K^T) V over kept blocks, from dO and what the forward pass gave.
//
// Three launches. `attention_backward_rows`: of every row of Q the base of its exponents, from the logarithm of its
// sum, and delta = sum(dO * O). Then, twice, `attention_backward_wgmma`, compiled for what it walks:
//
//   S24_STATIONARY_KV  an item                     stays   passes, of its kept blocks                       gives
//   1         a column of blocks, of K's  K, V    Q, dO, of each head of Q that shares K, in turn  dK, dV
//   0         a row of blocks, of Q's     Q, dO   K, V                                             dQ
//
// With the first and the second of either pair, a warpgroup's 64 rows of what stays and a tile of kTile rows of what
// passes (for 1 all of it is transposed), in registers:
//
//   S = first first^T    P = exp(scale * S - base)    G = second second^T    dS = P * (G - delta)
//   sums[0] += dS first    sums[1] += P second, for 1 alone
//
// P and dS are rounded to the element, of which P makes dS.
//
// A channel is a thread that copies and the warpgroups that it feeds: two that share the tiles of a block of 128, or
// one with a block of 64 of its own. A slot has a tile of the first and of the second that pass.
//
//   role      who                                 what
//   copy      last warpgroup, a thread of warp c  channel c: what stays, an item; slots; finds the next item
//   multiply  the first two warpgroups            the products above, and what is between them
//
//   tensor cores  | S G |   | P second | dS first | next S | next G |          | next P second |
//   registers         | P | dS |                            | next P | next dS |
//
//   barriers  full, free: of a slot. item_full: the item's own operands and what it is have come; item_free: its
//             warpgroups have no more use of them. Named 1, 2: the threads of a warpgroup.
//   registers sums 128, S 32, G 32, P 16, dS 16 a thread, of 240: what copies has 24.
//
// Each sum is in the order of its tables, by one warpgroup: no atomics touch it, and the bits of a result depend on its
// row or column of blocks alone. Items are dealt as in attention_wgmma.cu.
#include "blocksparse/attention_backward_wgmma/rows.cuh"

// Keeps what is computed from `v` out of registers until here: the compiler may not move it in front of a loop.
__device__ __forceinline__ u32 made_here(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

using Ring = PipelineState<Config::kSlots>;
using Products = WarpgroupProducts<Config>;

// A channel's part of shared memory.
struct Channel : ChannelBarriers<Config, Channel> {
  u32 base;
  __device__ __forceinline__ Channel(u32 base) : base(base) {}
  __device__ __forceinline__ u32 barriers() const { return base + Config::kBarrierAt; }
  __device__ __forceinline__ u32 free(u32 slot) const { return full(slot) + 8 * Config::kSlots; }
  __device__ __forceinline__ u32 item(u32 count) const {  // words
    return base + Config::kItemsAt + count % Config::kItems * Config::kItemBytes;
  }
  __device__ __forceinline__ u32 start(u32 slot) const { return base + Config::kStartsAt + 4 * slot; }
  __device__ __forceinline__ u32 tile(u32 slot, u32 which) const {
    return base + Config::kSlotsAt + (slot * 2 + which) * Config::kTileBytes;
  }
  __device__ __forceinline__ u32 line(u32 slot, u32 which) const {
    return base + Config::kLinesAt + (slot * 2 + which) * Config::kLineBytes;
  }
  __device__ __forceinline__ u32 stay(u32 group, u32 which) const {
    return base + (group * 2 + which) * Config::kOwnBytes;
  }
};

// Work -----------------------------------------------------------------------------------------------

// What a channel works on, as it lies in shared memory.
struct Item {
  u32 matrix, line;  // of what stays; the row or column of blocks in it
  int tiles;         // that pass, -1: there is no item
  int rows, keys;    // cells of the batch that count

  static constexpr u32 kLineAt = 4, kTilesAt = 8, kRowsAt = 12, kKeysAt = 16;

  // By a whole warp.
  __device__ __forceinline__ void load(u32 at) {
    matrix = uniform(at), line = uniform(at + kLineAt), tiles = (int)uniform(at + kTilesAt);
    rows = (int)uniform(at + kRowsAt), keys = (int)uniform(at + kKeysAt);
  }
};

// The tables' entries of an item that count, of its `one`-th head of Q: they increase. What copies has few registers,
// so all is loaded where it is needed.
struct Entries {
  const int* first;
  int count;

  static __device__ __forceinline__ u32 batch(const AttentionBackwardWgmmaParams& p, u32 item) {
    return load_shared_as<u32>(item) / (Config::kKeys ? p.kv_heads : p.heads);
  }
  static __device__ __forceinline__ u32 head(const AttentionBackwardWgmmaParams& p, u32 item, u32 one) {
    const u32 matrix = load_shared_as<u32>(item);
    return Config::kKeys ? matrix % p.kv_heads * p.group + one : matrix % p.heads;
  }
  // Matrix of what passes.
  static __device__ __forceinline__ u32 matrix(const AttentionBackwardWgmmaParams& p, u32 item, u32 one) {
    const u32 from = batch(p, item), of_head = head(p, item, one);
    return Config::kKeys ? from * p.heads + of_head : from * p.kv_heads + of_head / p.group;
  }

  // How many of them are below `limit`.
  __device__ __forceinline__ int below(int limit) const {
    int found = 0;
    for (int end = count; found < end;) {
      const int middle = (found + end) / 2;
      if (first[middle] < limit) found = middle + 1;
      else end = middle;
    }
    return found;
  }

  __device__ __forceinline__ Entries(const AttentionBackwardWgmmaParams& p, u32 item, u32 one) {
    const int line = load_shared_as<int>(item + Item::kLineAt);
    const int* from = p.items.pointers + (head(p, item, one) * p.head_lines + line);
    first = p.items.entries + from[0];
    count = from[1] - from[0];
    if constexpr (Config::kLengths) {
      const int own = load_shared_as<int>(item + (Config::kKeys ? Item::kKeysAt : Item::kRowsAt));
      const int other = load_shared_as<int>(item + (Config::kKeys ? Item::kRowsAt : Item::kKeysAt));
      count = line * Config::kBlock < own ? below((other + Config::kBlock - 1) / Config::kBlock) : 0;
    }
    if constexpr (Config::kCausal && !Config::kKeys) count = below(line + 1);
    if constexpr (Config::kCausal && Config::kKeys) {
      const int hidden = below(line);
      first += hidden, count -= hidden;
    }
  }
};

// Copies ---------------------------------------------------------------------------------------------

// The thread that feeds a channel.
struct Copier {
  const AttentionBackwardWgmmaParams& p;
  const Channel channel;
  u32 items = 0, tiles = 0;  // so far

  // Rows `start` and on of what passes, and of Q's what belongs to them.
  __device__ __forceinline__ void copy_tiles(u32 matrix, u32 start) {
    const Channel channel{Config::kChannels == 1 ? this->channel.base : made_here(this->channel.base)};
    const u32 slot = made_here(tiles % Config::kSlots), full = channel.full(slot);
    matrix = made_here(matrix);
    barrier_wait(channel.free(slot), ~(tiles / Config::kSlots) & 1);
    store_shared(channel.start(slot), start);
    barrier_arrive_expect_tx(full, 2 * (Config::kTileBytes + Config::kLineBytes));
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int box = 0; box < Config::kBoxes; ++box)
        copy_box(channel.tile(slot, which) + box * Config::kBoxBytes, &p.passes[which], box * 64, start, matrix, full);
      if constexpr (Config::kKeys)
        bulk_load(channel.line(slot, which), (which ? p.deltas : p.bases) + (i64)matrix * p.rows + start,
                  Config::kLineBytes, full);
    }
    ++tiles;
  }

  __device__ __forceinline__ u32 heads() const { return Config::kKeys ? p.group : 1; }  // of Q, of an item

  __device__ __forceinline__ void find(u32 index) const {
    const u32 item = channel.item(items);
    const Place place(p, index);
    store_shared(item, place.matrix);
    const u32 head = Entries::head(p, item, 0) * p.head_lines;
    store_shared(item + Item::kLineAt, (u32)p.items.order[head + place.line] - head);
    const u32 batch = Config::kLengths ? Entries::batch(p, item) : 0;
    const int rows = counted<Config>(p.rows, p.items.q_lengths, batch);
    const int keys = counted<Config>(p.keys, p.items.kv_lengths, batch);
    store_shared(item + Item::kRowsAt, (u32)rows), store_shared(item + Item::kKeysAt, (u32)keys);
    int tiles = 0;
#pragma unroll 1
    for (u32 one = 0; one < heads(); ++one) tiles += Config::kPieces * Entries(p, item, one).count;
    store_shared(item + Item::kTilesAt, (u32)tiles);
  }

  // What stays, once its warpgroups are done with that of the last item.
  __device__ __forceinline__ void publish() {
    const u32 item = channel.item(items), full = channel.item_full();
    const int tiles = load_shared_as<int>(item + Item::kTilesAt);
    barrier_wait(channel.item_free(), ~items & 1);
    barrier_arrive_expect_tx(full, tiles > 0 ? Config::kGroups * 2 * Config::kOwnBytes : 0);
    if (tiles > 0) {
      const u32 matrix = load_shared_as<u32>(item), line = load_shared_as<u32>(item + Item::kLineAt);
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (u32 group = 0; group < Config::kGroups; ++group)
          copy_rows<Config, Config::kOwnBoxBytes>(channel.stay(group, which), &p.stays[which],
                                                  line * Config::kBlock + group * 64, matrix, full);
    }
  }

  __device__ __forceinline__ void copy_item() {
#pragma unroll 1
    for (u32 one = 0; one < heads(); ++one) {
      const Entries entries(p, channel.item(items), one);
      const u32 matrix = Entries::matrix(p, channel.item(items), one);
      const int* from = entries.first;
      int entry = entries.count > 0 ? *from : 0;
#pragma unroll 1
      for (int left = entries.count; left > 0; --left) {
        const u32 start = (u32)entry * Config::kBlock;
        if (left > 1) entry = *++from;  // comes while slots are waited for
#pragma unroll 1
        for (u32 piece = 0; piece < Config::kPieces; ++piece) copy_tiles(matrix, start + piece * Config::kTile);
      }
    }
  }

  // From item `index` on.
  __device__ __forceinline__ void copy_all(u32 index) {
    for (; index < items_of(p); ++items) {
      find(index);
      publish();
      copy_item();
      index = channels<Config>() + atomicAdd(p.items.taken, 1);
    }
    store_shared(channel.item(items) + Item::kTilesAt, ~0u);
    publish();
  }
};

// Sums -----------------------------------------------------------------------------------------------

// A warpgroup: 64 rows of an item at a time. Of a thread's two rows, g and g + 8 of its warp's 16, [0] is the first.
struct Multiplier {
  const AttentionBackwardWgmmaParams& p;
  const Channel channel;
  const u32 group;  // of its channel
  Ring at;
  u32 items = 0;              // so far
  float bases[2], deltas[2];  // of the thread's rows, where rows of Q stay

  // The thread's first row.
  __device__ __forceinline__ int row(const Item& item) const {
    return first_row(item.line * Config::kBlock + group * 64);
  }

  // Waits for a slot; rows that don't count become zeros. Returns which row is its first, where it matters.
  __device__ __forceinline__ int take(const Item& item, const Ring& one) const {
    barrier_wait(channel.full(one.stage), one.parity);
    if constexpr (!Config::kCausal && !Config::kLengths) return 0;
    const int start = (int)uniform(channel.start(one.stage));
    if constexpr (Config::kLengths) {
      const int end = (Config::kKeys ? item.rows : item.keys) - start;
      if (end < Config::kTile)  // two tiles, in boxes that lie behind one another
        clear_rows<Config::kTile, 2 * Config::kBoxes>(channel.tile(one.stage, 0), max(end, 0), 1 + threadIdx.x / 128);
    }
    return start;
  }

  // The product of the warpgroup's rows of one of the two that stay and the tile's of what passes.
  __device__ __forceinline__ void issue_cells(float (&cells)[Config::kCells], u32 which, u32 slot) const {
    const u64 own = Products::Own::descriptor(made_here(channel.stay(group, which)));
    Products::issue_cells<1>(cells, own, Products::Tile::descriptor(channel.tile(slot, which)));
  }
  __device__ __forceinline__ void issue_sums(float (&sums)[Config::kSums], const u32 (&factors)[Config::kCells / 2],
                                             u32 which, u32 slot) const {
    const u64 b = Products::Summed::descriptor(channel.tile(slot, which));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kTile / 16; ++k) {
      const u32 a[4] = {factors[4 * k], factors[4 * k + 1], factors[4 * k + 2], factors[4 * k + 3]};
      wgmma_registers<Config::kElement, 1>(sums, a, b + k * Products::Summed::kStep);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void load_rows(const Item& item) {
    const i64 line = (i64)item.matrix * p.rows + row(item);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bases[half] = p.bases[line + 8 * half], deltas[half] = p.deltas[line + 8 * half];
  }
  // Ties words to this point of the program.
  static __device__ __forceinline__ void settle(u32 (&words)[Config::kCells / 2]) {
#pragma unroll
    for (int i = 0; i < Config::kCells / 2; ++i) asm volatile("" : "+r"(words[i])::"memory");
  }
  // What belongs to the thread's columns of 8 j and on.
  __device__ __forceinline__ void of_columns(float (&found)[2], u32 slot, u32 which, int j) const {
    u32 words[2];
    load_shared_words(words, channel.line(slot, which) + (8 * j + first_column()) * 4);
    found[0] = __uint_as_float(words[0]), found[1] = __uint_as_float(words[1]);
  }

  // Scores become exponentials.
  __device__ __forceinline__ void exponentiate(float (&scores)[Config::kCells], u32 slot) const {
#pragma unroll
    for (int j = 0; j < Config::kTile / 8; ++j) {
      float base[2];
      if constexpr (Config::kKeys) of_columns(base, slot, 0, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[4 * j + i];
        score = power_of_2(__fmaf_rn(score, p.exponent_scale, -(Config::kKeys ? base[i % 2] : bases[i / 2])));
      }
    }
  }
  // Whether cells of the tile are dropped.
  __device__ __forceinline__ bool hides(const Item& item, int start) const {
    const int first = (int)(item.line * Config::kBlock + group * 64);
    if constexpr (Config::kKeys) return Config::kCausal && start < first + 63;
    return (Config::kLengths && start + Config::kTile > item.keys) ||
           (Config::kCausal && start + Config::kTile > first + 1);
  }
  // Zeros for them.
  __device__ __forceinline__ void hide(float (&scores)[Config::kCells], const Item& item, int start) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(item) + 8 * half;
      int begin = 0, end = Config::kTile;  // of the columns that stay
      if constexpr (Config::kKeys) begin = own - start - first_column();
      else {
        end = item.keys;
        if constexpr (Config::kCausal) end = min(end, own + 1);
        end -= start + first_column();
      }
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * j + i < begin || 8 * j + i >= end) scores[4 * j + 2 * half + i] = 0.0f;
    }
  }
  // P and G become dS, in place of G.
  __device__ __forceinline__ void differentiate(float (&cells)[Config::kCells],
                                                const u32 (&factors)[Config::kCells / 2], u32 slot) const {
#pragma unroll
    for (int j = 0; j < Config::kTile / 8; ++j) {
      float delta[2];
      if constexpr (Config::kKeys) of_columns(delta, slot, 1, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& cell = cells[4 * j + i];
        const float factor = Config::In::to_float((u16)(factors[2 * j + i / 2] >> (i % 2 * 16)));
        cell = factor * (cell - (Config::kKeys ? delta[i % 2] : deltas[i / 2]));
      }
    }
  }

  // Of a tile whose P and G are there: its products and, where there is a next one, S of that.
  template <bool kMore>
  __device__ __forceinline__ void step(float (&sums)[Config::kResults][Config::kSums], float (&scores)[Config::kCells],
                                       float (&cells)[Config::kCells], u32 (&factors)[Config::kCells / 2]) {
    u32 changes[Config::kCells / 2];
    if constexpr (Config::kKeys) issue_sums(sums[1], factors, 1, at.stage);
    differentiate(cells, factors, at.stage);
    Products::round(changes, cells);
    issue_sums(sums[0], changes, 0, at.stage);
    const u32 free = channel.free(at.stage);
    at.next();
    if constexpr (kMore) {
      issue_cells(scores, 0, at.stage);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    wgmma_fence_operand(sums[0]);
    if constexpr (Config::kKeys) wgmma_fence_operand(sums[1]);
    release(free);
  }
  // P and G of a tile whose S is in flight. Waits for the next one where there is one, of which `start` is the first
  // row then.
  __device__ __forceinline__ void finish(float (&scores)[Config::kCells], float (&cells)[Config::kCells],
                                         u32 (&factors)[Config::kCells / 2], int& start, bool more, const Item& item) {
    issue_cells(cells, 1, at.stage);
    wgmma_wait<1>();
    wgmma_fence_operand(scores);
    exponentiate(scores, at.stage);
    if (hides(item, start)) hide(scores, item, start);
    Products::round(factors, scores);
    settle(factors);
    if (more) {  // a branch, which keeps what is above it there
      Ring next = at;
      next.next();
      start = take(item, next);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(cells);
  }

  __device__ __forceinline__ void multiply(float (&sums)[Config::kResults][Config::kSums], const Item& item) {
    float scores[Config::kCells], cells[Config::kCells];
    u32 factors[Config::kCells / 2];
    int start = take(item, at);
    issue_cells(scores, 0, at.stage);
#pragma unroll
    for (int which = 0; which < Config::kResults; ++which) {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[which][i] = 0.0f;
      wgmma_fence_operand(sums[which]);
    }
    int left = item.tiles;
    while (true) {
      finish(scores, cells, factors, start, left > 1, item);
      if (--left == 0) break;
      step<true>(sums, scores, cells, factors);
    }
    release(channel.item_free());
    step<false>(sums, scores, cells, factors);
  }

  __device__ __forceinline__ void write(void* results, const float (&sums)[Config::kSums], float factor,
                                        const Item& item) const {
    const int counted = Config::kKeys ? item.keys : item.rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(item) + 8 * half;
      const bool counts = own < counted && item.tiles > 0;
      const i64 line = (i64)item.matrix * (Config::kKeys ? p.keys : p.rows) + own;
      write_row<Config>(results, line, half, sums, factor, counts);
    }
  }

  __device__ __forceinline__ void work() {
    float sums[Config::kResults][Config::kSums];
    for (;; ++items) {
      const u32 place = channel.item(items);
      barrier_wait(channel.item_full(), items & 1);
      Item item;
      item.load(place);
      if (item.tiles < 0) break;
      if (item.tiles > 0) {
        if constexpr (!Config::kKeys) load_rows(item);
        multiply(sums, item);
        item.load(place);  // no register had to keep it
      } else {
        release(channel.item_free());
      }
      write(p.results[0], sums[0], p.scale, item);
      if constexpr (Config::kKeys) write(p.results[1], sums[1], 1.0f, item);
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_wgmma(const __grid_constant__ AttentionBackwardWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (u32 index = 0; index < Config::kChannels; ++index) {
      Channel(base + index * Config::kChannelBytes).init();
    }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents_and_wait();

  if (warpgroup == 2) {
    warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, index = Config::kChannels == 1 ? 0 : warp;
    if (warp < Config::kChannels && threadIdx.x % 32 == 0)
      Copier{p, {base + index * Config::kChannelBytes}}.copy_all(blockIdx.x * Config::kChannels + index);
  } else {
    warpgroup_reg_alloc<Config::kSumRegisters>();
    if constexpr (Config::kChannels == 1) Multiplier{p, {base}, warpgroup}.work();
    else Multiplier{p, {base + warpgroup * Config::kChannelBytes}, 0}.work();
  }
}
