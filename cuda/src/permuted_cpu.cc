// Gather and scatter of permuted caches: unit by unit according to the table, or many units at a
// time if the table is a transposition or an interleaving.

#include "kvshelf/permuted_cpu.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kvshelf/paged_index.h"

namespace kvshelf {
namespace {

using Byte = unsigned char;

// Tokens that are consecutive in the slot mapping and inside one block; or skipped tokens.
struct Run {
  int64_t token;   // first token
  int64_t length;  // tokens
  int64_t offset;  // of the block's first byte in the cache; kSkippedSlot: skipped
  int64_t first;   // the first token's place in the block
};

// Each slot is read exactly once, so what has been checked is what is used. Runs end where a
// place in the block is a multiple of `longest`.
int64_t find_runs(const PermutedIndex& index, const int64_t* slots, int64_t longest,
                  std::vector<Run>& runs) {
  int64_t next = 0;  // slot that would continue the current run
  int64_t end = -1;  // first slot that cannot belong to it
  bool skipping = false;
  for (int64_t token = 0; token < index.tokens; ++token) {
    const int64_t slot = slots[token];
    if (slot == kSkippedSlot) {
      if (skipping) {
        ++runs.back().length;
      } else {
        runs.push_back({token, 1, kSkippedSlot, 0});
        skipping = true;
        end = -1;
      }
      continue;
    }
    if (slot < 0 || slot >= index.num_blocks * index.block_size) return token;
    if (slot == next && slot < end) {
      ++runs.back().length;
    } else {
      const int64_t block = slot / index.block_size;
      runs.push_back({token, 1, block * index.block_stride, slot - block * index.block_size});
      skipping = false;
      end = std::min(slot + longest - runs.back().first % longest,
                     (block + 1) * index.block_size);
    }
    next = slot + 1;
  }
  return kAllSlotsGood;
}

// The kind of a table.
enum class Form {
  kUnits,        // anything
  kLinear,       // whole rows, one behind the other
  kTransposed,   // kTile neighbouring tokens of a unit are neighbours in the cache
  kInterleaved,  // two neighbouring tokens alternate, for kTile units
};
constexpr int64_t kTile = 8;

Form form_of(const PermutedIndex& index, int64_t kv) {
  const int64_t unit = index.unit[kv];
  const int64_t units = index.row_bytes / unit;
  const int32_t* const table = index.table[kv];
  if (units == 1) {
    int64_t different = 0;
    for (int64_t token = 1; token < index.block_size; ++token) {
      different |= (table[token] - int64_t{table[0]}) ^ (token * unit);
    }
    if (different == 0) return Form::kLinear;
  }
  if (unit > 4 || units % kTile != 0) return Form::kUnits;
  if (index.block_size % kTile == 0) {
    int32_t different = 0;
    for (int64_t token = 0; token < index.block_size && different == 0; token += kTile) {
      const int32_t* const first = table + token * units;
      for (int64_t i = 1; i < kTile; ++i) {
        const int32_t* const row = first + i * units;
        const int32_t step = static_cast<int32_t>(i * unit);
        for (int64_t u = 0; u < units; ++u) different |= row[u] ^ (first[u] + step);
      }
    }
    if (different == 0) return Form::kTransposed;
  }
  if (index.block_size % 2 == 0) {
    int32_t different = 0;
    for (int64_t token = 0; token < index.block_size && different == 0; token += 2) {
      const int32_t* const even = table + token * units;
      const int32_t* const odd = even + units;
      for (int64_t u = 0; u < units; u += kTile) {
        for (int64_t i = 0; i < kTile; ++i) {
          different |= even[u + i] ^ (even[u] + static_cast<int32_t>(2 * i * unit));
          different |= odd[u + i] ^ (even[u + i] + static_cast<int32_t>(unit));
        }
      }
    }
    if (different == 0) return Form::kInterleaved;
  }
  return Form::kUnits;
}

template <bool kGather>
inline void move(Byte* paged, Byte* chunk, size_t bytes) {
  if constexpr (kGather) {
    std::memcpy(chunk, paged, bytes);
  } else {
    std::memcpy(paged, chunk, bytes);
  }
}

// The rows of `tokens` tokens of one (block, head, kv), unit by unit.
template <bool kGather, size_t kUnit>
void copy_units(const int32_t* table, int64_t units, int64_t tokens, Byte* region, Byte* rows,
                int64_t row_stride) {
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t u = 0; u < units; ++u) {
      move<kGather>(region + table[u], rows + u * static_cast<int64_t>(kUnit), kUnit);
    }
    table += units;
    rows += row_stride;
  }
}

