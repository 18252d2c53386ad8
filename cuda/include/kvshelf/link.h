// The copies of one direction between a device and host memory, paced.
//
// A copy engine works in order of arrival: a small copy of the engine that serves the model waits
// for all that was enqueued before it. So no more is enqueued than the link carries in a fifth of a
// millisecond, in several pieces, and the next piece when the oldest one has ended: the link is
// never idle, and nobody waits longer. How much that is, is measured on each piece that ran right
// behind another.
//
// Any thread may call; the threads that copy take turns, piece by piece. Waiting needs no GIL, and
// all events are made beforehand.

#ifndef KVSHELF_LINK_H_
#define KVSHELF_LINK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace kvshelf {

struct Transfer {
  void* to;
  const void* from;
  int64_t bytes;
};

class Link {
 public:
  // How long these copies may keep the copy engine from others.
  static constexpr double kQueuedSeconds = 0.2e-3;
  // The queue consists of so many pieces, so that it does not run empty while a thread wakes up.
  static constexpr int64_t kPieces = 4;

  Link() = default;
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // All functions return null or the text of an error. After an error nothing of the call that
  // returned it is under way any more.
  const char* open(int device);

  // Copies from now on begin behind an event.
  const char* follow(void* event);

  // Enqueues copies in order and waits while the queue is full; records `done` behind the last.
  const char* copy(const std::vector<Transfer>& transfers, void* done);

  // Waits for the copies that `done` was recorded behind.
  const char* wait(void* done);

  // Bytes per second, as far as it is known.
  double rate();

 private:
  struct Piece {
    void* event;  // recorded behind it
    int64_t bytes;
    bool follows;  // the piece before it was under way when it was enqueued
  };

  int64_t budget() const;
  const char* enqueue(std::vector<Transfer>::const_iterator* next, int64_t* done_bytes,
                      std::vector<Transfer>::const_iterator end);
  const char* make_room(int64_t bytes);
  const char* end_oldest();
  const char* settled(const char* error);

  int device_ = 0;
  void* stream_ = nullptr;
  std::mutex mutex_;
  std::deque<Piece> under_way_;
  int64_t queued_ = 0;            // bytes of the pieces under way
  std::vector<void*> free_events_;
  void* last_ = nullptr;  // event of the piece that ended last
  double rate_ = 0;
  // Of the piece that is put together.
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
};

}  // namespace kvshelf

#endif  // KVSHELF_LINK_H_
