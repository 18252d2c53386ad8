// Compiled while configuring, to see whether the compiler can use apache-tvm-ffi.
#include <tvm/ffi/function.h>

#include <cstdint>

static int64_t one() { return 1; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one, one);

int main() { return 0; }
