// The xxh3-128 of more than 240 bytes (seed 0, default secret; by its specification), on the CPU and
// as they arrive: bytes that were just read are hashed while they are in the processor's caches.

#ifndef KVSHELF_XXH3_CPU_H_
#define KVSHELF_XXH3_CPU_H_

#include <cstdint>

namespace kvshelf {

// Inputs of so many bytes or fewer are hashed in other ways, which are not here.
constexpr int64_t kShortInput = 240;
constexpr int64_t kHexChars = 32;

class Xxh3 {
 public:
  Xxh3(const unsigned char* input, int64_t bytes);

  // Tells that the first `count` bytes of the input are there.
  void advance(int64_t count);

  // Writes the hash as hexadecimal digits; all bytes are there.
  void finish(char* hex);

 private:
  const unsigned char* input_;
  int64_t bytes_;
  int64_t done_ = 0;  // blocks of 1 KiB
  uint64_t sums_[8];
};

}  // namespace kvshelf

#endif  // KVSHELF_XXH3_CPU_H_
