// The xxh3-128 of each tensor of each object in a load buffer, computed on a GPU.
//
// Owns the hash (seed 0, default secret; by its specification) and what each thread of its two
// kernels does. Like launch.h it is also compiled as plain C++, see emulation/emulate.cc. Only the
// run on a GPU that decides whether loads are verified there has these kernels (KVSHELF_DESIGN).
//
// More than 240 bytes are hashed in blocks of 1 KiB: 16 stripes of 64 bytes, each added to eight
// accumulators, which are scrambled behind each block. What a block adds does not depend on the
// blocks before it; only the scrambling has an order. So there are three kernels. sum_thread adds up
// each block by itself, four threads a block, two accumulators each. chain_thread takes these sums
// in order, and adds what is behind the last whole block: eight threads a tensor, one accumulator
// each. finish_thread, one thread a tensor, merges the accumulators. No thread waits for another.
// Tensors that are not aligned to 16 bytes have no sums: chain_thread reads all of them.

#ifndef KVSHELF_XXH3_H_
#define KVSHELF_XXH3_H_

#include <cstdint>

#include "kvshelf/launch.h"

namespace kvshelf {

constexpr int64_t kTensorsPerLaunch = 256;
constexpr int64_t kStripeBytes = 64;
constexpr int64_t kStripes = 16;  // of a block
constexpr int64_t kHashBlock = kStripes * kStripeBytes;
constexpr int64_t kLanes = 8;  // accumulators
constexpr int64_t kPairs = kLanes / 2;
constexpr int64_t kSumBytes = kLanes * 8;  // of a block, or of a tensor in the end
constexpr int64_t kDigestBytes = 16;
constexpr int64_t kLongest = 240;  // of the inputs that are hashed without blocks

// Threads of a block of each kernel.
constexpr int64_t kSumThreads = 512;
constexpr int64_t kChainThreads = 256;
constexpr int64_t kFinishThreads = 32;
// Blocks of one tensor that the threads of a GPU's block add up at once.
constexpr int64_t kTileBlocks = kSumThreads / kPairs;

#if defined(__CUDA_ARCH__)
// In a register: threads that need different words of the arguments at once get them one by one.
#define KVSHELF_KEEP(value) asm volatile("" : "+l"(value))
// No load is put off until its value is needed.
#define KVSHELF_ISSUED __syncwarp(__activemask())
#else
#define KVSHELF_KEEP(value)
#define KVSHELF_ISSUED
#endif

constexpr int64_t kSecretWords = 24;
constexpr int64_t kSecretBytes = kSecretWords * 8;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMix1 = 0x165667919E3779F9, kPrimeMix2 = 0x9FB21C651E98DF25;

// Arguments of the launches for some tensors of all shards, by value. A payload holds them one
// after another.
struct HashArguments {
  const unsigned char* payloads;  // of the first shard
  int64_t shard_stride;
  unsigned char* sums;     // [shards, tiles of a shard, kTileBlocks, kSumBytes]
  unsigned char* ends;     // [shards, tensors, kSumBytes]
  unsigned char* digests;  // [shards, all_tensors, kDigestBytes], canonical
  int64_t all_tensors;
  uint32_t shards;
  uint32_t tensors;
  int64_t starts[kTensorsPerLaunch + 1];
  uint32_t first_tile[kTensorsPerLaunch + 1];
  uint64_t secret[kSecretWords];
  uint64_t initial[kLanes];
};
static_assert(sizeof(HashArguments) <= 4096, "kernel arguments are at most 4 KiB");

// Blocks of an input behind which the accumulators are scrambled; its last byte is in none.
KVSHELF_HD int64_t hash_blocks(int64_t bytes) {
  return bytes <= kLongest ? 0 : (bytes - 1) / kHashBlock;
}

inline int64_t hash_tiles(int64_t bytes) { return ceil_div(hash_blocks(bytes), kTileBlocks); }

inline int64_t sums_bytes(const int64_t* starts, int64_t tensors) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < tensors; ++i) tiles += hash_tiles(starts[i + 1] - starts[i]);
  return tiles * kTileBlocks * kSumBytes;
}

// Bytes that the kernels need beside the digests, for each shard. starts: of all tensors, and the
// end.
inline int64_t hash_room(const int64_t* starts, int64_t tensors) {
  return sums_bytes(starts, tensors) + smaller(tensors, kTensorsPerLaunch) * kSumBytes;
}

