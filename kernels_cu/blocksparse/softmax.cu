// The softmax of each row of a block-sparse matrix over its kept cells, or its gradient. Memory bound: what a row keeps
// is read once, held in registers and written once; of a row beyond the registers all but the first tile is read twice.
//
//   forward    v = x * scale + rpe + key mask + attention mask, y = exp(v - max v) / sum exp(v - max v)
//   backward   dx = y * (dy - sum y * dy) * scale
//
//   role         who              what
//   every team   kWarps warps     the kRows rows of a line that 512 contiguous bytes of a block hold: an item
//   every warp   32 threads       of a tile of kWarps * kChunks blocks every kWarps-th, 512 bytes each
//   every thread                  16 bytes of a row in each of them
//
//   barriers: a team's own, after the rows' maxima and after their sums; none where it is a warp
//   registers: kChunks vectors of 16 bytes as float32 (backward: two as they are), 128 at most
//
//   forward    a team stays for many items; while it works on one, the first tile of the next comes to shared memory
//     copies   | item 1 .. | item 2 ..                      | item 3 ..
//     team     |           | maxima | exp | sums | store .. | maxima | exp | ..
//   backward   a team has one item: | load .. | sums | store .. |
//   of a long row, other tiles of the item: | load, maxima, exp | before the first, and | load, exp, store | after it
//
// A row's sum is folded in an order that its number of blocks gives: by threads over their cells, over the lanes of a
// row by a tree, over the warps from the first to the last.
#include "blocksparse/params/softmax.cuh"
#include "common/element.cuh"
#include "ptx/async.cuh"

// Words of the host, by the numbers that it passes.
enum class AttentionMask { NONE = 0, ADD = 1, MUL = 2 };

// Everything that is compiled in.
struct Config {
  static constexpr ElementKind kElement = ElementKind(S24_ELEMENT);
  using In = Element<kElement>;
  using Bits = In::Bits;
  static constexpr int kBlock = S24_BLOCK;
  static constexpr int kWarps = S24_WARPS;    // of a team
  static constexpr int kTeams = S24_TEAMS;    // of a block of threads
  static constexpr int kChunks = S24_CHUNKS;  // vectors of 16 bytes that a thread holds
  static constexpr bool kBackward = S24_BACKWARD, kRpe = S24_RPE, kCausal = S24_CAUSAL;
  static constexpr AttentionMask kKeyMask = AttentionMask(S24_KEY_MASK), kAttnMask = AttentionMask(S24_ATTN_MASK);
  static constexpr bool kMasks = kRpe || kKeyMask != AttentionMask::NONE || kAttnMask != AttentionMask::NONE;
  static constexpr bool kColumns = kMasks || kCausal;
  static constexpr int kVector = 16 / sizeof(Bits);  // cells
  static constexpr int kLanes = kBlock / kVector;    // of a row
  static constexpr int kRows = 32 / kLanes;          // of a warp, and of its team
  static constexpr int kParts = kBlock / kRows;      // teams that share a line
  static constexpr int kTile = kWarps * kChunks;     // blocks of a line that a team holds
  static constexpr int kThreads = 32 * kWarps * kTeams;
  static constexpr int kBlocksPerSm = S24_BLOCKS_PER_SM;
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

// Of an item's line, among the values. Items beyond the last have none.
struct Ends {
  int begin, end;

  __device__ __forceinline__ Ends(const SoftmaxParams& p, u32 item) : begin(0), end(0) {
    if (item >= p.work_items) return;
    const u32 line = item / Config::kParts / p.batch;
    begin = p.pointers[line], end = p.pointers[line + 1];
  }
};

// What a thread works on: a vector of each block that is its warp's.
struct Place {
  u32 team, warp, lane;
  int count;                     // blocks of the line
  const int* columns;            // of the line's blocks
  i64 start;                     // of the thread's vector in the line's first block, among the values
  i64 rpe, key_mask, attn_mask;  // of its row's first cell of those; the vector's place in its block included
  int row;                       // in its head
  int column;                    // of the vector in its block

