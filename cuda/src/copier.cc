#include "kvshelf/copier.h"

#include <algorithm>
#include <utility>

#include "kvshelf/device.h"
#include "kvshelf/launch.h"
#include "kvshelf/pieces.h"

namespace kvshelf {
namespace {

unsigned char* address(int64_t value) {
  return reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(value));
}

}  // namespace

Copier::Copier(int device, std::vector<LayerRun> runs, int64_t payload_bytes, bool direct)
    : device_(device), runs_(std::move(runs)), payload_bytes_(payload_bytes), direct_(direct) {
  for (const LayerRun& run : runs_) {
    tokens_ = std::max(tokens_, run.first_slot + run.index.tokens / run.parts);
  }
}

Copier::~Copier() {
  for (const Buffer& buffer : buffers_) {
    device_free_event(device_, buffer.copied);
    device_free_event(device_, buffer.moved);
    if (buffer.stream != nullptr) device_free_stream(device_, buffer.stream);
  }
  for (void* event : fences_) device_free_event(device_, event);
}

bool Copier::countable(int64_t shards) const {
  for (const LayerRun& run : runs_) {
    PagedIndex index = run.index;
    index.shards = shards;
    const std::vector<int64_t> slots(static_cast<size_t>(index.tokens), kSkippedSlot);
    if (make_plan(index, run.caches.data(), run.starts.data(), slots.data(), nullptr, 1).too_large) {
      return false;
    }
  }
  return true;
}

const char* Copier::open(void* stream) {
  if (const char* error = out_.open(device_)) return error;
  if (const char* error = in_.open(device_)) return error;
  void* event = nullptr;
  if (const char* error = fence(stream, &event)) return error;
  const char* const error = in_.follow(event);
  unfence(event);
  return error;
}

const char* Copier::add_buffer(unsigned char* payloads, int64_t stride, bool for_loads) {
  Buffer buffer{payloads, stride, nullptr, nullptr, nullptr};
  if (for_loads) {
    if (const char* error = device_new_stream(device_, true, &buffer.stream)) return error;
  }
  if (const char* error = device_new_event(device_, false, &buffer.copied)) return error;
  if (const char* error = device_new_event(device_, false, &buffer.moved)) return error;
  buffers_.push_back(buffer);
  (for_loads ? load_buffers_ : store_buffers_).push_back(&buffers_.back());
  return nullptr;
}

void Copier::bind(int64_t run, const int64_t* caches) {
  std::vector<int64_t>& bound = runs_[static_cast<size_t>(run)].caches;
  std::copy(caches, caches + bound.size(), bound.begin());
}

PagedIndex Copier::index_of(const LayerRun& run, int64_t tokens) const {
  PagedIndex index = run.index;
  if (tokens != tokens_) {
    index.tokens = tokens * run.parts;
    set_buffer_strides(index);
  }
  return index;
}

std::vector<int64_t> Copier::starts_of(const LayerRun& run, int64_t tokens) const {
  std::vector<int64_t> starts = run.starts;
  if (tokens != tokens_) {
    for (int64_t& start : starts) start = start / tokens_ * tokens;
  }
  return starts;
}

int64_t Copier::payload_bytes(int64_t tokens) const {
  return tokens == tokens_ ? payload_bytes_ : payload_bytes_ / tokens_ * tokens;
}

int64_t Copier::bad_slot(int64_t tokens, const int64_t* slots) const {
  for (const LayerRun& run : runs_) {
    const PagedIndex index = index_of(run, tokens);
    const int64_t bad = first_bad_slot(slots + run.first_slot, index.tokens / run.parts,
                                       index.num_blocks * index.block_size);
    if (bad != kAllSlotsGood) return run.first_slot + bad;
  }
  return kAllSlotsGood;
}