// The widest vector for which kernels exist that fits all tensors: 16 bytes or 1.
inline int64_t hash_width(const unsigned char* payloads, int64_t stride, int64_t shards,
                          const int64_t* starts, int64_t tensors) {
  uint64_t all = reinterpret_cast<uintptr_t>(payloads);
  if (shards > 1) all |= static_cast<uint64_t>(stride);
  for (int64_t i = 0; i <= tensors; ++i) all |= static_cast<uint64_t>(starts[i]);
  return all % 16 == 0 ? 16 : 1;
}

// Calls launch(arguments, tiles) for each launch of a call, where tiles is the number of tiles of
// all shards; stops at the first that returns false. room: hash_room for each shard, which all
// launches of a call use.
template <typename Launch>
bool for_each_hash_launch(const unsigned char* payloads, int64_t stride, int64_t shards,
                          const int64_t* starts, int64_t tensors, unsigned char* room,
                          unsigned char* digests, const Launch& launch) {
  static constexpr uint64_t kSecret[kSecretWords] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
      0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
      0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
      0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
      0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
      0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
  };
  static constexpr uint64_t kInitial[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                                kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  HashArguments a{};
  a.payloads = payloads;
  a.shard_stride = stride;
  a.sums = room;
  a.ends = room + shards * sums_bytes(starts, tensors);
  a.all_tensors = tensors;
  a.shards = static_cast<uint32_t>(shards);
  for (int64_t i = 0; i < kSecretWords; ++i) a.secret[i] = kSecret[i];
  for (int64_t i = 0; i < kLanes; ++i) a.initial[i] = kInitial[i];
  for (int64_t first = 0; first < tensors; first += kTensorsPerLaunch) {
    a.tensors = static_cast<uint32_t>(smaller(kTensorsPerLaunch, tensors - first));
    a.digests = digests + first * kDigestBytes;
    for (uint32_t i = 0; i <= a.tensors; ++i) a.starts[i] = starts[first + i];
    for (uint32_t i = 0; i < a.tensors; ++i) {
      a.first_tile[i + 1] =
          a.first_tile[i] + static_cast<uint32_t>(hash_tiles(a.starts[i + 1] - a.starts[i]));
    }
    if (!launch(static_cast<const HashArguments&>(a), shards * a.first_tile[a.tensors])) {
      return false;
    }
  }
  return true;
}

// --- arithmetic --------------------------------------------------------------------

// The product of the lower and the upper half.
KVSHELF_HD uint64_t multiply_halves(uint64_t value) {
  return (value & 0xFFFFFFFF) * (value >> 32);
}

KVSHELF_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

KVSHELF_HD uint64_t folded_product(uint64_t a, uint64_t b) { return (a * b) ^ high_product(a, b); }

KVSHELF_HD uint64_t swapped(uint64_t value) {
  value = (value >> 32) | (value << 32);
  value = ((value >> 16) & 0x0000FFFF0000FFFF) | ((value & 0x0000FFFF0000FFFF) << 16);
  return ((value >> 8) & 0x00FF00FF00FF00FF) | ((value & 0x00FF00FF00FF00FF) << 8);
}

KVSHELF_HD uint64_t avalanche(uint64_t value) {
  value = (value ^ (value >> 37)) * kPrimeMix1;
  return value ^ (value >> 32);
}

KVSHELF_HD uint64_t avalanche_of_few(uint64_t value) {
  value = (value ^ (value >> 33)) * kPrime64_2;
  value = (value ^ (value >> 29)) * kPrime64_3;
  return value ^ (value >> 32);
}

struct Digest {
  uint64_t low, high;
};

struct Words {
  uint64_t first, second;
};

KVSHELF_HD Words words_of(const Vector16& vector) {
  return {vector.x | uint64_t{vector.y} << 32, vector.z | uint64_t{vector.w} << 32};
}

KVSHELF_HD Vector16 vector_of(uint64_t first, uint64_t second) {
  Vector16 vector{};
  vector.x = static_cast<uint32_t>(first);
  vector.y = static_cast<uint32_t>(first >> 32);
  vector.z = static_cast<uint32_t>(second);
  vector.w = static_cast<uint32_t>(second >> 32);
  return vector;
}

// Little-endian, from any address.
template <typename Memory>
KVSHELF_HD uint64_t load_bytes(const unsigned char* address, int64_t bytes, Memory& memory) {
  uint64_t value = 0;
  for (int64_t i = 0; i < bytes; ++i) {
    value |= uint64_t{memory.template load<Vector1>(address + i)} << (8 * i);
  }
  return value;
}

