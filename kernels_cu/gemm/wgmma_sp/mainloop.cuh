// The role of gemm/wgmma_sp.cu that multiplies.
#pragma once
#include "gemm/wgmma_sp/stream_k_fixup.cuh"
#ifdef S24_F32_SPLIT
#include "gemm/wgmma_sp/blocked_sum.cuh"
#include "gemm/wgmma_sp/split_products.cuh"
#endif

constexpr int kTurnBarrier = 8;

// One warpgroup's sums of one item.
struct Multiplier {
  const WgmmaSpParams& p;
  PipelineState<Config::kWeightStages> weight;
  PipelineState<Config::kSourceStages> source;
  u32 base, warpgroup, source_free;  // the last: of the block of the cluster that this lane reports to
  Barriers barriers;
  u32 last_weight = 0, last_source = 0;

  __device__ __forceinline__ void free_weight(u32 slot, u32 zero = 0) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.weight_free(slot) + zero);
  }
  __device__ __forceinline__ void free_source(u32 slot) const {
    if (threadIdx.x % 32 >= Config::kSourceShare) return;
    if constexpr (Config::kSourceShare == 1) barrier_arrive(source_free + 8 * slot);
    else barrier_arrive_cluster(source_free + 8 * slot);
  }

  static __device__ __forceinline__ u64 source_descriptor(u32 address) {
    if constexpr (Config::kColumnsX)
      return matrix_descriptor_of_lines<2 * Config::kGroup, Config::kGroupBytes>(address);
    else return matrix_descriptor(address);
  }

  static __device__ __forceinline__ void clear(Sums (&sums)[Config::kRowBlocks]) {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[r][i] = 0;
      wgmma_fence_operand(sums[r]);
    }
  }
  static __device__ __forceinline__ void add(Sums (&totals)[Config::kRowBlocks],
                                             const Sums (&sums)[Config::kRowBlocks]) {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) totals[r][i] += sums[r][i];
  }

#ifdef S24_W_PRESPLIT
  // Tiles of K; every kTilesOfSum of them their sums leave the tensor cores.
  __device__ __forceinline__ void multiply_split(Sums (&totals)[Config::kRowBlocks], u32 begin, u32 end,
                                                 const Groups&) {
    static_assert(Config::kTilesOfSum % 2 == 0, "two tiles take turns with registers for metadata");
    for (u32 tile = begin; tile < end;) {
      Sums sums[Config::kRowBlocks];
      u32 first[Config::kRowBlocks][1], second[Config::kRowBlocks][1];
      issue<0>(sums, first);
      go_on();
#pragma unroll 1
      while (++tile < end) {
        issue<1>(sums, second);
        free_last<1>();
        go_on();
        if (++tile == end || (tile - begin) % Config::kTilesOfSum == 0) break;
        issue<1>(sums, first);
        free_last<1>();
        go_on();
      }
      free_last<0>();
#pragma unroll
      for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_fence_operand(sums[r]);
      add(totals, sums);
    }
  }
  __device__ __forceinline__ void go_on() { source.next(), source.next(), weight.next(); }
  // Once no more than kPending tiles are multiplied, the stages of the one before are free.
  template <int kPending> __device__ __forceinline__ void free_last() const {
    wgmma_wait<kPending>();
    free_source(source.slot >= 2 ? source.slot - 2 : source.slot + Config::kSourceStages - 2);
    free_source(source.slot >= 1 ? source.slot - 1 : Config::kSourceStages - 1);
    free_weight(weight.slot >= 1 ? weight.slot - 1 : Config::kWeightStages - 1);
  }

  // A tile's products. The first box is of X's low part, the second of its high one; the small products come first.
  template <int kAdd>
  __device__ __forceinline__ void issue(Sums (&sums)[Config::kRowBlocks], u32 (&metadata)[Config::kRowBlocks][1]) {
    const u32 values = base + weight.slot * Config::kWeightBytes + warpgroup * Config::kRowBlocks * Config::kTileBytes;
    barrier_wait(barriers.weight_full(weight.slot), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
      load_shared_words(metadata[r], values + r * Config::kTileBytes + Tile::kValueBytes + threadIdx.x % 128 * 4);
    PipelineState<Config::kSourceStages> box = source;
    u64 boxes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i, box.next()) {
      barrier_wait(barriers.source_full(box.slot), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kSourceAt + box.slot * Config::kSourceBytes);
    }
    const u64 high = matrix_descriptor(values);
    wgmma_fence();
    multiply_box<kAdd>(sums, high, boxes[0], metadata);
    multiply_box<1>(sums, high + 4, boxes[1], metadata);
    multiply_box<1>(sums, high, boxes[1], metadata);
    wgmma_commit();
  }
  // A part of the tile with one of X, in two steps. Descriptors count 16 bytes.
  template <int kAdd> __device__ __forceinline__ void multiply_box(Sums (&sums)[Config::kRowBlocks], u64 a, u64 b,
                                                                   const u32 (&metadata)[Config::kRowBlocks][1]) const {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      const u64 at = a + r * (Config::kTileBytes >> 4);
      wgmma_sp<ElementKind::BF16, 0, kAdd, false>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<ElementKind::BF16, 1, 1, false>(sums[r], at + 2, b + 4, metadata[r][0]);
    }
  }
