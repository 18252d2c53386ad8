// The CPU functions for kvshelf.kv.ops: gather and scatter with plain addresses, exported through
// the stable C ABI of apache-tvm-ffi, which releases the GIL around each call. No torch.
//
// The caller has checked everything but the slots' values: addresses are valid for the whole call,
// strides stay inside the caches, the buffers have exactly the size that the counts say.

#include <tvm/ffi/function.h>

#include <cstdint>

#include "kvshelf/copy_cpu.h"
#include "kvshelf/permuted_cpu.h"
#include "kvshelf/pieces.h"

namespace {

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// The index described by integers: the fields of PagedIndex in order of declaration, up to
// shard_stride.
kvshelf::PagedIndex index_at(int64_t address) {
  const int64_t* const fields = at<const int64_t>(address);
  kvshelf::PagedIndex index{};
  index.num_blocks = fields[0];
  index.block_size = fields[1];
  index.block_stride = fields[2];
  index.token_stride = fields[3];
  index.kv_stride = fields[4];
  index.head_stride = fields[5];
  index.first_head = fields[6];
  index.layers = fields[7];
  index.tokens = fields[8];
  index.shards = fields[9];
  index.heads = fields[10];
  index.kv_planes = fields[11];
  index.row_bytes = fields[12];
  index.shard_stride = fields[13];
  kvshelf::set_buffer_strides(index);
  return index;
}

// Increased whenever the arguments of an exported function change, so that kvshelf.kv.ops never
// calls a library of another version; kvshelf.kv.ops.library has the same number.
constexpr int64_t kLibraryVersion = 7;

int64_t version() { return kLibraryVersion; }

// index: address of its integers; caches: address of one address for each layer; slots: address of
// one slot for each token; buffers: address of the first buffer. Returns -1, or the position of the
// first bad slot when nothing has been copied.
int64_t gather(int64_t index, int64_t caches, int64_t slots, int64_t buffers) {
  return kvshelf::gather_cpu(index_at(index), at<const int64_t>(caches),
                             at<const int64_t>(slots), at<unsigned char>(buffers));
}

int64_t scatter(int64_t index, int64_t caches, int64_t slots, int64_t buffers) {
  return kvshelf::scatter_cpu(index_at(index), at<const int64_t>(caches),
                              at<const int64_t>(slots), at<const unsigned char>(buffers));
}

// Gather and scatter of one chunk for caches that are permuted inside each (block, head). caches,
// slots and the result as above; chunk: address of the chunk buffer; tables: address of the int32
// tables of all KV planes, one after another; unit_k, unit_v: bytes of the units of each plane.
kvshelf::PermutedIndex make_permuted_index(int64_t tables, int64_t layers, int64_t tokens,
                                           int64_t num_blocks, int64_t block_size,
                                           int64_t block_stride, int64_t head_stride,
                                           int64_t kv_planes, int64_t first_head, int64_t heads,
                                           int64_t row_bytes, int64_t unit_k, int64_t unit_v) {
  kvshelf::PermutedIndex index{};
  index.num_blocks = num_blocks;
  index.block_size = block_size;
  index.block_stride = block_stride;
  index.head_stride = head_stride;
  index.first_head = first_head;
  index.layers = layers;
  index.kv_planes = kv_planes;
  index.tokens = tokens;
  index.heads = heads;
  index.row_bytes = row_bytes;
  const int32_t* table = at<const int32_t>(tables);
  const int64_t units[kvshelf::kMaxKvPlanes] = {unit_k, unit_v};
  for (int64_t kv = 0; kv < kv_planes; ++kv) {
    index.unit[kv] = units[kv];
    index.table[kv] = table;
    table += block_size * (row_bytes / units[kv]);
  }
  return index;
}

int64_t gather_permuted(int64_t caches, int64_t slots, int64_t chunk, int64_t tables,
                        int64_t layers, int64_t tokens, int64_t num_blocks, int64_t block_size,
                        int64_t block_stride, int64_t head_stride, int64_t kv_planes,
                        int64_t first_head, int64_t heads, int64_t row_bytes, int64_t unit_k,
                        int64_t unit_v) {
  return kvshelf::gather_permuted_cpu(
      make_permuted_index(tables, layers, tokens, num_blocks, block_size, block_stride,
                          head_stride, kv_planes, first_head, heads, row_bytes, unit_k, unit_v),
      at<const int64_t>(caches), at<const int64_t>(slots), at<unsigned char>(chunk));
}

int64_t scatter_permuted(int64_t caches, int64_t slots, int64_t chunk, int64_t tables,
                         int64_t layers, int64_t tokens, int64_t num_blocks, int64_t block_size,
                         int64_t block_stride, int64_t head_stride, int64_t kv_planes,
                         int64_t first_head, int64_t heads, int64_t row_bytes, int64_t unit_k,
                         int64_t unit_v) {
  return kvshelf::scatter_permuted_cpu(
      make_permuted_index(tables, layers, tokens, num_blocks, block_size, block_stride,
                          head_stride, kv_planes, first_head, heads, row_bytes, unit_k, unit_v),
      at<const int64_t>(caches), at<const int64_t>(slots), at<const unsigned char>(chunk));
}

// Position of the first of `count` slots that is neither skipped nor in the cache, or -1.
int64_t check_slots(int64_t slots, int64_t count, int64_t cache_slots) {
  return kvshelf::first_bad_slot(at<const int64_t>(slots), count, cache_slots);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter, scatter);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_permuted, gather_permuted);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter_permuted, scatter_permuted);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_slots, check_slots);
