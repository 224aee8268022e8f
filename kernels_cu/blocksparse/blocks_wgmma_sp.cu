// C = epilogue(alpha * op(S) @ X) for a block-sparse S whose kept blocks are 2:4 along k, with operands loaded by TMA.
// dsd is computed as it stands, dds as C^T = op(S)^T @ op(A)^T. Here rows are rows of op(S), and tokens are columns of
// X, whichever way C lies in memory.
//
// A row panel has 128 rows of op(S): one block row of blocks of 128, or two of 64 that share the columns of X that both
// keep. A cluster computes one row panel times kTileN tokens for each of its CTAs. The CTAs share the values of S and
// their metadata: each loads a part of them and multicasts it. S is the sparse A operand of wgmma.sp, and one of its
// stages is one block column. X is the B operand, and one of its stages is 64 rows. Block columns are summed in
// increasing order, so the bits of a result depend on its block row and token alone.
//
// role        warps                        work
// producer S  last warpgroup, warp 0       values and metadata of the panel's block rows, up to kSparseStages ahead,
//                                          also into the next work tiles
// producer X  last warpgroup, warps 1, 2   alternate stages of X, up to kDenseStages ahead
// consumer    each of two warpgroups       64 rows x kTileN by wgmma.sp; skips block columns without its block;
//                                          stages its results and stores them by TMA while the next stages are loaded
//
// barriers   sparse_full, dense_full: a stage's bytes have arrived. sparse_empty, dense_empty: all warps that read the
//            stage are done, for S those of the whole cluster. Named barriers 1 and 2 guard a warpgroup's staging area.
// registers  kTileN / 2 accumulators; producer warps release registers to the consumers.
//
// producer | S, X X | S, X X | ..
// mainloop          | wgmma 0 | 1 | 2 | 3 | ..                one step in flight; the previous stages are released
//                                                             meanwhile
// epilogue                                 | fill | store |
//
// The kernel is persistent. Work tiles: row panels from the longest to the shortest with every token tile of a raster
// group, then the next raster group, so that concurrent work tiles read the same part of X. Cluster c of G takes work
// tile c of a raster group, then 2G - 1 - c, then 2G + c, so that no cluster gets only long panels. Every other raster
// group runs the other way round, because at its end some clusters have one work tile less.
#include "blocksparse/block_mainloop.cuh"
#include "blocksparse/params/blocks_wgmma_sp.cuh"
#include "blocksparse/tile_epilogue.cuh"
#include "blocksparse/token_boxes.cuh"
#include "ptx/multicast.cuh"

#define S24_CLUSTER_SIZE S24_CLUSTER_N
#include "common/cluster.cuh"

// All compile-time constants; macros are read here alone.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kTileN = S24_TILE_N;        // tokens of a CTA's tile
  static constexpr int kClusterN = S24_CLUSTER_N;  // CTAs of a cluster, along N
  static constexpr int kSparseStages = S24_SPARSE_STAGES, kDenseStages = S24_DENSE_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;                      // buffers of a staging area
  static constexpr Major kDenseMajor = Major(S24_DENSE_MAJOR);      // major dimension of X; MN: tokens are contiguous
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; otherwise rows of op(S) are contiguous
  static constexpr bool kUnalignedRows = S24_UNALIGNED_ROWS;        // rows of C begin where TMA cannot store them

  static constexpr int kWarpgroups = 2, kConsumerThreads = 128 * kWarpgroups, kThreads = kConsumerThreads + 128;
  static constexpr int kHalves = kBlock / 64;                  // stages of X for one block
  static constexpr int kPanelBlockRows = 128 / kBlock;         // block rows of a row panel
  static constexpr int kValueRowBytes = kBlock;                // bytes of a block's row: half as many values of 2 bytes
  static constexpr int kValueBytes = kBlock * kValueRowBytes;  // of a block
  static constexpr int kMetadataBytes = kBlock * kBlock / 8;   // bytes for a block: 4 bits for each group of four
  static constexpr int kMetadataAt = kPanelBlockRows * kValueBytes;  // offset in a stage
  static constexpr int kSparseBytes = kPanelBlockRows * (kValueBytes + kMetadataBytes), kDenseBytes = kTileN * 128;
  static constexpr int kWarpgroupN = kTileN,
                       kAccumulators = kWarpgroupN / 2;  // tokens of a warpgroup, accumulators of a thread
  // X is read by every block row that keeps a block at its rows. The kernel never reads C.
  static constexpr u64 kDensePolicy = kEvictLast, kOutPolicy = kEvictFirst;

  // Shared memory: stages of X and of S, a staging area for each warpgroup, barriers, a word for each stage of S that
  // says which block rows it has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kSparseAt = kDenseStages * kDenseBytes;
  static constexpr int kStagingAt = kSparseAt + kSparseStages * kSparseBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static_assert(kBlock == 64 || kBlock == 128, "a row tile is of one block_row");
  static_assert(kTileN % 64 == 0 && kTileN <= 256, "a warpgroup has whole groups of tokens");

  // Registers of a producer and of a consumer thread after reallocation.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
};
constexpr int kBox64Bytes = 64 * 128;  // 64 rows of 128 bytes
using SparseOperand = DenseOperand<Major::K, Config::kValueRowBytes, 0>;
using XOperand = DenseOperand<Config::kDenseMajor, 128, kBox64Bytes>;
using AccumulatorTile = float[Config::kAccumulators];  // one thread's part of 64 rows x kTileN

