// Stores and loads between paged caches on a device and page-locked host memory.
//
// Owns the streams, the events and the use of the device buffers; their memory is the caller's.
//
// A store: `store` enqueues, on the engine's stream, the kernels that gather all layers and shards
// of a chunk into a device buffer, and queues the chunk. The thread in `run` waits until they are
// done, and copies the buffer to the host by a Link. `wait` waits for one chunk.
// A load: `load` copies payloads to a device buffer by a Link of the other direction, and enqueues
// behind it, and behind the caller's fence, the kernels that scatter them; it waits until they are
// done. Where the layers lie inside the blocks, payloads are copied directly into the blocks.
// A tail is copied like a chunk of fewer tokens: its payload holds fewer rows of each layer.
//
// store and fence never wait. All other functions may; none needs the GIL. Any thread may call
// any of them. Device buffers are added before the first store or load.

#ifndef KVSHELF_COPIER_H_
#define KVSHELF_COPIER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "kvshelf/link.h"
#include "kvshelf/paged_index.h"

namespace kvshelf {

// Layers of one layout, and their places in the payload of each shard.
struct LayerRun {
  PagedIndex index;  // of one shard: the first
  std::vector<int64_t> caches;
  std::vector<int64_t> starts;  // of each layer in a payload, in bytes
  // A payload holds the heads `parts` times, and the caches hold only the `part`-th of these groups.
  int64_t parts;
  int64_t part;
  // The run uses the slots of a chunk from this one on: index.tokens / parts of them.
  int64_t first_slot;
};

class Copier {
 public:
  // Results of store besides the number of the chunk.
  static constexpr int64_t kNoBuffer = -1;
  // Minus the position of a bad slot.
  static constexpr int64_t kFirstBadSlot = -2;

  Copier(int device, std::vector<LayerRun> runs, int64_t payload_bytes, bool direct);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Whether the kernels can count the slots and links of `shards` shards.
  bool countable(int64_t shards) const;

  // The functions below return null or the text of an error.
  // Loads begin behind what is on the stream: the buffers' memory may still be in use there.
  const char* open(void* stream);
  // A device buffer for all shards of a chunk, the first at `payloads`.
  const char* add_buffer(unsigned char* payloads, int64_t stride, bool for_loads);

  // Kernels of loads from now on: at most `blocks` blocks of threads each, see limit_blocks; 0: any
  // number. Nothing may be under way.
  void limit(int64_t blocks) { most_blocks_ = blocks; }

  // Sets the addresses of a run's caches. Nothing may be under way.
  void bind(int64_t run, const int64_t* caches);

  // tokens: the slots of a chunk, or fewer: of a tail. payloads: where the first `shards` shards
  // belong. Sets *chunk to a number for wait, kNoBuffer or kFirstBadSlot - position; nothing was
  // enqueued then.
  const char* store(int64_t tokens, const int64_t* slots, const int64_t* payloads, int64_t shards,
                    void* stream, int64_t* chunk);

  // Waits until a chunk is in its payloads, and forgets it.
  const char* wait(int64_t chunk);

  // Forgets a chunk for which nobody waits.
  void forget(int64_t chunk);

  // Waits until nothing is under way to the host.
  void drain();

  // Copies what store has queued, until stop is called and nothing is left.
  void run();
  void stop();

  // Loads `shards` shards from the first one on. fence: an event, or null. Sets *bad to the
  // position of a bad slot, or kAllSlotsGood.
  const char* load(int64_t tokens, int64_t first_shard, const int64_t* slots,
                   const int64_t* payloads, int64_t shards, void* fence, int64_t* bad);

  // Asks the device whether it still works, without waiting: an error that this does not repeat was
  // one of the call that returned it.
  const char* check();

  // An event behind what is on a stream now; it is returned by `unfence`.
  const char* fence(void* stream, void** event);
  void unfence(void* event);

  double rate(bool store) { return (store ? out_ : in_).rate(); }

 private:
  struct Buffer {
    unsigned char* payloads;
    int64_t stride;
    void* stream;  // of loads; null for stores
    void* copied;  // event: the transfer between host and device has ended
    void* moved;   // event: gather or scatter has ended
  };

  struct Job {
    int64_t chunk;
    Buffer* buffer;
    std::vector<Transfer> transfers;
    bool ended = false;
    bool forgotten = false;
    const char* error = nullptr;
  };

  // A run's part of a chunk or tail of `tokens` slots: its index, and its starts in a payload.
  PagedIndex index_of(const LayerRun& run, int64_t tokens) const;
  std::vector<int64_t> starts_of(const LayerRun& run, int64_t tokens) const;
  int64_t payload_bytes(int64_t tokens) const;

  const char* enqueue(const LayerRun& run, bool gather, int64_t tokens, int64_t first_shard,
                      int64_t shards, const int64_t* slots, const Buffer& buffer, void* stream);
  int64_t bad_slot(int64_t tokens, const int64_t* slots) const;
  bool gathered(const Job& job);
  const char* begin(const Job& job);
  void end(Job* job, const char* error);
  const char* load_by_kernels(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                              const int64_t* slots, const int64_t* payloads, int64_t shards,
                              void* fence);
  const char* scatter(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                      const int64_t* slots, int64_t shards, void* fence);
  const char* load_into_blocks(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                               const int64_t* slots, const int64_t* payloads, int64_t shards,
                               void* fence);

  const int device_;
  std::vector<LayerRun> runs_;
  int64_t tokens_ = 0;  // slots of a whole chunk
  const int64_t payload_bytes_;
  const bool direct_;
  int64_t most_blocks_ = 0;
  Link out_;
  Link in_;
  std::deque<Buffer> buffers_;

  std::mutex mutex_;
  std::condition_variable queued_;  // there is a chunk to copy, or stop was called
  std::condition_variable ended_;   // a chunk has ended
  std::condition_variable loaded_;  // a buffer of loads is free
  std::vector<Buffer*> store_buffers_;  // the free ones
  std::vector<Buffer*> load_buffers_;
  std::deque<Job*> queue_;
  std::unordered_map<int64_t, std::unique_ptr<Job>> jobs_;
  std::vector<void*> fences_;  // events that nobody uses
  int64_t next_ = 0;
  int64_t running_ = 0;  // chunks that are queued or being copied
  bool stopped_ = false;
};

}  // namespace kvshelf

#endif  // KVSHELF_COPIER_H_
