// Gather and scatter on the CPU: each piece is copied as it is found.

#include "kvshelf/copy_cpu.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kvshelf/pieces.h"

namespace kvshelf {
namespace {

// Near 1 MiB, C libraries switch to stores that bypass the caches. Smaller copies are up to a
// quarter faster here, and leave the chunk in the cache for hashing.
constexpr int64_t kMemcpyBytes = 256 * 1024;

void copy_bytes(unsigned char* to, const unsigned char* from, int64_t bytes) {
  for (int64_t done = 0; done < bytes; done += kMemcpyBytes) {
    std::memcpy(to + done, from + done,
                static_cast<size_t>(std::min(kMemcpyBytes, bytes - done)));
  }
}

template <bool kGather>
int64_t run_all(PagedIndex index, const int64_t* caches, const int64_t* slots,
                unsigned char* buffers) {
  step_over_single_slots(index);
  std::vector<Run> runs;
  runs.reserve(static_cast<size_t>(index.tokens));
  const int64_t bad = find_runs(index, slots, runs);
  if (bad != kAllSlotsGood) return bad;

  for (int64_t layer = 0; layer < index.layers; ++layer) {
    unsigned char* const cache = reinterpret_cast<unsigned char*>(caches[layer]);
    for (const Run& run : runs) {
      for_each_piece(
          index, run, layer,
          [=](int64_t paged, int64_t buffer, int64_t bytes) {
            if constexpr (kGather) {
              copy_bytes(buffers + buffer, cache + paged, bytes);
            } else {
              copy_bytes(cache + paged, buffers + buffer, bytes);
            }
          },
          [=](int64_t buffer, int64_t bytes) {
            if constexpr (kGather) std::memset(buffers + buffer, 0, static_cast<size_t>(bytes));
          });
    }
  }
  return kAllSlotsGood;
}

}  // namespace

int64_t gather_cpu(PagedIndex index, const int64_t* caches, const int64_t* slots,
                   unsigned char* buffers) {
  return run_all<true>(index, caches, slots, buffers);
}

int64_t scatter_cpu(PagedIndex index, const int64_t* caches, const int64_t* slots,
                    const unsigned char* buffers) {
  return run_all<false>(index, caches, slots, const_cast<unsigned char*>(buffers));
}

}  // namespace kvshelf