template <bool kGather>
void copy_long_units(Form form, const int32_t* table, int64_t units, int64_t unit, int64_t tokens,
                     Byte* region, Byte* rows, int64_t row_stride) {
  if (form == Form::kLinear && row_stride == unit) {
    return move<kGather>(region + table[0], rows, static_cast<size_t>(tokens * unit));
  }
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t u = 0; u < units; ++u) {
      move<kGather>(region + table[u], rows + u * unit, static_cast<size_t>(unit));
    }
    table += units;
    rows += row_stride;
  }
}

#if defined(__SSE2__)

inline __m128i load(const Byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline void store(Byte* to, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

// Transposes kTile × kTile units of 2 bytes: line i of the one side is column i of the other.
template <size_t kUnit>
struct Transpose;

template <>
struct Transpose<2> {
  static void run(const Byte* const from[kTile], Byte* const to[kTile]) {
    __m128i a[kTile], b[kTile];
    for (int i = 0; i < kTile; ++i) a[i] = load(from[i]);
    for (int i = 0; i < 4; ++i) {
      b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
      b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      a[4 * i] = _mm_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 1] = _mm_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
      a[4 * i + 2] = _mm_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
      a[4 * i + 3] = _mm_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      store(to[2 * i], _mm_unpacklo_epi64(a[i], a[i + 4]));
      store(to[2 * i + 1], _mm_unpackhi_epi64(a[i], a[i + 4]));
    }
  }
};

// Units of 4 bytes: four squares of 4 × 4.
template <>
struct Transpose<4> {
  static void run(const Byte* const from[kTile], Byte* const to[kTile]) {
    for (int line = 0; line < kTile; line += 4) {
      for (int column = 0; column < kTile; column += 4) {
        __m128i a[4], b[4];
        for (int i = 0; i < 4; ++i) a[i] = load(from[line + i] + 4 * column);
        b[0] = _mm_unpacklo_epi32(a[0], a[1]);
        b[1] = _mm_unpackhi_epi32(a[0], a[1]);
        b[2] = _mm_unpacklo_epi32(a[2], a[3]);
        b[3] = _mm_unpackhi_epi32(a[2], a[3]);
        store(to[column] + 4 * line, _mm_unpacklo_epi64(b[0], b[2]));
        store(to[column + 1] + 4 * line, _mm_unpackhi_epi64(b[0], b[2]));
        store(to[column + 2] + 4 * line, _mm_unpacklo_epi64(b[1], b[3]));
        store(to[column + 3] + 4 * line, _mm_unpackhi_epi64(b[1], b[3]));
      }
    }
  }
};

// Units of 1 byte: lines of 8 bytes.
template <>
struct Transpose<1> {
  static void run(const Byte* const from[kTile], Byte* const to[kTile]) {
    __m128i a[kTile], b[4], c[4];
    for (int i = 0; i < kTile; ++i) {
      a[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from[i]));
    }
    for (int i = 0; i < 4; ++i) b[i] = _mm_unpacklo_epi8(a[2 * i], a[2 * i + 1]);
    c[0] = _mm_unpacklo_epi16(b[0], b[1]);
    c[1] = _mm_unpackhi_epi16(b[0], b[1]);
    c[2] = _mm_unpacklo_epi16(b[2], b[3]);
    c[3] = _mm_unpackhi_epi16(b[2], b[3]);
    b[0] = _mm_unpacklo_epi32(c[0], c[2]);
    b[1] = _mm_unpackhi_epi32(c[0], c[2]);
    b[2] = _mm_unpacklo_epi32(c[1], c[3]);
    b[3] = _mm_unpackhi_epi32(c[1], c[3]);
    for (int i = 0; i < 4; ++i) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to[2 * i]), b[i]);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to[2 * i + 1]), _mm_unpackhi_epi64(b[i], b[i]));
    }
  }
};

// Sorts 2 × kTile alternating units into two lines, and back.
template <size_t kUnit>
struct Interleave;

template <>
struct Interleave<2> {
  static void apart(const Byte* both, Byte* even, Byte* odd) {
    const __m128i a = halves(load(both));
    const __m128i b = halves(load(both + 16));
    store(even, _mm_unpacklo_epi64(a, b));
    store(odd, _mm_unpackhi_epi64(a, b));
  }
  static void together(const Byte* even, const Byte* odd, Byte* both) {
    const __m128i a = load(even);
    const __m128i b = load(odd);
    store(both, _mm_unpacklo_epi16(a, b));
    store(both + 16, _mm_unpackhi_epi16(a, b));
  }

