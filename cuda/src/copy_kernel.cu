// All kernels, for a compiler of device code only (NVRTC).

#include "kvshelf/copy_kernel.h"

namespace kvshelf {

#define KVSHELF_KERNELS(Vector)                                                         \
  template __global__ void copy_kernel<Vector, true>(const __grid_constant__ LaunchArguments); \
  template __global__ void copy_kernel<Vector, false>(const __grid_constant__ LaunchArguments)

KVSHELF_KERNELS(Vector16);
KVSHELF_KERNELS(Vector8);
KVSHELF_KERNELS(Vector4);
KVSHELF_KERNELS(Vector1);

}  // namespace kvshelf