using SparseRing = PipelineState<Config::kSparseStages>;
using DenseRing = PipelineState<Config::kDenseStages>;

using Boxes = TokenBoxes<Config>;

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 sparse_full(u32 stage) const { return at + 8 * stage; }
  __device__ __forceinline__ u32 sparse_empty(u32 stage) const { return at + 8 * (Config::kSparseStages + stage); }
  __device__ __forceinline__ u32 dense_full(u32 stage) const { return at + 8 * (2 * Config::kSparseStages + stage); }
  __device__ __forceinline__ u32 dense_empty(u32 stage) const {
    return at + 8 * (2 * Config::kSparseStages + Config::kDenseStages + stage);
  }
  // A word that tells which block rows a stage of S has.
  __device__ __forceinline__ u32 present(u32 stage) const {
    return at + 16 * (Config::kSparseStages + Config::kDenseStages) + 4 * stage;
  }
};

// The work tile of a CTA.
struct WorkTile {
  u32 head, block_row, batch, token;  // block_row: the panel's first, in its head
  int count;                          // columns of blocks

  // `tile` counts token tiles of all batches.
  __device__ __forceinline__ WorkTile(const BlocksWgmmaSpParams& p, u32 panel, u32 tile, u32 cta_rank) {
    head = panel / p.head_panels, block_row = panel % p.head_panels * Config::kPanelBlockRows;
    batch = tile / p.cluster_tiles;
    token = (tile % p.cluster_tiles * Config::kClusterN + cta_rank) * Config::kTileN;
    count = p.panel_columns[panel];
  }
  __device__ __forceinline__ u32 row() const {
    return block_row * Config::kBlock;
  }  // first row of the panel, in its head
  __device__ __forceinline__ u32 matrix(const BlocksWgmmaSpParams& p) const { return batch * p.heads + head; }
};

// Persistent tile scheduler of a cluster: the rounds of each raster group, one raster group after the other. In the
// last round of a raster group a cluster may have no work tile.
struct TileScheduler {
  const BlocksWgmmaSpParams& p;
  u32 raster_group = 0, round = 0;

  __device__ __forceinline__ bool more() const { return raster_group < p.raster_groups; }
  __device__ __forceinline__ void next() {
    if (++round * clusters() >= items()) round = 0, ++raster_group;
  }
  __device__ __forceinline__ bool has_item() const { return index() < items(); }
  __device__ __forceinline__ WorkTile work(u32 cta_rank) const {
    return {p, (u32)p.panel_order[index() / group_width()], raster_group * p.raster_tiles + index() % group_width(),
            cta_rank};
  }

 private:
  static __device__ __forceinline__ u32 clusters() { return gridDim.x / Config::kClusterN; }
  // Token tiles of the raster group; its work tiles; the work tile of this round.
  __device__ __forceinline__ u32 group_width() const {
    return min(p.raster_tiles, p.batch * p.cluster_tiles - raster_group * p.raster_tiles);
  }
  __device__ __forceinline__ u32 items() const { return p.panels * group_width(); }
  __device__ __forceinline__ u32 index() const {
    const u32 mine = blockIdx.x / Config::kClusterN;
    return round * clusters() + ((round + raster_group) % 2 ? clusters() - 1 - mine : mine);
  }
};

