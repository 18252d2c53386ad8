// How gather and scatter are laid out over the blocks and threads of a GPU, and what each thread
// does.
//
// Owns the launch plan and the body of the kernels. Everything here is also compiled as plain
// C++: src/copy_cuda.cu runs copy_layers in kernels, emulation/emulate.cc runs it for each block
// and each thread in loops, so that it can be proved without a GPU that every byte is written
// exactly once.
//
// A lane is one vector of one token: (kv, head, vector of the row). A block is a rectangle of
// lanes (x) and tokens (y) of one layer (blockIdx.y); each thread keeps its lane and walks over
// `steps` tokens, kInFlight independent loads at a time. So what depends on the lane is computed
// once, a warp touches rows as a whole, and no thread waits for another.

#ifndef KVSHELF_LAUNCH_H_
#define KVSHELF_LAUNCH_H_

#include <cstdint>

#include "kvshelf/paged_index.h"

namespace kvshelf {

// Addresses of the caches and the slots travel in the kernel's arguments: they need no memory on the
// device that would have to be kept until the last launch, or the last replay of a graph, is over,
// and no copy to the device that would wait behind others. 4 KiB of arguments are allowed
// everywhere; what does not fit takes another launch.
constexpr int64_t kLayersPerLaunch = 128;
constexpr int64_t kSlotsPerLaunch = 512;

constexpr int64_t kBlockThreads = 256;
constexpr int64_t kInFlight = 4;   // loads of one thread under way at once
constexpr int64_t kMostSteps = 16;

// Vectors of the widths that are copied at once.
#if defined(__CUDACC__)
using Vector16 = uint4;
using Vector8 = uint2;
#else
struct alignas(16) Vector16 {
  uint32_t x, y, z, w;
};
struct alignas(8) Vector8 {
  uint32_t x, y;
};
#endif
using Vector4 = uint32_t;
using Vector1 = uint8_t;

// Division by a number that is known before the launch: n / divisor for 0 <= n < 2^31.
//
// With s = ceil(log2(divisor)) and m = ceil(2^(31 + s) / divisor), n * m / 2^(31 + s) exceeds
// n / divisor by less than 1 / divisor for all n < 2^31, so its floor is the quotient.
struct Divider {
  uint32_t multiplier;
  uint32_t divisor;
  uint32_t shift;

  KVSHELF_HD uint32_t quotient(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(n << 1, multiplier);
#else
    const uint32_t high =
        static_cast<uint32_t>((static_cast<uint64_t>(n << 1) * multiplier) >> 32);
#endif
    return high >> shift;
  }
};

// divisor: 1 to 2^31 - 1.
inline Divider divider_of(int64_t divisor) {
  uint32_t shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const uint64_t by = static_cast<uint64_t>(divisor);
  const uint64_t multiplier = ((uint64_t{1} << (31 + shift)) + by - 1) / by;
  return {static_cast<uint32_t>(multiplier), static_cast<uint32_t>(divisor), shift};
}

// Arguments of one launch, by value.
struct LaunchArguments {
  PagedIndex index;
  int64_t first_token;

  unsigned char* buffers;
  int64_t buffer_step;  // bytes in a buffer from a thread's token to its next one

  uint32_t tokens;  // of this launch
  uint32_t layers;
  uint32_t lanes;
  uint32_t lanes_per_block;
  uint32_t rows_per_block;  // tokens beside each other in a block
  uint32_t steps;           // tokens of each thread, a multiple of kInFlight
  uint32_t kv_inside_head;  // order of lanes: (head, kv) rather than (kv, head)

  Divider blocks;       // by block_size
  Divider lane_tiles;   // by the number of blocks that share tokens
  Divider row_vectors;  // by the vectors of a row
  Divider inner;        // by the number of KV planes or heads, whichever is inside
  Divider shard_heads;  // by the heads of a shard