template <typename Memory>
KVSHELF_HD uint64_t load_word(const unsigned char* address, Vector8, Memory& memory) {
  const Vector8 vector = memory.template load<Vector8>(address);
  return vector.x | uint64_t{vector.y} << 32;
}

template <typename Memory>
KVSHELF_HD uint64_t load_word(const unsigned char* address, Vector1, Memory& memory) {
  return load_bytes(address, 8, memory);
}

// Eight bytes of the secret.
KVSHELF_HD uint64_t secret_at(const HashArguments& a, int64_t offset) {
  const int64_t word = offset / 8, shift = offset % 8 * 8;
  if (shift == 0) return a.secret[word];
  return a.secret[word] >> shift | a.secret[word + 1] << (64 - shift);
}

// --- the blocks of 1 KiB -----------------------------------------------------------

// Adds up the blocks of some tiles: those of `block`, one of `blocks` of the launch. All addresses
// are aligned to 16 bytes.
template <typename Memory>
KVSHELF_HD void sum_thread(const HashArguments& a, uint32_t block, uint32_t blocks,
                           uint32_t thread, Memory& memory) {
  const uint32_t pair = thread % kPairs;
  uint64_t keys[kStripes + 1];
  KVSHELF_UNROLL
  for (int i = 0; i <= kStripes; ++i) {
    keys[i] = a.secret[2 * pair + static_cast<uint32_t>(i)];
    KVSHELF_KEEP(keys[i]);
  }

  const uint32_t of_shard = a.first_tile[a.tensors];
  const uint64_t all = uint64_t{of_shard} * a.shards;
  const uint64_t end = all * (block + 1) / blocks;
  uint64_t next = all * block / blocks;
  uint32_t shard = static_cast<uint32_t>(next / of_shard);
  uint32_t tile = static_cast<uint32_t>(next - uint64_t{shard} * of_shard);
  uint32_t tensor = 0;
  for (; next < end; ++next, ++tile) {
    if (tile == of_shard) {
      ++shard;
      tile = tensor = 0;
    }
    while (tile >= a.first_tile[tensor + 1]) ++tensor;

    const int64_t start = a.starts[tensor];
    const int64_t number = int64_t{tile - a.first_tile[tensor]} * kTileBlocks + thread / kPairs;
    if (number >= hash_blocks(a.starts[tensor + 1] - start)) continue;
    const unsigned char* const input =
        a.payloads + shard * a.shard_stride + start + number * kHashBlock + pair * 16;
    Words words[kStripes];
    KVSHELF_UNROLL
    for (int i = 0; i < kStripes; ++i) {
      words[i] = words_of(memory.template load<Vector16>(input + i * kStripeBytes));
    }
    KVSHELF_ISSUED;
    uint64_t first = 0, second = 0;
    KVSHELF_UNROLL
    for (int i = 0; i < kStripes; ++i) {
      first += words[i].second + multiply_halves(words[i].first ^ keys[i]);
      second += words[i].first + multiply_halves(words[i].second ^ keys[i + 1]);
    }
    memory.store(a.sums + (static_cast<int64_t>(next) * kTileBlocks + thread / kPairs) * kSumBytes +
                     pair * 16,
                 vector_of(first, second));
  }
}

// Adds one accumulator's part of a stripe, with the secret from an offset on.
template <typename Vector, typename Memory>
KVSHELF_HD void add_stripe(const HashArguments& a, const unsigned char* stripe, int64_t offset,
                           uint32_t lane, uint64_t& sum, Memory& memory) {
  const uint64_t own = load_word(stripe + 8 * lane, Vector{}, memory);
  const uint64_t other = load_word(stripe + 8 * (lane ^ 1), Vector{}, memory);
  sum += other + multiply_halves(own ^ secret_at(a, offset + 8 * lane));
}