#elif defined S24_F32_SPLIT
  using RowParts = WeightParts[Config::kRowBlocks];
  using RowTiles = WeightTile32[Config::kRowBlocks];

  // Tiles of K: while the tensor cores multiply one, the next is split.
  __device__ __forceinline__ void multiply_split(Sums (&totals)[Config::kRowBlocks], u32 begin, u32 end,
                                                 const Groups& groups) {
    static_assert(Config::kTilesOfGroup % 2 == 0, "two tiles take turns with registers for their parts");
    RowParts one, other;
    if (begin < end) {
      RowTiles tile;
      read_weight(tile);
      split_weight(tile, one);
    }
    for (u32 tile = begin; tile < end; tile += 2) {
      if (groups.begins(tile)) groups.add(totals, tile);
      multiply_tile(totals, one, other, tile + 1 < end);
      if (tile + 1 < end) multiply_tile(totals, other, one, tile + 2 < end);
    }
  }

  __device__ __forceinline__ void multiply_tile(Sums (&totals)[Config::kRowBlocks], const RowParts& parts,
                                                RowParts& next, bool has_next) {
    u64 boxes[Config::kXParts];
    PipelineState<Config::kSourceStages> box = source;
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i, box.next()) {
      barrier_wait(barriers.source_full(box.slot), box.parity);
      boxes[i] = matrix_descriptor(base + Config::kSourceAt + box.slot * Config::kSourceBytes);
    }
    if constexpr (Config::kTurns) named_barrier_sync(kTurnBarrier + warpgroup, Config::kMultiplying);
    Sums sums[Config::kRowBlocks];
    issue(sums, parts, boxes);
    if constexpr (Config::kTurns) named_barrier_arrive(kTurnBarrier + (warpgroup ^ 1), Config::kMultiplying);
    if (has_next) {
      RowTiles tile;
      read_weight(tile);
      split_weight(tile, next);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_fence_operand(sums[r]);
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i, source.next()) free_source(source.slot);
    add(totals, sums);
  }

  // Box i is of X's part kXParts - 1 - i, which meets those parts of W whose products with it are large enough.
  __device__ __forceinline__ void issue(Sums (&sums)[Config::kRowBlocks], const RowParts& parts,
                                        const u64 (&boxes)[Config::kXParts]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kXParts; ++i)
#pragma unroll
      for (int part = i; part >= 0; --part)
#pragma unroll
        for (int r = 0; r < Config::kRowBlocks; ++r) {
          const WeightParts& w = parts[r];
          if (i == 0) wgmma_sp_bf16<0, 0>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          else wgmma_sp_bf16<0, 1>(sums[r], w.words[0][part], boxes[i], w.metadata[0]);
          wgmma_sp_bf16<1, 1>(sums[r], w.words[1][part], boxes[i] + 4, w.metadata[0]);
        }
    wgmma_commit();
  }

  __device__ __forceinline__ void read_weight(RowTiles& tile) const {
    barrier_wait(barriers.weight_full(weight.slot), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
      tile[r].read(base + weight.slot * Config::kWeightBytes + (warpgroup * Config::kRowBlocks + r) * Tile::kBytes);
  }
  // Loads that are under way hold back nothing that is reported after them, and the wgmma of others starve them, for as
  // long as it takes to fill a stage anew: the barrier's address needs what they bring.
  __device__ __forceinline__ void split_weight(RowTiles& tile, RowParts& parts) {
    u32 came = 0;
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      came ^= tile[r].of_each_load();
      parts[r].take(tile[r]);
    }
    __syncwarp();
    free_weight(weight.slot, came & nothing(p));
    weight.next();
  }
