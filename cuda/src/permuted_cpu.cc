// Gather and scatter of permuted caches: unit by unit according to the table, or many units at a
// time if the table is a transposition or an interleaving.

#include "kvshelf/permuted_cpu.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

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
  kTransposed,   // neighbouring tokens of a unit are neighbours in the cache, for a line
  kInterleaved,  // two neighbouring tokens alternate, for two lines
};
// Bytes of a line: what one instruction moves on all processors.
constexpr int64_t kLine = 16;

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
  const int64_t tile = kLine / unit;
  if (unit > 4 || units % tile != 0) return Form::kUnits;
  if (index.block_size % tile == 0) {
    int32_t different = 0;
    for (int64_t token = 0; token < index.block_size && different == 0; token += tile) {
      const int32_t* const first = table + token * units;
      for (int64_t i = 1; i < tile; ++i) {
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
      for (int64_t u = 0; u < units; u += tile) {
        for (int64_t i = 0; i < tile; ++i) {
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

// A line of units. The compiler makes of its shuffles what the processor has: SSE, AVX or NEON.
template <typename Unit>
struct Line {
  typedef Unit Vector __attribute__((vector_size(kLine)));
  static constexpr size_t kUnits = kLine / sizeof(Unit);
  using Places = std::make_index_sequence<kUnits>;

  static Vector load(const Byte* from) {
    Vector line;
    std::memcpy(&line, from, kLine);
    return line;
  }
  static void store(Byte* to, Vector line) { std::memcpy(to, &line, kLine); }

  // The units of two lines at these places, counted from the first line's first unit.
  template <size_t... kFrom>
  static Vector pick(Vector a, Vector b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, kFrom...);
#else
    return __builtin_shuffle(a, b, Vector{kFrom...});
#endif
  }
  // The units of two lines in turn: those of their first halves, or of their second halves.
  template <size_t kHalf, size_t... kPlace>
  static Vector zip(Vector a, Vector b, std::index_sequence<kPlace...>) {
    return pick<kHalf * kUnits / 2 + kPlace / 2 + kPlace % 2 * kUnits...>(a, b);
  }
  // Every other unit of two lines one behind the other, from the first or the second one on.
  template <size_t kFirst, size_t... kPlace>
  static Vector unzip(Vector a, Vector b, std::index_sequence<kPlace...>) {
    return pick<kFirst + 2 * kPlace...>(a, b);
  }

  // Line i of the one side becomes column i of the other: that is what log2(kUnits) times zipping
  // the first half of the lines with the second half does.
  template <size_t kLeft, size_t... kPlace>
  static void zip_all(Vector* lines, std::index_sequence<kPlace...> places) {
    const Vector zipped[kUnits] = {
        zip<kPlace % 2>(lines[kPlace / 2], lines[kPlace / 2 + kUnits / 2], places)...};
    ((lines[kPlace] = zipped[kPlace]), ...);
    if constexpr (kLeft > 2) zip_all<kLeft / 2>(lines, places);
  }
  static void transpose(const Byte* const from[kUnits], Byte* const to[kUnits]) {
    Vector lines[kUnits];
    for (size_t i = 0; i < kUnits; ++i) lines[i] = load(from[i]);
    zip_all<kUnits>(lines, Places{});
    for (size_t i = 0; i < kUnits; ++i) store(to[i], lines[i]);
  }

  static void apart(const Byte* both, Byte* even, Byte* odd) {
    const Vector a = load(both), b = load(both + kLine);
    store(even, unzip<0>(a, b, Places{}));
    store(odd, unzip<1>(a, b, Places{}));
  }
  static void together(const Byte* even, const Byte* odd, Byte* both) {
    const Vector a = load(even), b = load(odd);
    store(both, zip<0>(a, b, Places{}));
    store(both + kLine, zip<1>(a, b, Places{}));
  }
};

// The tokens of a line, whose first stands at a multiple of them in its block.
template <bool kGather, typename Unit>
void copy_transposed(const int32_t* table, int64_t units, Byte* region, Byte* rows,
                     int64_t row_stride) {
  constexpr int64_t kTile = Line<Unit>::kUnits;
  for (int64_t u = 0; u < units; u += kTile) {
    Byte* paged[kTile];
    Byte* chunk[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      paged[i] = region + table[u + i];
      chunk[i] = rows + i * row_stride + u * int64_t{sizeof(Unit)};
    }
    if constexpr (kGather) {
      Line<Unit>::transpose(paged, chunk);
    } else {
      Line<Unit>::transpose(chunk, paged);
    }
  }
}

// Two tokens, the first at an even place in its block.
template <bool kGather, typename Unit>
void copy_interleaved(const int32_t* table, int64_t units, Byte* region, Byte* rows,
                      int64_t row_stride) {
  for (int64_t u = 0; u < units; u += int64_t{Line<Unit>::kUnits}) {
    Byte* const paged = region + table[u];
    Byte* const even = rows + u * int64_t{sizeof(Unit)};
    Byte* const odd = even + row_stride;
    if constexpr (kGather) {
      Line<Unit>::apart(paged, even, odd);
    } else {
      Line<Unit>::together(even, odd, paged);
    }
  }
}

// The rows of a run of one (head, kv).
template <bool kGather, typename Unit>
void copy_rows(Form form, const int32_t* table, int64_t units, const Run& run, Byte* region,
               Byte* rows, int64_t row_stride) {
  const int64_t step = form == Form::kTransposed ? int64_t{Line<Unit>::kUnits} : 2;
  int64_t done = 0;
  const auto plain = [&](int64_t until) {
    copy_units<kGather, sizeof(Unit)>(table + (run.first + done) * units, units, until - done, region,
                               rows + done * row_stride, row_stride);
    done = until;
  };
  if (form == Form::kUnits || form == Form::kLinear) return plain(run.length);
  const int64_t lead = (step - run.first % step) % step;
  plain(lead < run.length ? lead : run.length);
  for (; done + step <= run.length; done += step) {
    const int32_t* const entry = table + (run.first + done) * units;
    if (form == Form::kTransposed) {
      copy_transposed<kGather, Unit>(entry, units, region, rows + done * row_stride, row_stride);
    } else {
      copy_interleaved<kGather, Unit>(entry, units, region, rows + done * row_stride, row_stride);
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
              copy_rows<kGather, uint8_t>(forms[kv], table, units, run, region, rows, token_stride);
              break;
            case 2:
              copy_rows<kGather, uint16_t>(forms[kv], table, units, run, region, rows, token_stride);
              break;
            case 4:
              copy_rows<kGather, uint32_t>(forms[kv], table, units, run, region, rows, token_stride);
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