// Computes one accumulator of a tensor. Vector: Vector8, behind sum_thread, or Vector1 without it.
// item: (shard × tensors + tensor) × kLanes + accumulator, of this launch.
template <typename Vector, typename Memory>
KVSHELF_HD void chain_thread(const HashArguments& a, uint32_t item, Memory& memory) {
  constexpr int64_t kAtOnce = 16;
  const uint32_t lane = item % kLanes;
  const uint32_t of_all = item / kLanes;
  const uint32_t shard = of_all / a.tensors;
  const uint32_t tensor = of_all - shard * a.tensors;
  const unsigned char* const input = a.payloads + shard * a.shard_stride + a.starts[tensor];
  const int64_t bytes = a.starts[tensor + 1] - a.starts[tensor];
  if (bytes <= kLongest) return;

  const int64_t blocks = hash_blocks(bytes);
  const int64_t tile = int64_t{shard} * a.first_tile[a.tensors] + a.first_tile[tensor];
  const unsigned char* const sums = a.sums + tile * kTileBlocks * kSumBytes + 8 * lane;
  const uint64_t key = a.secret[kStripes + lane];
  uint64_t sum = a.initial[lane];
  for (int64_t first = 0; first < blocks; first += kAtOnce) {
    uint64_t words[kAtOnce];
    if (sizeof(Vector) == 8) {
      KVSHELF_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        // Beyond the last block, that one's: loads without a condition are issued together.
        const int64_t block = first + i < blocks ? first + i : blocks - 1;
        words[i] = load_word(sums + block * kSumBytes, Vector8{}, memory);
      }
      KVSHELF_ISSUED;
    }
    KVSHELF_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= blocks) break;
      if (sizeof(Vector) == 8) {
        sum += words[i];
      } else {
        const unsigned char* const block = input + (first + i) * kHashBlock;
        for (int64_t j = 0; j < kStripes; ++j) {
          add_stripe<Vector>(a, block + j * kStripeBytes, j * 8, lane, sum, memory);
        }
      }
      sum = (sum ^ (sum >> 47) ^ key) * kPrime32_1;
    }
  }
  const unsigned char* const rest = input + blocks * kHashBlock;
  const int64_t stripes = (bytes - 1 - blocks * kHashBlock) / kStripeBytes;
  KVSHELF_UNROLL
  for (int64_t i = 0; i < kStripes - 1; ++i) {
    if (i < stripes) add_stripe<Vector>(a, rest + i * kStripeBytes, i * 8, lane, sum, memory);
  }
  add_stripe<Vector>(a, input + bytes - kStripeBytes, kSecretBytes - kStripeBytes - 7, lane, sum,
                     memory);
  Vector8 vector{};
  vector.x = static_cast<uint32_t>(sum);
  vector.y = static_cast<uint32_t>(sum >> 32);
  memory.store(a.ends + int64_t{of_all} * kSumBytes + 8 * lane, vector);
}

KVSHELF_HD uint64_t merged(const HashArguments& a, const Words (&sums)[kPairs], int64_t offset,
                           uint64_t value) {
  KVSHELF_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    value += folded_product(sums[i].first ^ secret_at(a, offset + 16 * i),
                            sums[i].second ^ secret_at(a, offset + 16 * i + 8));
  }
  return avalanche(value);
}

template <typename Memory>
KVSHELF_HD Digest digest_of_many(const HashArguments& a, int64_t bytes, const unsigned char* end,
                                 Memory& memory) {
  Words sums[kPairs];
  KVSHELF_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    sums[i] = words_of(memory.template load<Vector16>(end + i * 16));
  }
  const uint64_t length = static_cast<uint64_t>(bytes);
  return {merged(a, sums, 11, length * kPrime64_1),
          merged(a, sums, kSecretBytes - kStripeBytes - 11, ~(length * kPrime64_2))};
}

// --- at most 240 bytes -------------------------------------------------------------