  __device__ __forceinline__ Place(const SoftmaxParams& p, u32 item, const Ends& ends) {
    const u32 thread = threadIdx.x % (32 * Config::kWarps);
    team = threadIdx.x / (32 * Config::kWarps), warp = thread / 32, lane = thread % 32;
    const u32 part = item % Config::kParts, line = item / Config::kParts / p.batch;
    const u32 batch = item / Config::kParts % p.batch, head = line / p.head_block_rows;
    count = ends.end - ends.begin;
    columns = p.columns + ends.begin;
    start = (batch * p.blocks + ends.begin) * (Config::kBlock * Config::kBlock) + (part * 32 + lane) * Config::kVector;
    row = (line - head * p.head_block_rows) * Config::kBlock + part * Config::kRows + lane / Config::kLanes;
    column = lane % Config::kLanes * Config::kVector;
    key_mask = batch * p.row_cells + column;
    attn_mask = (i64)row * p.row_cells + column;
    rpe = (i64)head * p.head_block_rows * Config::kBlock * p.row_cells + attn_mask;
  }

  __device__ __forceinline__ int tiles() const { return (count + Config::kTile - 1) / Config::kTile; }
  // Vectors of a tile that there are for the thread's warp.
  __device__ __forceinline__ int held(int tile) const {
    return (count - tile * Config::kTile - (int)warp + Config::kWarps - 1) / Config::kWarps;
  }
  // Of the thread's vectors in a tile, the blocks' places in the line: the first's, and the distance of the next.
  __device__ __forceinline__ int block(int tile) const { return tile * Config::kTile + (int)warp; }
  static constexpr int kStep = Config::kWarps;
  // Where they lie among the values, in cells.
  __device__ __forceinline__ i64 cell(int tile) const { return start + (i64)block(tile) * kBlockCells; }
  static constexpr int kBlockCells = Config::kBlock * Config::kBlock, kCellStep = kStep * kBlockCells;
};

// Past L1: nothing is read twice soon.
__device__ __forceinline__ uint4 load(const void* from, i64 cell) {
  return __ldcg((const uint4*)((const Config::Bits*)from + cell));
}

__device__ __forceinline__ void store(void* to, i64 cell, const Cells& cells) {
  *(uint4*)((Config::Bits*)to + cell) = rounded(cells);
}

// Rows -----------------------------------------------------------------------------------------------

struct Largest {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// Of a row, from what each of its threads has. `partial` is of this call alone.
template <class Fold>
__device__ __forceinline__ float over_row(float v, const Place& at,
                                          float (&partial)[Config::kTeams][Config::kWarps][Config::kRows]) {
#pragma unroll
  for (int step = Config::kLanes / 2; step > 0; step /= 2) v = Fold::of(v, __shfl_xor_sync(0xffffffffu, v, step));
  if constexpr (Config::kWarps > 1) {
    const u32 row = at.lane / Config::kLanes;
    if (at.lane % Config::kLanes == 0) partial[at.team][at.warp][row] = v;
    asm volatile("bar.sync %0, %1;" ::"r"(at.team), "n"(32 * Config::kWarps) : "memory");
    v = partial[at.team][0][row];
#pragma unroll
    for (int warp = 1; warp < Config::kWarps; ++warp) v = Fold::of(v, partial[at.team][warp][row]);
  }
  return v;
}

// Of a row by warps; one for each fold of an item, so that nothing is written where it may still be read.
struct Partials {
  float of[2][Config::kTeams][Config::kWarps][Config::kRows];
};

// Forward --------------------------------------------------------------------------------------------

// exp(d), d <= 0; d is in units of 1 / kPerUnit. Where results have 16 bits that is ln 4, so that exp(d) is the square
// of a power of two: it has float32's subnormals, which cost more to get of the instruction itself.
__device__ __forceinline__ float exponential(float d) {
  float v;
  if constexpr (sizeof(Config::Bits) == 4) {
    asm("ex2.approx.f32 %0, %1;" : "=f"(v) : "f"(__fmul_rn(d, Config::kLog2e)));
    return v;
  }
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(d));
  return __fmul_rn(v, v);
}

// The first tile of a team's next item. A thread reads what it has copied itself.
struct Stage {
  uint4 x[Config::kChunks][Config::kThreads];

