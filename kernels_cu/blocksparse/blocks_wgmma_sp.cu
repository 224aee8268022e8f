// C = epilogue(alpha * op(S) @ X) for a block-sparse S whose kept blocks are 2:4 along the sums, operands fed by the
// copy engine: dsd as it stands, dds as C^T = op(S)^T @ op(A)^T. Rows are those of op(S) here and tokens the columns of
// X, whichever way C lies in memory.
//
// A row of blocks of op(S) is a line, 128 rows are a strip: one line of blocks of 128, or two of 64 that share the
// columns of X that both keep. A cluster takes one strip with kTokens tokens for each of its blocks of threads, which
// share the values of S and their metadata: each copies a part of them to all. S is the sparse A operand of wgmma.sp, a
// stage a column of blocks; X is B, a stage 64 rows of it. Columns are summed in increasing order, so the bits of a
// result depend on its line and token alone.
//
//   role        who                          what
//   copy S      last warpgroup, warp 0       values and metadata of the strip's lines, kSparseStages ahead, also of the
//                                            next items
//   copy X      last warpgroup, warps 1, 2   in turns, kDenseStages ahead
//   multiply    each of two warpgroups       64 rows x kTokens; passes over columns that its line lacks
//   write       the same                     its results, staged for the copy engine, while the next are copied in
//
//   barriers    sparse_full, dense_full: a stage's bytes have come; sparse_free, dense_free: all warps that read it are
//               done: of S those of the whole cluster. Named 1, 2: a warpgroup's staging area.
//   registers   kTokens / 2 accumulators; threads that copy hand theirs over.
//
//   copy     | S, X X | S, X X | ..
//   multiply          | wgmma 0 | 1 | 2 | 3 | ..                 one step in flight, the stages before it freed
//                                                                meanwhile
//   write                                   | fill | copy |
//
// Items: strips from the longest to the shortest with every token tile of a band, then the next band: items that run at
// once read the same part of X. Cluster c of G takes a band's item c, then 2G - 1 - c, then 2G + c: in turns, so that
// none has only the longer ones; every other band the other way round, for at its end some have one item less.
#include "blocksparse/multiplier.cuh"
#include "blocksparse/writer.cuh"
#include "ptx/multicast.cuh"

#define S24_CLUSTER_SIZE S24_CLUSTER_N
#include "common/cluster.cuh"

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kTokens = S24_TILE_N;    // of a block of threads
  static constexpr int kShare = S24_CLUSTER_N;  // blocks of a cluster
  static constexpr int kSparseStages = S24_SPARSE_STAGES, kDenseStages = S24_DENSE_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;                      // of a staging area
  static constexpr Major kDenseMajor = Major(S24_DENSE_MAJOR);      // how X lies; MN: tokens are contiguous
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; else its rows of op(S) are

  static constexpr int kWarpgroups = 2, kMultiplying = 128 * kWarpgroups, kThreads = kMultiplying + 128;
  static constexpr int kHalves = kBlock / 64;                 // stages of X that meet a block
  static constexpr int kLines = 128 / kBlock;                 // of a strip
  static constexpr int kLineBytes = kBlock;                   // of a row of a block: half as many values of 2 bytes
  static constexpr int kValueBytes = kBlock * kLineBytes;     // of a block
  static constexpr int kMetadataBytes = kBlock * kBlock / 8;  // of a block: 4 bits for each group of four
  static constexpr int kMetadataAt = kLines * kValueBytes;    // in a stage
  static constexpr int kSparseBytes = kLines * (kValueBytes + kMetadataBytes), kDenseBytes = kTokens * 128;
  static constexpr int kColumns = kTokens, kSums = kColumns / 2;  // of a warpgroup
  // X is read by every line that keeps a block of its rows, C is not read at all.
  static constexpr u64 kDensePolicy = kEvictLast, kOutPolicy = kEvictFirst;

  // Shared memory: stages of X and of S, a staging area a warpgroup, barriers, which lines each stage of S has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kSparseAt = kDenseStages * kDenseBytes;
  static constexpr int kStagingAt = kSparseAt + kSparseStages * kSparseBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static_assert(kBlock == 64 || kBlock == 128, "a row tile is of one line");
  static_assert(kTokens % 64 == 0 && kTokens <= 256, "a warpgroup has whole groups of tokens");

  // Registers of a thread that copies and of one that multiplies, once they part.
  static constexpr int kCopyRegisters = 40, kSumRegisters = 232;
};
constexpr int kGroupBytes = 64 * 128;  // 64 lines of 128 bytes
using SparseOperand = DenseOperand<Major::K, Config::kLineBytes, 0>;
using XOperand = DenseOperand<Config::kDenseMajor, 128, kGroupBytes>;
using Sums = float[Config::kSums];  // a thread's share of 64 rows x kTokens

