// A device made of loops: every block and every thread of a launch, one after another, on the
// host. Built by the tests only, from the same launch plan, kernel body and binding as the CUDA
// library. Its memory can be watched: each load and each store must be aligned and inside a
// declared region, and is counted for each byte; others are counted as violations and not executed.
//
// Not thread-safe: the tests use it on one thread at a time.

#include <tvm/ffi/function.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvshelf/binding.h"
#include "kvshelf/device.h"
#include "kvshelf/launch.h"

namespace kvshelf {
namespace {

constexpr int64_t kProcessors = 2;

struct Region {
  const unsigned char* start;
  size_t bytes;
  uint8_t* loads;   // of each byte; saturating
  uint8_t* stores;
};

std::vector<Region> regions;
bool watching = false;
int64_t violations = 0;  // loads and stores outside all regions, or not aligned
int64_t launches = 0;
int64_t blocks = 0;
int64_t copies = 0;
int64_t last_width = 0;

bool note(const void* address, size_t bytes, bool store) {
  if (!watching) return true;
  const unsigned char* const start = static_cast<const unsigned char*>(address);
  for (const Region& region : regions) {
    if (start < region.start || start + bytes > region.start + region.bytes) continue;
    uint8_t* const counts = (store ? region.stores : region.loads) + (start - region.start);
    for (size_t i = 0; i < bytes; ++i) {
      if (counts[i] < 255) ++counts[i];
    }
    return true;
  }
  ++violations;
  return false;
}

struct WatchedMemory {
  template <typename Vector>
  Vector load(const unsigned char* address) const {
    Vector value{};
    if (note_vector(address, sizeof(Vector), false)) std::memcpy(&value, address, sizeof(Vector));
    return value;
  }
  template <typename Vector>
  void store(unsigned char* address, Vector value) const {
    if (note_vector(address, sizeof(Vector), true)) std::memcpy(address, &value, sizeof(Vector));
  }

 private:
  static bool note_vector(const unsigned char* address, size_t bytes, bool store) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) ++violations;
    return note(address, bytes, store);
  }
};

template <typename Vector, bool kGather>
void run_blocks(const LaunchArguments& arguments, const Grid& grid, const Grid& threads) {
  WatchedMemory memory;
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) {
        for (uint32_t ty = 0; ty < threads.y; ++ty) {
          for (uint32_t tx = 0; tx < threads.x; ++tx) {
            copy_thread<Vector, kGather>(arguments, Grid{x, y, z}, Grid{tx, ty, 0}, memory);
          }
        }
      }
    }
  }
}

template <bool kGather>
bool run_launch(int64_t width, const LaunchArguments& arguments, const Grid& grid,
                const Grid& threads) {
  // What a device would refuse.
  const int64_t block_threads = static_cast<int64_t>(threads.x) * threads.y * threads.z;
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.y > 65535 || grid.z > 65535 ||
      block_threads < 1 || block_threads > kBlockThreads) {
    return false;
  }
  ++launches;
  blocks += static_cast<int64_t>(grid.x) * grid.y * grid.z;
  switch (width) {
    case 16:
      run_blocks<Vector16, kGather>(arguments, grid, threads);
      return true;
    case 8:
      run_blocks<Vector8, kGather>(arguments, grid, threads);
      return true;
    case 4:
      run_blocks<Vector4, kGather>(arguments, grid, threads);
      return true;
    case 2:
      run_blocks<Vector2, kGather>(arguments, grid, threads);
      return true;
    case 1:
      run_blocks<Vector1, kGather>(arguments, grid, threads);
      return true;
    default:
      return false;
  }
}

// From here to the next call of watch: counts[0 … bytes) of loads and stores of each region.
void watch(int64_t start, int64_t bytes, int64_t loads, int64_t stores) {
  watching = true;
  regions.push_back({at<const unsigned char>(start), static_cast<size_t>(bytes),
                     at<uint8_t>(loads), at<uint8_t>(stores)});
}

void unwatch() {
  regions.clear();
  watching = false;
  violations = launches = blocks = copies = last_width = 0;
}

// 0 violations, 1 launches, 2 blocks, 3 copies, 4 width of the last launch.
int64_t seen(int64_t which) {
  const int64_t values[] = {violations, launches, blocks, copies, last_width};
  return which >= 0 && which < 5 ? values[which] : -1;
}

int64_t divide(int64_t n, int64_t divisor) {
  return divider_of(divisor).quotient(static_cast<uint32_t>(n));
}

}  // namespace

const char* device_count(int64_t* count) {
  *count = 1;
  return nullptr;
}

const char* device_processors(int, int64_t* processors) {
  *processors = kProcessors;
  return nullptr;
}

const char* device_launch(bool gather, LaunchPlan& plan, const int64_t* caches, int, void*) {
  last_width = plan.width;
  const bool done = for_each_launch(
      plan, caches, [&](const LaunchArguments& arguments, const Grid& grid, const Grid& threads) {
        return gather ? run_launch<true>(plan.width, arguments, grid, threads)
                      : run_launch<false>(plan.width, arguments, grid, threads);
      });
  return done ? nullptr : "invalid configuration argument";
}

const char* device_copies(void* const* to, const void* const* from, const size_t* bytes,
                          size_t count, int, void*) {
  for (size_t i = 0; i < count; ++i) {
    const bool good = note(from[i], bytes[i], false) && note(to[i], bytes[i], true);
    if (good) std::memcpy(to[i], from[i], bytes[i]);
    ++copies;
  }
  return nullptr;
}

const char* device_kernel(bool, int64_t, int, KernelAttributes* attributes) {
  *attributes = {};
  return nullptr;
}

int64_t device_toolkit() { return 0; }

}  // namespace kvshelf

TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_watch, kvshelf::watch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_unwatch, kvshelf::unwatch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_seen, kvshelf::seen);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_divide, kvshelf::divide);