// Producers ---------------------------------------------------------------------------------------------

// Visits the block columns in which the panel keeps a block, in increasing order. All lanes of a warp call `visit`
// together with the column, whether the lane's block row keeps it, and then the block's place among all values. Places
// are looked up only with kPlaces.
template <bool kPlaces, class Visit> __device__ __forceinline__ void for_block_columns(const BlocksWgmmaSpParams& p,
                                                                                       const WorkTile& work, u32 lane,
                                                                                       Visit visit) {
  const i64 block_row = (i64)work.head * p.head_block_rows + work.block_row + lane;
  const bool mine = lane < Config::kPanelBlockRows && work.block_row + lane < p.head_block_rows;
  const u32* kept = p.kept + block_row * p.bit_words;
  int next = kPlaces && mine ? p.pointers[block_row] : p.blocks;
  auto entry = [&]() {
    return p.value_index && next < p.blocks ? p.value_index[next] : next;
  };  // past the last entry there is none
  int place = entry();
  u32 ahead = mine && p.bit_words ? kept[0] : 0;
  for (u32 word = 0; word < p.bit_words; ++word) {
    const u32 bits = ahead;
    ahead = mine && word + 1 < p.bit_words ? kept[word + 1] : 0;
    for (u32 any = __reduce_or_sync(~0u, bits); any; any &= any - 1) {
      const u32 bit = __ffs(any) - 1;
      const bool keeps = bits >> bit & 1;
      visit(word * 32 + bit, keeps, work.batch * p.blocks + place);
      if (kPlaces && keeps) ++next, place = entry();
    }
  }
}

// The producer warp of S: lane l handles block row l of the panel.
struct SparseProducer {
  const BlocksWgmmaSpParams& p;
  u32 base, cta_rank, lane;
  Barriers barriers;
  SparseRing at;

  // Loads this CTA's part of a kept block and its metadata, and multicasts it to the cluster.
  __device__ __forceinline__ void load_block(u32 stage, u32 place, u32 full) const {
    constexpr u32 kRows = Config::kBlock / Config::kClusterN, kWords = Config::kMetadataBytes / Config::kClusterN;
    const u32 to = stage + lane * Config::kValueBytes + cta_rank * kRows * Config::kValueRowBytes;
    const u32 metadata_to = stage + Config::kMetadataAt + lane * Config::kMetadataBytes + cta_rank * kWords;
    const u32 row = place * Config::kBlock + cta_rank * kRows;
    const u8* metadata = p.metadata + (i64)place * Config::kMetadataBytes + cta_rank * kWords;
    if constexpr (Config::kClusterN == 1) {
      tma_load(to, &p.values_map, 0, row, full);
      bulk_load(metadata_to, metadata, kWords, full);
    } else {
      constexpr u16 kAll = (1 << Config::kClusterN) - 1;
      tma_load_multicast(to, &p.values_map, 0, row, full, kAll);
      bulk_load_multicast(metadata_to, metadata, kWords, full, kAll);
    }
  }

  __device__ __forceinline__ void produce() {
    for (TileScheduler scheduler{p}; scheduler.more(); scheduler.next()) {
      if (!scheduler.has_item()) continue;
      for_block_columns<true>(p, scheduler.work(cta_rank), lane, [&](u32, bool keeps, u32 place) {
        barrier_wait(barriers.sparse_empty(at.stage), at.parity ^ 1);
        const u32 full = barriers.sparse_full(at.stage), present = __ballot_sync(~0u, keeps);
        if (lane == 0) {
          if constexpr (Config::kPanelBlockRows > 1) store_shared(barriers.present(at.stage), present);
          barrier_arrive_expect_tx(full, __popc(present) * (Config::kValueBytes + Config::kMetadataBytes));
        }
        __syncwarp();
        if (keeps) load_block(base + Config::kSparseAt + at.stage * Config::kSparseBytes, place, full);
        __syncwarp();
        at.next();
      });
    }
    // No CTA exits while another CTA may still arrive at its barriers.
    if constexpr (Config::kClusterN > 1)
      for (int i = 0; i < Config::kSparseStages; ++i, at.next())
        barrier_wait(barriers.sparse_empty(at.stage), at.parity ^ 1);
  }
};

