// The places of a token's KV in a paged KV cache and in chunk buffers.
//
// Owns the index arithmetic of gather and scatter on CPUs. Integers in, byte offsets out; nothing
// here touches memory. All offsets are 64 bits wide.
//
// A paged cache is described by byte strides, so one descriptor covers every strided layout:
// tokens outside or inside heads, K and V one after the other, nested or interleaved, blocks of
// any kernel block size, MLA (kv_planes = 1, heads = 1), and whole (block, head)s as opaque bytes
// (block_size = 1; a "slot" is then a block id).
//
// One call copies one or several shards of a chunk, of equally many heads. Each shard has its own
// buffer: for each layer [kv_planes, tokens, heads, row_bytes] without gaps, layers one after another.

#ifndef KVSHELF_PAGED_INDEX_H_
#define KVSHELF_PAGED_INDEX_H_

#include <cstdint>

namespace kvshelf {

// The value in a slot mapping that means "skip this token".
constexpr int64_t kSkippedSlot = -1;

// Result of a check of slots: all are valid. Any other result is the position of a bad slot.
constexpr int64_t kAllSlotsGood = -1;

struct PagedIndex {
  // The paged cache of one layer; strides in bytes from the cache's first byte.
  int64_t num_blocks;
  int64_t block_size;  // slots in a block
  int64_t block_stride;
  int64_t token_stride;
  int64_t kv_stride;
  int64_t head_stride;
  int64_t first_head;  // head 0 of the first shard is this head of the cache

  // What is copied.
  int64_t layers;
  int64_t tokens;
  int64_t shards;
  int64_t heads;  // of each shard
  int64_t kv_planes;  // 2 = K and V, 1 = single content
  int64_t row_bytes;  // one (token, kv, head)

  // From one shard's buffer to the next one's, in bytes.
  int64_t shard_stride;

  // Inside a buffer, in bytes; set by set_buffer_strides.
  int64_t buffer_layer_stride;
  int64_t buffer_kv_stride;
  int64_t buffer_token_stride;
  int64_t buffer_head_stride;

  bool slot_in_cache(int64_t slot) const {
    return slot >= 0 && slot < num_blocks * block_size;
  }

  // First byte of a slot's row of kv 0 and head 0 in its layer's cache.
  int64_t slot_offset(int64_t block, int64_t token_in_block) const {
    return block * block_stride + token_in_block * token_stride;
  }

  // From there to the row of a kv and a head, which counts from the first shard's head 0.
  int64_t row_offset(int64_t kv, int64_t head) const {
    return kv * kv_stride + (first_head + head) * head_stride;
  }

  // First byte of a row in the buffers, from the first buffer's first byte.
  int64_t buffer_offset(int64_t shard, int64_t layer, int64_t kv, int64_t token,
                                   int64_t head_in_shard) const {
    return shard * shard_stride + layer * buffer_layer_stride + kv * buffer_kv_stride +
           token * buffer_token_stride + head_in_shard * buffer_head_stride;
  }

  // True if consecutive slots are token_stride apart even across the border of two blocks.
  bool blocks_are_linear() const { return block_stride == block_size * token_stride; }
};

// Fills the strides inside a buffer.
inline void set_buffer_strides(PagedIndex& index) {
  index.buffer_head_stride = index.row_bytes;
  index.buffer_token_stride = index.heads * index.buffer_head_stride;
  index.buffer_kv_stride = index.tokens * index.buffer_token_stride;
  index.buffer_layer_stride = index.kv_planes * index.buffer_kv_stride;
}

}  // namespace kvshelf

#endif  // KVSHELF_PAGED_INDEX_H_
