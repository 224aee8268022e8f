// The softmax of each row of a block-sparse matrix over its kept cells, or its gradient. Memory bound: the kept cells
// of a row are read once, held in registers and written once. If a row exceeds the registers, all but its first tile is
// read twice.
//
//   forward    v = x * scale + rpe + key mask + attention mask, y = exp(v - max v) / sum exp(v - max v)
//   backward   dx = y * (dy - sum y * dy) * scale
//
//   role         threads          work
//   team         kWarps warps     a work tile: the kRows rows of a block row that 512 contiguous bytes of a block hold
//   warp         32 threads       every kWarps-th block of a tile of kWarps * kChunks blocks, 512 bytes of each
//   thread                        16 bytes of a row in each of these blocks
//
//   barriers: one for each team, after the rows' maxima and after their sums; none if a team is one warp
//   registers: kChunks vectors of 16 bytes as float32 (backward: two as they are), 128 at most
//
//   forward    persistent teams; while a team computes, cp.async loads the first tile of its next work tile
//     cp.async | work 1 .. | work 2 ..                      | work 3 ..
//     team     |           | maxima | exp | sums | store .. | maxima | exp | ..
//   backward   a team has one work tile: | load .. | sums | store .. |
//   long rows  other tiles: | load, maxima, exp | before the first tile, and | load, exp, store | after it
//
// A row's sum is reduced in an order that depends on its number of blocks alone: by threads over their cells, over the
// lanes of a row by a tree, over the warps from the first to the last.
#include "blocksparse/params/softmax.cuh"
#include "common/element.cuh"
#include "ptx/async.cuh"

// Codes that the host passes.
enum class AttentionMask { NONE = 0, ADD = 1, MUL = 2 };

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr ElementKind kElement = ElementKind(S24_ELEMENT);
  using In = Element<kElement>;
  using Bits = In::Bits;
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kWarps = S24_WARPS;    // warps of a team
  static constexpr int kTeams = S24_TEAMS;    // teams of a CTA
  static constexpr int kChunks = S24_CHUNKS;  // vectors of 16 bytes that a thread holds
  static constexpr bool kBackward = S24_BACKWARD, kRpe = S24_RPE, kCausal = S24_CAUSAL;
  static constexpr AttentionMask kKeyMask = AttentionMask(S24_KEY_MASK), kAttnMask = AttentionMask(S24_ATTN_MASK);
  static constexpr bool kMasks = kRpe || kKeyMask != AttentionMask::NONE || kAttnMask != AttentionMask::NONE;
  static constexpr bool kColumns = kMasks || kCausal;
  static constexpr int kVector = 16 / sizeof(Bits);         // cells
  static constexpr int kLanes = kBlock / kVector;           // lanes of a row
  static constexpr int kRows = 32 / kLanes;                 // rows of a warp, and of its team
  static constexpr int kTeamsPerBlockRow = kBlock / kRows;  // teams that share a block row
  static constexpr int kTile = kWarps * kChunks;            // blocks of a block row that a team holds
  static constexpr int kThreads = 32 * kWarps * kTeams;
  static constexpr int kCtasPerSm = S24_BLOCKS_PER_SM;
  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kPerUnit = sizeof(Bits) == 4 ? 1.0f : kLog2e / 2;  // units that a score of 1 has
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Vectors of 16 bytes --------------------------------------------------------------------------------

using Cells = float[Config::kVector];

__device__ __forceinline__ void widen(const uint4& from, Cells& to) {
  const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < Config::kVector; ++i) {
    if constexpr (sizeof(Config::Bits) == 4) to[i] = Config::In::to_float(words[i]);
    else to[i] = Config::In::to_float((u16)(words[i / 2] >> (16 * (i % 2))));
  }
}

