// Which device a thread's calls of the CUDA runtime go to. CUDA only.

#ifndef KVSHELF_DEVICE_GUARD_H_
#define KVSHELF_DEVICE_GUARD_H_

#include <cuda_runtime_api.h>

namespace kvshelf {

// Null, or the error's text. Also clears the runtime's last error.
inline const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(error);
}

// Makes a device current; the destructor restores the previous one, unless nothing has used that
// one: to make it current would create a context there, which takes half a gigabyte. (A new thread
// is on device 0, whatever device its process uses.)
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  // Of the constructor: null, or the text of an error.
  const char* error() const { return text_of(error_); }

 private:
  int device_;
  int before_ = 0;
  cudaError_t error_;
};

}  // namespace kvshelf

#endif  // KVSHELF_DEVICE_GUARD_H_
