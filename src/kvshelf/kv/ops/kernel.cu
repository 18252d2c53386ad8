// Gather and scatter of slot-mapped KV: NVRTC or HIPRTC compiles this for the device that is there,
// and the tests compile it as C++.
//
// A lane is one vector of one token's KV: (kv, head, vector of the row). A thread keeps its lane and
// walks over tokens, four independent loads at a time. No thread waits for another. Addresses and
// places are arguments, passed by value: nothing on the device has to outlive a launch.

#if defined(__CUDACC_RTC__)
using Vector16 = uint4;
using Vector8 = uint2;
// Each byte of a source is read once. Weights and activations should stay in the caches instead.
template <typename Vector>
__device__ __forceinline__ Vector load(const Vector* from) {
  return __ldcs(from);
}
#elif defined(__HIPCC_RTC__)
#define __grid_constant__
using Vector16 = uint4;
using Vector8 = uint2;
template <typename Vector>
__device__ __forceinline__ Vector load(const Vector* from) {
  return *from;
}
#endif

using Byte = unsigned char;
using Count = unsigned int;
using Offset = long long;  // bytes

constexpr int kLayers = 128;
constexpr int kTokens = 512;
constexpr int kInFlight = 4;

// kvshelf.kv.ops.kernel fills it: see _ARGUMENTS there.
struct Arguments {
  Byte* buffers;  // of the first shard
  Offset kv_stride, head_stride;  // in the caches
  Offset shard_step, buffer_kv, buffer_token, buffer_head;  // in the buffers
  Count tokens, layers, lanes;
  Count heads, shard_heads, planes, vectors;  // heads of all shards and of one; vectors of a row
  Count kv_inside;  // K and V of a head lie beside each other
  Offset caches[kLayers];  // the address of each layer's first copied head
  Offset starts[kLayers];  // of each layer in a buffer
  Offset places[kTokens];  // of each token's slot from the first copied head on; -1: skip the token
};

template <typename Vector, bool kGather>
__device__ __forceinline__ void copy_lane(const Arguments& a, Count lane, Count layer, Count first,
                                          Count step) {
  const Count row = lane / a.vectors;
  const Count in_row = (lane - row * a.vectors) * sizeof(Vector);
  const Count inner = a.kv_inside ? a.planes : a.heads;
  const Count outer = row / inner, rest = row - outer * inner;
  const Count head = a.kv_inside ? outer : rest, kv = a.kv_inside ? rest : outer;
  const Count shard = head / a.shard_heads;
  Byte* const paged = reinterpret_cast<Byte*>(a.caches[layer]) + kv * a.kv_stride +
                      head * a.head_stride + in_row;
  Byte* const packed = a.buffers + shard * a.shard_step + a.starts[layer] + kv * a.buffer_kv +
                       (head - shard * a.shard_heads) * a.buffer_head + in_row;
  for (Count token = first; token < a.tokens; token += kInFlight * step) {
    Vector values[kInFlight];
    Offset places[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Count at = token + i * step;
      places[i] = at < a.tokens ? a.places[at] : -1;
      values[i] = Vector{};
      if (places[i] >= 0) {
        const Byte* const from = kGather ? paged + places[i] : packed + at * a.buffer_token;
        values[i] = load(reinterpret_cast<const Vector*>(from));
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Count at = token + i * step;
      if (kGather && at < a.tokens) {
        *reinterpret_cast<Vector*>(packed + at * a.buffer_token) = values[i];
      }
      if (!kGather && places[i] >= 0) {
        *reinterpret_cast<Vector*>(paged + places[i]) = values[i];
      }
    }
  }
}

#define KVSHELF_KERNEL(name, Vector, gather)                                              \
  extern "C" __global__ void __launch_bounds__(256)                                       \
      name(const __grid_constant__ Arguments a) {                                         \
    const Count lane = blockIdx.x * blockDim.x + threadIdx.x;                             \
    if (lane >= a.lanes) return;                                                          \
    const Count first = blockIdx.y * blockDim.y + threadIdx.y;                            \
    for (Count layer = blockIdx.z; layer < a.layers; layer += gridDim.z) {                \
      copy_lane<Vector, gather>(a, lane, layer, first, gridDim.y * blockDim.y);           \
    }                                                                                     \
  }

KVSHELF_KERNEL(gather_16, Vector16, true)
KVSHELF_KERNEL(gather_8, Vector8, true)
KVSHELF_KERNEL(gather_4, Count, true)
KVSHELF_KERNEL(gather_1, Byte, true)
KVSHELF_KERNEL(scatter_16, Vector16, false)
KVSHELF_KERNEL(scatter_8, Vector8, false)
KVSHELF_KERNEL(scatter_4, Count, false)
KVSHELF_KERNEL(scatter_1, Byte, false)
