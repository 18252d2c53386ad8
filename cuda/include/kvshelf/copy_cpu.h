// Gather and scatter on the CPU.

#ifndef KVSHELF_COPY_CPU_H_
#define KVSHELF_COPY_CPU_H_

#include <cstdint>

#include "kvshelf/paged_index.h"

namespace kvshelf {

// Answer of gather_cpu and scatter_cpu when every slot was good.
constexpr int64_t kAllSlotsGood = -1;

// Copies rows out of the paged caches into the chunk buffer; rows of skipped tokens become zero.
//
// caches: index.layers addresses; slots: index.tokens slots. All slots are checked first: when
// one is neither kSkippedSlot nor in the cache, its position is returned and nothing has been
// touched. One thread, no locks; allocates a list of at most index.tokens entries.
int64_t gather_cpu(const PagedIndex& index, const int64_t* caches, const int64_t* slots,
                   unsigned char* chunk);

// The other way round; skipped tokens are not written. Of a slot that occurs twice, the last
// token's row stays.
int64_t scatter_cpu(const PagedIndex& index, const int64_t* caches, const int64_t* slots,
                    const unsigned char* chunk);

}  // namespace kvshelf

#endif  // KVSHELF_COPY_CPU_H_
