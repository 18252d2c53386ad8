// The device functions that the files of the library use which are not kernels.
//
// Two implementations: src/copy_cuda.cu and src/streams_cuda.cu for CUDA, and emulation/emulate.cc,
// which executes the same calls on the host and is built by the tests only. Each function returns
// null, or an error text that stays valid as long as the library is loaded.

#ifndef KVSHELF_DEVICE_H_
#define KVSHELF_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "kvshelf/launch.h"

namespace kvshelf {

// Number of usable devices.
const char* device_count(int64_t* count);

// Number of multiprocessors. Looked up once for each device.
const char* device_processors(int device, int64_t* processors);

// Enqueues the launches of a plan on a stream. Allocates nothing, waits for nothing.
const char* device_launch(bool gather, LaunchPlan& plan, const int64_t* caches, int device,
                          void* stream);

// Enqueues copies between a device and page-locked host memory on a stream. The sources must not
// change until the stream has passed the copies: they may be read at any time until then.
const char* device_copies(void* const* to, const void* const* from, const size_t* bytes,
                          size_t count, int device, void* stream);

// Streams and events, as addresses that only the device interprets. A thread that waits for an
// event sleeps. No function but the ones named new allocates.
const char* device_new_stream(int device, bool urgent, void** stream);
// The time between two events is only known of those that are timed, which are slower.
const char* device_new_event(int device, bool timed, void** event);
void device_free_stream(int device, void* stream);
void device_free_event(int device, void* event);
const char* device_record(int device, void* event, void* stream);
const char* device_wait(int device, void* stream, void* event);
const char* device_synchronize(int device, void* event);
const char* device_reached(int device, void* event, bool* reached);
// Waits for all that was enqueued on a stream.
const char* device_finish(int device, void* stream);
// Seconds between two events that have been reached.
const char* device_seconds(int device, void* first, void* second, double* seconds);

// While an object of this class lives, calls of its thread neither fail because another thread
// captures a graph, nor make that capture fail.
class BesideCaptures {
 public:
  explicit BesideCaptures(int device);
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int device_;
  int mode_;
};

// The driver's attributes of one kernel. Reading them loads the kernel, so that it can be captured
// in graphs.
struct KernelAttributes {
  int64_t registers;
  int64_t local_bytes;  // of each thread; more than 0 means spilled registers
  int64_t shared_bytes;
  int64_t binary_version;  // 90: machine code of sm_90 runs
  int64_t ptx_version;
};
const char* device_kernel(bool gather, int64_t width, int device, KernelAttributes* attributes);

// CUDA version that the library was built with, as 13000 for 13.0.
int64_t device_toolkit();

}  // namespace kvshelf

#endif  // KVSHELF_DEVICE_H_