template <class In = Config::In> __device__ __forceinline__ uint4 rounded(const Cells& from) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Config::Bits) == 4) words[i] = In::from_float(canonical_nan(from[i]));
    else words[i] = In::pair(from[2 * i], from[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Places ---------------------------------------------------------------------------------------------

// The blocks of a work tile's block row among the values. Work tiles beyond the last have none.
struct BlockRange {
  int begin, end;

  __device__ __forceinline__ BlockRange(const SoftmaxParams& p, u32 work) : begin(0), end(0) {
    if (work >= p.work_items) return;
    const u32 line = work / Config::kTeamsPerBlockRow / p.batch;
    begin = p.pointers[line], end = p.pointers[line + 1];
  }
};

// The part of a work tile that a thread handles: one vector of each block that its warp has.
struct Place {
  u32 team, warp, lane;
  int count;                     // blocks of the block row
  const int* columns;            // columns of these blocks
  i64 start;                     // cell of the thread's vector in the first block, among the values
  i64 rpe, key_mask, attn_mask;  // cells of its row in these operands, with the vector's column in its block added
  int row;                       // row in its head
  int column;                    // column of the vector in its block

  __device__ __forceinline__ Place(const SoftmaxParams& p, u32 work, const BlockRange& range) {
    const u32 thread = threadIdx.x % (32 * Config::kWarps);
    team = threadIdx.x / (32 * Config::kWarps), warp = thread / 32, lane = thread % 32;
    const u32 part = work % Config::kTeamsPerBlockRow, line = work / Config::kTeamsPerBlockRow / p.batch;
    const u32 batch = work / Config::kTeamsPerBlockRow % p.batch, head = line / p.head_block_rows;
    count = range.end - range.begin;
    columns = p.columns + range.begin;
    start = (batch * p.blocks + range.begin) * (Config::kBlock * Config::kBlock) + (part * 32 + lane) * Config::kVector;
    row = (line - head * p.head_block_rows) * Config::kBlock + part * Config::kRows + lane / Config::kLanes;
    column = lane % Config::kLanes * Config::kVector;
    key_mask = batch * p.row_cells + column;
    attn_mask = (i64)row * p.row_cells + column;
    rpe = (i64)head * p.head_block_rows * Config::kBlock * p.row_cells + attn_mask;
  }

  __device__ __forceinline__ int tiles() const { return (count + Config::kTile - 1) / Config::kTile; }
  // Number of vectors that the thread's warp has in a tile.
  __device__ __forceinline__ int held(int tile) const {
    return (count - tile * Config::kTile - (int)warp + Config::kWarps - 1) / Config::kWarps;
  }
  // Position in the block row of the thread's first block of a tile, and distance to its next block.
  __device__ __forceinline__ int block(int tile) const { return tile * Config::kTile + (int)warp; }
  static constexpr int kStep = Config::kWarps;
  // Cell of the thread's first vector of a tile, among the values.
  __device__ __forceinline__ i64 cell(int tile) const { return start + (i64)block(tile) * kBlockCells; }
  static constexpr int kBlockCells = Config::kBlock * Config::kBlock, kCellStep = kStep * kBlockCells;
};

// Loads bypass L1, because nothing is read twice soon.
__device__ __forceinline__ uint4 load(const void* from, i64 cell) {
  return __ldcg((const uint4*)((const Config::Bits*)from + cell));
}

__device__ __forceinline__ void store(void* to, i64 cell, const Cells& cells) {
  *(uint4*)((Config::Bits*)to + cell) = rounded(cells);
}

// Rows -----------------------------------------------------------------------------------------------

struct Max {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// Reduces a value over a row from the values of its threads. No other call may use the same `partial`.
template <class Reduction>
__device__ __forceinline__ float reduce_row(float v, const Place& at,
                                            float (&partial)[Config::kTeams][Config::kWarps][Config::kRows]) {
#pragma unroll
  for (int step = Config::kLanes / 2; step > 0; step /= 2) v = Reduction::of(v, __shfl_xor_sync(0xffffffffu, v, step));
  if constexpr (Config::kWarps > 1) {
    const u32 row = at.lane / Config::kLanes;
    if (at.lane % Config::kLanes == 0) partial[at.team][at.warp][row] = v;
    asm volatile("bar.sync %0, %1;" ::"r"(at.team), "n"(32 * Config::kWarps) : "memory");
    v = partial[at.team][0][row];
#pragma unroll
    for (int warp = 1; warp < Config::kWarps; ++warp) v = Reduction::of(v, partial[at.team][warp][row]);
  }
  return v;
}

// Partial results of rows by warp. Each reduction of a work tile has its own, so that nothing is overwritten while it
// may still be read.
struct Partials {
  float of[2][Config::kTeams][Config::kWarps][Config::kRows];
};

// Forward --------------------------------------------------------------------------------------------

// Returns exp(d) for d <= 0, in units of 1 / kPerUnit. For 16-bit results the unit is ln 4, so that exp(d) is the
// square of a power of two: this reaches float32's subnormals, which the instruction itself computes more slowly.
__device__ __forceinline__ float exponential(float d) {
  float v;
  if constexpr (sizeof(Config::Bits) == 4) {
    asm("ex2.approx.f32 %0, %1;" : "=f"(v) : "f"(__fmul_rn(d, Config::kLog2e)));
    return v;
  }
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(d));
  return __fmul_rn(v, v);
}

// The first tile of a team's next work tile. A thread reads only what it copied itself.
struct Stage {
  uint4 x[Config::kChunks][Config::kThreads];

  __device__ __forceinline__ void copy(const SoftmaxParams& p, const Place& at) {
    const int held = at.held(0);
    const uint4* from = (const uint4*)((const Config::Bits*)p.x + at.cell(0));
    asm volatile("" ::: "memory");  // keeps earlier reads of the stage in front
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i)
      if (i < held)
        cp_async_16(shared_address(&x[i][threadIdx.x]), from + i * (Place::kCellStep / Config::kVector), true);
    cp_async_commit();
  }
};

template <AttentionMask kMask> __device__ __forceinline__ void add_mask(Cells& v, const void* mask, i64 cell) {
  if constexpr (kMask != AttentionMask::NONE) {
    Cells added;
    widen(*(const uint4*)((const Config::Bits*)mask + cell), added);
#pragma unroll
    for (int i = 0; i < Config::kVector; ++i) {
      if constexpr (kMask == AttentionMask::MUL) added[i] = added[i] == 0.0f ? minus_infinity() : 0.0f;
      v[i] = __fadd_rn(v[i], added[i]);
    }
  }
}

// The scores of a tile's blocks, in units of 1 / kPerUnit, and then their exponentials.
struct Scores {
  Cells v[Config::kChunks];
  int held;  // vectors

  // Loads the scores from memory, or with kStaged from the stage.
  template <bool kStaged>
  __device__ __forceinline__ void load_scores(const SoftmaxParams& p, const Place& at, int tile, const Stage& stage) {
    uint4 x[Config::kChunks];
    held = at.held(tile);
    const int* column = at.columns + at.block(tile);
    const i64 cell = at.cell(tile);
    const float scale = Config::kMasks ? p.scale : __fmul_rn(p.scale, Config::kPerUnit);
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i)
      if (!kStaged && i < held) x[i] = load(p.x, cell + i * Place::kCellStep);
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      if (i >= held) continue;
      widen(kStaged ? stage.x[i][threadIdx.x] : x[i], v[i]);
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c) v[i][c] = __fmul_rn(v[i][c], scale);
      if constexpr (Config::kColumns) add(p, at, column[i * Place::kStep] * Config::kBlock, v[i]);
    }
  }

  static __device__ __forceinline__ void add(const SoftmaxParams& p, const Place& at, int column, Cells& v) {
    if (Config::kMasks && (!Config::kCausal || column + at.column <= at.row)) {
      add_mask<Config::kRpe ? AttentionMask::ADD : AttentionMask::NONE>(v, p.rpe, at.rpe + column);
      add_mask<Config::kKeyMask>(v, p.key_mask, at.key_mask + column);
      add_mask<Config::kAttnMask>(v, p.attn_mask, at.attn_mask + column);
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c) v[c] = __fmul_rn(v[c], Config::kPerUnit);
    }
    if constexpr (Config::kCausal)
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c)
        if (column + at.column + c > at.row) v[c] = minus_infinity();
  }

  __device__ __forceinline__ float largest(float top) const {
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i)
      if (i < held)