  int64_t caches[kLayersPerLaunch];
  uint32_t starts[kLayersPerLaunch];  // of the layers in a shard's buffer, in vectors
  int32_t slot_values[kSlotsPerLaunch];  // one for each token of this launch
};

// The plan of all launches of a call.
struct LaunchPlan {
  LaunchArguments arguments;  // without what differs by launch
  const int64_t* slots;       // on the host
  const int64_t* starts;      // of the layers in a shard's buffer, in bytes; null: without gaps
  int64_t cache_slots;        // slots in the cache
  int64_t width;              // bytes of a vector: 16, 8, 4 or 1
  int64_t launch_tokens;      // most tokens of a launch
  int64_t launch_layers;      // most layers that are copied beside each other
  int64_t lane_tiles;
  bool empty;      // nothing to launch
  bool too_large;  // more slots or lanes than 31 bits can count, or vectors of a buffer than 32
};

// Where a layer begins in a shard's buffer. starts: as in LaunchPlan.
inline int64_t layer_start(const PagedIndex& index, const int64_t* starts, int64_t layer) {
  return starts == nullptr ? layer * index.buffer_layer_stride : starts[layer];
}

// The widest vector that fits all addresses: every stride that is used, the row, every base. There
// is none of 2 bytes: only rows of an odd number of 2-byte elements would use it.
inline int64_t vector_width(const PagedIndex& index, const int64_t* caches, const int64_t* starts,
                            uintptr_t buffers) {
  uint64_t all = 16 | static_cast<uint64_t>(index.row_bytes) | buffers;
  const auto add = [&all](int64_t count, int64_t stride) {
    if (count > 1) all |= static_cast<uint64_t>(stride);
  };
  for (int64_t layer = 0; layer < index.layers; ++layer) {
    all |= static_cast<uint64_t>(caches[layer] | layer_start(index, starts, layer));
  }
  all |= static_cast<uint64_t>(index.first_head * index.head_stride);
  add(index.num_blocks, index.block_stride);
  add(index.block_size, index.token_stride);
  add(index.kv_planes, index.kv_stride);
  add(index.heads * index.shards, index.head_stride);
  add(index.shards, index.shard_stride);
  // Strides inside a buffer are multiples of row_bytes.
  const int64_t width = static_cast<int64_t>(all & (~all + 1));
  return width == 2 ? 1 : width;
}

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Plans the launches of a call.
//
// starts, slots: as in LaunchPlan, slots good ones. processors: multiprocessors of the device.
inline LaunchPlan make_plan(const PagedIndex& index, const int64_t* caches, const int64_t* starts,
                            const int64_t* slots, unsigned char* buffers, int64_t processors) {
  LaunchPlan plan{};
  plan.width = vector_width(index, caches, starts, reinterpret_cast<uintptr_t>(buffers));
  plan.slots = slots;
  plan.starts = starts;
  plan.cache_slots = index.num_blocks * index.block_size;
  LaunchArguments& a = plan.arguments;
  a.index = index;
  a.buffers = buffers;

  const int64_t row_vectors = index.row_bytes / plan.width;
  const int64_t all_heads = index.shards * index.heads;
  const int64_t lanes = index.kv_planes * all_heads * row_vectors;
  plan.empty = lanes == 0 || index.tokens == 0 || index.layers == 0;
  plan.too_large = lanes > INT32_MAX || plan.cache_slots > INT32_MAX;
  for (int64_t layer = 0; layer < index.layers; ++layer) {
    plan.too_large |= layer_start(index, starts, layer) / plan.width > UINT32_MAX;
  }
  if (plan.empty || plan.too_large) return plan;

  plan.launch_tokens = smaller(index.tokens, kSlotsPerLaunch);

  const int64_t lane_tiles = ceil_div(lanes, kBlockThreads);
  const int64_t lanes_per_block = ceil_div(lanes, lane_tiles);
  int64_t rows = kBlockThreads / lanes_per_block;
  if (rows > plan.launch_tokens) rows = plan.launch_tokens;
  // Long enough to pay for a thread's start, short enough for two blocks on each processor.
  int64_t steps = kMostSteps;
  plan.launch_layers = smaller(index.layers, kLayersPerLaunch);
  const int64_t beside = lane_tiles * plan.launch_layers;
  while (steps > kInFlight && ceil_div(plan.launch_tokens, rows * steps) * beside < 2 * processors) {
    steps /= 2;
  }
  plan.lane_tiles = lane_tiles;
  plan.too_large = ceil_div(plan.launch_tokens, rows * steps) * lane_tiles > INT32_MAX;
  if (plan.too_large) return plan;

  a.buffer_step = rows * index.buffer_token_stride;
  a.lanes = static_cast<uint32_t>(lanes);
  a.lanes_per_block = static_cast<uint32_t>(lanes_per_block);
  a.rows_per_block = static_cast<uint32_t>(rows);
  a.steps = static_cast<uint32_t>(steps);
  // Lanes in the order of the cache: what lies beside each other there is touched by one warp.
  a.kv_inside_head = index.kv_stride < index.head_stride;
  a.blocks = divider_of(index.block_size);
  a.lane_tiles = divider_of(lane_tiles);
  a.row_vectors = divider_of(row_vectors);
  a.inner = divider_of(a.kv_inside_head ? index.kv_planes : all_heads);
  a.shard_heads = divider_of(index.heads);
  return plan;
}

// Lets a launch have at most `most` blocks, each of which copies more: they leave the other
// multiprocessors to others. There are as many as share the lanes of a token in any case.
inline void limit_blocks(LaunchPlan& plan, int64_t most) {
  if (plan.empty || plan.too_large) return;
  LaunchArguments& a = plan.arguments;
  const auto token_tiles = [&] {
    return ceil_div(plan.launch_tokens, int64_t{a.rows_per_block} * a.steps);
  };
  while (token_tiles() > 1 && token_tiles() * plan.lane_tiles * plan.launch_layers > most) {
    a.steps *= 2;
  }
  const int64_t beside = most / (token_tiles() * plan.lane_tiles);
  plan.launch_layers = smaller(plan.launch_layers, beside > 1 ? beside : 1);
}

struct Grid {
  uint32_t x, y;
};

// Calls launch(arguments, grid, threads) for each launch of a plan; stops at the first that
// returns false.
template <typename Launch>
bool for_each_launch(LaunchPlan& plan, const int64_t* caches, const Launch& launch) {
  LaunchArguments& a = plan.arguments;
  const PagedIndex& index = a.index;
  if (plan.empty) return true;
  for (int64_t token = 0; token < index.tokens; token += plan.launch_tokens) {
    const int64_t tokens = smaller(plan.launch_tokens, index.tokens - token);
    a.first_token = token;
    a.tokens = static_cast<uint32_t>(tokens);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t slot = plan.slots[token + i];
      a.slot_values[i] =
          static_cast<int32_t>(slot >= 0 && slot < plan.cache_slots ? slot : kSkippedSlot);
    }
    const int64_t tiles = ceil_div(tokens, int64_t{a.rows_per_block} * a.steps);
    for (int64_t layer = 0; layer < index.layers; layer += kLayersPerLaunch) {
      const int64_t layers = smaller(kLayersPerLaunch, index.layers - layer);
      a.layers = static_cast<uint32_t>(layers);
      for (int64_t i = 0; i < layers; ++i) {
        a.caches[i] = caches[layer + i];
        a.starts[i] = static_cast<uint32_t>(layer_start(index, plan.starts, layer + i) / plan.width);
      }
      const Grid grid{static_cast<uint32_t>(tiles * plan.lane_tiles),
                      static_cast<uint32_t>(smaller(layers, plan.launch_layers))};
      const Grid threads{a.lanes_per_block, a.rows_per_block};
      if (!launch(static_cast<const LaunchArguments&>(a), grid, threads)) return false;
    }
  }
  return true;
}

