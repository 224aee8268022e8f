// O = softmax(scale * Q K^T) V over kept blocks, and the logarithm of each row's sum of exponentials.
//
// An item is a row of blocks of one head of one batch; a tile is 128 keys: a kept block of 128, or two of 64, in
// increasing columns. A channel is a warp that copies and the warpgroups that it feeds, each of which has 64 rows: two
// that share the tiles of a row of blocks of 128, or one with a row of blocks of 64 of its own.
//
//   role      who                          what
//   copy      last warpgroup, warp c       channel c: Q an item; K and V, a slot a tile each, also of the next item
//   multiply  the first two warpgroups     S = Q K^T, softmax in registers, O += P V with P from registers
//
//   barriers  full, free: of a slot. item_full: the item's Q and what it is have come; item_free: its warpgroups have
//             no more use of them. Named 1, 2: a warpgroup's turn to multiply; 3, 4: the threads of a warpgroup.
//   registers S 64, P 32, O head_size / 2 a thread; the threads that copy hand theirs over.
//
//   tensor cores  | S0 |        | S1 | P0 V0 |        | S2 | P1 V1 |
//   softmax            | 0      |     | 1             |     | 2             a tile's runs while P V of the last does
//
// Slots are filled in the order in which they are read: K0 K1 V0 K2 V1 ... Each row's sums are in increasing columns of
// kept tiles, by one thread block, so the bits of a result depend on its row of blocks alone.
//
// Items: matrices in bands whose K and V stay in L2, and of a band every head's longest row, then the next. A channel
// takes the first that none has, by a counter in memory: who works on an item changes nothing in it.
#include "blocksparse/attention.cuh"

// Everything that is compiled in.
struct Config : AttentionType<S24_ELEMENT, S24_BLOCK, S24_HEAD, bool(S24_CAUSAL), bool(S24_LENGTHS), 128 /* keys */,
                              S24_PIPELINE_STAGES> {
  static constexpr int kSign = S24_SIGN;         // of the scale
  static constexpr bool kTurns = S24_PING_PONG;  // whether the warpgroups take turns to multiply

  static constexpr int kBeside = kTile / kBlock, kPartBytes = kBlock * 128;  // blocks of a tile; of a box of each

  // Shared memory: Q of each warpgroup, slots of each channel, of each its barriers and what its item is.
  static constexpr int kSlotsAt = 2 * kOwnBytes, kBarrierAt = kSlotsAt + kChannels * kSlots * kTileBytes;
  static constexpr int kChannelBytes = 256;
  static_assert(16 * kSlots + 48 <= kChannelBytes, "barriers, then what the item is");

  static constexpr int kCopyRegisters = 40, kSumRegisters = 232;
};

struct AttentionWgmmaParams {
  TensorMap q_map, k_map, v_map;  // [Z * heads, rows, head_size]: boxes of 128 bytes x 64 rows, x a block's
  void* o;                        // [Z * H, rows, head_size]
  float* lse;                     // [Z * H, rows]
  AttentionItems items;           // whose lines are rows of blocks
  float scale;                    // |scale| * log2(e)
  u32 matrices, heads, group;     // Z * H, H, heads of Q that share one of K and V
  u32 rows, keys;                 // cells of a head
  u32 head_lines;                 // rows of blocks of a head
  u32 band;                       // matrices
};
static_assert(matches_host<AttentionWgmmaParams>(), "the host has another AttentionWgmmaParams");

using Ring = PipelineState<Config::kSlots>;
using Products = WarpgroupProducts<Config>;

// A channel's part of shared memory.
struct Channel : ChannelBarriers<Config, Channel> {
  u32 base, index;
  __device__ __forceinline__ Channel(u32 base, u32 index) : base(base), index(index) {}
  __device__ __forceinline__ u32 barriers() const { return base + Config::kBarrierAt + index * Config::kChannelBytes; }
  __device__ __forceinline__ u32 free(u32 slot) const { return full(Config::kSlots + slot); }
  __device__ __forceinline__ u32 item() const { return barriers() + kBarrierBytes; }  // words
  __device__ __forceinline__ u32 slot(u32 slot) const {
    return base + Config::kSlotsAt + (index * Config::kSlots + slot) * Config::kTileBytes;
  }
  __device__ __forceinline__ u32 query(u32 group) const {
    return base + (index * Config::kGroups + group) * Config::kOwnBytes;
  }
};

