// The stores and loads of kvshelf.kv.native_copier, exported like the functions of binding.cc.
//
// A copier is named by its address, events and streams by the device's own addresses. Devices are
// numbers. A device error raises RuntimeError with the driver's message.

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvshelf/binding.h"
#include "kvshelf/copier.h"

namespace {

using kvshelf::at;
using kvshelf::Copier;

void check(const char* error) {
  if (error != nullptr) {
    TVM_FFI_THROW(RuntimeError) << "CUDA error: " << error;
  }
}

// runs: for each run of layers the fields of a PagedIndex, the addresses of its caches' addresses and
// of their starts, parts, part, first slot. Returns 0 when the counts exceed what the kernels can count.
int64_t open(int64_t device, int64_t runs_address, int64_t count, int64_t payload_bytes,
             int64_t shards, bool direct, int64_t stream) {
  constexpr int64_t kFields = kvshelf::kIndexFields + 5;
  std::vector<kvshelf::LayerRun> runs;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* const fields = at<const int64_t>(runs_address) + i * kFields;
    kvshelf::LayerRun run{};
    run.index = kvshelf::index_at(runs_address + i * kFields * int64_t{sizeof(int64_t)});
    const int64_t* const rest = fields + kvshelf::kIndexFields;
    const int64_t* const caches = at<const int64_t>(rest[0]);
    run.caches.assign(caches, caches + run.index.layers);
    const int64_t* const starts = at<const int64_t>(rest[1]);
    run.starts.assign(starts, starts + run.index.layers);
    run.parts = rest[2];
    run.part = rest[3];
    run.first_slot = rest[4];
    runs.push_back(std::move(run));
  }
  auto copier = std::make_unique<Copier>(static_cast<int>(device), std::move(runs), payload_bytes,
                                         direct);
  if (!copier->countable(shards)) return 0;
  check(copier->open(at<void>(stream)));
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(copier.release()));
}

void close(int64_t copier) { delete at<Copier>(copier); }

void add_buffer(int64_t copier, int64_t payloads, int64_t stride, bool for_loads) {
  check(at<Copier>(copier)->add_buffer(at<unsigned char>(payloads), stride, for_loads));
}

void limit(int64_t copier, int64_t blocks) { at<Copier>(copier)->limit(blocks); }

void bind(int64_t copier, int64_t run, int64_t caches) {
  at<Copier>(copier)->bind(run, at<const int64_t>(caches));
}

// Returns the number of the chunk, -1 when no buffer is free, -2 minus the position of a bad slot.
int64_t store(int64_t copier, int64_t tokens, int64_t slots, int64_t payloads, int64_t shards,
              int64_t stream) {
  int64_t chunk = 0;
  check(at<Copier>(copier)->store(tokens, at<const int64_t>(slots), at<const int64_t>(payloads),
                                  shards, at<void>(stream), &chunk));
  return chunk;
}

void wait(int64_t copier, int64_t chunk) { check(at<Copier>(copier)->wait(chunk)); }

void forget(int64_t copier, int64_t chunk) { at<Copier>(copier)->forget(chunk); }

void drain(int64_t copier) { at<Copier>(copier)->drain(); }

void run(int64_t copier) { at<Copier>(copier)->run(); }

void stop(int64_t copier) { at<Copier>(copier)->stop(); }

// Returns -1, or the position of a bad slot.
int64_t load(int64_t copier, int64_t tokens, int64_t first_shard, int64_t slots, int64_t payloads,
             int64_t shards, int64_t fence) {
  int64_t bad = 0;
  check(at<Copier>(copier)->load(tokens, first_shard, at<const int64_t>(slots),
                                 at<const int64_t>(payloads), shards, at<void>(fence), &bad));
  return bad;
}

void ask(int64_t copier) { check(at<Copier>(copier)->check()); }

int64_t fence(int64_t copier, int64_t stream) {
  void* event = nullptr;
  check(at<Copier>(copier)->fence(at<void>(stream), &event));
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(event));
}

void unfence(int64_t copier, int64_t event) { at<Copier>(copier)->unfence(at<void>(event)); }

double rate(int64_t copier, bool of_stores) { return at<Copier>(copier)->rate(of_stores); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_open, open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_close, close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_add_buffer, add_buffer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_limit, limit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_bind, bind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_store, store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_wait, wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_forget, forget);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_drain, drain);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_stop, stop);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_load, load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_check, ask);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_fence, fence);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_unfence, unfence);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copier_rate, rate);
