// A libcudnn.so.9 without a GPU: just enough for the executor's test (../csrc_test.cc).
//
// Its plan text is "copy <bytes>, needs <bytes of workspace>...": execute copies that many bytes
// from the pointer with uid 1 to the one with uid 2, and adds the first byte of the workspace to
// the first byte copied, so that pointers, workspace and fills can all be seen. It checks what
// cuDNN demands: that one handle is in one thread at a time, and that nothing is used after it was
// destroyed.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "fake_graph.h"

namespace {

enum { kSuccess = 0, kBadParam = 2000, kNotSupported = 3000 };

struct Handle {
  std::atomic<bool> busy{false};
  void* stream = nullptr;
  void* context = nullptr;
};

struct Descriptor {
  int type = 0;
  bool finalized = false;
  void* context = nullptr;
  std::string text;
  std::vector<int64_t> uids;
  std::vector<void*> pointers;
  void* workspace = nullptr;
};

thread_local std::string last_error;

int Fail(int status, const std::string& why) {
  last_error = "fake: " + why;
  return status;
}

// A broken rule of cuDNN's is a bug in the executor: stop at once.
void Demand(bool ok, const char* rule) {
  if (ok) return;
  std::fprintf(stderr, "fake cuDNN: %s\n", rule);
  std::abort();
}

// One thread in a handle, for a scope.
struct InHandle {
  explicit InHandle(void* handle) : h(static_cast<Handle*>(handle)) {
    Demand(!h->busy.exchange(true), "two threads are in one handle");
  }
  ~InHandle() { h->busy.store(false); }
  Handle* const h;
};

// What a plan does with the pointers of a variant pack, as the copy of a graph.
int Copies(void* handle, void* plan, void* variant_pack, FakeGraph& graph) {
  auto* h = static_cast<Handle*>(handle);
  auto* p = static_cast<Descriptor*>(plan);
  auto* v = static_cast<Descriptor*>(variant_pack);
  Demand(p->finalized && v->finalized, "a descriptor was executed before finalize");
  Demand(p->context == h->context, "a plan was executed on another device");
  const size_t from = p->text.find("from ");  // another uid than 1 to read, and the next to write
  const int64_t first = from == p->text.npos ? 1 : std::atoi(p->text.c_str() + from + 5);
  char* source = nullptr;
  char* target = nullptr;
  for (size_t i = 0; i < v->uids.size(); ++i) {
    if (v->uids[i] == first) source = static_cast<char*>(v->pointers[i]);
    if (v->uids[i] == first + 1) target = static_cast<char*>(v->pointers[i]);
  }
  if (source == nullptr || target == nullptr) {
    return Fail(kBadParam, "the variant pack lacks uid 1 or 2");
  }
  graph.source = source;
  graph.target = target;
  graph.bytes = std::atoi(p->text.c_str() + 5);
  return kSuccess;
}

}  // namespace