struct BlocksWgmmaSpParams {
  TensorMap values_map;  // [Z * blocks * b, b / 2]: boxes of b / kShare rows
  TensorMap right_map;   // X [Z * H, ..]: boxes of 128 bytes
  TensorMap out_map;     // C [Z * H, ..]: boxes of 128 bytes x kStepColumns or 64
  const u8* metadata;    // [Z * blocks][kMetadataBytes]
  const int* order;      // [strips]: from the longest to the shortest
  const int* counts;     // [strips]: columns of blocks that each keeps any of
  const u32* kept;       // [lines][words]: bit c % 32 of word c / 32: whether the line keeps column c
  const int* pointers;   // [lines + 1]: where each line's entries begin
  const int* places;     // [blocks]: a line's blocks among the values; null: as they are counted
  const void* bias;      // [H, rows], or null
  int blocks;            // kept, of a batch
  float alpha;
  u32 strips, head_strips, head_lines;  // of all heads, of one
  u32 words;                            // of a line's bits
  u32 heads, batch;
  u32 tokens, token_clusters;  // clusters' token tiles that cover a matrix
  u32 band, bands;             // token tiles of all batches in a band; how many bands
};
static_assert(matches_host<BlocksWgmmaSpParams>(), "the host has another BlocksWgmmaSpParams");

using SparseRing = PipelineState<Config::kSparseStages>;
using DenseRing = PipelineState<Config::kDenseStages>;

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 sparse_full(u32 slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 sparse_free(u32 slot) const { return at + 8 * (Config::kSparseStages + slot); }
  __device__ __forceinline__ u32 dense_full(u32 slot) const { return at + 8 * (2 * Config::kSparseStages + slot); }
  __device__ __forceinline__ u32 dense_free(u32 slot) const {
    return at + 8 * (2 * Config::kSparseStages + Config::kDenseStages + slot);
  }
  // A word: which lines a stage of S has.
  __device__ __forceinline__ u32 present(u32 slot) const {
    return at + 16 * (Config::kSparseStages + Config::kDenseStages) + 4 * slot;
  }
};

// What a block of threads works on.
struct Item {
  u32 head, line, batch, token;  // line: the first, in its head
  int count;                     // columns of blocks

  // tile: of tokens, in all batches.
  __device__ __forceinline__ Item(const BlocksWgmmaSpParams& p, u32 strip, u32 tile, u32 share) {
    head = strip / p.head_strips, line = strip % p.head_strips * Config::kLines;
    batch = tile / p.token_clusters;
    token = (tile % p.token_clusters * Config::kShare + share) * Config::kTokens;
    count = p.counts[strip];
  }
  __device__ __forceinline__ u32 row() const { return line * Config::kBlock; }  // its first, in its head
  __device__ __forceinline__ u32 matrix(const BlocksWgmmaSpParams& p) const { return batch * p.heads + head; }
};

// A cluster's turns: those of each band, one band after the other. In a band's last turn it may have no item.
struct Turns {
  const BlocksWgmmaSpParams& p;
  u32 band = 0, turn = 0;

  __device__ __forceinline__ bool more() const { return band < p.bands; }
  __device__ __forceinline__ void next() {
    if (++turn * clusters() >= items()) turn = 0, ++band;
  }
  __device__ __forceinline__ bool has_item() const { return index() < items(); }
  __device__ __forceinline__ Item item(u32 share) const {
    return {p, (u32)p.order[index() / wide()], band * p.band + index() % wide(), share};
  }