// Work -----------------------------------------------------------------------------------------------

// What a channel works on.
struct Item {
  u32 matrix, row;  // the row of blocks, in its head
  int count, last;  // kept blocks that count, -1: there is no item; and the column of the last
  int rows, keys;   // cells of the batch that count
  int begin;        // its first entry of the tables: of the warp that copies alone

  // By a whole warp.
  __device__ __forceinline__ void find(const AttentionWgmmaParams& p, u32 index, u32 lane) {
    const Place place(p, index);
    matrix = place.matrix;
    const u32 head = matrix % p.heads, batch = matrix / p.heads;
    const u32 line = (u32)p.items.order[head * p.head_lines + place.line];
    row = line - head * p.head_lines;
    begin = p.items.pointers[line];
    count = p.items.pointers[line + 1] - begin;
    rows = counted<Config>(p.rows, p.items.q_lengths, batch);
    keys = counted<Config>(p.keys, p.items.kv_lengths, batch);
    if (Config::kLengths && (int)(row * Config::kBlock) >= rows) count = 0;
    if constexpr (Config::kLengths || Config::kCausal) {
      int limit = (keys + Config::kBlock - 1) / Config::kBlock;
      if constexpr (Config::kCausal) limit = min(limit, (int)row + 1);
      int found = 0;
      for (int at = 0; at < count; at += 32) {
        const bool counts = at + (int)lane < count && p.items.entries[begin + at + lane] < limit;
        const u32 those = __ballot_sync(~0u, counts);
        found += __popc(those);
        if (those != ~0u) break;  // columns increase
      }
      count = found;
    }
    last = count > 0 ? p.items.entries[begin + count - 1] : 0;
  }
  __device__ __forceinline__ int tiles() const { return (count + Config::kBeside - 1) / Config::kBeside; }

  __device__ __forceinline__ void store(u32 at) const {
    store_shared(at, matrix), store_shared(at + 4, row), store_shared(at + 8, (u32)count);
    store_shared(at + 12, (u32)last), store_shared(at + 16, (u32)rows), store_shared(at + 20, (u32)keys);
  }
  __device__ __forceinline__ void load(u32 at) {
    matrix = uniform(at), row = uniform(at + 4), count = (int)uniform(at + 8);
    last = (int)uniform(at + 12), rows = (int)uniform(at + 16), keys = (int)uniform(at + 20);
  }
};

// Copies ---------------------------------------------------------------------------------------------

// The warp that feeds a channel.
struct Copier {
  const AttentionWgmmaParams& p;
  const Channel channel;
  const u32 lane;
  Ring at;
  u32 item_parity = 1;

  // Keys' rows of up to kBeside blocks.
  __device__ __forceinline__ void copy_tile(const TensorMap* map, u32 matrix, const int (&columns)[Config::kBeside],
                                            int blocks) {
    if (lane == 0) {
      const u32 full = channel.full(at.stage), to = channel.slot(at.stage);
      barrier_wait(channel.free(at.stage), at.parity ^ 1);
      barrier_arrive_expect_tx(full, min(blocks, Config::kBeside) * Config::kBlock * Config::kHead * 2);
#pragma unroll
      for (int beside = 0; beside < Config::kBeside; ++beside)
        if (beside < blocks)
          copy_rows<Config, Config::kBoxBytes>(to + beside * Config::kPartBytes, map,
                                               (u32)columns[beside] * Config::kBlock, matrix, full);
    }
    __syncwarp();
    at.next();
  }

  __device__ __forceinline__ void publish(const Item& item) {
    if (lane == 0) {
      const u32 full = channel.item_full();
      barrier_wait(channel.item_free(), item_parity);
      item.store(channel.item());
      barrier_arrive_expect_tx(full, item.count > 0 ? Config::kGroups * Config::kOwnBytes : 0);
      if (item.count > 0) {
#pragma unroll
        for (int group = 0; group < Config::kGroups; ++group)
          copy_rows<Config, Config::kOwnBoxBytes>(channel.query(group), &p.q_map,
                                                  item.row * Config::kBlock + group * 64, item.matrix, full);
      }
    }
    __syncwarp();
    item_parity ^= 1;
  }