#if defined(__CUDA_ARCH__)
#define KVSHELF_UNROLL _Pragma("unroll")
#else
#define KVSHELF_UNROLL
#endif

// What one thread does in one layer. Memory has load<Vector>(address) and store(address, value).
template <typename Vector, bool kGather, typename Memory>
KVSHELF_HD void copy_thread(const LaunchArguments& a, const Grid& block, const Grid& thread,
                            Memory& memory) {
  const uint32_t token_tile = a.lane_tiles.quotient(block.x);
  const uint32_t lane_tile = block.x - token_tile * a.lane_tiles.divisor;
  const uint32_t lane = lane_tile * a.lanes_per_block + thread.x;
  if (lane >= a.lanes) return;

  const uint32_t row = a.row_vectors.quotient(lane);
  const uint32_t outer = a.inner.quotient(row);
  const uint32_t inner = row - outer * a.inner.divisor;
  const uint32_t head = a.kv_inside_head ? outer : inner;
  const uint32_t kv = a.kv_inside_head ? inner : outer;
  const uint32_t shard = a.shard_heads.quotient(head);
  const int64_t in_row =
      static_cast<int64_t>(lane - row * a.row_vectors.divisor) * int64_t{sizeof(Vector)};
  uint32_t token = token_tile * a.rows_per_block * a.steps + thread.y;

  const PagedIndex& index = a.index;
  unsigned char* const paged =
      reinterpret_cast<unsigned char*>(a.caches[block.y]) + index.row_offset(kv, head) + in_row;
  unsigned char* buffer = a.buffers + a.starts[block.y] * int64_t{sizeof(Vector)} +
                          index.buffer_offset(shard, 0, kv, a.first_token + token,
                                              head - shard * a.shard_heads.divisor) +
                          in_row;

  for (uint32_t done = 0; done < a.steps; done += kInFlight) {
    // Beyond the last token, that one's slot: loads without a condition are issued together.
    uint32_t tokens[kInFlight];
    int32_t slots[kInFlight];
    KVSHELF_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      tokens[i] = token + static_cast<uint32_t>(i) * a.rows_per_block;
      const uint32_t last = a.tokens - 1;
      slots[i] = a.slot_values[tokens[i] < last ? tokens[i] : last];
    }

    bool good[kInFlight];
    int64_t offsets[kInFlight];
    Vector values[kInFlight];
    KVSHELF_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      good[i] = tokens[i] < a.tokens && slots[i] >= 0;
      const uint32_t slot = good[i] ? static_cast<uint32_t>(slots[i]) : 0;
      const uint32_t id = a.blocks.quotient(slot);
      offsets[i] = index.slot_offset(id, slot - id * a.blocks.divisor);
      values[i] = Vector{};
      if (good[i]) {
        values[i] =
            memory.template load<Vector>(kGather ? paged + offsets[i] : buffer + i * a.buffer_step);
      }
    }

    KVSHELF_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (kGather) {
        if (tokens[i] < a.tokens) memory.store(buffer + i * a.buffer_step, values[i]);
      } else {
        if (good[i]) memory.store(paged + offsets[i], values[i]);
      }
    }
    token += kInFlight * a.rows_per_block;
    buffer += kInFlight * a.buffer_step;
  }
}

// What one thread does: its block's layer, and those of the blocks that a limited grid lacks.
template <typename Vector, bool kGather, typename Memory>
KVSHELF_HD void copy_layers(const LaunchArguments& a, const Grid& grid, const Grid& block,
                            const Grid& thread, Memory& memory) {
  for (uint32_t layer = block.y; layer < a.layers; layer += grid.y) {
    copy_thread<Vector, kGather>(a, Grid{block.x, layer}, thread, memory);
  }
}

}  // namespace kvshelf

#endif  // KVSHELF_LAUNCH_H_