 private:
  static __device__ __forceinline__ u32 clusters() { return gridDim.x / Config::kShare; }
  // Token tiles of the band; its items; this turn's.
  __device__ __forceinline__ u32 wide() const { return min(p.band, p.batch * p.token_clusters - band * p.band); }
  __device__ __forceinline__ u32 items() const { return p.strips * wide(); }
  __device__ __forceinline__ u32 index() const {
    const u32 mine = blockIdx.x / Config::kShare;
    return turn * clusters() + ((turn + band) % 2 ? clusters() - 1 - mine : mine);
  }
};

// Copies ---------------------------------------------------------------------------------------------

// A strip's columns of blocks, in increasing order. `visit` is told, by all lanes of a warp: the column, whether the
// lane's line keeps it, and its block's place among all values then. Places are looked up for kPlaces alone.
template <bool kPlaces, class Visit>
__device__ __forceinline__ void for_columns(const BlocksWgmmaSpParams& p, const Item& item, u32 lane, Visit visit) {
  const i64 line = (i64)item.head * p.head_lines + item.line + lane;
  const bool mine = lane < Config::kLines && item.line + lane < p.head_lines;
  const u32* kept = p.kept + line * p.words;
  int next = kPlaces && mine ? p.pointers[line] : p.blocks;
  auto entry = [&]() { return p.places && next < p.blocks ? p.places[next] : next; };  // past the end there is none
  int place = entry();
  u32 ahead = mine && p.words ? kept[0] : 0;
  for (u32 word = 0; word < p.words; ++word) {
    const u32 bits = ahead;
    ahead = mine && word + 1 < p.words ? kept[word + 1] : 0;
    for (u32 any = __reduce_or_sync(~0u, bits); any; any &= any - 1) {
      const u32 bit = __ffs(any) - 1;
      const bool keeps = bits >> bit & 1;
      visit(word * 32 + bit, keeps, item.batch * p.blocks + place);
      if (kPlaces && keeps) ++next, place = entry();
    }
  }
}

// The warp that copies S: lane l has line l of the strip.
struct SparseCopier {
  const BlocksWgmmaSpParams& p;
  u32 base, share, lane;
  Barriers barriers;
  SparseRing at;

  // This block's part of a kept block, to every block of the cluster.
  __device__ __forceinline__ void copy_block(u32 stage, u32 place, u32 full) const {
    constexpr u32 kRows = Config::kBlock / Config::kShare, kWords = Config::kMetadataBytes / Config::kShare;
    const u32 to = stage + lane * Config::kValueBytes + share * kRows * Config::kLineBytes;
    const u32 metadata_to = stage + Config::kMetadataAt + lane * Config::kMetadataBytes + share * kWords;
    const u32 row = place * Config::kBlock + share * kRows;
    const u8* metadata = p.metadata + (i64)place * Config::kMetadataBytes + share * kWords;
    if constexpr (Config::kShare == 1) {
      tma_load(to, &p.values_map, 0, row, full);
      bulk_load(metadata_to, metadata, kWords, full);
    } else {
      constexpr u16 kAll = (1 << Config::kShare) - 1;
      tma_load_multicast(to, &p.values_map, 0, row, full, kAll);
      bulk_load_multicast(metadata_to, metadata, kWords, full, kAll);
    }
  }

  __device__ __forceinline__ void copy_all() {
    for (Turns turns{p}; turns.more(); turns.next()) {
      if (!turns.has_item()) continue;
      for_columns<true>(p, turns.item(share), lane, [&](u32, bool keeps, u32 place) {
        barrier_wait(barriers.sparse_free(at.stage), at.parity ^ 1);
        const u32 full = barriers.sparse_full(at.stage), present = __ballot_sync(~0u, keeps);
        if (lane == 0) {
          if constexpr (Config::kLines > 1) store_shared(barriers.present(at.stage), present);
          barrier_arrive_expect_tx(full, __popc(present) * (Config::kValueBytes + Config::kMetadataBytes));
        }
        __syncwarp();
        if (keeps) copy_block(base + Config::kSparseAt + at.stage * Config::kSparseBytes, place, full);
        __syncwarp();
        at.next();
      });
    }
    // Nobody leaves while others may still report to its barriers.
    if constexpr (Config::kShare > 1)
      for (int i = 0; i < Config::kSparseStages; ++i, at.next())
        barrier_wait(barriers.sparse_free(at.stage), at.parity ^ 1);
  }
};