  // One item; finds the next meanwhile, which lane 0 knows.
  __device__ __forceinline__ void copy_item(Item& item, u32 next) {
    const u32 matrix = item.matrix / p.heads * (p.heads / p.group) + item.matrix % p.heads / p.group;
    const int tiles = item.tiles(), count = item.count;
    int columns[Config::kBeside], before[Config::kBeside], window = 0;
    const int* entries = p.items.entries + item.begin;
    if (count == 0) publish(item);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int beside = 0; beside < Config::kBeside; ++beside) {
        const int entry = tile * Config::kBeside + beside;
        if (entry % 32 == 0) window = entry + (int)lane < count ? entries[entry + lane] : 0;
        before[beside] = columns[beside];
        columns[beside] = __shfl_sync(~0u, window, entry % 32);
      }
      copy_tile(&p.k_map, matrix, columns, count - tile * Config::kBeside);
      if (tile == 0) publish(item);
      else copy_tile(&p.v_map, matrix, before, Config::kBeside);
    }
    next = __shfl_sync(~0u, next, 0);
    if (next < items_of(p)) item.find(p, next, lane);
    else item.count = -1;
    if (tiles > 0) copy_tile(&p.v_map, matrix, columns, count - (tiles - 1) * Config::kBeside);
  }

  __device__ __forceinline__ void copy_all() {
    Item item;
    const u32 first = blockIdx.x + channel.index * gridDim.x;
    item.count = -1;
    if (first < items_of(p)) item.find(p, first, lane);
    while (item.count >= 0) copy_item(item, lane == 0 ? channels<Config>() + atomicAdd(p.items.taken, 1) : 0);
    publish(item);
  }
};

// Sums -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// A warpgroup: 64 rows of an item at a time. Of a thread's two rows, g and g + 8 of its warp's 16, [0] is the first.
struct Multiplier {
  const AttentionWgmmaParams& p;
  const Channel channel;
  const u32 group, warpgroup;
  Ring at;
  u32 item_parity = 0;
  float most[2], sum[2];  // the largest score so far, before the scale; this thread's share of the exponentials
  u32 weights[Config::kCells / 2];  // P, rounded

