// Launches of the kernels that hash objects in a load buffer. Neither allocates nor waits.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kvshelf/device.h"
#include "kvshelf/device_guard.h"
#include "kvshelf/xxh3.h"

namespace kvshelf {
namespace {

// What is hashed is scattered next, so it may stay in the caches.
struct CachedMemory {
  template <typename Vector>
  __device__ __forceinline__ Vector load(const unsigned char* address) const {
    return *reinterpret_cast<const Vector*>(address);
  }
  template <typename Vector>
  __device__ __forceinline__ void store(unsigned char* address, Vector value) const {
    *reinterpret_cast<Vector*>(address) = value;
  }
};

__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const __grid_constant__ HashArguments arguments) {
  CachedMemory memory;
  sum_thread(arguments, blockIdx.x, gridDim.x, threadIdx.x, memory);
}

template <typename Vector>
__global__ void __launch_bounds__(kChainThreads)
    chain_kernel(const __grid_constant__ HashArguments arguments) {
  CachedMemory memory;
  const uint32_t items = arguments.shards * arguments.tensors * kLanes;
  for (uint32_t item = blockIdx.x * kChainThreads + threadIdx.x; item < items;
       item += gridDim.x * kChainThreads) {
    chain_thread<Vector>(arguments, item, memory);
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ HashArguments arguments) {
  CachedMemory memory;
  const uint32_t items = arguments.shards * arguments.tensors;
  for (uint32_t item = blockIdx.x * kFinishThreads + threadIdx.x; item < items;
       item += gridDim.x * kFinishThreads) {
    finish_thread(arguments, item, memory);
  }
}

}  // namespace

const char* device_hash(const HashArguments& arguments, int64_t tiles, int64_t width,
                        int64_t blocks, int device, void* stream_address) {
  const DeviceGuard guard(device);
  if (const char* error = guard.error()) return error;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_address);
  const auto grid = [blocks](int64_t most) {
    return static_cast<uint32_t>(smaller(blocks, most));
  };
  const int64_t items = int64_t{arguments.shards} * arguments.tensors;
  const uint32_t chain_grid = grid(ceil_div(items * kLanes, kChainThreads));
  if (width == 16) {
    if (tiles > 0) sum_kernel<<<grid(tiles), kSumThreads, 0, stream>>>(arguments);
    chain_kernel<Vector8><<<chain_grid, kChainThreads, 0, stream>>>(arguments);
  } else {
    chain_kernel<Vector1><<<chain_grid, kChainThreads, 0, stream>>>(arguments);
  }
  finish_kernel<<<grid(ceil_div(items, kFinishThreads)), kFinishThreads, 0, stream>>>(arguments);
  return text_of(cudaGetLastError());
}

}  // namespace kvshelf
