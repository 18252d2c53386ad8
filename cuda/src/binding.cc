// What kvshelf.ops calls on the CPU: gather and scatter over plain addresses, exported through the
// stable C ABI of apache-tvm-ffi (which releases the GIL around each call). No torch in here.

#include "kvshelf/binding.h"

#include <tvm/ffi/function.h>

#include <cstdint>

#include "kvshelf/copy_cpu.h"
#include "kvshelf/pieces.h"

namespace {

using kvshelf::at;

// Raised whenever the arguments of an exported function change, so that kvshelf.ops never calls a
// library of another version; kvshelf.ops holds the same number.
constexpr int64_t kLibraryVersion = 2;

int64_t version() { return kLibraryVersion; }

// index: address of its 16 integers; caches: address of one address for each layer; slots:
// address of chunks × tokens slots; buffers: address of the first buffer; bad_slot: address of an
// int64, or 0. Returns -1, or the position of the first bad slot when nothing has been copied.
int64_t gather(int64_t index, int64_t caches, int64_t slots, int64_t buffers, int64_t bad_slot) {
  return kvshelf::gather_cpu(kvshelf::index_at(index), at<const int64_t>(caches),
                             at<const int64_t>(slots), at<unsigned char>(buffers),
                             at<int64_t>(bad_slot));
}

int64_t scatter(int64_t index, int64_t caches, int64_t slots, int64_t buffers, int64_t bad_slot) {
  return kvshelf::scatter_cpu(kvshelf::index_at(index), at<const int64_t>(caches),
                              at<const int64_t>(slots), at<const unsigned char>(buffers),
                              at<int64_t>(bad_slot));
}

// Position of the first of `count` slots that is neither skipped nor one of `cache_slots`, or -1.
int64_t check_slots(int64_t slots, int64_t count, int64_t cache_slots) {
  return kvshelf::first_bad_slot(at<const int64_t>(slots), count, cache_slots);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter, scatter);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_slots, check_slots);