  __device__ __forceinline__ void copy(const SoftmaxParams& p, const Place& at) {
    const int held = at.held(0);
    const uint4* from = (const uint4*)((const Config::Bits*)p.x + at.cell(0));
    asm volatile("" ::: "memory");  // what was here has been read
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

// The scores of a tile's blocks, in units of 1 / kPerUnit, then their exponentials.
struct Scores {
  Cells v[Config::kChunks];
  int held;  // vectors

  // From memory, or the first one from where it was copied to.
  template <bool kStaged>
  __device__ __forceinline__ void take(const SoftmaxParams& p, const Place& at, int tile, const Stage& stage) {
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

  // v = exp(v - base); returns their sum
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

// What is subtracted of scores: where all are -Inf, their exponentials are 0.
__device__ __forceinline__ float base_of(float top) { return top == minus_infinity() ? 0.0f : top; }

// Scores and exponentials of a row so far, by thread.
struct Running {
  float top = minus_infinity(), sum = 0.0f;

  __device__ __forceinline__ void follow(Scores& scores) {
    const float before = top;
    top = scores.largest(top);
    sum *= exponential(before - base_of(top));
    sum += scores.exponentials(base_of(top));
  }
};

// Of the whole row. The first tile's exponentials, which are of the thread's own base, are in registers.
__device__ __forceinline__ void finish(const SoftmaxParams& p, const Place& at, Scores& scores, const Running& running,
                                       Partials& partial, const Stage& stage) {
  // The largest of a row is no NaN, but a NaN's exponential is one, and makes the sum NaN.
  const float base = base_of(over_row<Largest>(running.top, at, partial.of[0]));
  const float shift = exponential(running.top - base);
  const float total = over_row<Sum>(running.sum * shift, at, partial.of[1]);
  const float factor = total == 0.0f ? 0.0f : __frcp_rn(total);
  scores.store_tile(p, at, 0, shift * factor);
#pragma unroll 1
  for (int tile = 1; tile < at.tiles(); ++tile) {
    scores.take<false>(p, at, tile, stage);
    scores.exponentials(base);
    scores.store_tile(p, at, tile, factor);
  }
}

// While a team works on an item, the first tile of its next one is copied.
__device__ __forceinline__ void forward(const SoftmaxParams& p, u32 item, Partials& partial, Stage& stage) {
  const u32 step = gridDim.x * Config::kTeams;
  Place at(p, item, Ends(p, item));
  stage.copy(p, at);
  Ends ends(p, item + step);
#pragma unroll 1
  while (item < p.work_items) {
    Scores scores;
    Running running;
#pragma unroll 1
    for (int tile = at.tiles() - 1; tile > 0; --tile) {
      scores.take<false>(p, at, tile, stage);
      running.follow(scores);
    }
    cp_async_wait<0>();
    scores.take<true>(p, at, 0, stage);
    item += step;
    const Place next(p, item, ends);
    stage.copy(p, next);
    ends = Ends(p, item + step);
    if (at.count > 0) {
      running.follow(scores);
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

__device__ __forceinline__ void backward(const SoftmaxParams& p, u32 item, Partials& partial) {
  const Place at(p, item, Ends(p, item));
  if (at.count == 0) return;
  Gradients gradients;
  float sum = 0.0f;
#pragma unroll 1
  for (int tile = at.tiles() - 1; tile >= 0; --tile) {
    gradients.load_tile(p, at, tile);
    sum = gradients.products(sum);
  }
  const float total = over_row<Sum>(sum, at, partial.of[0]);
  gradients.store_tile(p, at, 0, total);
#pragma unroll 1
  for (int tile = 1; tile < at.tiles(); ++tile) {
    gradients.load_tile(p, at, tile);
    gradients.store_tile(p, at, tile, total);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    softmax(const __grid_constant__ SoftmaxParams p) {
  extern __shared__ uint4 shared[];
  __shared__ Partials partial;
  launch_dependents_and_wait();
  const u32 item = blockIdx.x * Config::kTeams + threadIdx.x / (32 * Config::kWarps);
  if (item >= p.work_items) return;
  if constexpr (Config::kBackward) backward(p, item, partial);
  else forward(p, item, partial, *(Stage*)shared);
}
