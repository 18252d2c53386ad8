// Gather and scatter, on the CPU, of caches whose elements are permuted inside each (block, head).
//
// vLLM's CPU attention packs K (and on some processors V) of a block for its instruction set. The
// learned place of each element is given here as a table of byte offsets.

#ifndef KVSHELF_PERMUTED_CPU_H_
#define KVSHELF_PERMUTED_CPU_H_

#include <cstdint>

namespace kvshelf {

// K and V. (The tables of a plane consist of units: bytes of a row that are also contiguous in the
// cache.)
constexpr int64_t kMaxKvPlanes = 2;

struct PermutedIndex {
  // The paged cache of one layer; strides in bytes from the cache's first byte.
  int64_t num_blocks;
  int64_t block_size;  // slots in a block
  int64_t block_stride;
  int64_t head_stride;
  int64_t first_head;  // the chunk's head 0 is this head of the cache

  // What is copied: for each layer [kv_planes, tokens, heads, row_bytes] without gaps.
  int64_t layers;
  int64_t kv_planes;
  int64_t tokens;
  int64_t heads;
  int64_t row_bytes;

  // For each KV plane: the size of its units, which divides row_bytes, and a table of int32
  // [block_size, row_bytes / unit]: the byte offset of each unit of a token's row inside its
  // (block, head).
  int64_t unit[kMaxKvPlanes];
  const int32_t* table[kMaxKvPlanes];
};

// As gather_cpu and scatter_cpu (copy_cpu.h): the position of the first bad slot, when nothing
// has been touched, or kAllSlotsGood. A table's offsets must keep its units inside what the
// caller may touch of a (block, head). A scatter writes the bytes of its tokens and no others, so
// that several may write different tokens of one block at once.
int64_t gather_permuted_cpu(const PermutedIndex& index, const int64_t* caches,
                            const int64_t* slots, unsigned char* chunk);
int64_t scatter_permuted_cpu(const PermutedIndex& index, const int64_t* caches,
                             const int64_t* slots, const unsigned char* chunk);

}  // namespace kvshelf

#endif  // KVSHELF_PERMUTED_CPU_H_
