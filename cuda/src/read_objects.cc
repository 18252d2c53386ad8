// Reads whole files and checks them, without Python: called by kvshelf.backends.native through
// ctypes, which releases the GIL. A library of its own that needs no other, so that backends need
// neither torch nor apache-tvm-ffi.

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>

#include "kvshelf/xxh3_cpu.h"

namespace {

// As much as stays in a level-2 cache until it is hashed.
constexpr int64_t kPiece = 512 * 1024;

struct Text {
  const char* at;
  int64_t bytes;

  bool is_at(const char* other) const {
    return std::memcmp(at, other, static_cast<size_t>(bytes)) == 0;
  }
};

// One file, see kvshelf.backends.base.Whole; kvshelf.backends.native makes these records.
struct Whole {
  Text end, first, second, after;
  const int64_t* borders;  // of the parts: the first byte of the first, and the end of each
  int64_t parts;
};

// Nanoseconds for all files.
struct Times {
  int64_t reading, checking;
};

int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

// Opens an absolute path that has no symbolic link in it.
int open_unlinked(const char* path, uint64_t flags) {
#if defined(__linux__)
  constexpr long kOpenat2 = 437;
  struct {
    uint64_t flags, mode, resolve;
  } how = {flags, 0, 0x04};  // RESOLVE_NO_SYMLINKS
  return static_cast<int>(syscall(kOpenat2, AT_FDCWD, path, &how, sizeof how));
#else
  (void)path, (void)flags;
  errno = ENOSYS;
  return -1;
#endif
}

// If the bytes up to the first part are those expected but for the hashes, returns these.
const char* hashes_in(const Whole& whole, Text text, const char* buffer) {
  const char* const end = buffer + whole.borders[0];
  const int64_t before = whole.first.bytes + text.bytes + whole.second.bytes;
  const int64_t hashes = whole.parts * (kvshelf::kHexChars + 1) - 1;
  if (before + hashes + whole.after.bytes > whole.borders[0]) return nullptr;
  const char* const first = buffer + before;
  for (int64_t i = 1; i < whole.parts; ++i) {
    if (first[i * (kvshelf::kHexChars + 1) - 1] != ',') return nullptr;
  }
  const bool good = whole.first.is_at(buffer) && text.is_at(buffer + whole.first.bytes) &&
                    whole.second.is_at(first - whole.second.bytes) &&
                    whole.after.is_at(first + hashes) &&
                    std::all_of(first + hashes + whole.after.bytes, end,
                                [](char c) { return c == ' '; });
  return good ? first : nullptr;
}

// Reads a file and checks it; whether that was possible, and it is as expected.
bool read_file(int fd, const Whole& whole, Text text, unsigned char* buffer, int64_t until,
               Times& times) {
  const int64_t* const borders = whole.borders;
  const int64_t size = borders[whole.parts];
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size != size) return false;
  const char* hashes = nullptr;
  int64_t part = 0;
  kvshelf::Xxh3 hash(buffer + borders[0], borders[1] - borders[0]);
  int64_t begin = now();
  for (int64_t end = 0; end < size;) {
    if (begin > until) return false;
    const int64_t wanted = std::min(size - end, std::max(kPiece, borders[0] - end));
    const ssize_t count = pread(fd, buffer + end, static_cast<size_t>(wanted), end);
    const int64_t read = now();
    times.reading += read - begin;
    if (count == 0 || (count < 0 && errno != EINTR)) return false;
    end += std::max<int64_t>(count, 0);
    if (end >= borders[0]) {
      if (hashes == nullptr) {
        hashes = hashes_in(whole, text, reinterpret_cast<const char*>(buffer));
        if (hashes == nullptr) return false;
      }
      for (; part < whole.parts; ++part) {
        hash.advance(std::max<int64_t>(0, end - borders[part]));
        if (end < borders[part + 1]) break;
        char found[kvshelf::kHexChars];
        hash.finish(found);
        const Text expected{hashes + part * (kvshelf::kHexChars + 1), kvshelf::kHexChars};
        if (!expected.is_at(found)) return false;
        if (part + 1 < whole.parts) {
          hash = kvshelf::Xxh3(buffer + borders[part + 1], borders[part + 2] - borders[part + 1]);
        }
      }
    }
    begin = now();
    times.checking += begin - read;
  }
  return part == whole.parts;
}

}  // namespace

// Reads and checks files, for so many nanoseconds at most. Each path is `start` and the end of a
// record. results: two integers for the nanoseconds of reading and of checking, and one for each
// file, set to 1 if it was read and is as expected. What is wrong with others is found out by
// reading them again. The number in the name changes with the arguments: no other version is called.
extern "C" __attribute__((visibility("default"))) void kvshelf_read_objects_2(
    const char* start, const char* text, int64_t text_bytes, const Whole* wholes,
    unsigned char* const* buffers, int64_t count, uint64_t flags, int64_t allowed,
    int64_t* results) {
  Times times{};
  char path[PATH_MAX];
  const size_t start_bytes = std::strlen(start);
  for (int64_t i = 0, until = now() + allowed; i < count; ++i) {
    const Text end = wholes[i].end;
    if (start_bytes + static_cast<size_t>(end.bytes) >= sizeof path) continue;
    std::memcpy(path, start, start_bytes);
    std::memcpy(path + start_bytes, end.at, static_cast<size_t>(end.bytes));
    path[start_bytes + static_cast<size_t>(end.bytes)] = 0;
    const int64_t begin = now();
    const int fd = open_unlinked(path, flags);
    times.reading += now() - begin;
    if (fd < 0) continue;
    results[2 + i] = read_file(fd, wholes[i], {text, text_bytes}, buffers[i], until, times);
    close(fd);
  }
  results[0] = times.reading;
  results[1] = times.checking;
}
