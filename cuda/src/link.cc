#include "kvshelf/link.h"

#include <algorithm>

#include "kvshelf/device.h"

namespace kvshelf {
namespace {

// What is assumed until something is measured: less than any link carries. The first object is
// copied in small pieces, after a dozen of which the rate is known.
constexpr double kFirstRate = 1e9;
constexpr double kLeastRate = 0.1e9;
// The weight of one piece in the rate: others use the link as well, now and then.
constexpr double kWeight = 0.25;
// Pieces start at multiples of it.
constexpr int64_t kPage = 4096;
// Pieces may have become smaller while larger ones are under way, but no more than so many.
constexpr size_t kMostPieces = 2 * Link::kPieces;

}  // namespace

Link::~Link() {
  for (const Piece& piece : under_way_) device_free_event(device_, piece.event);
  for (void* event : free_events_) device_free_event(device_, event);
  if (last_ != nullptr) device_free_event(device_, last_);
  if (stream_ != nullptr) device_free_stream(device_, stream_);
}

const char* Link::open(int device) {
  device_ = device;
  rate_ = kFirstRate;
  if (const char* error = device_new_stream(device, false, &stream_)) return error;
  while (free_events_.size() < kMostPieces + 1) {
    void* event = nullptr;
    if (const char* error = device_new_event(device, true, &event)) return error;
    free_events_.push_back(event);
  }
  return nullptr;
}

const char* Link::follow(void* event) { return device_wait(device_, stream_, event); }

double Link::rate() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rate_;
}

int64_t Link::budget() const { return static_cast<int64_t>(kQueuedSeconds * rate_); }

const char* Link::copy(const std::vector<Transfer>& transfers, void* done) {
  auto next = transfers.begin();
  int64_t done_bytes = 0;  // of *next
  while (true) {
    // Once for each piece: other threads come in between.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next != transfers.end()) {
      const char* error = enqueue(&next, &done_bytes, transfers.end());
      if (error != nullptr) return settled(error);
    }
    if (next == transfers.end()) {
      const char* error = device_record(device_, done, stream_);
      return error == nullptr ? nullptr : settled(error);
    }
  }
}

const char* Link::wait(void* done) {
  const char* const error = device_synchronize(device_, done);
  if (error == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  return settled(error);
}

// Enqueues one piece: a part of a transfer, or several small ones.
const char* Link::enqueue(std::vector<Transfer>::const_iterator* next, int64_t* done_bytes,
                          std::vector<Transfer>::const_iterator end) {
  const int64_t most = std::max(kPage, budget() / kPieces / kPage * kPage);
  to_.clear();
  from_.clear();
  sizes_.clear();
  int64_t bytes = 0;
  while (*next != end && bytes < most) {
    const Transfer& transfer = **next;
    const int64_t part = std::min(transfer.bytes - *done_bytes, most - bytes);
    to_.push_back(static_cast<unsigned char*>(transfer.to) + *done_bytes);
    from_.push_back(static_cast<const unsigned char*>(transfer.from) + *done_bytes);
    sizes_.push_back(static_cast<size_t>(part));
    bytes += part;
    *done_bytes += part;
    if (*done_bytes == transfer.bytes) {
      ++*next;
      *done_bytes = 0;
    }
  }
  if (const char* error = make_room(bytes)) return error;
  bool idle = true;
  if (!under_way_.empty()) {
    const char* error = device_reached(device_, under_way_.back().event, &idle);
    if (error != nullptr) return error;
  }
  const char* error = device_copies(to_.data(), from_.data(), sizes_.data(), sizes_.size(),
                                    device_, stream_);
  if (error != nullptr) return error;
  void* const event = free_events_.back();
  free_events_.pop_back();
  under_way_.push_back({event, bytes, !idle});
  queued_ += bytes;
  return device_record(device_, event, stream_);
}

const char* Link::make_room(int64_t bytes) {
  while (!under_way_.empty() &&
         (queued_ + bytes > budget() || under_way_.size() >= kMostPieces)) {
    if (const char* error = end_oldest()) return error;
  }
  return nullptr;
}

// Waits for the oldest piece and learns from it.
const char* Link::end_oldest() {
  const Piece piece = under_way_.front();
  if (const char* error = device_synchronize(device_, piece.event)) return error;
  under_way_.pop_front();
  queued_ -= piece.bytes;
  void* const before = last_;
  last_ = piece.event;
  if (before == nullptr) return nullptr;
  free_events_.push_back(before);
  if (!piece.follows) return nullptr;
  double seconds = 0;
  if (const char* error = device_seconds(device_, before, piece.event, &seconds)) return error;
  const double rate = static_cast<double>(piece.bytes) / std::max(seconds, 1e-6);
  rate_ = std::max(kLeastRate, rate_ + kWeight * (rate - rate_));
  return nullptr;
}

// Ends all that is under way, after an error; returns the error.
const char* Link::settled(const char* error) {
  // A device that cannot be waited for does no work any more.
  static_cast<void>(device_finish(device_, stream_));
  for (const Piece& piece : under_way_) free_events_.push_back(piece.event);
  under_way_.clear();
  queued_ = 0;
  return error;
}

}  // namespace kvshelf
