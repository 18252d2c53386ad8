// What the files that export functions share: how kvshelf.kv.ops hands its arguments over.
//
// The caller has checked everything but the slots' values: addresses are valid for the whole call
// (or until the stream has passed it), strides stay inside the caches, the buffers have exactly
// the size that the counts say.

#ifndef KVSHELF_BINDING_H_
#define KVSHELF_BINDING_H_

#include <cstdint>

#include "kvshelf/paged_index.h"

namespace kvshelf {

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// The index described by kIndexFields integers: the fields of PagedIndex in order of declaration, up to
// shard_stride.
constexpr int64_t kIndexFields = 14;
inline PagedIndex index_at(int64_t address) {
  const int64_t* const fields = at<const int64_t>(address);
  PagedIndex index{};
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
  set_buffer_strides(index);
  return index;
}

}  // namespace kvshelf

#endif  // KVSHELF_BINDING_H_