// A producer warp of X; two of them alternate between stages.
struct DenseProducer {
  const BlocksWgmmaSpParams& p;
  u32 base, cta_rank, lane, warp;  // warp: 0 or 1, of the two
  Barriers barriers;
  DenseRing at;
  u32 number = 0;  // sequence number of the stage

  __device__ __forceinline__ void load_stage(const WorkTile& work, u32 k, u32 matrix) const {
    const u32 full = barriers.dense_full(at.stage), to = base + at.stage * Config::kDenseBytes;
    const u32 tokens = Boxes::loaded(work.token, p.tokens);
    if (lane == 0) barrier_arrive_expect_tx(full, tokens * 128);
    __syncwarp();
    if constexpr (Boxes::kLines) {
      if (tokens && lane == 0) tma_load(to, Boxes::map(p, tokens), k, work.token, matrix, full, Config::kDensePolicy);
    } else {
      if (lane * 64 < tokens)
        tma_load(to + lane * kBox64Bytes, &p.right_map, work.token + lane * 64, k, matrix, full, Config::kDensePolicy);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void produce() {
    for (TileScheduler scheduler{p}; scheduler.more(); scheduler.next()) {
      if (!scheduler.has_item()) continue;
      const WorkTile work = scheduler.work(cta_rank);
      const u32 matrix = work.matrix(p);
      for_block_columns<false>(p, work, lane, [&](u32 column, bool, u32) {
#pragma unroll
        for (u32 half = 0; half < Config::kHalves; ++half, ++number, at.next()) {
          if (number % 2 != warp) continue;
          barrier_wait(barriers.dense_empty(at.stage), at.parity ^ 1);
          load_stage(work, column * Config::kBlock + half * 64, matrix);
        }
      });
    }
  }
};

// Mainloop -----------------------------------------------------------------------------------------------

using SparseRelease = ConsumerRelease<Config, true>;  // threads read metadata

struct ConsumerMainloop {
  u32 base, warpgroup_m;
  SparseRelease sparse_release;
  Barriers barriers;
  SparseRing sparse;
  DenseRing dense;
  bool in_flight = false;  // whether a step that reads the stages below is in flight
  u32 in_flight_sparse = 0, in_flight_dense = 0;

  __device__ __forceinline__ void release_dense(u32 stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.dense_empty(stage));
  }

  // Returns whether the stage of S has this warpgroup's block row.
  __device__ __forceinline__ bool has_block_row() const {
    if constexpr (Config::kPanelBlockRows == 1) return true;
    return present_blocks<1>(barriers.present(sparse.stage), warpgroup_m);
  }

  // Issues two wgmma steps: 64 k of the block with one stage of X. The instructions read their metadata register at any
  // time until they complete, so the other half uses another register.
  template <int kHalf> __device__ __forceinline__ void multiply_half(AccumulatorTile& sums, u32& metadata) {
    const u32 stage = base + Config::kSparseAt + sparse.stage * Config::kSparseBytes;
    metadata = load_shared_as<u32>(stage + Config::kMetadataAt +
                                   ((warpgroup_m * 128 + threadIdx.x % 128) * Config::kHalves + kHalf) * 4);
    barrier_wait(barriers.dense_full(dense.stage), dense.parity);
    const u64 a = SparseOperand::descriptor(stage + warpgroup_m * 64 * Config::kValueRowBytes) + kHalf * 4;
    const u64 b = XOperand::descriptor(base + dense.stage * Config::kDenseBytes);
    constexpr bool kTokensContiguousInX = Config::kDenseMajor == Major::MN;
    wgmma_fence();
    wgmma_sp<Config::kElement, 0, 1, kTokensContiguousInX>(sums, a, b, metadata);
    wgmma_sp<Config::kElement, 1, 1, kTokensContiguousInX>(sums, a + 2, b + 2 * XOperand::kStep, metadata);
    wgmma_commit();
    wgmma_wait<1>();  // all but the half just issued
    __syncwarp();     // all lanes have read metadata before one lane releases the stage
    if (in_flight) {
      release_dense(in_flight_dense);
      if (kHalf == 0 || Config::kHalves == 1) sparse_release.release(in_flight_sparse);
    }
    in_flight = true, in_flight_dense = dense.stage, in_flight_sparse = sparse.stage;
    dense.next();
  }

  __device__ __forceinline__ void pass_over() {
    finish();
    barrier_wait(barriers.dense_full(dense.stage),
                 dense.parity);  // without this wait the barrier's next phase could be mistaken for this one
    sparse_release.release(sparse.stage), release_dense(dense.stage);
    dense.next();
  }

  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    if (in_flight) release_dense(in_flight_dense), sparse_release.release(in_flight_sparse);
    in_flight = false;
  }