// A warp that copies X; two take stages in turn.
struct DenseCopier {
  const BlocksWgmmaSpParams& p;
  u32 base, share, lane, mine;  // the last: of the two
  Barriers barriers;
  DenseRing at;
  u32 number = 0;  // of the stage

  __device__ __forceinline__ void copy_stage(const Item& item, u32 k, u32 matrix) const {
    const u32 full = barriers.dense_full(at.stage), to = base + at.stage * Config::kDenseBytes;
    if (lane == 0) barrier_arrive_expect_tx(full, Config::kDenseBytes);
    __syncwarp();
    if constexpr (Config::kDenseMajor == Major::K) {
      if (lane == 0) tma_load(to, &p.right_map, k, item.token, matrix, full, Config::kDensePolicy);
    } else {
      if (lane < Config::kTokens / 64)
        tma_load(to + lane * kGroupBytes, &p.right_map, item.token + lane * 64, k, matrix, full, Config::kDensePolicy);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_all() {
    for (Turns turns{p}; turns.more(); turns.next()) {
      if (!turns.has_item()) continue;
      const Item item = turns.item(share);
      const u32 matrix = item.matrix(p);
      for_columns<false>(p, item, lane, [&](u32 column, bool, u32) {
#pragma unroll
        for (u32 half = 0; half < Config::kHalves; ++half, ++number, at.next()) {
          if (number % 2 != mine) continue;
          barrier_wait(barriers.dense_free(at.stage), at.parity ^ 1);
          copy_stage(item, column * Config::kBlock + half * 64, matrix);
        }
      });
    }
  }
};

// Sums -----------------------------------------------------------------------------------------------

using SparseReporter = Reporter<Config, true>;  // threads read metadata

struct Multiplier {
  u32 base, row_group;
  SparseReporter sparse_reporter;
  Barriers barriers;
  SparseRing sparse;
  DenseRing dense;
  bool flying = false;  // a step, of these stages
  u32 flying_sparse = 0, flying_dense = 0;

  __device__ __forceinline__ void free_dense(u32 slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.dense_free(slot));
  }

  // Whether the stage of S has this warpgroup's line.
  __device__ __forceinline__ bool has_line() const {
    if constexpr (Config::kLines == 1) return true;
    return lines_of<1>(barriers.present(sparse.stage), row_group);
  }

  // Two steps of wgmma: 64 k of the block with one stage of X. Its metadata stay in their register while these run,
  // which read it whenever they like; the next half has another one.
  template <int kHalf> __device__ __forceinline__ void multiply_half(Sums& sums, u32& metadata) {
    const u32 stage = base + Config::kSparseAt + sparse.stage * Config::kSparseBytes;
    metadata = load_shared_as<u32>(stage + Config::kMetadataAt +
                                   ((row_group * 128 + threadIdx.x % 128) * Config::kHalves + kHalf) * 4);
    barrier_wait(barriers.dense_full(dense.stage), dense.parity);
    const u64 a = SparseOperand::descriptor(stage + row_group * 64 * Config::kLineBytes) + kHalf * 4;
    const u64 b = XOperand::descriptor(base + dense.stage * Config::kDenseBytes);
    constexpr bool kLines = Config::kDenseMajor == Major::MN;
    wgmma_fence();
    wgmma_sp<Config::kElement, 0, 1, kLines>(sums, a, b, metadata);
    wgmma_sp<Config::kElement, 1, 1, kLines>(sums, a + 2, b + 2 * XOperand::kStep, metadata);
    wgmma_commit();
    wgmma_wait<1>();  // all but the half just issued
    __syncwarp();     // metadata that other lanes have read is freed by this one's report
    if (flying) {
      free_dense(flying_dense);
      if (kHalf == 0 || Config::kHalves == 1) sparse_reporter.release(flying_sparse);
    }
    flying = true, flying_dense = dense.stage, flying_sparse = sparse.stage;
    dense.next();
  }

  __device__ __forceinline__ void pass_over() {
    finish();
    barrier_wait(barriers.dense_full(dense.stage), dense.parity);  // or its next stage would be taken for this one
    sparse_reporter.release(sparse.stage), free_dense(dense.stage);
    dense.next();
  }

  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    if (flying) free_dense(flying_dense), sparse_reporter.release(flying_sparse);
    flying = false;
  }

