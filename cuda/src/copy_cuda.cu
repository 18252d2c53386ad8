// Launches of the gather and scatter kernels, and copies between device and host.
//
// No allocation and no synchronisation, so all launches can be captured in CUDA graphs.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvshelf/copy_kernel.h"
#include "kvshelf/device.h"
#include "kvshelf/device_guard.h"
#include "kvshelf/launch.h"

namespace kvshelf {
namespace {

template <bool kGather>
const void* kernel_of(int64_t width) {
  switch (width) {
    case 16:
      return reinterpret_cast<const void*>(&copy_kernel<Vector16, kGather>);
    case 8:
      return reinterpret_cast<const void*>(&copy_kernel<Vector8, kGather>);
    case 4:
      return reinterpret_cast<const void*>(&copy_kernel<Vector4, kGather>);
    default:
      return reinterpret_cast<const void*>(&copy_kernel<Vector1, kGather>);
  }
}

const void* kernel_of(bool gather, int64_t width) {
  return gather ? kernel_of<true>(width) : kernel_of<false>(width);
}

cudaError_t copy_one_by_one(void* const* to, const void* const* from, const size_t* bytes,
                            size_t count, cudaStream_t stream) {
  for (size_t i = 0; i < count; ++i) {
    const cudaError_t error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// An attribute of a device, asked for once. `known` has one more than the value, 0 before.
constexpr int kKnownDevices = 64;
using Known = std::atomic<int>[kKnownDevices];

cudaError_t attribute_of(int device, cudaDeviceAttr attribute, Known& known, int* value) {
  const bool keep = device < kKnownDevices;
  const int found = keep ? known[device].load(std::memory_order_relaxed) : 0;
  if (found != 0) {
    *value = found - 1;
    return cudaSuccess;
  }
  const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
  if (error == cudaSuccess && keep) known[device].store(*value + 1, std::memory_order_relaxed);
  return error;
}

#if CUDART_VERSION >= 12080
constexpr size_t kSmallCopy = 128 * 1024;

// Batches take the addresses of registered memory for those of the device. Where these differ
// (WSL2, GPUs lent to virtual machines), they read what is not mapped, and the context is lost.
bool batches_may_use_registered_memory(int device) {
  static Known known;
  int value = 0;
  return attribute_of(device, cudaDevAttrCanUseHostPointerForRegisteredMem, known, &value) ==
             cudaSuccess &&
         value != 0;
}

cudaError_t copy_as_batch(void* const* to, const void* const* from, const size_t* bytes,
                          size_t count, cudaStream_t stream) {
  cudaMemcpyAttributes attributes{};
  // The sources do not change until the stream has passed the copies.
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderAny;
  // Small copies must not be done by the processors, which the model uses; large ones never are.
  const bool small = *std::max_element(bytes, bytes + count) <= kSmallCopy;
  attributes.flags = small ? cudaMemcpyFlagPreferOverlapWithCompute : cudaMemcpyFlagDefault;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(to, from, bytes, count, &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(const_cast<void**>(to), const_cast<void**>(from),
                              const_cast<size_t*>(bytes), count, &attributes, &first, 1, &failed,
                              stream);
#endif
}
#endif

}  // namespace

const char* device_count(int64_t* count) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  *count = error == cudaSuccess ? devices : 0;
  return text_of(error);
}

const char* device_processors(int device, int64_t* processors) {
  static Known known;
  int value = 0;
  const cudaError_t error = attribute_of(device, cudaDevAttrMultiProcessorCount, known, &value);
  if (error != cudaSuccess) return text_of(error);
  *processors = value;
  return nullptr;
}

const char* device_launch(bool gather, LaunchPlan& plan, const int64_t* caches, int device,
                          void* stream) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  const void* const kernel = kernel_of(gather, plan.width);
  cudaError_t error = cudaSuccess;
  for_each_launch(plan, caches,
                  [&](const LaunchArguments& arguments, const Grid& grid, const Grid& threads) {
                    void* pointers[] = {const_cast<LaunchArguments*>(&arguments)};
                    error = cudaLaunchKernel(kernel, dim3(grid.x, grid.y),
                                             dim3(threads.x, threads.y), pointers, 0,
                                             static_cast<cudaStream_t>(stream));
                    return error == cudaSuccess;
                  });
  return text_of(error);
}

const char* device_copies(void* const* to, const void* const* from, const size_t* bytes,
                          size_t count, int device, void* stream_address) {
  if (count == 0) return nullptr;
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_address);
#if CUDART_VERSION >= 12080
  // Batches are refused by older drivers, by the legacy default stream and inside captures.
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  const bool legacy = stream == nullptr || stream == cudaStreamLegacy;
  if (count > 1 && !legacy && batches_may_use_registered_memory(device) &&
      cudaStreamIsCapturing(stream, &capturing) == cudaSuccess &&
      capturing == cudaStreamCaptureStatusNone) {
    const cudaError_t error = copy_as_batch(to, from, bytes, count, stream);
    if (error == cudaSuccess) return nullptr;
    if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver) {
      return text_of(error);
    }
    static_cast<void>(cudaGetLastError());
  }
#endif
  return text_of(copy_one_by_one(to, from, bytes, count, stream));
}

const char* device_kernel(bool gather, int64_t width, int device, KernelAttributes* attributes) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  cudaFuncAttributes found{};
  const cudaError_t error = cudaFuncGetAttributes(&found, kernel_of(gather, width));
  if (error != cudaSuccess) return text_of(error);
  attributes->registers = found.numRegs;
  attributes->local_bytes = static_cast<int64_t>(found.localSizeBytes);
  attributes->shared_bytes = static_cast<int64_t>(found.sharedSizeBytes);
  attributes->binary_version = found.binaryVersion;
  attributes->ptx_version = found.ptxVersion;
  return nullptr;
}

int64_t device_toolkit() { return CUDART_VERSION; }

}  // namespace kvshelf