template <typename Memory>
KVSHELF_HD Digest digest_of_up_to_16(const HashArguments& a, const unsigned char* input,
                                     int64_t bytes, Memory& memory) {
  const uint64_t* const secret = a.secret;
  const uint64_t length = static_cast<uint64_t>(bytes);
  if (bytes > 8) {
    const uint64_t first = load_bytes(input, 8, memory);
    uint64_t last = load_bytes(input + bytes - 8, 8, memory);
    const uint64_t mixed = first ^ last ^ secret[4] ^ secret[5];
    last ^= secret[6] ^ secret[7];
    const uint64_t low = mixed * kPrime64_1 + ((length - 1) << 54);
    const uint64_t high = high_product(mixed, kPrime64_1) + last +
                          (last & 0xFFFFFFFF) * (kPrime32_2 - 1);
    const uint64_t folded = low ^ swapped(high);
    return {avalanche(folded * kPrime64_2),
            avalanche(high_product(folded, kPrime64_2) + high * kPrime64_2)};
  }
  if (bytes > 3) {
    const uint64_t keyed =
        (load_bytes(input, 4, memory) | load_bytes(input + bytes - 4, 4, memory) << 32) ^
        secret[2] ^ secret[3];
    const uint64_t factor = kPrime64_1 + (length << 2);
    uint64_t low = keyed * factor;
    const uint64_t high = high_product(keyed, factor) + (low << 1);
    low ^= high >> 3;
    low = (low ^ (low >> 35)) * kPrimeMix2;
    return {low ^ (low >> 28), avalanche(high)};
  }
  if (bytes > 0) {
    const uint64_t packed = load_bytes(input, 1, memory) << 16 |
                            load_bytes(input + bytes / 2, 1, memory) << 24 |
                            load_bytes(input + bytes - 1, 1, memory) | length << 8;
    const uint64_t other = swapped(packed) >> 32;
    const uint64_t rotated = (other << 13 | other >> 19) & 0xFFFFFFFF;
    const uint64_t low = (secret[0] ^ (secret[0] >> 32)) & 0xFFFFFFFF;
    const uint64_t high = (secret[1] ^ (secret[1] >> 32)) & 0xFFFFFFFF;
    return {avalanche_of_few(packed ^ low), avalanche_of_few(rotated ^ high)};
  }
  return {avalanche_of_few(secret[8] ^ secret[9]), avalanche_of_few(secret[10] ^ secret[11])};
}

// Mixes 16 bytes at each of two places into a digest.
template <typename Memory>
KVSHELF_HD void mix(const HashArguments& a, const unsigned char* one, const unsigned char* other,
                    int64_t offset, Digest& digest, Memory& memory) {
  const Words ones{load_bytes(one, 8, memory), load_bytes(one + 8, 8, memory)};
  const Words others{load_bytes(other, 8, memory), load_bytes(other + 8, 8, memory)};
  digest.low += folded_product(ones.first ^ secret_at(a, offset),
                               ones.second ^ secret_at(a, offset + 8));
  digest.low ^= others.first + others.second;
  digest.high += folded_product(others.first ^ secret_at(a, offset + 16),
                                others.second ^ secret_at(a, offset + 24));
  digest.high ^= ones.first + ones.second;
}

template <typename Memory>
KVSHELF_HD Digest digest_of_up_to_240(const HashArguments& a, const unsigned char* input,
                                      int64_t bytes, Memory& memory) {
  const uint64_t length = static_cast<uint64_t>(bytes);
  Digest digest{length * kPrime64_1, 0};
  if (bytes <= 128) {
    for (int64_t i = (bytes - 1) / 32; i >= 0; --i) {
      mix(a, input + 16 * i, input + bytes - 16 * (i + 1), 32 * i, digest, memory);
    }
  } else {
    const auto mix_two = [&](int64_t i, int64_t offset) {
      mix(a, input + 32 * i, input + 32 * i + 16, offset, digest, memory);
    };
    for (int64_t i = 0; i < 4; ++i) mix_two(i, 32 * i);
    digest = {avalanche(digest.low), avalanche(digest.high)};
    for (int64_t i = 4; i < bytes / 32; ++i) mix_two(i, 32 * (i - 4) + 3);
    mix(a, input + bytes - 16, input + bytes - 32, 103, digest, memory);
  }
  return {avalanche(digest.low + digest.high),
          uint64_t{0} - avalanche(digest.low * kPrime64_1 + digest.high * kPrime64_4 +
                                  length * kPrime64_2)};
}

// --- one tensor --------------------------------------------------------------------

// Writes the digest of a tensor. item: shard × tensors + tensor, of this launch.
template <typename Memory>
KVSHELF_HD void finish_thread(const HashArguments& a, uint32_t item, Memory& memory) {
  const uint32_t shard = item / a.tensors;
  const uint32_t tensor = item - shard * a.tensors;
  const unsigned char* const input = a.payloads + shard * a.shard_stride + a.starts[tensor];
  const int64_t bytes = a.starts[tensor + 1] - a.starts[tensor];
  Digest digest{};
  if (bytes <= 16) {
    digest = digest_of_up_to_16(a, input, bytes, memory);
  } else if (bytes <= kLongest) {
    digest = digest_of_up_to_240(a, input, bytes, memory);
  } else {
    digest = digest_of_many(a, bytes, a.ends + int64_t{item} * kSumBytes, memory);
  }
  memory.store(a.digests + (shard * a.all_tensors + tensor) * kDigestBytes,
               vector_of(swapped(digest.high), swapped(digest.low)));
}

}  // namespace kvshelf

#endif  // KVSHELF_XXH3_H_
