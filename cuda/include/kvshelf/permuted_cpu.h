// Gather and scatter, on the CPU, of caches whose elements are permuted inside each (block, head).
//
// vLLM's CPU attention packs K (and on some processors V) of a block for its instruction set. Where
// each element went has been learned; here it is a table of byte offsets.

#ifndef KVSHELF_PERMUTED_CPU_H_
#define KVSHELF_PERMUTED_CPU_H_

#include <cstdint>

namespace kvshelf {

// A table's entry is a unit: this many neighbouring bytes of a row that are neighbours in the
// cache as well. 2 = K and V.
constexpr int64_t kMostKvs = 2;

struct PermutedIndex {
  // The paged cache of one layer; strides in bytes from the cache's first byte.
  int64_t num_blocks;
  int64_t block_size;  // slots in a block
  int64_t block_stride;
  int64_t head_stride;
  int64_t first_head;  // the chunk's head 0 is this head of the cache

  // What is copied: for each layer [kvs, tokens, heads, row_bytes] without gaps.
  int64_t layers;
  int64_t kvs;
  int64_t tokens;
  int64_t heads;
  int64_t row_bytes;

  // For each kv: the size of its units, which divides row_bytes, and a table of int32
  // [block_size, row_bytes / unit]: how far behind the first byte of its (block, head) each unit
  // of a token's row lies.
  int64_t unit[kMostKvs];
  const int32_t* table[kMostKvs];
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
