// A device made of loops: every block and every thread of a launch, one after another, on the
// host. Built by the tests only, from the same launch plan, kernel body and binding as the CUDA
// library. Its memory can be watched: each load and each store must be aligned and inside a
// declared region, and is counted for each byte; others are counted as violations and not executed.
//
// Device 0 does at once what is enqueued. Other devices are simulated by a function of the tests
// (emulation_simulate), which owns their streams and events, and decides when work is done.
//
// What is watched is not thread-safe: the tests use it on one thread at a time.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
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
int64_t most_blocks = 0;  // of each launch; 0: any number
std::atomic<int64_t> exposed{0};  // waits and questions outside of BesideCaptures
thread_local int beside_captures = 0;

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
  for (uint32_t y = 0; y < grid.y; ++y) {
    for (uint32_t x = 0; x < grid.x; ++x) {
      for (uint32_t ty = 0; ty < threads.y; ++ty) {
        for (uint32_t tx = 0; tx < threads.x; ++tx) {
          copy_layers<Vector, kGather>(arguments, grid, Grid{x, y}, Grid{tx, ty}, memory);
        }
      }
    }
  }
}

// What a device would refuse.
bool refused(const Grid& grid, const Grid& threads) {
  const int64_t block_threads = static_cast<int64_t>(threads.x) * threads.y;
  return grid.x < 1 || grid.y < 1 || grid.y > 65535 || block_threads < 1 ||
         block_threads > kBlockThreads;
}

template <bool kGather>
void run_launch(int64_t width, const LaunchArguments& arguments, const Grid& grid,
                const Grid& threads) {
  ++launches;
  blocks += static_cast<int64_t>(grid.x) * grid.y;
  switch (width) {
    case 16:
      run_blocks<Vector16, kGather>(arguments, grid, threads);
      return;
    case 8:
      run_blocks<Vector8, kGather>(arguments, grid, threads);
      return;
    case 4:
      run_blocks<Vector4, kGather>(arguments, grid, threads);
      return;
    default:
      run_blocks<Vector1, kGather>(arguments, grid, threads);
      return;
  }
}

// --- devices that tests simulate -------------------------------------------------------

// (device, what, a, b, bytes) -> int. Never destroyed: Python may be gone by then.
tvm::ffi::Function& simulator = *new tvm::ffi::Function;
std::mutex mutex;
std::unordered_map<int64_t, std::function<void()>> works;  // enqueued, by token
int64_t next_token = 1;

void simulate(tvm::ffi::Function function) { simulator = std::move(function); }

// Does one piece of work; called by the simulated device.
void run_work(int64_t token) {
  std::function<void()> work;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = works.find(token);
    if (found == works.end()) return;
    work = std::move(found->second);
    works.erase(found);
  }
  work();
}

const char* ask(int device, const char* what, const void* a, const void* b, int64_t bytes,
                int64_t* answer) {
  static std::set<std::string> texts;
  try {
    *answer = simulator(int64_t{device}, tvm::ffi::String(what), reinterpret_cast<int64_t>(a),
                        reinterpret_cast<int64_t>(b), bytes)
                  .cast<int64_t>();
    return nullptr;
  } catch (const tvm::ffi::Error& error) {
    std::string text = error.message();
    const std::string prefix = "CUDA error: ";
    if (text.rfind(prefix, 0) == 0) text.erase(0, prefix.size());
    const std::lock_guard<std::mutex> lock(mutex);
    return texts.insert(text).first->c_str();
  }
}

const char* tell(int device, const char* what, const void* a, const void* b) {
  int64_t answer = 0;
  return device == 0 ? nullptr : ask(device, what, a, b, 0, &answer);
}

const char* make(int device, const char* what, int64_t kind, void** made) {
  int64_t handle = 1;
  if (device != 0) {
    if (const char* error = ask(device, what, reinterpret_cast<void*>(kind), nullptr, 0, &handle)) {
      return error;
    }
  }
  *made = at<void>(handle);
  return nullptr;
}

// bytes: of a copy between host and device; 0 for kernels.
const char* enqueue(int device, void* stream, int64_t bytes, std::function<void()> work) {
  if (device == 0) {
    work();
    return nullptr;
  }
  int64_t token = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    token = next_token++;
    works[token] = std::move(work);
  }
  int64_t answer = 0;
  return ask(device, "work", stream, at<void>(token), bytes, &answer);
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