  __device__ __forceinline__ void multiply(AccumulatorTile& sums, int columns) {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) sums[i] = 0.0f;
    u32 first = 0, second = 0;
    for (int at = 0; at < columns; ++at, sparse.next()) {
      barrier_wait(barriers.sparse_full(sparse.stage), sparse.parity);
      if constexpr (Config::kHalves == 2) {
        multiply_half<0>(sums, first);
        multiply_half<1>(sums, second);
      } else {
        if (!has_block_row()) pass_over();
        else if (at % 2) multiply_half<0>(sums, second);
        else multiply_half<0>(sums, first);
      }
    }
    finish();
    wgmma_fence_operand(sums);
  }
};

// Epilogue --------------------------------------------------------------------------------------------

// Stores the results of one warpgroup: 64 rows x kTileN.
struct EpilogueStore : TileEpilogue<EpilogueStore, Config, BlocksWgmmaSpParams, Config::kTokensContiguous,
                                    Config::kUnalignedRows ? StoredBy::Warps : StoredBy::Tma> {
  __device__ __forceinline__ void write(const AccumulatorTile& sums, const WorkTile& work, u32 warpgroup_m) {
    const u32 row0 = work.row() + warpgroup_m * 64, rows = p.head_block_rows * Config::kBlock;
    write_tile(sums, work, row0, rows, (i64)work.head * rows + row0, work.token, p.tokens);
  }
  __device__ __forceinline__ void store(u32 buffer, const WorkTile& work, u32 row, u32 token) const {
    store_boxes(buffer, row, token, work.matrix(p));
  }
};

__device__ __forceinline__ void init_barriers(const Barriers& barriers) {
  constexpr int kWarps = 4 * Config::kWarpgroups;
  for (int i = 0; i < Config::kSparseStages; ++i) {
    barrier_init(barriers.sparse_full(i), 1);
    barrier_init(barriers.sparse_empty(i), kWarps * Config::kClusterN);
  }
  for (int i = 0; i < Config::kDenseStages; ++i) {
    barrier_init(barriers.dense_full(i), 1);
    barrier_init(barriers.dense_empty(i), kWarps);
  }
  barrier_init_fence();
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    blocks_wgmma_sp(const __grid_constant__ BlocksWgmmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 cta_rank = blockIdx.x % Config::kClusterN, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) init_barriers(barriers);
  if (threadIdx.x == Config::kConsumerThreads && p.blocks) {  // without blocks only C has a tensor map
    prefetch_tensor_map(&p.values_map), prefetch_tensor_map(&p.right_map);
    if constexpr (!Config::kUnalignedRows) prefetch_tensor_map(&p.out_map);
  }
  __syncthreads();
  if constexpr (Config::kClusterN > 1) cluster_sync_relaxed();
  launch_dependents_and_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (warp == 0) SparseProducer{p, base, cta_rank, lane, barriers}.produce();
    else if (warp < 3) DenseProducer{p, base, cta_rank, lane, warp - 1, barriers}.produce();
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    ConsumerMainloop mainloop{base, warpgroup, SparseRelease(barriers.sparse_empty(0)), barriers};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    EpilogueStore epilogue{{p, staging, 1 + (int)warpgroup}};
    AccumulatorTile sums;
    for (TileScheduler scheduler{p}; scheduler.more(); scheduler.next()) {
      if (!scheduler.has_item()) continue;
      const WorkTile work = scheduler.work(cta_rank);
      mainloop.multiply(sums, work.count);
      epilogue.write(sums, work, warpgroup);
    }
    if (epilogue.is_storing_thread()) tma_store_wait_read<0>();
  }
}