extern "C" {

extern void* FakeCurrentContext();  // of the fake driver

size_t cudnnGetVersion() { return 91900; }

const char* cudnnGetErrorString(int status) {
  return status == kSuccess    ? "CUDNN_STATUS_SUCCESS"
         : status == kBadParam ? "CUDNN_STATUS_BAD_PARAM"
                               : "CUDNN_STATUS_NOT_SUPPORTED";
}

void cudnnGetLastErrorString(char* message, size_t size) {
  std::snprintf(message, size, "%s", last_error.c_str());
}

int cudnnCreate(void** handle) {
  Demand(FakeCurrentContext() != nullptr, "a handle was created without a context");
  auto* created = new Handle;
  created->context = FakeCurrentContext();
  // The executor forgets its handles on purpose when it closes; the leak checker should not mind.
  static std::mutex mutex;
  static auto* all = new std::vector<Handle*>;
  std::lock_guard<std::mutex> lock(mutex);
  all->push_back(created);
  *handle = created;
  return kSuccess;
}

int cudnnSetStream(void* handle, void* stream) {
  InHandle(handle).h->stream = stream;
  return kSuccess;
}

int cudnnBackendCreateDescriptor(int type, void** descriptor) {
  auto* created = new Descriptor;
  created->type = type;
  *descriptor = created;
  return kSuccess;
}

int cudnnBackendDestroyDescriptor(void* descriptor) {
  auto* d = static_cast<Descriptor*>(descriptor);
  Demand(d->type != 5 || !d->finalized || d->context == FakeCurrentContext(),
         "a plan was destroyed in another context");
  delete d;
  return kSuccess;
}

int cudnnBackendSetAttribute(void* descriptor, int name, int type, int64_t count,
                             const void* elements) {
  auto* d = static_cast<Descriptor*>(descriptor);
  if (d->finalized) return Fail(kNotSupported, "an attribute was set after finalize");
  auto is = [&](int want_name, int want_type) { return name == want_name && type == want_type; };
  if (d->type == 5 && is(400, 0)) {
    d->context = (*static_cast<Handle* const*>(elements))->context;
  } else if (d->type == 5 && is(405, 24)) {
    d->text.assign(static_cast<const char*>(elements), count);
  } else if (d->type == 16 && is(1000, 3)) {
    const auto* uids = static_cast<const int64_t*>(elements);
    d->uids.assign(uids, uids + count);
  } else if (d->type == 16 && is(1001, 6)) {
    auto* const* pointers = static_cast<void* const*>(elements);
    d->pointers.assign(pointers, pointers + count);
  } else if (d->type == 16 && is(1003, 6) && count == 1) {
    d->workspace = *static_cast<void* const*>(elements);
  } else {
    return Fail(kBadParam, "unknown attribute " + std::to_string(name));
  }
  return kSuccess;
}

int cudnnBackendGetAttribute(void* descriptor, int name, int type, int64_t capacity, int64_t* count,
                             void* elements) {
  const auto* d = static_cast<Descriptor*>(descriptor);
  Demand(d->type == 5 && d->finalized, "a plan was asked before finalize");
  if (name != 402 || type != 3 || capacity != 1) return Fail(kBadParam, "unknown attribute");
  const size_t needs = d->text.find("needs ");
  *count = 1;
  *static_cast<int64_t*>(elements) =
      needs == d->text.npos ? 0 : std::atoll(d->text.c_str() + needs + 6);
  return kSuccess;
}

int cudnnBackendFinalize(void* descriptor) {
  auto* d = static_cast<Descriptor*>(descriptor);
  if (d->type == 5 && d->text.rfind("copy ", 0) != 0) return Fail(kBadParam, "unreadable plan");
  d->finalized = true;
  return kSuccess;
}

int cudnnBackendExecute(void* handle, void* plan, void* variant_pack) {
  InHandle scope(handle);
  FakeGraph graph;
  const int status = Copies(handle, plan, variant_pack, graph);
  if (status != kSuccess) return status;
  graph.Launch();
  const auto* pack = static_cast<Descriptor*>(variant_pack);
  if (pack->workspace != nullptr) graph.target[0] += *static_cast<char*>(pack->workspace);
  return kSuccess;
}

#ifndef FAKE_WITHOUT_CUDA_GRAPHS
int cudnnBackendPopulateCudaGraph(void* handle, void* plan, void* variant_pack, void* graph) {
  Demand(FakeCurrentContext() != nullptr, "a CUDA graph was populated without a context");
  InHandle scope(handle);
  auto* made = static_cast<FakeGraph*>(graph);
  Demand(made->nodes == 0, "a CUDA graph was populated twice");
  const int status = Copies(handle, plan, variant_pack, *made);
  if (status == kSuccess) made->nodes = 1;
  return status;
}

int cudnnBackendUpdateCudaGraph(void* handle, void* plan, void* variant_pack, void* graph) {
  InHandle scope(handle);
  auto* made = static_cast<FakeGraph*>(graph);
  Demand(made->nodes == 1, "a CUDA graph was updated before it was populated");
  return Copies(handle, plan, variant_pack, *made);
}
#endif

}  // extern "C"