 private:
  // Units 0 2 4 6, then 1 3 5 7.
  static __m128i halves(__m128i a) {
    constexpr int kEvenOdd = _MM_SHUFFLE(3, 1, 2, 0);
    a = _mm_shufflehi_epi16(_mm_shufflelo_epi16(a, kEvenOdd), kEvenOdd);
    return _mm_shuffle_epi32(a, kEvenOdd);
  }
};

template <>
struct Interleave<1> {
  static void apart(const Byte* both, Byte* even, Byte* odd) {
    const __m128i a = load(both);
    const __m128i evens = _mm_and_si128(a, _mm_set1_epi16(0xFF));
    const __m128i odds = _mm_srli_epi16(a, 8);
    const __m128i sorted = _mm_packus_epi16(evens, odds);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(even), sorted);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(odd), _mm_unpackhi_epi64(sorted, sorted));
  }
  static void together(const Byte* even, const Byte* odd, Byte* both) {
    store(both, _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(even)),
                                  _mm_loadl_epi64(reinterpret_cast<const __m128i*>(odd))));
  }
};

template <>
struct Interleave<4> {
  static void apart(const Byte* both, Byte* even, Byte* odd) {
    for (int i = 0; i < 2; ++i) {
      const __m128i a = _mm_shuffle_epi32(load(both + 32 * i), _MM_SHUFFLE(3, 1, 2, 0));
      const __m128i b = _mm_shuffle_epi32(load(both + 32 * i + 16), _MM_SHUFFLE(3, 1, 2, 0));
      store(even + 16 * i, _mm_unpacklo_epi64(a, b));
      store(odd + 16 * i, _mm_unpackhi_epi64(a, b));
    }
  }
  static void together(const Byte* even, const Byte* odd, Byte* both) {
    for (int i = 0; i < 2; ++i) {
      const __m128i a = load(even + 16 * i);
      const __m128i b = load(odd + 16 * i);
      store(both + 32 * i, _mm_unpacklo_epi32(a, b));
      store(both + 32 * i + 16, _mm_unpackhi_epi32(a, b));
    }
  }
};

#else

template <size_t kUnit>
struct Interleave {
  static void apart(const Byte* both, Byte* even, Byte* odd) {
    for (size_t i = 0; i < kTile; ++i) {
      std::memcpy(even + i * kUnit, both + 2 * i * kUnit, kUnit);
      std::memcpy(odd + i * kUnit, both + (2 * i + 1) * kUnit, kUnit);
    }
  }
  static void together(const Byte* even, const Byte* odd, Byte* both) {
    for (size_t i = 0; i < kTile; ++i) {
      std::memcpy(both + 2 * i * kUnit, even + i * kUnit, kUnit);
      std::memcpy(both + (2 * i + 1) * kUnit, odd + i * kUnit, kUnit);
    }
  }
};

template <size_t kUnit>
struct Transpose {
  static void run(const Byte* const from[kTile], Byte* const to[kTile]) {
    for (size_t i = 0; i < kTile; ++i) {
      for (size_t j = 0; j < kTile; ++j) {
        std::memcpy(to[j] + i * kUnit, from[i] + j * kUnit, kUnit);
      }
    }
  }
};

#endif

// kTile tokens whose first stands at a multiple of kTile in its block.
template <bool kGather, size_t kUnit>
void copy_transposed(const int32_t* table, int64_t units, Byte* region, Byte* rows,
                     int64_t row_stride) {
  for (int64_t u = 0; u < units; u += kTile) {
    Byte* paged[kTile];
    Byte* chunk[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      paged[i] = region + table[u + i];
      chunk[i] = rows + i * row_stride + u * static_cast<int64_t>(kUnit);
    }
    if constexpr (kGather) {
      Transpose<kUnit>::run(paged, chunk);
    } else {
      Transpose<kUnit>::run(chunk, paged);
    }
  }
}

// Two tokens, the first at an even place in its block.
template <bool kGather, size_t kUnit>
void copy_interleaved(const int32_t* table, int64_t units, Byte* region, Byte* rows,
                      int64_t row_stride) {
  for (int64_t u = 0; u < units; u += kTile) {
    Byte* const paged = region + table[u];
    Byte* const even = rows + u * static_cast<int64_t>(kUnit);
    Byte* const odd = even + row_stride;
    if constexpr (kGather) {
      Interleave<kUnit>::apart(paged, even, odd);
    } else {
      Interleave<kUnit>::together(even, odd, paged);
    }
  }
}

