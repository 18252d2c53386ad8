// Streams, events and the current device.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kvshelf/device.h"
#include "kvshelf/device_guard.h"

namespace kvshelf {
namespace {

// cuDevicePrimaryCtxGetState, by which the driver tells whether anything uses a device. The runtime
// has no such function, and the library is not linked with the driver.
using GetState = int (*)(int device, unsigned* flags, int* active);

GetState driver_function() {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &found, 12000, cudaEnableDefault, nullptr);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, nullptr);
#endif
  return text_of(error) == nullptr ? reinterpret_cast<GetState>(found) : nullptr;
}

bool in_use(int device) {
  static const GetState get_state = driver_function();
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == 0 && active != 0;
}

cudaStream_t stream_at(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_at(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

DeviceGuard::DeviceGuard(int device) : device_(device) {
  error_ = cudaGetDevice(&before_);
  if (error_ == cudaSuccess && before_ != device_) error_ = cudaSetDevice(device_);
}

DeviceGuard::~DeviceGuard() {
  if (error_ == cudaSuccess && before_ != device_ && in_use(before_)) {
    static_cast<void>(cudaSetDevice(before_));
  }
}

BesideCaptures::BesideCaptures(int device) : device_(device) {
  const DeviceGuard guard(device_);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(text_of(cudaThreadExchangeStreamCaptureMode(&mode)));
  mode_ = static_cast<int>(mode);
}

BesideCaptures::~BesideCaptures() {
  const DeviceGuard guard(device_);
  cudaStreamCaptureMode mode = static_cast<cudaStreamCaptureMode>(mode_);
  static_cast<void>(text_of(cudaThreadExchangeStreamCaptureMode(&mode)));
}

const char* device_new_stream(int device, bool urgent, void** stream) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  int least = 0;
  int greatest = 0;
  const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error != cudaSuccess) return text_of(error);
  cudaStream_t made = nullptr;
  const char* const text = text_of(
      cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, urgent ? greatest : least));
  *stream = made;
  return text;
}

const char* device_new_event(int device, bool timed, void** event) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  cudaEvent_t made = nullptr;
  const unsigned flags = cudaEventBlockingSync | (timed ? 0U : cudaEventDisableTiming);
  const char* const text = text_of(cudaEventCreateWithFlags(&made, flags));
  *event = made;
  return text;
}

void device_free_stream(int device, void* stream) {
  const DeviceGuard guard(device);
  if (guard.error() == nullptr) static_cast<void>(text_of(cudaStreamDestroy(stream_at(stream))));
}

void device_free_event(int device, void* event) {
  const DeviceGuard guard(device);
  if (guard.error() == nullptr) static_cast<void>(text_of(cudaEventDestroy(event_at(event))));
}

const char* device_record(int device, void* event, void* stream) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  return text_of(cudaEventRecord(event_at(event), stream_at(stream)));
}

const char* device_wait(int device, void* stream, void* event) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  return text_of(cudaStreamWaitEvent(stream_at(stream), event_at(event), 0));
}

const char* device_synchronize(int device, void* event) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  return text_of(cudaEventSynchronize(event_at(event)));
}

const char* device_reached(int device, void* event, bool* reached) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  const cudaError_t error = cudaEventQuery(event_at(event));
  *reached = error == cudaSuccess;
  if (error == cudaErrorNotReady) {
    // It is not an error, but the runtime would return it as the last one.
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  return text_of(error);
}

const char* device_finish(int device, void* stream) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  return text_of(cudaStreamSynchronize(stream_at(stream)));
}

const char* device_seconds(int device, void* first, void* second, double* seconds) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  float milliseconds = 0;
  const cudaError_t error = cudaEventElapsedTime(&milliseconds, event_at(first), event_at(second));
  *seconds = static_cast<double>(milliseconds) * 1e-3;
  return text_of(error);
}

}  // namespace kvshelf