#pragma unroll
        for (int c = 0; c < Config::kVector; ++c) top = fmaxf(top, v[i][c]);
    return top;
  }

  // Computes v = exp(v - base) and returns the sum.
  __device__ __forceinline__ float exponentials(float base) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i)
      if (i < held)
#pragma unroll
        for (int c = 0; c < Config::kVector; ++c) sum += v[i][c] = exponential(v[i][c] - base);
    return sum;
  }

  __device__ __forceinline__ void store_tile(const SoftmaxParams& p, const Place& at, int tile, float factor) {
    const i64 cell = at.cell(tile);
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      if (i >= held) continue;
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c) v[i][c] = __fmul_rn(v[i][c], factor);
      store(p.out, cell + i * Place::kCellStep, v[i]);
    }
  }
};

// Returns what is subtracted from scores. If all scores are -Inf, it is 0, so that their exponentials are 0.
__device__ __forceinline__ float base_of(float top) { return top == minus_infinity() ? 0.0f : top; }

// Running maximum and sum of exponentials of a row, for one thread.
struct Running {
  float top = minus_infinity(), sum = 0.0f;

  __device__ __forceinline__ void update(Scores& scores) {
    const float before = top;
    top = scores.largest(top);
    sum *= exponential(before - base_of(top));
    sum += scores.exponentials(base_of(top));
  }
};

