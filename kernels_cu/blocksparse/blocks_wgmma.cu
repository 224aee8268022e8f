// C = epilogue(alpha * op(S) @ X) for a block-sparse S, operands fed by the copy engine: dsd as it stands, dds as
// C^T = op(S)^T @ op(A)^T. Rows are those of op(S) here and tokens the columns of X, whichever way C lies in memory.
//
// A row of blocks of op(S) is a line, 128 rows are a strip, of small blocks and few tokens 64: one line, or several
// that share the columns of X that more than one of them keeps. A cluster takes one strip with kTokens tokens for each
// of its blocks, which share the values of S: each copies a part of them to all. A step is 128 bytes of columns of
// which the strip keeps any, and the rows of X that they meet. Steps are summed in increasing columns, so the bits of a
// result depend on its line and token alone.
//
// Of sdd a strip is a line, or 64 rows of small blocks, an item some of the columns of blocks that it keeps any of, and
// a step 128 bytes of k of op(A)'s rows, which a cluster shares, and of op(B)'s columns. The columns of a strip go to
// as few items as can be, in equal parts. 8-bit elements are multiplied where all operands lie with k contiguous.
//
//   role        who                          what
//   copy        last warpgroup, two warps    S, and the other two X, a stage a step, up to kStages ahead, also of
//               each                         the next items. Of small blocks each warp a column of blocks of S and X:
//                                            S by its lanes, as a copy of the engine costs more than such a block's
//   multiply    each of kWarpgroups          64 rows x kColumns tokens; passes over steps without its lines
//   write       the same                     its results, staged for the copy engine, while the next are copied in
//
//   barriers    full: a stage's bytes have come; free: all warps of the cluster that read it are done. Named 1 ..: a
//               warpgroup's staging area.
//   registers   kColumns / 2 accumulators; threads that copy hand theirs over.
//
//   copy     | step 0 | step 1 | step 2 | ..
//   multiply          | wgmma 0 | 1 | 2 | ..                     one step in flight, the stage before it freed
//                                                                meanwhile
//   write                                    | fill | copy |
//
// Items: strips from the longest to the shortest with every token tile of a band, then the next band. Of sdd the first
// one of every strip, of all batches, then the second of those that have one, and so on. Cluster c of G takes item c,
// then 2G - 1 - c, then 2G + c: in turns, so that none has only the longer ones.
#include "blocksparse/multiplier.cuh"
#include "blocksparse/writer.cuh"
#include "ptx/stmatrix.cuh"

#define S24_CLUSTER_SIZE S24_CLUSTER_N
#include "common/cluster.cuh"

// Everything that is compiled in.
struct Config : ProblemType<S24_ELEMENT, S24_OUT, S24_BIAS, S24_EPILOGUE> {
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kTokens = S24_TILE_N;          // of a block of threads
  static constexpr int kWarpgroups = S24_WARPGROUPS;  // that multiply
  static constexpr int kShare = S24_CLUSTER_N;        // blocks of a cluster
  static constexpr int kStages = S24_STAGES;
  static constexpr int kBuffers = S24_BUFFERS;                      // of a staging area
  static constexpr bool kSampled = S24_SAMPLED;                     // sdd
  static constexpr Major kSparseMajor = Major(S24_SPARSE_MAJOR);    // how op(S) lies in its blocks
  static constexpr Major kDenseMajor = Major(S24_DENSE_MAJOR);      // how X does; MN: tokens are contiguous
  static constexpr bool kTokensContiguous = S24_TOKENS_CONTIGUOUS;  // in C; else its rows of op(S) are
  static constexpr bool kRaw = S24_RAW;                             // results are the integer sums themselves