  __device__ __forceinline__ void multiply(Sums& sums, int columns) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sums[i] = 0.0f;
    u32 first = 0, second = 0;
    for (int at = 0; at < columns; ++at, sparse.next()) {
      barrier_wait(barriers.sparse_full(sparse.stage), sparse.parity);
      if constexpr (Config::kHalves == 2) {
        multiply_half<0>(sums, first);
        multiply_half<1>(sums, second);
      } else {
        if (!has_line()) pass_over();
        else if (at % 2) multiply_half<0>(sums, second);
        else multiply_half<0>(sums, first);
      }
    }
    finish();
    wgmma_fence_operand(sums);
  }
};

// Results --------------------------------------------------------------------------------------------

// 64 rows x kTokens of one warpgroup.
struct Writer : TileWriter<Writer, Config, BlocksWgmmaSpParams, Config::kTokensContiguous, false> {
  __device__ __forceinline__ void write(const Sums& sums, const Item& item, u32 row_group) {
    const u32 row0 = item.row() + row_group * 64, rows = p.head_lines * Config::kBlock;
    write_tile(sums, item, row0, rows, (i64)item.head * rows + row0, item.token, p.tokens);
  }
  __device__ __forceinline__ void store(u32 buffer, const Item& item, u32 row, u32 token) const {
    copy_out(buffer, row, token, item.matrix(p));
  }
};

__device__ __forceinline__ void init_barriers(const Barriers& barriers) {
  constexpr int kWarps = 4 * Config::kWarpgroups;
  for (int i = 0; i < Config::kSparseStages; ++i) {
    barrier_init(barriers.sparse_full(i), 1);
    barrier_init(barriers.sparse_free(i), kWarps * Config::kShare);
  }
  for (int i = 0; i < Config::kDenseStages; ++i) {
    barrier_init(barriers.dense_full(i), 1);
    barrier_init(barriers.dense_free(i), kWarps);
  }
  barrier_init_fence();
}

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    blocks_wgmma_sp(const __grid_constant__ BlocksWgmmaSpParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 share = blockIdx.x % Config::kShare, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) init_barriers(barriers);
  if (threadIdx.x == Config::kMultiplying && p.blocks) {  // else there are no maps but C's
    prefetch_tensor_map(&p.values_map), prefetch_tensor_map(&p.right_map), prefetch_tensor_map(&p.out_map);
  }
  __syncthreads();
  if constexpr (Config::kShare > 1) cluster_sync_relaxed();
  launch_dependents_and_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (warp == 0) SparseCopier{p, base, share, lane, barriers}.copy_all();
    else if (warp < 3) DenseCopier{p, base, share, lane, warp - 1, barriers}.copy_all();
  } else {
    warpgroup_reg_alloc<Config::kSumRegisters>();
    Multiplier multiplier{base, warpgroup, SparseReporter(barriers.sparse_free(0)), barriers};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    Writer writer{{p, staging, 1 + (int)warpgroup}};
    Sums sums;
    for (Turns turns{p}; turns.more(); turns.next()) {
      if (!turns.has_item()) continue;
      const Item item = turns.item(share);
      multiplier.multiply(sums, item.count);
      writer.write(sums, item, warpgroup);
    }
    if (writer.is_copier()) tma_store_wait_read<0>();
  }
}
