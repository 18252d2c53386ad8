// Where the KV of a token lies: in a paged KV cache, and in a chunk buffer.
//
// Owns all index arithmetic of the gather and scatter functions. Host code and CUDA kernels
// include this one header, so that they cannot disagree. Plain integers in, byte offsets out;
// nothing here touches memory. All offsets are 64 bits wide.
//
// A paged cache is described by byte strides, so one descriptor covers every strided layout:
// tokens outside or inside heads, K and V in front of, inside or beside each other, blocks of
// any kernel block size, MLA (kvs = 1, heads = 1), and whole (block, head)s as opaque bytes
// (block_size = 1; a "slot" is then a block id).

#ifndef KVSHELF_PAGED_INDEX_H_
#define KVSHELF_PAGED_INDEX_H_

#include <cstdint>

#if defined(__CUDACC__)
#define KVSHELF_HD __host__ __device__ __forceinline__
#else
#define KVSHELF_HD inline
#endif

namespace kvshelf {

// A slot mapping's way to say "skip this token".
constexpr int64_t kSkippedSlot = -1;

struct PagedIndex {
  // The paged cache of one layer; strides in bytes from the cache's first byte.
  int64_t num_blocks;
  int64_t block_size;  // slots in a block
  int64_t block_stride;
  int64_t token_stride;
  int64_t kv_stride;
  int64_t head_stride;
  int64_t first_head;  // the chunk's head 0 is this head of the cache

  // The chunk buffer; strides in bytes.
  int64_t chunk_layer_stride;
  int64_t chunk_kv_stride;
  int64_t chunk_token_stride;
  int64_t chunk_head_stride;

  // What is copied.
  int64_t layers;
  int64_t kvs;  // 2 = K and V, 1 = single content
  int64_t tokens;
  int64_t heads;
  int64_t row_bytes;  // one (token, kv, head)

  KVSHELF_HD bool slot_in_cache(int64_t slot) const {
    return slot >= 0 && slot < num_blocks * block_size;
  }

  // First byte of a row in its layer's cache.
  KVSHELF_HD int64_t paged_offset(int64_t slot, int64_t kv, int64_t head) const {
    const int64_t block = slot / block_size;
    return block * block_stride + (slot - block * block_size) * token_stride + kv * kv_stride +
           (first_head + head) * head_stride;
  }

  // First byte of a row in the chunk buffer.
  KVSHELF_HD int64_t chunk_offset(int64_t layer, int64_t kv, int64_t token, int64_t head) const {
    return layer * chunk_layer_stride + kv * chunk_kv_stride + token * chunk_token_stride +
           head * chunk_head_stride;
  }

  // True when slots that follow each other are token_stride apart also from the last slot of a
  // block to the first of the next one.
  KVSHELF_HD bool blocks_are_linear() const { return block_stride == block_size * token_stride; }
};

// Fills the chunk strides for the layout of chunk buffers: for each layer
// [kvs, tokens, heads, row_bytes] without gaps, layers one after another.
KVSHELF_HD void set_contiguous_chunk(PagedIndex& index) {
  index.chunk_head_stride = index.row_bytes;
  index.chunk_token_stride = index.heads * index.chunk_head_stride;
  index.chunk_kv_stride = index.tokens * index.chunk_token_stride;
  index.chunk_layer_stride = index.kvs * index.chunk_kv_stride;
}

}  // namespace kvshelf

#endif  // KVSHELF_PAGED_INDEX_H_