  // A step has kDepth k: half of a large block, or small ones side by side.
  static constexpr int kBytes = kElement == ElementKind::F16 || kElement == ElementKind::BF16 ? 2 : 1;
  static constexpr int kDepth = 128 / kBytes, kHalves = kBlock > kDepth ? kBlock / kDepth : 1;
  static constexpr int kBeside = kBlock < kDepth && !kSampled ? kDepth / kBlock : 1;
  static constexpr int kBox = kDepth / kBeside, kBoxBytes = kBytes * kBox;  // k of a box of S or X
  static constexpr bool kSmall = kBlock < 64;
  static constexpr int kRows = S24_TILE_M, kRowGroups = kRows / 64, kLines = kRows / kBlock;  // of a strip
  static constexpr int kLineGroups = kBlock > 64 ? kBlock / 64 : 1;                           // row tiles of a line
  static constexpr int kTileLines = kBlock < 64 ? 64 / kBlock : 1;                            // lines of a row tile
  static constexpr int kColumns = kTokens * kRowGroups / kWarpgroups;                         // tokens of a warpgroup
  // Of sdd: columns of blocks of an item, and what it has of each. A narrow item has part of one.
  static constexpr int kGroup = kTokens > kBlock ? kTokens / kBlock : 1, kPart = kTokens < kBlock ? kTokens : kBlock;
  static constexpr int kParts = kBlock / kPart;
  static constexpr int kSums = kColumns / 2;
  static constexpr bool kMixed = kLines > 1 && !kSampled;  // whether a stage may lack some lines
  static constexpr int kMultiplying = 128 * kWarpgroups;
  static constexpr bool kByLanes = kSmall && !kSampled;     // whether S is copied by them
  static constexpr int kFullArrivals = kByLanes ? 132 : 1;  // of a full barrier: with bytes, and of lanes that copy
  // X is read by every line that keeps a block of its rows, C is not read at all.
  static constexpr u64 kDensePolicy = kEvictLast, kOutPolicy = kEvictFirst;
  static constexpr int kThreads = kMultiplying + 128;
  static constexpr int kGroupBytes = 64 * 128;           // 64 lines of 128 bytes
  static constexpr int kLineBytes = kBlock * kBoxBytes;  // a line's block, or half of one
  static constexpr int kSparseBytes = kRowGroups * kGroupBytes, kDenseBytes = kTokens * 128;
  static constexpr int kStageBytes = kSparseBytes + kDenseBytes;

  // Shared memory: stages, a staging area a warpgroup, barriers, which lines each stage has.
  static constexpr int kOutBytes = sizeof(Out::Bits);
  static constexpr int kStepColumns = kOutBytes == 4 ? 32 : 64, kBufferBytes = 64 * kStepColumns * kOutBytes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kBarrierAt = kStagingAt + kWarpgroups * kBuffers * kBufferBytes;
  static_assert(kRowGroups <= kWarpgroups && kColumns % 64 == 0, "a warpgroup has 64 rows and whole groups of tokens");
  static_assert(kBytes == 2 || (kSparseMajor == Major::K && kDenseMajor == Major::K), "16-bit elements alone lie so");
  static_assert(kBoxBytes >= 32, "a block has a step of the instruction at least");

  // Registers of a thread that copies and of one that multiplies, once they part.
  static constexpr int kCopyRegisters = kByLanes ? 56 : 40, kSumRegisters = kByLanes ? 224 : 232;
};
constexpr int kSparseGroup = Config::kByLanes ? Config::kLineBytes : Config::kGroupBytes;
using SparseOperand = DenseOperand<Config::kSparseMajor, Config::kBoxBytes, kSparseGroup>;
// A line of X has one token's k; else 64 tokens, of sdd at most those of a column of blocks. A group: all k of those.
constexpr int kTokensBeside = Config::kSampled && Config::kSmall ? Config::kBlock : 64;
constexpr int kDenseLine = Config::kDenseMajor == Major::K ? Config::kBoxBytes : Config::kBytes * kTokensBeside;
constexpr int kDenseGroup = Config::kSmall ? Config::kBox * kDenseLine : Config::kGroupBytes;
constexpr int kTokenBytes = Config::kSmall ? Config::kBoxBytes : kDenseLine;  // from a token to the next, on average
using XOperand = DenseOperand<Config::kDenseMajor, kDenseLine, kDenseGroup>;
template <bool kInteger> struct SumOf {
  using Type = float;
};
template <> struct SumOf<true> {
  using Type = int;
};
using Sums = SumOf<Config::kElement == ElementKind::S8>::Type[Config::kSums];  // a thread's, of 64 rows x kColumns

struct BlocksWgmmaParams {
  TensorMap left_map;   // values [Z * blocks * b, b], of sdd op(A) [Z * H, ..]: boxes of 128 bytes
  TensorMap right_map;  // X, of sdd op(B) [Z * H, ..]: boxes of 128 bytes
  TensorMap out_map;    // C [Z * H, ..], of sdd values: boxes of 128 bytes x kStepColumns or 64
  const int* order;     // [strips]: from the longest to the shortest
  const int* counts;    // [strips]: columns of blocks that each keeps any of
  const u32* kept;      // [lines][words]: bit c % 32 of word c / 32: whether the line keeps column c; not of sdd
  const int* pointers;  // [lines + 1]: where each line's entries begin; of small blocks and of sdd [strips + 1]
  const int* columns;   // of sdd [blocks]: of a line's blocks; of small blocks [entries]: columns of a strip
  const int* places;    // [blocks]: a line's blocks among the values; null: as they are counted; of small blocks
                        // [entries][kLines]: of each line of a strip, below 0: it has none
  void* values;         // of small blocks
  const void* bias;     // [H, rows], or null
  int blocks;           // kept, of a batch
  float alpha;
  u32 strips, head_strips, head_lines;  // of all heads, of one
  u32 words;                            // of a line's bits
  u32 heads, batch;
  u32 tokens, token_clusters;  // clusters' token tiles that cover a matrix; not of sdd
  u32 band;                    // of token tiles of all batches, before the next band; not of sdd
  u32 groups, steps;           // of sdd: items of a strip at most, steps of its sums
  u32 whole;                   // of small blocks: whether right_map's boxes hold all kTokens tokens
};
static_assert(matches_host<BlocksWgmmaParams>(), "the host has another BlocksWgmmaParams");

