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
    case 2:
      return reinterpret_cast<const void*>(&copy_kernel<Vector2, kGather>);
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

#if CUDART_VERSION >= 12080
constexpr size_t kSmallCopy = 128 * 1024;

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
  constexpr int kKnown = 64;
  static std::atomic<int> known[kKnown];
  int value = device < kKnown ? known[device].load(std::memory_order_relaxed) : 0;
  if (value == 0) {
    const cudaError_t error =
        cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return text_of(error);
    if (device < kKnown) known[device].store(value, std::memory_order_relaxed);
  }
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
                    error = cudaLaunchKernel(kernel, dim3(grid.x, grid.y, grid.z),
                                             dim3(threads.x, threads.y, threads.z), pointers, 0,
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
  if (count > 1 && !legacy && cudaStreamIsCapturing(stream, &capturing) == cudaSuccess &&
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
