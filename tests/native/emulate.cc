// Runs the body of the kernels for each block and each thread, on the CPU.
#include <cstdint>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
struct Place {
  uint32_t x, y, z;
};
static thread_local Place blockIdx, threadIdx, gridDim, blockDim;
struct alignas(16) Vector16 {
  uint32_t x, y, z, w;
};
struct alignas(8) Vector8 {
  uint32_t x, y;
};
template <typename Vector>
inline Vector load(const Vector* from) {
  return *from;
}
#include "kernel.cu"
static bool next(Place& at, const Place& end) {
  if (++at.x < end.x) return true;
  at.x = 0;
  if (++at.y < end.y) return true;
  at.y = 0;
  return ++at.z < end.z;
}
extern "C" void run(void (*kernel)(Arguments), const Arguments* a, const Place* grid,
                    const Place* block) {
  gridDim = *grid, blockDim = *block, blockIdx = {};
  do {
    threadIdx = {};
    do kernel(*a);
    while (next(threadIdx, blockDim));
  } while (next(blockIdx, gridDim));
}
extern "C" unsigned long size_of_arguments() { return sizeof(Arguments); }