// The rows of a run of one (head, kv).
template <bool kGather, size_t kUnit>
void copy_rows(Form form, const int32_t* table, int64_t units, const Run& run, Byte* region,
               Byte* rows, int64_t row_stride) {
  const int64_t step = form == Form::kTransposed ? kTile : 2;
  int64_t done = 0;
  const auto plain = [&](int64_t until) {
    copy_units<kGather, kUnit>(table + (run.first + done) * units, units, until - done, region,
                               rows + done * row_stride, row_stride);
    done = until;
  };
  if (form == Form::kUnits || form == Form::kLinear) return plain(run.length);
  const int64_t lead = (step - run.first % step) % step;
  plain(lead < run.length ? lead : run.length);
  for (; done + step <= run.length; done += step) {
    const int32_t* const entry = table + (run.first + done) * units;
    if (form == Form::kTransposed) {
      copy_transposed<kGather, kUnit>(entry, units, region, rows + done * row_stride, row_stride);
    } else {
      copy_interleaved<kGather, kUnit>(entry, units, region, rows + done * row_stride, row_stride);
    }
  }
  plain(run.length);
}

constexpr int64_t kTokensAtOnce = 32;

template <bool kGather>
int64_t run_all(const PermutedIndex& index, const int64_t* caches, const int64_t* slots,
                Byte* chunk) {
  std::vector<Run> runs;
  runs.reserve(static_cast<size_t>(index.tokens));
  // The rows of all heads are visited once for each head: few enough to stay in the cache.
  const int64_t longest = index.heads > 1 ? kTokensAtOnce : index.block_size;
  const int64_t bad = find_runs(index, slots, longest, runs);
  if (bad != kAllSlotsGood) return bad;

  Form forms[kMaxKvPlanes] = {};
  for (int64_t kv = 0; kv < index.kv_planes; ++kv) forms[kv] = form_of(index, kv);
  const int64_t token_stride = index.heads * index.row_bytes;
  const int64_t kv_stride = index.tokens * token_stride;
  for (int64_t layer = 0; layer < index.layers; ++layer) {
    Byte* const cache = reinterpret_cast<Byte*>(caches[layer]);
    Byte* const layer_rows = chunk + layer * index.kv_planes * kv_stride;
    for (const Run& run : runs) {
      Byte* const run_rows = layer_rows + run.token * token_stride;
      if (run.offset == kSkippedSlot) {
        if constexpr (kGather) {
          for (int64_t kv = 0; kv < index.kv_planes; ++kv) {
            std::memset(run_rows + kv * kv_stride, 0,
                        static_cast<size_t>(run.length * token_stride));
          }
        }
        continue;
      }
      for (int64_t head = 0; head < index.heads; ++head) {
        Byte* const region = cache + run.offset + (index.first_head + head) * index.head_stride;
        for (int64_t kv = 0; kv < index.kv_planes; ++kv) {
          Byte* const rows = run_rows + kv * kv_stride + head * index.row_bytes;
          const int64_t unit = index.unit[kv];
          const int64_t units = index.row_bytes / unit;
          const int32_t* const table = index.table[kv];
          switch (unit) {
            case 1:
              copy_rows<kGather, 1>(forms[kv], table, units, run, region, rows, token_stride);
              break;
            case 2:
              copy_rows<kGather, 2>(forms[kv], table, units, run, region, rows, token_stride);
              break;
            case 4:
              copy_rows<kGather, 4>(forms[kv], table, units, run, region, rows, token_stride);
              break;
            case 8:
              copy_units<kGather, 8>(table + run.first * units, units, run.length, region, rows,
                                     token_stride);
              break;
            default:
              copy_long_units<kGather>(forms[kv], table + run.first * units, units, unit, run.length,
                                       region, rows, token_stride);
          }
        }
      }
    }
  }
  return kAllSlotsGood;
}

}  // namespace

int64_t gather_permuted_cpu(const PermutedIndex& index, const int64_t* caches,
                            const int64_t* slots, unsigned char* chunk) {
  return run_all<true>(index, caches, slots, chunk);
}

int64_t scatter_permuted_cpu(const PermutedIndex& index, const int64_t* caches,
                             const int64_t* slots, const unsigned char* chunk) {
  return run_all<false>(index, caches, slots, const_cast<unsigned char*>(chunk));
}

}  // namespace kvshelf