using Ring = PipelineState<Config::kStages>;

using Barriers = StageBarriers<Config>;

// Of all clusters; of sdd at most.
__device__ __forceinline__ u32 items_of(const BlocksWgmmaParams& p) {
  return p.batch * p.strips * (Config::kSampled ? p.groups : p.token_clusters);
}

// Of sdd: which items there are. The first of every strip, from the longest on, then the second of those that have one,
// and so on. All lanes of a warp ask.
struct Dealer {
  static constexpr int kMost = Config::kGroup * Config::kShare;  // parts of columns of blocks of an item

  u32 group = 0, before = 0, strips;  // whose items are being dealt out; items before those; strips that have one

  __device__ __forceinline__ explicit Dealer(const BlocksWgmmaParams& p) : strips(having(p, 0)) {}

  // Strips with an item of the group: they are the first ones.
  static __device__ __forceinline__ u32 having(const BlocksWgmmaParams& p, u32 group) {
    u32 low = 0, high = Config::kSampled ? p.strips : 0;
    while (low < high) {
      const u32 step = (high - low + 31) / 32, at = low + threadIdx.x % 32 * step;
      const bool has = at < high && p.counts[p.order[at]] * Config::kParts > (int)group * kMost;
      const u32 having = __popc(__ballot_sync(~0u, has));
      high = min(high, low + having * step);
      if (having) low += (having - 1) * step + 1;
    }
    return low;
  }

  // Whether there is an item of this index. Indices rise.
  __device__ __forceinline__ bool find(const BlocksWgmmaParams& p, u32 index) {
    if constexpr (Config::kSampled) {
      while (strips && index - before >= strips * p.batch) {
        before += strips * p.batch;
        strips = having(p, ++group);
      }
      return strips > 0;
    } else {
      return index < items_of(p);
    }
  }
};

// What a block of threads works on.
struct Item {
  u32 head, line, batch, token;  // line: the first, in its head; token: of sdd, in the first block
  int count;                     // columns of blocks; of sdd of this block of threads
  int first;                     // of sdd: the first of them among all strips'

  __device__ __forceinline__ Item(const BlocksWgmmaParams& p, const Dealer& dealer, u32 index, u32 share) {
    if constexpr (Config::kSampled) {
      const u32 in_group = index - dealer.before, strip = (u32)p.order[in_group / p.batch];
      batch = in_group % p.batch, head = strip / p.head_strips, line = strip % p.head_strips * Config::kLines;
      const int parts = p.counts[strip] * Config::kParts;
      const int groups = (parts + Dealer::kMost - 1) / Dealer::kMost;
      const int pieces = groups * Config::kShare, each = (parts + pieces - 1) / pieces;
      const int before = ((int)dealer.group * Config::kShare + (int)share) * each;
      count = max(0, min(each, parts - before));
      token = before % Config::kParts * Config::kPart, first = p.pointers[strip] + before / Config::kParts;
      return;
    }
    const u32 tiles = p.batch * p.token_clusters, in_band = p.band * p.strips, band = index / in_band;
    const u32 rest = index % in_band, wide = min(p.band, tiles - band * p.band), tile = band * p.band + rest % wide;
    const u32 strip = (u32)p.order[rest / wide];
    head = strip / p.head_strips, line = strip % p.head_strips * Config::kLines;
    batch = tile / p.token_clusters;
    token = (tile % p.token_clusters * Config::kShare + share) * Config::kTokens;
    first = 0, count = p.counts[strip];
  }
  __device__ __forceinline__ int steps(const BlocksWgmmaParams& p) const {
    return Config::kSampled ? (int)p.steps : (count + Config::kBeside - 1) / Config::kBeside * Config::kHalves;
  }
  __device__ __forceinline__ u32 row() const { return line * Config::kBlock; }  // its first, in its head
  __device__ __forceinline__ u32 matrix(const BlocksWgmmaParams& p) const { return batch * p.heads + head; }
};

// Copies ---------------------------------------------------------------------------------------------