// Finishes the whole row. The registers hold the first tile's exponentials, relative to the thread's own base.
__device__ __forceinline__ void finish(const SoftmaxParams& p, const Place& at, Scores& scores, const Running& running,
                                       Partials& partial, const Stage& stage) {
  // The maximum of a row is never NaN, but the exponential of a NaN is NaN and makes the sum NaN.
  const float base = base_of(reduce_row<Max>(running.top, at, partial.of[0]));
  const float shift = exponential(running.top - base);
  const float total = reduce_row<Sum>(running.sum * shift, at, partial.of[1]);
  const float factor = total == 0.0f ? 0.0f : __frcp_rn(total);
  scores.store_tile(p, at, 0, shift * factor);
#pragma unroll 1
  for (int tile = 1; tile < at.tiles(); ++tile) {
    scores.load_scores<false>(p, at, tile, stage);
    scores.exponentials(base);
    scores.store_tile(p, at, tile, factor);
  }
}

// While a team computes one work tile, the first tile of its next one is loaded.
__device__ __forceinline__ void forward(const SoftmaxParams& p, u32 work, Partials& partial, Stage& stage) {
  const u32 step = gridDim.x * Config::kTeams;
  Place at(p, work, BlockRange(p, work));
  stage.copy(p, at);
  BlockRange range(p, work + step);
#pragma unroll 1
  while (work < p.work_items) {
    Scores scores;
    Running running;
#pragma unroll 1
    for (int tile = at.tiles() - 1; tile > 0; --tile) {
      scores.load_scores<false>(p, at, tile, stage);
      running.update(scores);
    }
    cp_async_wait<0>();
    scores.load_scores<true>(p, at, 0, stage);
    work += step;
    const Place next(p, work, range);
    stage.copy(p, next);
    range = BlockRange(p, work + step);
    if (at.count > 0) {
      running.update(scores);
      finish(p, at, scores, running, partial, stage);
    }
    at = next;
  }
}

// Backward -------------------------------------------------------------------------------------------

struct Gradients {
  uint4 y[Config::kChunks], dy[Config::kChunks];
  int held;

  __device__ __forceinline__ void load_tile(const SoftmaxParams& p, const Place& at, int tile) {
    held = at.held(tile);
    const i64 cell = at.cell(tile);
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      if (i >= held) continue;
      y[i] = load(p.x, cell + i * Place::kCellStep);
      dy[i] = load(p.dy, cell + i * Place::kCellStep);
    }
  }

  __device__ __forceinline__ float products(float sum) const {
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      if (i >= held) continue;
      Cells a, b;
      widen(y[i], a), widen(dy[i], b);
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c) sum = __fmaf_rn(a[c], b[c], sum);
    }
    return sum;
  }

  __device__ __forceinline__ void store_tile(const SoftmaxParams& p, const Place& at, int tile, float total) {
    const i64 cell = at.cell(tile);
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      if (i >= held) continue;
      Cells a, b;
      widen(y[i], a), widen(dy[i], b);
#pragma unroll
      for (int c = 0; c < Config::kVector; ++c) a[c] = __fmul_rn(__fmul_rn(a[c], __fadd_rn(b[c], -total)), p.scale);
      store(p.out, cell + i * Place::kCellStep, a);
    }
  }
};

__device__ __forceinline__ void backward(const SoftmaxParams& p, u32 work, Partials& partial) {
  const Place at(p, work, BlockRange(p, work));
  if (at.count == 0) return;
  Gradients gradients;
  float sum = 0.0f;
#pragma unroll 1
  for (int tile = at.tiles() - 1; tile >= 0; --tile) {
    gradients.load_tile(p, at, tile);
    sum = gradients.products(sum);
  }
  const float total = reduce_row<Sum>(sum, at, partial.of[0]);
  gradients.store_tile(p, at, 0, total);
#pragma unroll 1
  for (int tile = 1; tile < at.tiles(); ++tile) {
    gradients.load_tile(p, at, tile);
    gradients.store_tile(p, at, tile, total);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    softmax(const __grid_constant__ SoftmaxParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Partials partial;
  launch_dependents_and_wait();
  const u32 work = blockIdx.x * Config::kTeams + threadIdx.x / (32 * Config::kWarps);
  if (work >= p.work_items) return;
  if constexpr (Config::kBackward) backward(p, work, partial);
  else forward(p, work, partial, *(Stage*)shared);
}
