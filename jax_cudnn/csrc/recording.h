// What Python calls to put a plan into a CUDA graph that the user drives, without XLA.
#ifndef JAX_CUDNN_CSRC_RECORDING_H_
#define JAX_CUDNN_CSRC_RECORDING_H_

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// The custom call's attributes; jax_cudnn/_core/cuda_graphs.py has the same fields.
struct JaxCudnnPlan {
  const char* plan;
  const char* name;
  const char* device_name;
  int64_t checksum;
  int64_t cudnn_version;
  const int64_t* bindings;
  int64_t binding_numbers;
  const uint8_t* scalars;
  int64_t scalar_bytes;
  const int64_t* fills;
  int64_t fill_numbers;
  int64_t workspace_bytes;
  int64_t plan_workspace_offset;
};

// Pointers with the bytes behind each.
struct JaxCudnnBuffers {
  void* const* data;
  const int64_t* bytes;
  int64_t count;
};

// A call site, which is kept for ever: CUDA graphs go on using its kernels. Null, and a message,
// where the plan is malformed.
void* JaxCudnnNewCallSite(const JaxCudnnPlan* p, char* message, int64_t size);

// Populates (or updates) a CUDA graph on a stream's device; the last result is the workspace.
// 0, or 1 and a message.
int JaxCudnnRecord(void* call_site, int32_t ordinal, void* stream, const JaxCudnnBuffers* operands,
                   const JaxCudnnBuffers* results, void* graph, int update, char* message,
                   int64_t size);

}  // extern "C"
#pragma GCC visibility pop

#endif  // JAX_CUDNN_CSRC_RECORDING_H_
