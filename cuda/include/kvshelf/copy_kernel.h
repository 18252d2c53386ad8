// The gather and scatter kernels.
//
// nvcc compiles them as part of src/copy_cuda.cu. Where there is no nvcc, NVRTC compiles them by
// themselves (src/copy_kernel.cu), src/copy_cuda.cu is plain C++, and
// src/registered_kernels.cc hands the compiled kernels to the CUDA runtime.

#ifndef KVSHELF_COPY_KERNEL_H_
#define KVSHELF_COPY_KERNEL_H_

#include "kvshelf/launch.h"

namespace kvshelf {

#if defined(__CUDACC__)

// Each byte of a source is read once, so it need not stay in the caches (".cs"), where the
// model's weights and activations are. What is written is read next, by the copy engine or by
// attention.
struct DeviceMemory {
  template <typename Vector>
  __device__ __forceinline__ Vector load(const unsigned char* address) const {
    return __ldcs(reinterpret_cast<const Vector*>(address));
  }
  template <typename Vector>
  __device__ __forceinline__ void store(unsigned char* address, Vector value) const {
    *reinterpret_cast<Vector*>(address) = value;
  }
};

template <typename Vector, bool kGather>
__global__ void __launch_bounds__(kBlockThreads)
    copy_kernel(const __grid_constant__ LaunchArguments arguments) {
  DeviceMemory memory;
  copy_layers<Vector, kGather>(arguments, Grid{gridDim.x, gridDim.y},
                               Grid{blockIdx.x, blockIdx.y}, Grid{threadIdx.x, threadIdx.y},
                               memory);
}

#else

// The address by which the CUDA runtime knows a kernel.
template <typename Vector, bool kGather>
inline char copy_kernel = 0;

#endif

static_assert(sizeof(LaunchArguments) <= 4096, "kernel arguments are at most 4 KiB");

}  // namespace kvshelf

#endif  // KVSHELF_COPY_KERNEL_H_