// This block's part of the columns of a kept block that a step has, to every block of the cluster.
__device__ __forceinline__ void copy_sparse(const BlocksWgmmaParams& p, u32 to, i64 place, u32 half, u32 share,
                                            u32 full) {
  constexpr u32 kAll = (1 << Config::kShare) - 1;
  constexpr u32 kLines = (Config::kSparseMajor == Major::K ? Config::kBlock : Config::kBox) / Config::kShare;
  const u32 row = (u32)place * Config::kBlock + share * kLines;
  if constexpr (Config::kSparseMajor == Major::K) {
    const u32 at = to + share * kLines * Config::kBoxBytes;
    if constexpr (Config::kShare == 1) tma_load(at, &p.left_map, half * Config::kDepth, row, full);
    else tma_load_multicast(at, &p.left_map, half * Config::kDepth, row, full, (u16)kAll);
  } else {
#pragma unroll
    for (int group = 0; group < Config::kLineGroups; ++group) {
      const u32 at = to + group * Config::kGroupBytes + share * kLines * Config::kBoxBytes;
      if constexpr (Config::kShare == 1) tma_load(at, &p.left_map, group * 64, row + half * 64, full);
      else tma_load_multicast(at, &p.left_map, group * 64, row + half * 64, full, (u16)kAll);
    }
  }
}

// kBox k of kLines rows (tokens) of a dense operand: box `turn`, then every `step`-th.
template <Major kMajor, int kLines, int kBox>
__device__ __forceinline__ void copy_dense(const TensorMap* map, u32 to, u32 k, u32 line, u32 matrix, u32 full,
                                           u32 turn = 0, u32 step = 1) {
  constexpr int kWide = kLines < 64 ? kLines : 64, kAcross = kMajor != Major::K ? kWide
                                                             : kLines <= 256    ? kLines
                                                                                : kLines / 2;
#pragma unroll
  for (u32 at = turn * kAcross; at < kLines; at += step * kAcross) {
    if constexpr (kMajor == Major::K)
      tma_load(to + at * kBox * Config::kBytes, map, k, line + at, matrix, full, Config::kDensePolicy);
    else tma_load(to + at * 128, map, line + at, k, matrix, full, Config::kDensePolicy);
  }
}

