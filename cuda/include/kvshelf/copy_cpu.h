// Gather and scatter on the CPU.

#ifndef KVSHELF_COPY_CPU_H_
#define KVSHELF_COPY_CPU_H_

#include <cstdint>

#include "kvshelf/paged_index.h"

namespace kvshelf {

// Copies rows out of the paged caches into the buffers; rows of skipped tokens become zero.
//
// caches: index.layers addresses; slots: index.tokens slots; buffers: the first shard's buffer.
// Returns kAllSlotsGood, or the position of the first bad slot when nothing has been
// touched. One thread, no locks; allocates a list of at most as many entries as slots.
int64_t gather_cpu(PagedIndex index, const int64_t* caches, const int64_t* slots,
                   unsigned char* buffers);

// The other way round; skipped tokens are not written. Of a slot that occurs twice, the last
// token's row stays.
int64_t scatter_cpu(PagedIndex index, const int64_t* caches, const int64_t* slots,
                    const unsigned char* buffers);

}  // namespace kvshelf

#endif  // KVSHELF_COPY_CPU_H_
