// Hands kernels that were compiled beforehand (KVSHELF_FATBIN, a fat binary) to the CUDA runtime,
// when the library is loaded.
//
// nvcc generates the same calls for the kernels of a .cu file. They need neither a driver nor a
// device: the runtime loads the machine code that fits a device when a kernel is first used there.

#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include "kvshelf/copy_kernel.h"

// Exported by the runtime, and declared only in a header for code that nvcc generates.
extern "C" {
void** __cudaRegisterFatBinary(void* binary);
void __cudaRegisterFatBinaryEnd(void** handle);
void __cudaUnregisterFatBinary(void** handle);
void __cudaRegisterFunction(void** handle, const char* host_address, char* device_name,
                            const char* name, int thread_limit, uint3* thread, uint3* block,
                            dim3* block_size, dim3* grid_size, int* warp_size);
}

// In the sections in which NVIDIA's tools look for device code.
__asm__(".pushsection " FATBIN_DATA_SECTION_NAME
        ", \"a\"\n"
        ".balign 16\n"
        "kvshelf_fatbin:\n"
        ".incbin \"" KVSHELF_FATBIN
        "\"\n"
        ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned long long kvshelf_fatbin[];

namespace kvshelf {
namespace {

__attribute__((section(FATBIN_CONTROL_SECTION_NAME))) __fatBinC_Wrapper_t binary = {
    FATBINC_MAGIC, FATBINC_VERSION, kvshelf_fatbin, nullptr};

class Registration {
 public:
  Registration() : handle_(__cudaRegisterFatBinary(&binary)) {
    // The names are what C++ makes of copy_kernel<uint4, false> and so on.
#define KVSHELF_REGISTER(Vector, vector_name)                                       \
  add(&copy_kernel<Vector, false>,                                                  \
      "_ZN7kvshelf11copy_kernelI" vector_name "Lb0EEEvNS_15LaunchArgumentsE");      \
  add(&copy_kernel<Vector, true>,                                                   \
      "_ZN7kvshelf11copy_kernelI" vector_name "Lb1EEEvNS_15LaunchArgumentsE")
    KVSHELF_REGISTER(Vector16, "5uint4");
    KVSHELF_REGISTER(Vector8, "5uint2");
    KVSHELF_REGISTER(Vector4, "j");
    KVSHELF_REGISTER(Vector1, "h");
    __cudaRegisterFatBinaryEnd(handle_);
  }
  ~Registration() { __cudaUnregisterFatBinary(handle_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  void add(const char* address, const char* name) {
    __cudaRegisterFunction(handle_, address, const_cast<char*>(name), name, -1, nullptr, nullptr,
                           nullptr, nullptr, nullptr);
  }

  void** handle_;
};

const Registration registration;

}  // namespace
}  // namespace kvshelf