// A warp that copies: the left operand, and all that is to say of a stage, or the right one. Two of each take stages in
// turn. Lane l has line l % 8 and, of the columns of blocks that a stage has, the l / 8-th.
template <bool kLeft> struct Copier {
  // A stage has one box of S, or of X: an elected lane requests it, since for a lane that is chosen by its number the
  // compiler makes a loop over all lanes. Every lane then looks up the same line.
  static constexpr bool kOneLine = Config::kLines == 1 && Config::kBeside == 1;
  static constexpr bool kOneBox = kOneLine && Config::kDenseMajor == Major::K && Config::kTokens <= 256;

  const BlocksWgmmaParams& p;
  u32 base, share, lane, mine;  // the last: of the two
  Barriers barriers;
  Ring at;
  u32 number = 0;  // of the stage
  // What the next stage has: columns of blocks; this lane's; its line's block among all values, if it keeps one.
  u32 beside = 0, column = 0, place = 0;
  bool here = false;

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Until the stage is free, if it is this warp's turn.
  __device__ __forceinline__ bool take_stage() const {
    if (number % 2 != mine) return false;
    barrier_wait(barriers.free(at.stage), at.parity ^ 1);
    return true;
  }
  __device__ __forceinline__ void next_stage() {
    ++number;
    at.next();
  }

  // X's rows: a lane each box of its column of blocks.
  __device__ __forceinline__ void copy_x(const Item& item, u32 matrix, u32 half) const {
    if constexpr (kOneBox) {
      if (elect_one())
        tma_load(stage() + Config::kSparseBytes, &p.right_map, column * Config::kBlock + half * Config::kDepth,
                 item.token, matrix, barriers.full(at.stage), Config::kDensePolicy);
      return;
    }
    const u32 to =
        stage() + Config::kSparseBytes +
        lane / 8 * (Config::kDenseMajor == Major::K ? Config::kTokens * Config::kBoxBytes : Config::kBox * 128);
    if (lane / 8 < beside)
      copy_dense<Config::kDenseMajor, Config::kTokens, Config::kBox>(
          &p.right_map, to, column * Config::kBlock + half * Config::kDepth, item.token, matrix, barriers.full(at.stage),
          lane % 8, 8);
  }

  __device__ __forceinline__ void copy_lines(u32 half) const {
    const u32 full = barriers.full(at.stage);
    if constexpr (kOneLine) {
      if (elect_one()) {
        barrier_arrive_expect_tx(full, Config::kLineBytes + Config::kTokens * Config::kBoxBytes);
        copy_sparse(p, stage(), place, half, share, full);
      }
      return;
    }
    const u32 present = __ballot_sync(~0u, here);
    if (lane == 0) {
      if constexpr (Config::kLines > 1) store_shared(barriers.present(at.stage), present);
      barrier_arrive_expect_tx(full,
                               __popc(present) * Config::kLineBytes + beside * (Config::kTokens * Config::kBoxBytes));
    }
    __syncwarp();
    if (here) {
      const u32 to = stage() + lane / 8 * (128 * Config::kBoxBytes) + lane % 8 * Config::kLineBytes;
      copy_sparse(p, to, place, half, share, full);
    }
  }

  __device__ __forceinline__ void copy_columns(const Item& item, u32 matrix) {
    for (u32 half = 0; half < Config::kHalves; ++half, next_stage()) {
      if (!take_stage()) continue;
      if constexpr (kLeft) copy_lines(half);
      else copy_x(item, matrix, half);
      __syncwarp();
    }
    beside = 0, here = false;
  }

  // A strip's columns of blocks, in increasing order.
  __device__ __forceinline__ void copy_strip(const Item& item) {
    const u32 matrix = item.matrix(p), of = kOneLine ? 0 : lane % 8;
    const i64 line = (i64)item.head * p.head_lines + item.line + of;
    const bool mine = of < Config::kLines && item.line + of < p.head_lines;
    const u32* kept = p.kept + line * p.words;
    int next = kLeft && mine ? p.pointers[line] : p.blocks, entry = entry_at(next);
    u32 ahead = mine && p.words ? kept[0] : 0;
    for (u32 word = 0; word < p.words; ++word) {
      const u32 bits = ahead;
      ahead = mine && word + 1 < p.words ? kept[word + 1] : 0;
      for (u32 any = __reduce_or_sync(~0u, bits); any; any &= any - 1) {
        const u32 bit = __ffs(any) - 1;
        const bool keeps = bits >> bit & 1;
        if (kOneLine || lane / 8 == beside)
          column = word * 32 + bit, here = keeps, place = item.batch * p.blocks + entry;
        if (kLeft && keeps) entry = entry_at(++next);
        if (++beside == Config::kBeside) copy_columns(item, matrix);
      }
    }
    if (beside > 0) copy_columns(item, matrix);
  }
  // Where the tables say that an entry has its values; past the end there is none.
  __device__ __forceinline__ int entry_at(int next) const {
    return p.places && next < p.blocks ? p.places[next] : next;
  }

  // This block's part of the strip's rows of op(A), to every block of the cluster.
  __device__ __forceinline__ void copy_rows(const Item& item, u32 k, u32 matrix, u32 full) const {
    constexpr bool kAlongK = Config::kSparseMajor == Major::K;
    constexpr u32 kLines = (kAlongK ? Config::kRows : Config::kBox) / Config::kShare;
    const u32 row = item.row() + (kAlongK ? share * kLines : 0), from = k + (kAlongK ? 0 : share * kLines);
#pragma unroll
    for (u32 at = 0; at < (kAlongK ? 1 : Config::kRows); at += 64) {
      const u32 to = stage() + at * 128 + share * kLines * 128;
      const u32 across = kAlongK ? from : row + at, down = kAlongK ? row : from;
      if constexpr (Config::kShare == 1) tma_load(to, &p.left_map, across, down, matrix, full, Config::kDensePolicy);
      else tma_load_multicast(to, &p.left_map, across, down, matrix, full, (u16)((1 << Config::kShare) - 1));
    }
  }

  // Of sdd: the strip's rows of op(A), or op(B)'s columns of every block of the item, a lane each.
  __device__ __forceinline__ void copy_item(const Item& item) {
    const u32 matrix = item.matrix(p);
    const int column = lane < item.count ? p.columns[item.first + lane] : 0;
    for (u32 step = 0; step < p.steps; ++step, next_stage()) {
      if (!take_stage()) continue;
      const u32 full = barriers.full(at.stage), right = stage() + Config::kSparseBytes;
      if (kLeft && lane == 0) {
        barrier_arrive_expect_tx(full, Config::kSparseBytes + item.count * Config::kPart * 128);
        copy_rows(item, step * Config::kDepth, matrix, full);
      }
      if (!kLeft && lane < item.count)
        copy_dense<Config::kDenseMajor, Config::kPart, Config::kBox>(
            &p.right_map, right + lane * Config::kPart * 128, step * Config::kDepth,
            column * Config::kBlock + item.token, matrix, full);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void copy_all() {
    Dealer dealer(p);
    for (u32 turn = 0; turn < turns_of<Config>(p) && dealer.find(p, item_of<Config>(turn)); ++turn) {
      const Item item(p, dealer, item_of<Config>(turn), share);
      if constexpr (Config::kSampled) copy_item(item);
      else copy_strip(item);
    }
    // Nobody leaves while others may still report to its barriers.
    if constexpr (kLeft && Config::kShare > 1)
      for (int i = 0; i < Config::kStages; ++i, at.next()) barrier_wait(barriers.free(at.stage), at.parity ^ 1);
  }
};

// Of small blocks: a warp that copies of every step one column of blocks, or some lines of it.
struct SmallCopier {
  // Warps of a column of blocks. Each has lines of its own, whole row tiles of them; else a part of every line.
  static constexpr int kShared = 4 / Config::kBeside;
  static constexpr bool kOwnLines = Config::kLines / kShared % Config::kTileLines == 0 && Config::kLines >= kShared;
  static constexpr int kOwn = kOwnLines ? Config::kLines / kShared : Config::kLines;
  static constexpr int kAhead = 32 / Config::kLines;  // steps that are looked up at a time
  static constexpr int kBlockBytes = Config::kBlock * Config::kBoxBytes, kChunks = Config::kBoxBytes / 16;  // of a row
  static constexpr int kPasses = kBlockBytes / 512 / (kOwnLines ? 1 : kShared);  // of 512 bytes, of a block
  static_assert(!Config::kByLanes || (kOwn <= 8 && Config::kStages <= 8), "bits of a u64");
  static_assert(!Config::kByLanes || kPasses > 0, "a warp copies 512 bytes at a time");

  const BlocksWgmmaParams& p;
  u32 base, lane, column, part;  // which column of blocks of a step, and which of its warps
  Barriers barriers;
  Ring at;
  u64 dirty = ~0ull;  // bit l of a stage's byte: whether line l of this warp's holds other than zeros

  // Of step l / kLines and line l % kLines: the column, below 0: none; the line's block, below 0: none.
  struct Found {
    int column, place;
  };
  __device__ __forceinline__ Found look_up(int first, int count, int step) const {
    const int index = (step + (int)lane / Config::kLines) * Config::kBeside + (int)column;
    if (index >= count) return {-1, -1};
    return {p.columns[first + index], p.places[(i64)(first + index) * Config::kLines + lane % Config::kLines]};
  }

  // Which of the lines beside those in `present`, in their row tiles, have to become zeros.
  static __device__ __forceinline__ u32 stale(u32 present, u32 dirty) {
    constexpr int kOf = Config::kTileLines;
    u32 tiles = present | present >> 1;
    if constexpr (kOf == 4) tiles |= tiles >> 2;
    tiles &= kOf == 4 ? 0x11 : 0x55;
    return dirty & tiles * ((1 << kOf) - 1) & ~present;
  }

  __device__ __forceinline__ void copy_x(const Item& item, u32 matrix, u32 k, u32 to, u32 full) const {
    if constexpr (Config::kDenseMajor == Major::K) {
      if (lane == 0) tma_load(to, &p.right_map, k, item.token, matrix, full, Config::kDensePolicy);
    } else if (p.whole) {
      if (lane == 0) tma_load(to, &p.right_map, 0, k, item.token / 64, matrix, full, Config::kDensePolicy);
    } else if (lane < Config::kTokens / 64) {
      tma_load(to + lane * (Config::kBox * 128), &p.right_map, item.token + lane * 64, k, 0, matrix, full,
               Config::kDensePolicy);
    }
  }

  // A block in kOwn places at most, from `to` on, or zeros.
  __device__ __forceinline__ void copy_blocks(const Item& item, u32 to, int place, u32 from, u32 present,
                                              u32 zeros) const {
    const u8* const values = (const u8*)p.values + (i64)item.batch * p.blocks * kBlockBytes + lane * 16;
#pragma unroll
    for (int line = 0; line < kOwn; ++line) {  // without branches, so that one needn't wait for the other
      const bool keep = present >> line & 1, copies = (present | zeros) >> line & 1;
      const i64 which = max(__shfl_sync(~0u, place, from + line), 0);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const u32 at = kOwnLines ? i : part * kPasses + i, row = (lane + 32 * at) / kChunks, chunk = lane % kChunks;
        const u32 turned = Config::kBoxBytes == 64 ? row / 2 % 4 : row / 4 % 2;  // the swizzle
        cp_async_16_if(copies, to + line * kBlockBytes + row * Config::kBoxBytes + (chunk ^ turned) * 16,
                       values + which * kBlockBytes + at * 512, keep);
      }
    }
  }

  // The step whose column and places lanes `from` on have found; kept: which of its lines keep the column.
  __device__ __forceinline__ void copy_step(const Item& item, u32 matrix, const Found& found, u32 from, u32 kept) {
    const u32 to = base + at.stage * Config::kStageBytes, full = barriers.full(at.stage);
    const u32 line = kOwnLines ? part * kOwn : 0, present = kept >> line & ((1 << kOwn) - 1);  // its first
    const int met = __shfl_sync(~0u, found.column, from);
    const u32 held = (u32)(dirty >> 8 * at.stage) & 0xff, zeros = stale(present, held);
    dirty ^= (u64)(held ^ ((held & ~zeros) | present)) << 8 * at.stage;
    barrier_wait(barriers.free(at.stage), at.parity ^ 1);
    const bool copies = part == 0 && met >= 0;
    constexpr u32 kColumnBytes = Config::kTokens * Config::kBoxBytes;
    if (lane == 0) {
      if (part == 0) store_shared(barriers.present(at.stage) + column, (u8)kept);
      barrier_arrive_expect_tx(full, copies ? kColumnBytes : 0);
    }
    __syncwarp();
    if (copies) copy_x(item, matrix, met * Config::kBlock, to + Config::kSparseBytes + column * kColumnBytes, full);
    __syncwarp();
    copy_blocks(item, to + column * (Config::kRows * Config::kBoxBytes) + line * kBlockBytes, found.place, from + line,
                present, zeros);
    cp_async_mbarrier_arrive(full);
  }

  __device__ __forceinline__ void copy_strip(const Item& item) {
    const int first = p.pointers[item.head * p.head_strips + item.line / Config::kLines], steps = item.steps(p);
    const u32 matrix = item.matrix(p);
    Found next = look_up(first, item.count, 0);
    for (int begin = 0; begin < steps; begin += kAhead) {
      const Found found = next;
      next = look_up(first, item.count, begin + kAhead);
      const u32 kept = __ballot_sync(~0u, found.place >= 0);
      for (int i = 0; i < min(kAhead, steps - begin); ++i, at.next())
        copy_step(item, matrix, found, i * Config::kLines, kept >> i * Config::kLines & ((1 << Config::kLines) - 1));
    }
  }

  __device__ __forceinline__ void copy_all() {
    Dealer dealer(p);
    for (u32 turn = 0; turn < turns_of<Config>(p) && dealer.find(p, item_of<Config>(turn)); ++turn)
      copy_strip(Item(p, dealer, item_of<Config>(turn), 0));
  }
};

// Sums -----------------------------------------------------------------------------------------------

// 64 rows x kColumns tokens of one warpgroup.
struct Multiplier : StepMultiplier<Config, Multiplier> {
  __device__ __forceinline__ void issue(Sums& sums, u32 lines) const {
    const u64 a = SparseOperand::descriptor(stage() + row_group * 64 * Config::kBoxBytes);
    const u64 b = XOperand::descriptor(stage() + Config::kSparseBytes + column_group * Config::kColumns * kTokenBytes);
    constexpr u32 kBesideB =
        Config::kDenseMajor == Major::K || Config::kSmall ? Config::kTokens * Config::kBoxBytes : Config::kBox * 128;
    wgmma_fence();
#pragma unroll
    for (int beside = 0; beside < Config::kBeside; ++beside) {  // the columns of blocks that it has, in order
      if (Config::kBeside > 1 && !(lines >> 8 * beside & 0xff)) continue;
#pragma unroll
      for (int k = 0; k < Config::kBoxBytes / 32; ++k)
        wgmma_dense<Config::kElement, Config::kSparseMajor, Config::kDenseMajor>(
            sums, a + (beside * (Config::kRows * Config::kBoxBytes) >> 4) + k * SparseOperand::kStep,
            b + (beside * kBesideB >> 4) + k * XOperand::kStep);
    }
    wgmma_commit();
  }
};

// Results --------------------------------------------------------------------------------------------

// 64 rows x kColumns tokens of one warpgroup; of sdd with small blocks, threads copy what is kept.
struct Writer
    : TileWriter<Writer, Config, BlocksWgmmaParams, Config::kTokensContiguous, Config::kSampled && Config::kSmall> {
  __device__ __forceinline__ void write(const Sums& sums, const Item& item, u32 row_group, u32 token_group) {
    const u32 row0 = item.row() + row_group * 64, token0 = item.token + token_group * Config::kColumns;
    const u32 tokens = Config::kSampled ? item.token + item.count * Config::kPart : p.tokens;
    const u32 rows = p.head_lines * Config::kBlock;
    write_tile(sums, item, row0, rows, (i64)item.head * rows + row0, token0, tokens);
  }

  __device__ __forceinline__ void store(u32 buffer, const Item& item, u32 row, u32 token) const {
    const u32 row_group = (row - item.row()) / 64;
    if constexpr (Config::kSampled && Config::kSmall) {
      copy_blocks<Config::kBlock>(buffer, item, row_group, token);
    } else if constexpr (Config::kSampled) {
      const i64 place = item.first + token / Config::kBlock + (i64)item.batch * p.blocks;
      tma_store(&p.out_map, token % Config::kBlock, (u32)place * Config::kBlock + row_group * 64, buffer);
      tma_store_commit();
    } else {
      copy_out(buffer, row, token, item.matrix(p));
    }
  }

  // A step's sums: they may be integers, and results of 8 bits or the sums themselves. A template of Out, so that what
  // a kind of results hasn't got isn't looked for.
  template <class Sum, class Out = Config::Out>
  __device__ __forceinline__ void fill(u32 buffer, const Sum* sums, const float (&bias)[2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < Config::kStepColumns / 8; ++j) {
      const Sum* const sum = sums + 4 * j;
      if constexpr (Config::kOutBytes != 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 to = buffer + staged_at(row + g + i / 2 * 8, 8 * j + 2 * t + i % 2);
          if constexpr (Config::kRaw) store_shared(to, (u32)sum[i]);
          else store_shared(to, Out::from_float(canonical_nan(result(sum[i], bias[i / 2]))));
        }
      } else {
        const u32 above = Out::pair(result(sum[0], bias[0]), result(sum[1], bias[0]));
        const u32 below = Out::pair(result(sum[2], bias[1]), result(sum[3], bias[1]));
        if constexpr (Config::kTokensContiguous) stmatrix_x2(buffer + staged_at(row + lane % 16, 8 * j), above, below);
        else stmatrix_transposed_x2(buffer + staged_at(row + lane / 8 % 2 * 8, 8 * j + lane % 8), above, below);
      }
    }
  }

  // A warp each kept block of the buffer's lines and columns. A template: larger blocks have no such code.
  template <int kBlock>
  __device__ __forceinline__ void copy_blocks(u32 buffer, const Item& item, u32 row_group, u32 token) const {
    constexpr int kBytes = Config::kOutBytes, kAcross = Config::kStepColumns / kBlock, kDown = 64 / kBlock;
    constexpr int kRowChunks = kBlock * kBytes / 16, kChunks = kBlock * kRowChunks;
    for (int at = threadIdx.x % 128 / 32; at < kAcross * kDown; at += 4) {
      const int across = at % kAcross, down = at / kAcross, column = (int)token / kBlock + across;
      if (column >= item.count) continue;
      const int place = p.places[(i64)(item.first + column) * Config::kLines + row_group * kDown + down];
      if (place < 0) continue;
      u8* const to = (u8*)p.values + ((i64)item.batch * p.blocks + place) * (kChunks * 16);
      for (int chunk = threadIdx.x % 32; chunk < kChunks; chunk += 32) {
        const int row = down * kBlock + chunk / kRowChunks, cell = across * kBlock + chunk % kRowChunks * (16 / kBytes);
        float v[4];
        load_shared_x4(v, buffer + staged_at(row, cell));
        *(float4*)(to + chunk * 16) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

extern "C" __global__ void S24_CLUSTER __launch_bounds__(Config::kThreads, 1)
    blocks_wgmma(const __grid_constant__ BlocksWgmmaParams p) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const Barriers barriers{base + Config::kBarrierAt};
  const u32 share = blockIdx.x % Config::kShare, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      store_shared(barriers.present(i), 0u);
      barrier_init(barriers.full(i), Config::kFullArrivals);
      barrier_init(barriers.free(i), 4 * Config::kWarpgroups * Config::kShare);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Config::kShare > 1) cluster_sync_relaxed();
  if constexpr (Config::kByLanes) launch_dependent_grids();
  grid_dependency_wait();

  if (warpgroup == Config::kWarpgroups) {
    warpgroup_reg_dealloc<Config::kCopyRegisters>();
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if constexpr (Config::kByLanes)
      SmallCopier{p, base, lane, warp / SmallCopier::kShared, warp % SmallCopier::kShared, barriers}.copy_all();
    else if (warp < 2) Copier<true>{p, base, share, lane, warp, barriers}.copy_all();
    else Copier<false>{p, base, share, lane, warp - 2, barriers}.copy_all();
    // The next kernel starts only now: earlier, its requests would compete for memory with those of this kernel. With
    // small blocks that made no difference.
    if (!Config::kByLanes && warp == 3 && lane == 0) launch_dependent_grids();
  } else {
    warpgroup_reg_alloc<Config::kSumRegisters>();
    const u32 row_group = warpgroup % Config::kRowGroups, token_group = warpgroup / Config::kRowGroups;
    Multiplier multiplier{{{}, base, row_group, token_group, Reporter<Config>(barriers.free(0)), barriers}};
    const u32 staging = base + Config::kStagingAt + warpgroup * Config::kBuffers * Config::kBufferBytes;
    Writer writer{{p, staging, 1 + (int)warpgroup}};
    Sums sums;
    Dealer dealer(p);
    for (u32 turn = 0; turn < turns_of<Config>(p) && dealer.find(p, item_of<Config>(turn)); ++turn) {
      const Item item(p, dealer, item_of<Config>(turn), share);
      multiplier.multiply(sums, item.steps(p));
      writer.write(sums, item, row_group, token_group);
    }
    if (writer.is_copier()) tma_store_wait_read<0>();
  }
}
