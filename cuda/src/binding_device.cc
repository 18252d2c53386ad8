// The functions for kvshelf.kv.ops with paged caches on a device. Part of the library if there is a
// CUDA compiler; the tests compile them together with an emulation of the device.
//
// The first argument of each function that enqueues work is an anchor: a tensor on the caches'
// device, from which apache-tvm-ffi gets the device and torch's current stream. A device error
// raises RuntimeError with the driver's message.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>

#include "kvshelf/binding.h"
#include "kvshelf/device.h"
#include "kvshelf/launch.h"
#include "kvshelf/pieces.h"

namespace {

using kvshelf::at;
using tvm::ffi::TensorView;

void check(const char* error) {
  if (error != nullptr) {
    TVM_FFI_THROW(RuntimeError) << "CUDA error: " << error;
  }
}

void* stream_of(const TensorView& anchor) {
  return TVMFFIEnvGetStream(anchor.device().device_type, anchor.device().device_id);
}

// slots: on the host, all checked before anything is launched. Returns the width of the vectors in
// bytes; 0 when there was nothing to do; -1 when the counts exceed what the kernels can count; -2
// minus the position of the first bad slot. Nothing was launched when the answer is negative.
template <bool kGather>
int64_t launch(TensorView anchor, int64_t index_address, int64_t caches, int64_t slots_address,
               int64_t buffers) {
  const kvshelf::PagedIndex index = kvshelf::index_at(index_address);
  const int64_t* const slots = at<const int64_t>(slots_address);
  const int device = anchor.device().device_id;
  // The slots are read twice, to check and to use them. If another thread changes the mapping in
  // between, the launches skip slots that are not in the cache.
  const int64_t bad =
      kvshelf::first_bad_slot(slots, index.tokens, index.num_blocks * index.block_size);
  if (bad != kvshelf::kAllSlotsGood) return -2 - bad;
  int64_t processors = 0;
  check(kvshelf::device_processors(device, &processors));
  const int64_t* const addresses = at<const int64_t>(caches);
  kvshelf::LaunchPlan plan =
      kvshelf::make_plan(index, addresses, nullptr, slots, at<unsigned char>(buffers), processors);
  if (plan.empty) return 0;
  if (plan.too_large) return -1;
  check(kvshelf::device_launch(kGather, plan, addresses, device, stream_of(anchor)));
  return plan.width;
}

int64_t device_count() {
  int64_t count = 0;
  check(kvshelf::device_count(&count));
  return count;
}

// One attribute of one kernel on one device, which loads the kernel: 0 registers, 1 bytes of local
// memory, 2 bytes of shared memory, 3 version of the machine code, 4 version of the PTX.
int64_t kernel_attribute(int64_t device, bool gather, int64_t width, int64_t which) {
  kvshelf::KernelAttributes found{};
  check(kvshelf::device_kernel(gather, width, static_cast<int>(device), &found));
  const int64_t values[] = {found.registers, found.local_bytes, found.shared_bytes,
                            found.binary_version, found.ptx_version};
  if (which < 0 || which >= 5) {
    TVM_FFI_THROW(ValueError) << "there is no attribute " << which;
  }
  return values[which];
}

// The architectures of the kernels, in CMake's notation: "80-real 90-real 100".
tvm::ffi::String architectures() { return KVSHELF_CUDA_ARCHITECTURES; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_gather, launch<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_scatter, launch<false>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_count, device_count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_kernel, kernel_attribute);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_toolkit, kvshelf::device_toolkit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_architectures, architectures);