// Enqueues the kernels for one run. The slots have been checked; if another thread changes them
// meanwhile, those that are not in the cache are skipped.
const char* Copier::enqueue(const LayerRun& run, bool gather, int64_t tokens, int64_t first_shard,
                            int64_t shards, const int64_t* slots, const Buffer& buffer,
                            void* stream) {
  PagedIndex index = index_of(run, tokens);
  index.first_head += first_shard * index.heads;
  index.shards = shards;
  index.shard_stride = buffer.stride;
  slots += run.first_slot;
  std::vector<int64_t> rows;
  if (run.parts > 1) {
    rows.assign(static_cast<size_t>(index.tokens), kSkippedSlot);
    for (int64_t token = 0; token < index.tokens / run.parts; ++token) {
      rows[static_cast<size_t>(token * run.parts + run.part)] = slots[token];
    }
    slots = rows.data();
  }
  int64_t processors = 0;
  if (const char* error = device_processors(device_, &processors)) return error;
  const std::vector<int64_t> starts = starts_of(run, tokens);
  LaunchPlan launches =
      make_plan(index, run.caches.data(), starts.data(), slots, buffer.payloads, processors);
  if (!gather && most_blocks_ > 0) limit_blocks(launches, most_blocks_);
  return device_launch(gather, launches, run.caches.data(), device_, stream);
}

// --- stores ------------------------------------------------------------------------

const char* Copier::store(int64_t tokens, const int64_t* slots, const int64_t* payloads,
                          int64_t shards, void* stream, int64_t* chunk) {
  const int64_t bad = bad_slot(tokens, slots);
  if (bad != kAllSlotsGood) {
    *chunk = kFirstBadSlot - bad;
    return nullptr;
  }
  Buffer* buffer = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (store_buffers_.empty()) {
      *chunk = kNoBuffer;
      return nullptr;
    }
    buffer = store_buffers_.back();
    store_buffers_.pop_back();
  }
  const char* error = nullptr;
  for (const LayerRun& run : runs_) {
    if (error != nullptr) break;
    error = enqueue(run, true, tokens, 0, shards, slots, *buffer, stream);
  }
  if (error == nullptr) error = device_record(device_, buffer->moved, stream);
  auto job = std::make_unique<Job>();
  job->buffer = buffer;
  for (int64_t shard = 0; shard < shards; ++shard) {
    job->transfers.push_back({address(payloads[shard]), buffer->payloads + shard * buffer->stride,
                              payload_bytes(tokens)});
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error != nullptr) {
    store_buffers_.push_back(buffer);
    return error;
  }
  *chunk = job->chunk = next_++;
  queue_.push_back(job.get());
  jobs_[*chunk] = std::move(job);
  ++running_;
  queued_.notify_one();
  return nullptr;
}

const char* Copier::wait(int64_t chunk) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return jobs_.at(chunk)->ended; });
  const char* const error = jobs_.at(chunk)->error;
  jobs_.erase(chunk);
  return error;
}

void Copier::forget(int64_t chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = jobs_.find(chunk);
  if (found == jobs_.end()) return;
  if (found->second->ended) {
    jobs_.erase(found);
  } else {
    found->second->forgotten = true;
  }
}

void Copier::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return running_ == 0; });
}

void Copier::run() {
  const BesideCaptures beside(device_);
  // The chunk whose pieces are enqueued, but have not all ended: the next chunk's pieces follow at
  // once, so that the link is not idle in between.
  Job* before = nullptr;
  while (true) {
    Job* job = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (before == nullptr) {
        queued_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
        if (queue_.empty()) return;
      }
      if (!queue_.empty()) job = queue_.front();
    }
    if (before != nullptr && (job == nullptr || !gathered(*job))) {
      // A chunk whose gather waits for the engine must not delay the one before it.
      end(before, out_.wait(before->buffer->copied));
      before = nullptr;
      continue;
    }
    const char* const error = begin(*job);
    if (before != nullptr) end(before, out_.wait(before->buffer->copied));
    before = job;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.pop_front();
    }
    if (error != nullptr) {
      end(job, error);
      before = nullptr;
    }
  }
}

bool Copier::gathered(const Job& job) {
  bool reached = false;
  return device_reached(device_, job.buffer->moved, &reached) == nullptr && reached;
}

// Nothing is enqueued before the gather is done: a copy that waits would keep others waiting.
const char* Copier::begin(const Job& job) {
  if (const char* error = device_synchronize(device_, job.buffer->moved)) return error;
  return out_.copy(job.transfers, job.buffer->copied);
}

void Copier::end(Job* job, const char* error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  store_buffers_.push_back(job->buffer);
  job->error = error;
  job->ended = true;
  if (job->forgotten) jobs_.erase(jobs_.find(job->chunk));
  --running_;
  ended_.notify_all();
}

void Copier::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  queued_.notify_all();
}

// --- loads -------------------------------------------------------------------------

