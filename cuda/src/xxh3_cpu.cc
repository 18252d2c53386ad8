#include "kvshelf/xxh3_cpu.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvshelf {
namespace {

constexpr int64_t kStripe = 64;
constexpr int64_t kStripes = 16;  // of a block
constexpr int64_t kBlock = kStripe * kStripes;
constexpr int64_t kSecretBytes = 192;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;

alignas(64) constexpr uint64_t kSecretWords[kSecretBytes / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
const unsigned char* const kSecret = reinterpret_cast<const unsigned char*>(kSecretWords);

uint64_t word_at(const unsigned char* address) {
  uint64_t word;
  std::memcpy(&word, address, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// Adds stripes; the secret moves on by eight bytes with each.
void add(uint64_t* sums, const unsigned char* input, const unsigned char* secret,
         int64_t stripes) {
  for (int64_t stripe = 0; stripe < stripes; ++stripe, input += kStripe, secret += 8) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t word = word_at(input + 8 * i), key = word ^ word_at(secret + 8 * i);
      sums[i ^ 1] += word;
      sums[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
  }
}

void add_blocks_plainly(uint64_t* sums, const unsigned char* input, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    add(sums, input + block * kBlock, kSecret, kStripes);
    for (int i = 0; i < 8; ++i) {
      const uint64_t key = word_at(kSecret + kSecretBytes - kStripe + 8 * i);
      sums[i] = (sums[i] ^ (sums[i] >> 47) ^ key) * kPrime32_1;
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i load(const void* address) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(address));
}

// The same, four sums at once.
__attribute__((target("avx2"))) void add_blocks_by_avx2(uint64_t* sums, const unsigned char* input,
                                                        int64_t blocks) {
  const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32_1));
  __m256i halves[2] = {load(sums), load(sums + 4)};
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t stripe = 0; stripe < kStripes; ++stripe, input += kStripe) {
      for (int i = 0; i < 2; ++i) {
        const __m256i words = load(input + 32 * i);
        const __m256i keys = _mm256_xor_si256(words, load(kSecret + 8 * stripe + 32 * i));
        const __m256i products = _mm256_mul_epu32(keys, _mm256_srli_epi64(keys, 32));
        const __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
        halves[i] = _mm256_add_epi64(halves[i], _mm256_add_epi64(products, swapped));
      }
    }
    for (int i = 0; i < 2; ++i) {
      const __m256i mixed = _mm256_xor_si256(halves[i], _mm256_srli_epi64(halves[i], 47));
      const __m256i keys =
          _mm256_xor_si256(mixed, load(kSecret + kSecretBytes - kStripe + 32 * i));
      const __m256i low = _mm256_mul_epu32(keys, prime);
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keys, 32), prime);
      halves[i] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), halves[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4), halves[1]);
}

// Whether the processor has AVX2, and the system keeps its registers. The compilers' own test needs a
// runtime that not all of them have.
bool has_avx2() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  unsigned kept, above;
  __asm__("xgetbv" : "=a"(kept), "=d"(above) : "c"(0));
  return (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

const auto add_blocks = has_avx2() ? add_blocks_by_avx2 : add_blocks_plainly;
#else
constexpr auto add_blocks = add_blocks_plainly;
#endif

uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t* sums, const unsigned char* secret, uint64_t value) {
  for (int i = 0; i < 8; i += 2) {
    value += folded_product(sums[i] ^ word_at(secret + 8 * i),
                            sums[i + 1] ^ word_at(secret + 8 * i + 8));
  }
  value = (value ^ (value >> 37)) * 0x165667919E3779F9;
  return value ^ (value >> 32);
}

void write_hex(uint64_t value, char* hex) {
  for (int i = 0; i < 16; ++i) hex[i] = "0123456789abcdef"[(value >> (60 - 4 * i)) & 15];
}

}  // namespace

Xxh3::Xxh3(const unsigned char* input, int64_t bytes)
    : input_(input),
      bytes_(bytes),
      sums_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {}

void Xxh3::advance(int64_t count) {
  // The last block, whole or not, is added by finish().
  const int64_t there = std::min((bytes_ - 1) / kBlock, count / kBlock);
  if (there <= done_) return;
  add_blocks(sums_, input_ + done_ * kBlock, there - done_);
  done_ = there;
}

void Xxh3::finish(char* hex) {
  advance(bytes_);
  const int64_t start = done_ * kBlock;
  add(sums_, input_ + start, kSecret, (bytes_ - 1 - start) / kStripe);
  add(sums_, input_ + bytes_ - kStripe, kSecret + kSecretBytes - kStripe - 7, 1);
  const uint64_t length = static_cast<uint64_t>(bytes_);
  write_hex(merged(sums_, kSecret + kSecretBytes - kStripe - 11, ~(length * kPrime64_2)), hex);
  write_hex(merged(sums_, kSecret + 11, length * kPrime64_1), hex + 16);
}

}  // namespace kvshelf
