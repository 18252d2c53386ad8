// The function for the run on a GPU that hashes objects in a load buffer; see xxh3.h.

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "kvshelf/binding.h"
#include "kvshelf/device.h"
#include "kvshelf/xxh3.h"

namespace {

using kvshelf::at;

// Bytes of scratch memory that the tensors of one shard need. starts: address of the first bytes of
// all tensors in a payload, and of its end.
int64_t hash_room(int64_t starts, int64_t tensors) {
  return kvshelf::hash_room(at<const int64_t>(starts), tensors);
}

// Enqueues the kernels that write, for each shard, the canonical xxh3-128 of each tensor. payloads:
// of the first shard; stride: to the next one. room: 16-byte aligned memory on the device, hash_room
// for each shard, in use until the stream has passed the kernels. digests: 16 bytes for each shard and
// tensor, aligned alike. blocks: most blocks of threads. Returns the width of the vectors.
int64_t hash(int64_t device, int64_t stream, int64_t payloads_address, int64_t stride,
             int64_t shards, int64_t starts_address, int64_t tensors, int64_t room,
             int64_t digests, int64_t blocks) {
  const unsigned char* const payloads = at<const unsigned char>(payloads_address);
  const int64_t* const starts = at<const int64_t>(starts_address);
  const int64_t width = kvshelf::hash_width(payloads, stride, shards, starts, tensors);
  const char* error = nullptr;
  kvshelf::for_each_hash_launch(
      payloads, stride, shards, starts, tensors, at<unsigned char>(room),
      at<unsigned char>(digests), [&](const kvshelf::HashArguments& arguments, int64_t tiles) {
        error = kvshelf::device_hash(arguments, tiles, width, blocks, static_cast<int>(device),
                                     at<void>(stream));
        return error == nullptr;
      });
  if (error != nullptr) {
    TVM_FFI_THROW(RuntimeError) << "CUDA error: " << error;
  }
  return width;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(design_hash, hash);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(design_hash_room, hash_room);