// 0 violations, 1 launches, 2 blocks, 3 copies, 4 width of the last launch, 5 calls that would make
// the capture of a graph on another thread fail.
int64_t seen(int64_t which) {
  const int64_t values[] = {violations, launches, blocks, copies, last_width, exposed};
  return which >= 0 && which < 6 ? values[which] : -1;
}

void limit(int64_t blocks_of_a_launch) { most_blocks = blocks_of_a_launch; }

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

const char* device_launch(bool gather, LaunchPlan& plan, const int64_t* caches, int device,
                          void* stream) {
  last_width = plan.width;
  if (most_blocks > 0) limit_blocks(plan, most_blocks);
  const char* error = nullptr;
  const int64_t width = plan.width;
  const bool done = for_each_launch(
      plan, caches, [&](const LaunchArguments& arguments, const Grid& grid, const Grid& threads) {
        if (refused(grid, threads)) return false;
        error = enqueue(device, stream, 0, [=] {
          gather ? run_launch<true>(width, arguments, grid, threads)
                 : run_launch<false>(width, arguments, grid, threads);
        });
        return error == nullptr;
      });
  return done || error != nullptr ? error : "invalid configuration argument";
}

const char* device_copies(void* const* to, const void* const* from, const size_t* bytes,
                          size_t count, int device, void* stream) {
  const std::vector<void*> all_to(to, to + count);
  const std::vector<const void*> all_from(from, from + count);
  const std::vector<size_t> sizes(bytes, bytes + count);
  int64_t total = 0;
  for (const size_t size : sizes) total += static_cast<int64_t>(size);
  return enqueue(device, stream, total, [=] {
    for (size_t i = 0; i < all_to.size(); ++i) {
      const bool good = note(all_from[i], sizes[i], false) && note(all_to[i], sizes[i], true);
      if (good) std::memcpy(all_to[i], all_from[i], sizes[i]);
      ++copies;
    }
  });
}

const char* device_new_stream(int device, bool urgent, void** stream) {
  return make(device, "stream", urgent ? 1 : 0, stream);
}

const char* device_new_event(int device, bool timed, void** event) {
  return make(device, "event", timed ? 1 : 0, event);
}

void device_free_stream(int device, void* stream) {
  static_cast<void>(tell(device, "free", stream, nullptr));
}

void device_free_event(int device, void* event) {
  static_cast<void>(tell(device, "free", event, nullptr));
}

const char* device_record(int device, void* event, void* stream) {
  return tell(device, "record", event, stream);
}

const char* device_wait(int device, void* stream, void* event) {
  return tell(device, "wait", stream, event);
}

const char* device_synchronize(int device, void* event) {
  if (beside_captures == 0) ++exposed;
  return tell(device, "synchronize", event, nullptr);
}

const char* device_finish(int device, void* stream) {
  if (beside_captures == 0) ++exposed;
  return tell(device, "finish", stream, nullptr);
}

const char* device_reached(int device, void* event, bool* reached) {
  if (beside_captures == 0) ++exposed;
  int64_t answer = 1;
  const char* const error =
      device == 0 ? nullptr : ask(device, "query", event, nullptr, 0, &answer);
  *reached = answer != 0;
  return error;
}

const char* device_seconds(int device, void* first, void* second, double* seconds) {
  int64_t nanoseconds = 1000;
  const char* const error =
      device == 0 ? nullptr : ask(device, "nanoseconds", first, second, 0, &nanoseconds);
  *seconds = static_cast<double>(nanoseconds) * 1e-9;
  return error;
}

BesideCaptures::BesideCaptures(int device) : device_(device), mode_(beside_captures++) {}
BesideCaptures::~BesideCaptures() { beside_captures = mode_; }

const char* device_kernel(bool, int64_t, int, KernelAttributes* attributes) {
  *attributes = {};
  return nullptr;
}

int64_t device_toolkit() { return 0; }

}  // namespace kvshelf

TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_watch, kvshelf::watch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_unwatch, kvshelf::unwatch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_seen, kvshelf::seen);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_limit, kvshelf::limit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_divide, kvshelf::divide);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_simulate, kvshelf::simulate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(emulation_run, kvshelf::run_work);