#else
  // Two steps: half a tile of W with one stage of X. The half's metadata stays in its registers while its wgmma run,
  // which read them whenever they like; the other half has others.
  template <int kHalf>
  __device__ __forceinline__ void multiply_half(Sums (&sums)[Config::kRowBlocks],
                                                u32 (&metadata)[Config::kRowBlocks][Tile::kWords / 2]) {
    const u32 values = base + weight.slot * Config::kWeightBytes + warpgroup * Config::kRowBlocks * Tile::kBytes;
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r)
      load_shared_words(metadata[r], values + r * Tile::kBytes + Tile::kValueBytes +
                                         (threadIdx.x % 128 * Tile::kWords + kHalf * Tile::kWords / 2) * 4);
    barrier_wait(barriers.source_full(source.slot), source.parity);
    const u64 a = matrix_descriptor(values);
    const u64 b = source_descriptor(base + Config::kSourceAt + source.slot * Config::kSourceBytes);
    constexpr u64 kSecond = Config::kColumnsX ? 4 * Config::kGroup : 4;  // half of the box's columns
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {  // the selector is an immediate; descriptors count 16 bytes
      const u64 at = a + r * (Tile::kBytes >> 4) + kHalf * 4;
      wgmma_sp<Config::kElement, 0, Config::kPromote ? 0 : 1, Config::kColumnsX>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<Config::kElement, Config::kEightBit ? 0 : 1, 1, Config::kColumnsX>(
          sums[r], at + 2, b + kSecond, metadata[r][Config::kEightBit ? 1 : 0]);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void free_last() const {
    free_source(last_source);
    free_weight(last_weight);
  }

  // kOn: on top of what the sums are.
  template <bool kOn = false> __device__ __forceinline__ void multiply(Sums (&sums)[Config::kRowBlocks], u32 tiles) {
    if constexpr (!kOn) clear(sums);
    u32 first[Config::kRowBlocks][Tile::kWords / 2], second[Config::kRowBlocks][Tile::kWords / 2];
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.slot), weight.parity);
      multiply_half<0>(sums, first);
      wgmma_wait<1>();  // all but the half just issued: the stages before it are free
      if (at > 0) free_last();
      last_source = source.slot, last_weight = weight.slot;
      source.next();
      multiply_half<1>(sums, second);
      wgmma_wait<1>();
      free_source(last_source);
      last_source = source.slot;
      source.next(), weight.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_fence_operand(sums[r]);
    if (tiles > 0) free_last();
  }

  // All of K, in kParts. Of the sums of the parts before, registers hold as many as they can, `workspace` the others.
  __device__ __forceinline__ void multiply_parts(Sums (&sums)[Config::kRowBlocks], u32 tiles, Handover workspace) {
    // Found again where it is needed: few registers are left.
    const auto parked = [&] { return workspace.quads(blockIdx.x, warpgroup, 0); };
    multiply(sums, tiles / Config::kParts);
#pragma unroll 1
    for (u32 part = 1; part < Config::kParts; ++part) {
      Sum held[Config::kHeld > 0 ? Config::kHeld : 1];
      // By an operation that changes nothing: of a mere copy the compiler keeps both in one place, and spills all.
#pragma unroll
      for (int i = 0; i < Config::kHeld; ++i)
        held[i] = sum_of(bits_of(sums[i / Config::kSums][i % Config::kSums]) ^ nothing(p));
      workspace.park<Config::kHeld>(sums, parked());
      multiply(sums, tiles * (part + 1) / Config::kParts - tiles * part / Config::kParts);
#pragma unroll
      for (int i = 0; i < Config::kHeld; ++i) sums[i / Config::kSums][i % Config::kSums] += held[i];
      workspace.add_parked<Config::kHeld>(sums, parked());
    }
  }

  // Tiles of K of an item whose parts may end elsewhere than its ranges, on top of what its first part's sums are. What
  // whole parts have come to waits in the workspace. No branch passes by their sums: the compiler would move them.
  __device__ __forceinline__ void multiply_pieces(Sums (&sums)[Config::kRowBlocks], const Turns& turn,
                                                  Handover workspace) {
    const u32 tiles = (u32)workspace.p.k_tiles;
    const auto begin = [tiles](u32 part) { return tiles * part / Config::kParts; };
    float* parked = workspace.p.blocked_sums + place_of_sums(block_of_groups(turn), warpgroup, 0);
    u32 tile = turn.first, part = tile ? (tile * Config::kParts - 1) / tiles : 0;  // of the tile before
#pragma unroll 1
    while (true) {
      const u32 end = min(begin(part + 1), turn.last);
      multiply<true>(sums, end - tile);
      if (end == turn.last) break;
      if constexpr (Config::kParts > 2) workspace.add_parked(sums, parked, begin(part) > 0 ? ~0u : 0);
      workspace.park(sums, parked);
      clear(sums);
      tile = end, ++part;
    }
  }
  // And those of the last part become the item's.
  __device__ __forceinline__ void add_parts(Sums (&sums)[Config::kRowBlocks], const Turns& turn,
                                            Handover workspace) const {
    workspace.add_parked(sums, workspace.p.blocked_sums + place_of_sums(block_of_groups(turn), warpgroup, 0));
  }

  // All of K, box by box. The other warpgroup's wgmma run while this one adds.
  __device__ __forceinline__ void multiply_promoting(Sums (&totals)[Config::kRowBlocks], u32 tiles) {
    clear(totals);
    Sums sums[Config::kRowBlocks];
    u32 metadata[Config::kRowBlocks][Tile::kWords / 2];
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.slot), weight.parity);
      multiply_half<0>(sums, metadata);
      promote(totals, sums);
      multiply_half<1>(sums, metadata);
      promote(totals, sums);
      free_weight(weight.slot);
      weight.next();
    }
  }
  __device__ __forceinline__ void promote(Sums (&totals)[Config::kRowBlocks], Sums (&sums)[Config::kRowBlocks]) {
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) wgmma_fence_operand(sums[r]);
    free_source(source.slot);
    source.next();
    add(totals, sums);
  }
#endif
};