  // The thread's first row.
  __device__ __forceinline__ int row(const Item& item) const {
    return first_row(item.row * Config::kBlock + group * 64);
  }
  // Of those who multiply, the one whose turn it is.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Config::kTurns) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void give_turn() const {
    if constexpr (Config::kTurns) named_barrier_arrive(2 - warpgroup, 256);
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[Config::kCells]) const {
    const u64 own = Products::Own::descriptor(channel.query(group));
    Products::issue_cells<Config::kSign>(scores, own, Products::Tile::descriptor(channel.slot(at.stage)));
  }
  __device__ __forceinline__ void issue_values(float (&out)[Config::kSums], u32 slot) const {
    const u64 b = Products::Summed::descriptor(channel.slot(slot));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kTile / 16; ++k) {
      const u32 a[4] = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3]};
      wgmma_registers<Config::kElement, 1>(out, a, b + k * Products::Summed::kStep);
    }
    wgmma_commit();
  }

  // Of the last tile: its last block may have keys that don't count, and others lie behind it.
  __device__ __forceinline__ void hide(float (&scores)[Config::kCells], const Item& item) const {
    const int first = (item.count - 1) % Config::kBeside * Config::kBlock, key = item.last * Config::kBlock;
    const int query = row(item);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int end = min(Config::kBlock, item.keys - key);
      if constexpr (Config::kCausal) end = min(end, query + 8 * half + 1 - key);
      end += first - first_column();
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j) {
        if (8 * j >= end) scores[4 * j + 2 * half] = -infinity();
        if (8 * j + 1 >= end) scores[4 * j + 2 * half + 1] = -infinity();
      }
    }
  }
  __device__ __forceinline__ static bool hides(const Item& item) {
    const bool part = Config::kBeside > 1 && item.count % Config::kBeside;
    return part || (Config::kCausal && item.last == (int)item.row) ||
           (Config::kLengths && item.keys < (item.last + 1) * Config::kBlock);
  }

  // Scores become exponentials; returns by what the sums so far are multiplied.
  template <bool kFirst> __device__ __forceinline__ void softmax(float (&scores)[Config::kCells], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = kFirst ? -infinity() : most[half];
      const float before = top;
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j)
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      top = quad_max(top);
      most[half] = top;
      const float base = top == -infinity() ? 0.0f : top * p.scale;
      factor[half] = kFirst ? 0.0f : power_of_2(__fmaf_rn(before, p.scale, -base));
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < Config::kTile / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[4 * j + 2 * half + i];
          score = power_of_2(__fmaf_rn(score, p.scale, -base));
          total += score;
        }
      sum[half] = kFirst ? total : __fmaf_rn(sum[half], factor[half], total);
    }
  }

  // Zeros for the rows of V in the last tile that don't count: what lies there may be NaN.
  __device__ __forceinline__ void clear_values(const Item& item) const {
    const int first = (item.count - 1) % Config::kBeside * Config::kBlock;
    const int end = first + min(Config::kBlock, item.keys - item.last * Config::kBlock);
    if (end < Config::kTile) clear_rows<Config::kTile, Config::kBoxes>(channel.slot(at.stage), end, 3 + warpgroup);
  }

  __device__ __forceinline__ void multiply(float (&out)[Config::kSums], const Item& item) {
    float scores[Config::kCells], factor[2];
    const int tiles = item.tiles();
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) out[i] = 0.0f;
    barrier_wait(channel.full(at.stage), at.parity);
    take_turn();
    issue_scores(scores);
    give_turn();
    wgmma_wait<0>();
    wgmma_fence_operand(scores);
    release(channel.free(at.stage));
    at.next();
    if (tiles == 1 && hides(item)) hide(scores, item);
    softmax<true>(scores, factor);
    Products::round(weights, scores);
    for (int tile = 1; tile < tiles; ++tile) {
      const u32 keys = at.stage;
      barrier_wait(channel.full(at.stage), at.parity);
      take_turn();
      issue_scores(scores);
      at.next();
      barrier_wait(channel.full(at.stage), at.parity);
      issue_values(out, at.stage);
      give_turn();
      wgmma_wait<1>();
      wgmma_fence_operand(scores);
      release(channel.free(keys));
      if (tile == tiles - 1 && hides(item)) hide(scores, item);
      softmax<false>(scores, factor);
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      release(channel.free(at.stage));
      at.next();
      Products::round(weights, scores);
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) out[i] *= factor[i / 2 % 2];
    }
    release(channel.item_free());
    barrier_wait(channel.full(at.stage), at.parity);
    clear_values(item);
    issue_values(out, at.stage);
    wgmma_wait<0>();
    wgmma_fence_operand(out);
    release(channel.free(at.stage));
    at.next();
  }

  __device__ __forceinline__ void write(const float (&out)[Config::kSums], const Item& item) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(item) + 8 * half;
      const i64 line = (i64)item.matrix * p.rows + own;
      const bool counts = own < item.rows && item.count > 0;
      const float total = quad_sum(sum[half]), part = total == 0.0f ? 0.0f : 1.0f / total;
      if (threadIdx.x % 4 == 0)
        p.lse[line] =
            counts && total != 0.0f ? __fmaf_rn(most[half] * p.scale, 0.6931471805599453f, logf(total)) : -infinity();

      u16* to = (u16*)p.o + line * Config::kHead + threadIdx.x % 4 * 8;
#pragma unroll
      for (int j = 0; j < Config::kHead / 32; ++j) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = 16 * j + 4 * i + 2 * half;
          words[i] = counts ? Config::In::pair(out[from] * part, out[from + 1] * part) : 0;
        }
        turn_quad(words);
        *(uint4*)(to + 32 * j) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void work() {
    if (Config::kTurns && warpgroup == 1) give_turn();
    float out[Config::kSums];
    while (true) {
      Item item;
      barrier_wait(channel.item_full(), item_parity);
      item_parity ^= 1;
      item.load(channel.item());
      if (item.count < 0) break;
      if (item.count > 0) {
        multiply(out, item);
      } else {
        release(channel.item_free());
        sum[0] = sum[1] = 0.0f;
      }
      write(out, item);
    }
    if (Config::kTurns && warpgroup == 0) take_turn();  // the other's last
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    attention_wgmma(const __grid_constant__ AttentionWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    for (u32 index = 0; index < Config::kChannels; ++index) Channel(base, index).init();
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents_and_wait();

  if (warpgroup == 2) {
    warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 warp = threadIdx.x % 128 / 32;
    if (warp < Config::kChannels) Copier{p, {base, warp}, threadIdx.x % 32}.copy_all();
  } else {
    warpgroup_reg_alloc<Config::kSumRegisters>();
    Multiplier{p, {base, warpgroup / Config::kGroups}, warpgroup % Config::kGroups, warpgroup}.work();
  }
}