const char* Copier::load(int64_t tokens, int64_t first_shard, const int64_t* slots,
                         const int64_t* payloads, int64_t shards, void* fence, int64_t* bad) {
  *bad = bad_slot(tokens, slots);
  if (*bad != kAllSlotsGood) return nullptr;
  const BesideCaptures beside(device_);
  Buffer* buffer = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    loaded_.wait(lock, [&] { return !load_buffers_.empty(); });
    buffer = load_buffers_.back();
    load_buffers_.pop_back();
  }
  const char* const error =
      direct_ ? load_into_blocks(*buffer, tokens, first_shard, slots, payloads, shards, fence)
              : load_by_kernels(*buffer, tokens, first_shard, slots, payloads, shards, fence);
  const std::lock_guard<std::mutex> lock(mutex_);
  load_buffers_.push_back(buffer);
  loaded_.notify_one();
  return error;
}

const char* Copier::load_by_kernels(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                                    const int64_t* slots, const int64_t* payloads, int64_t shards,
                                    void* fence) {
  std::vector<Transfer> transfers;
  for (int64_t shard = 0; shard < shards; ++shard) {
    transfers.push_back({buffer.payloads + shard * buffer.stride, address(payloads[shard]),
                         payload_bytes(tokens)});
  }
  if (const char* error = in_.copy(transfers, buffer.copied)) return error;
  const char* const error = scatter(buffer, tokens, first_shard, slots, shards, fence);
  if (error != nullptr) {
    // The payloads and the blocks are the caller's again.
    static_cast<void>(in_.wait(buffer.copied));
    static_cast<void>(device_finish(device_, buffer.stream));
  }
  return error;
}

const char* Copier::scatter(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                            const int64_t* slots, int64_t shards, void* fence) {
  if (const char* error = device_wait(device_, buffer.stream, buffer.copied)) return error;
  if (fence != nullptr) {
    if (const char* error = device_wait(device_, buffer.stream, fence)) return error;
  }
  for (const LayerRun& run : runs_) {
    const char* error =
        enqueue(run, false, tokens, first_shard, shards, slots, buffer, buffer.stream);
    if (error != nullptr) return error;
  }
  if (const char* error = device_record(device_, buffer.moved, buffer.stream)) return error;
  return device_synchronize(device_, buffer.moved);
}

const char* Copier::load_into_blocks(const Buffer& buffer, int64_t tokens, int64_t first_shard,
                                     const int64_t* slots, const int64_t* payloads, int64_t shards,
                                     void* fence) {
  // Not on the device: the copies of other threads would wait as well.
  if (fence != nullptr) {
    if (const char* error = device_synchronize(device_, fence)) return error;
  }
  std::vector<Transfer> transfers;
  std::vector<Run> pieces;
  for (const LayerRun& run : runs_) {
    PagedIndex index = index_of(run, tokens);
    index.first_head += first_shard * index.heads;
    step_over_single_slots(index);
    pieces.clear();
    find_runs(index, slots + run.first_slot, pieces);
    const std::vector<int64_t> starts = starts_of(run, tokens);
    for (int64_t shard = 0; shard < shards; ++shard) {
      for (size_t layer = 0; layer < starts.size(); ++layer) {
        const unsigned char* const from = address(payloads[shard]) + starts[layer];
        unsigned char* const cache = address(run.caches[layer]);
        for (const Run& piece : pieces) {
          for_each_piece(
              index, piece, 0,
              [&](int64_t paged, int64_t offset, int64_t bytes) {
                transfers.push_back({cache + paged, from + offset, bytes});
              },
              [](int64_t, int64_t) {});
        }
      }
      index.first_head += index.heads;
    }
  }
  if (const char* error = in_.copy(transfers, buffer.copied)) return error;
  return in_.wait(buffer.copied);
}

const char* Copier::check() {
  const BesideCaptures beside(device_);
  bool reached = false;
  return device_reached(device_, buffers_.front().moved, &reached);
}

// --- fences ------------------------------------------------------------------------

const char* Copier::fence(void* stream, void** event) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    *event = nullptr;
    if (!fences_.empty()) {
      *event = fences_.back();
      fences_.pop_back();
    }
  }
  if (*event == nullptr) {
    if (const char* error = device_new_event(device_, false, event)) return error;
  }
  const char* const error = device_record(device_, *event, stream);
  if (error != nullptr) unfence(*event);
  return error;
}

void Copier::unfence(void* event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fences_.push_back(event);
}

}  // namespace kvshelf
