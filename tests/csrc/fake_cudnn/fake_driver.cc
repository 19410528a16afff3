// A libcuda.so.1 without a GPU, for ../csrc_test.cc. A stream is a number: its context is the
// stream's hundreds, so stream 101 and 102 are of one device and 201 of another.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fake_graph.h"

namespace {
thread_local std::vector<void*> contexts;
}

extern "C" {

void* FakeCurrentContext() { return contexts.empty() ? nullptr : contexts.back(); }

int cuGetErrorString(int, const char** text) {
  *text = "a fake driver's error";
  return 0;
}

int cuStreamGetCtx(void* stream, void** context) {
  *context = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(stream) / 100 * 100);
  return *context == nullptr ? 400 : 0;
}

int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = static_cast<int>(reinterpret_cast<uintptr_t>(contexts.back()) / 100);
  return 0;
}

int cuDeviceGetName(char* name, int length, int device) {
  std::snprintf(name, length, "%s", device == 9 ? "Another GPU" : "Fake GPU");
  return 0;
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void*) {
  std::memset(reinterpret_cast<void*>(address), value, count);
  return 0;
}

int cuMemsetD32Async(uint64_t address, unsigned int value, size_t count, void*) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned int*>(address)[i] = value;
  return 0;
}

int cuGraphGetNodes(void* graph, void**, size_t* count) {
  *count = static_cast<FakeGraph*>(graph)->nodes;
  return 0;
}

}  // extern "C"
