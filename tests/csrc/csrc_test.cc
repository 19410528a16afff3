// The executor against a fake cuDNN and driver: no GPU, no XLA. Each case is a name on the command
// line, run in a process of its own, since closing and forking cannot be undone.
#include <sys/wait.h>
#include <unistd.h>

#include <clocale>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "executor.h"
#include "fake_cudnn/fake_graph.h"

namespace jax_cudnn {
extern "C" {  // of handler.cc
const char* JaxCudnnNewCallSite(int64_t count, const char* const* names, const char* const* data,
                                const int64_t* sizes, CallSite** site);
const char* JaxCudnnRecord(CallSite* site, int32_t ordinal, void* stream, const Buffer* buffers,
                           size_t operands, size_t results, void* graph, int update);
}

namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

void CheckFails(const ffi::Error& error, const std::vector<std::string>& words) {
  CHECK(error.failure());
  for (const std::string& word : words) {
    if (error.message().find(word) != std::string::npos) continue;
    std::fprintf(stderr, "'%s' is not in: %s\n", word.c_str(), error.message().c_str());
    std::_Exit(1);
  }
}

// What is thrown, as an error.
template <typename Function>
ffi::Error Caught(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const ffi::Error& error) {
    return error;
  }
}

void CheckSucceeds(const ffi::Error& error) {
  if (error.failure()) std::fprintf(stderr, "%s\n", error.message().c_str());
  CHECK(error.success());
}

Stream StreamOf(int device, int number = 1) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(device * 100 + number));
}

constexpr int64_t kBytes = 32;

// The attributes of a call.
struct Given {
  std::string plan, name, device_name;
  int64_t cudnn_version, workspace_bytes, plan_workspace_offset;
  std::vector<int64_t> bindings, memsets;

  // As bytes, with their checksum or another one.
  Attributes Encoded(int64_t added = 0) const {
    const auto bytes = [](const auto* data, size_t count) {
      return std::string(reinterpret_cast<const char*>(data), count * sizeof(*data));
    };
    Attributes all{{"plan", plan},
                   {"name", name},
                   {"device_name", device_name},
                   {"cudnn_version", bytes(&cudnn_version, 1)},
                   {"workspace_bytes", bytes(&workspace_bytes, 1)},
                   {"plan_workspace_offset", bytes(&plan_workspace_offset, 1)},
                   {"bindings", bytes(bindings.data(), bindings.size())},
                   {"memsets", bytes(memsets.data(), memsets.size())}};
    const int64_t checksum = Checksum(all) + added;
    all["checksum"] = bytes(&checksum, 1);
    return all;
  }
};

// Copies operand 0 to result 0; a memset writes 5 where the plan's workspace begins. Plans with
// another `comment` are not the same.
Given Copy(const std::string& comment = "") {
  Given a;
  a.plan = "copy 32, needs 48" + comment;
  a.name = "my_graph";
  a.device_name = "Fake GPU";
  a.cudnn_version = 91900;
  a.bindings = {1, 0, 0, kBytes, 2, 1, 0, kBytes, 3, 3, 0x0707070707070707, -7};
  a.memsets = {1, 16, 4, 5, 1, 0, 8, 0x01020304};
  a.workspace_bytes = 64;
  a.plan_workspace_offset = 16;
  return a;
}

ffi::Error Refused(const Attributes& attributes) {
  return Caught([&] { CallSite site(attributes); });
}
ffi::Error Refused(const Given& given) { return Refused(given.Encoded()); }

// A call site whose errors are returned.
class Site {
 public:
  explicit Site(const Given& given) {
    CheckSucceeds(Caught([&] { site_ = std::make_unique<CallSite>(given.Encoded()); }));
  }
  ffi::Error Initialize(int32_t ordinal, Stream stream) {
    return Caught([&] { site_->Initialize(ordinal, stream); });
  }
  ffi::Error Execute(int32_t ordinal, Stream stream, Buffers operands, Buffers results,
                     const Recording* into = nullptr) {
    return Caught([&] { site_->Execute(ordinal, stream, operands, results, into); });
  }

 private:
  std::unique_ptr<CallSite> site_;
};

std::unique_ptr<Site> Make(const Given& given) { return std::make_unique<Site>(given); }

struct Arrays {
  explicit Arrays(char seed) {
    for (int i = 0; i < kBytes; ++i) in[i] = static_cast<char>(seed + i);
  }
  ffi::Error Run(Site& site, int device, Stream stream, const Recording* into = nullptr) {
    const Buffer operands[] = {{in, kBytes}};
    const Buffer results[] = {{out, kBytes}, {workspace, 64}};
    return site.Execute(device, stream, {operands, 1}, {results, 2}, into);
  }
  bool Right() const {
    return out[0] == in[0] + 5 && std::memcmp(in + 1, out + 1, kBytes - 1) == 0;
  }
  alignas(16) char in[kBytes], out[kBytes] = {};
  alignas(16) char workspace[64] = {};
};

void TestPacksAreReused() {
  timed = true;
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::vector<Arrays> arrays(4, Arrays(1));
  for (int round = 0; round < 100; ++round) {
    for (Arrays& a : arrays) CheckSucceeds(a.Run(*site, 1, StreamOf(1, 1 + round % 2)));
  }
  for (Arrays& a : arrays) CHECK(a.Right());
  for (const Arrays& a : arrays) CHECK(a.workspace[0] == 4 && a.workspace[7] == 1);
  CHECK(counts.packs_built == 4 && counts.packs_alive == 4);
  Arrays fifth(9);
  CheckSucceeds(fifth.Run(*site, 1, StreamOf(1)));
  CHECK(fifth.Right() && counts.packs_built == 5 && counts.packs_alive == 4);
  CHECK(counts.executions == 401);
  site.reset();
  CHECK(counts.packs_alive == 0 && counts.call_sites_alive == 0);

  // Pointers that differ in one place alone, the first or the last, are another pack's.
  Given given = Copy();
  given.bindings = {1, 0, 0, kBytes, 2, 1, 0, kBytes};
  site = Make(given);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays to(0), from[] = {Arrays(10), Arrays(50)};
  alignas(16) char other[64] = {};
  for (int round = 0; round < 2; ++round) {
    for (const Arrays& source : from) {
      for (char* workspace : {to.workspace, other}) {
        const Buffer operand{const_cast<char*>(source.in), kBytes};
        const Buffer results[] = {{to.out, kBytes}, {workspace, 64}};
        std::memset(to.workspace, 90, 64);
        std::memset(other, 90, 64);
        CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {results, 2}));
        CHECK(to.out[1] == source.in[1] && to.out[0] == source.in[0] + 5);
      }
    }
  }
  CHECK(counts.packs_alive == 4);
}

void TestPlansAreSharedAndReleased() {
  for (int round = 0; round < 50; ++round) {
    auto first = Make(Copy()), second = Make(Copy()), other = Make(Copy("other"));
    for (int device : {1, 2}) {
      for (Site* site : {first.get(), second.get(), other.get()}) {
        for (int again = 0; again < 3; ++again)
          CheckSucceeds(site->Initialize(device, StreamOf(device)));
        Arrays a(1);
        CheckSucceeds(a.Run(*site, device, StreamOf(device)));
        CHECK(a.Right());
      }
    }
    CHECK(counts.plans_alive == 4);  // two texts on two devices
    first.reset();
    CHECK(counts.plans_alive == 4);
  }
  CHECK(counts.plans_finalized == 200 && counts.plans_alive == 0);
  CHECK(counts.handles_created == 2);
}

void TestThreads() {
  timed = true;
  auto site = Make(Copy()), twin = Make(Copy());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Arrays a(static_cast<char>(t)), b(static_cast<char>(t + 1));
      for (int i = 0; i < 1000; ++i) {
        Site& which = i % 3 == 0 ? *twin : *site;
        const int device = 1 + i / 500;
        CheckSucceeds(which.Initialize(device, StreamOf(device, t)));
        Arrays& arrays = i % 7 == 0 ? b : a;
        CheckSucceeds(arrays.Run(which, device, StreamOf(device, t)));
        CHECK(arrays.Right());
        if (i % 100 == 0) {
          auto passing = Make(Copy("passing"));
          CheckSucceeds(passing->Initialize(device, StreamOf(device, t)));
          CheckSucceeds(a.Run(*passing, device, StreamOf(device, t)));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counts.executions == 8 * 1010);
  CHECK(counts.plans_alive == 2 && counts.packs_alive <= 4 * 4 * Device::kMaxLanes);
  CHECK(counts.handles_created <= 2 * Device::kMaxLanes);
  std::printf("%lld handles, %lld packs built\n", (long long)counts.handles_created.load(),
              (long long)counts.packs_built.load());
}

void TestRefusals() {
  Given a = Copy();
  a.cudnn_version = 92800;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)), {"9.28.0", "9.19.0", "libcudnn.so.9"});
  auto site = Make(Copy());
  CheckFails(site->Initialize(9, StreamOf(9)), {"Fake GPU", "Another GPU", "jax_cudnn.target"});
  CheckFails(site->Initialize(64, StreamOf(1)), {"device 64"});
  CheckFails(site->Initialize(3, StreamOf(0)), {"stream's context", "a fake driver's error"});
  Arrays arrays(1);
  CheckFails(arrays.Run(*site, 1, StreamOf(1)), {"without being initialized", "CUDA"});
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  const Buffer small{arrays.in, 31}, right{arrays.in, 32}, work{arrays.workspace, 64};
  auto run = [&](std::vector<Buffer> in, std::vector<Buffer> out) {
    return site->Execute(1, StreamOf(1), in, out);
  };
  CheckFails(run({small}, {right, work}), {"operand 0 has 31 bytes", "32"});
  CheckFails(run({right}, {small, work}), {"result 0 has 31 bytes"});
  CheckFails(run({right}, {right, small}), {"31 bytes of workspace", "64"});
  CheckFails(run({}, {right, work}), {"0 operands"});
  CheckFails(run({right}, {work}), {"1 results"});
  a = Copy();
  Attributes altered = a.Encoded();
  altered["bindings"][0] ^= 8;
  CheckFails(Refused(altered), {"checksum", "Lower the function again"});
  CheckFails(Refused(a.Encoded(1)), {"checksum"});
  CheckFails(Refused(a.Encoded(int64_t{1} << 32)), {"checksum"});
  for (const char* name : {"plan", "memsets", "checksum", "workspace_bytes"}) {
    altered = a.Encoded();
    altered.erase(name);
    CheckFails(Refused(altered), {"malformed", name});
  }
  for (const char* name : {"bindings", "memsets", "cudnn_version"}) {
    altered = a.Encoded();
    altered[name] += "x";
    CheckFails(Refused(altered), {"malformed", name});
  }
  altered = a.Encoded();
  altered["cudnn_version"] += altered["cudnn_version"];
  CheckFails(Refused(altered), {"malformed", "cudnn_version"});
  a.plan = "";
  CheckFails(Refused(a), {"its plan is empty"});
  a = Copy();
  for (const int64_t offset : {17, -16, 80}) {
    a.plan_workspace_offset = offset;
    CheckFails(Refused(a), {"multiple of 16"});
  }
  a.workspace_bytes = -1;
  CheckFails(Refused(a), {"multiple of 16"});
  a = Copy();
  a.plan_workspace_offset = 32;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"32 bytes of workspace", "needs 48", "cache clear"});
  a.plan = "nonsense";
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"finalize a plan", "CUDNN_STATUS_BAD_PARAM", "2000", "fake: unreadable plan"});
  a = Copy();
  a.bindings[0] = -1;
  auto unbound = Make(a);
  CheckSucceeds(unbound->Initialize(1, StreamOf(1)));
  CheckFails(arrays.Run(*unbound, 1, StreamOf(1)), {"execute a plan", "lacks uid 1"});
  CHECK(counts.plans_alive == 1);
}

void TestInitialResults() {
  Given a = Copy();
  a.plan = "copy 16";  // half of result 0
  a.memsets = {0, 0, kBytes, 0xff800000};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[kBytes], workspace[64] = {};
  alignas(16) float out[kBytes / 4];
  std::memset(in, 3, kBytes);
  const Buffer operand{in, kBytes}, results[] = {{out, kBytes}, {workspace, 64}};
  CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {results, 2}));
  CHECK(std::memcmp(reinterpret_cast<char*>(out) + 1, in + 1, 15) == 0);
  CHECK(out[4] == -INFINITY && out[7] == -INFINITY);
  const std::vector<std::vector<int64_t>> wrong = {
      {2, 0, 4, 0},                // result 2: 1 is the workspace
      {-1, 0, 4, 0},               // result -1
      {0, 0, kBytes + 4, 1},       // beyond result 0
      {1, 64, 4, 1},               // beyond the workspace
      {1, -4, 4, 1},               // before it
      {1, 0, -4, 1},               // negative bytes
      {1, 2, 4, 1},                // not aligned to its word
      {1, 0, 6, 1},                // one word and a half
      {0, 0, 4, -1},               // not of 4 bytes
      {0, 0, 4, int64_t{1} << 32}  // not of 4 bytes
  };
  for (const std::vector<int64_t>& row : wrong) {
    a.memsets = {0, 0, 3, 0};
    CheckSucceeds(Refused(a));
    a.memsets.insert(a.memsets.end(), row.begin(), row.end());
    CheckFails(Refused(a), {"malformed", "row 1 of memsets"});
  }
  a.memsets = {0, 0, 4};
  CheckFails(Refused(a), {"malformed", "memsets does not consist of rows"});
}

void TestViews() {
  Given a = Copy();
  // uid 5 is 32 bytes at 32 of an operand of 64, itself not the plan's; uid 6 lies in the
  // workspace.
  a.plan += ", from 5";
  a.workspace_bytes = 128;
  a.plan_workspace_offset = 64;
  a.memsets = {0, 64, 4, 5};
  a.bindings = {-1, 0, 0, 64, -1, 4, 0, 16, 5, 4, 1, 16, 6, 2, 32, 32};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[64], workspace[128] = {};
  for (int i = 0; i < 64; ++i) in[i] = static_cast<char>(i);
  const Buffer operand{in, 64}, result{workspace, 128};
  CheckSucceeds(site->Execute(1, StreamOf(1), {&operand, 1}, {&result, 1}));
  CHECK(workspace[32] == 32 + 5 && workspace[63] == 63);
  // Rows that lead outside of the memory are refused before anything runs.
  const std::vector<std::pair<std::vector<int64_t>, int>> wrong = {
      {{-1, 0, 0, 48, 5, 4, 0, 48}, 1},                // begins where its source ends
      {{-1, 0, 0, 48, -1, 4, 0, 32, 5, 4, 1, 16}, 2},  // the same of a view
      {{1, 0, 0, 48, 2, 4, 0, 8}, 1},                  // not a multiple of 16
      {{1, 0, 0, 48, 2, 2, 8, 8}, 1},                  // not a multiple of 16
      {{-1, 3, 0, 4, 1, 4, 0, 0}, 1},                  // a view of a constant
      {{1, 4, 0, 0}, 0},                               // a view of itself
      {{1, 0, 0, 48, 2, 4, 2, 0}, 1},                  // a view of a later row
      {{1, 0, 0, 48, 2, 4, -1, 0}, 1},                 // a view of no row
      {{1, 0, 0, -1}, 0},                              // negative bytes
      {{1, 0, 1 << 20, 0}, 0},                         // too many operands
      {{1, 0, 256, 0}, 0},                             // too many operands
      {{2, 2, 48, 32}, 0},                             // ends outside of the workspace
      {{2, 2, 80, 0}, 0},                              // begins outside of it
      {{2, 2, -16, 0}, 0},                             // begins before it
      {{3, 3, 0, 4, 3, 3, 16, 4}, 1},                  // uid 3 again
      {{2, 0, 0, 32, 1, 1, 0, 32}, 0},                 // not in the order
      {{1, 0, 0, 32, 2, 0, 0, 32, 2, 1, 0, 32}, 2},    // not in the order
      {{1, 0, 0, 32, 2, 1, 1, 32}, 1},                 // not in the order
      {{1, 0, 0, 32, -1, 1, 0, 32, 2, 4, 0, 0}, 2},    // not in the order
      {{1, 1, 0, 32, -1, 0, 0, 32, 2, 1, 1, 32}, 2},   // a result after another operand
      {{-2, 0, 0, 32}, 0},                             // no uid
      {{-2, 3, 0, 0}, 0},                              // no uid
      {{1, 9, 0, 0}, 0},                               // an unknown kind
      {{1, -1, 0, 0}, 0},                              // an unknown kind
  };
  for (const auto& [bindings, row] : wrong) {
    a.bindings = bindings;
    CheckFails(Refused(a), {"malformed", "row " + std::to_string(row) + " of bindings"});
  }
  a.bindings = {-1, 0, 0, 32};
  CheckFails(Refused(a), {"bindings has no uid"});
  a.bindings.clear();
  for (int64_t row = 0; row < 257; ++row) {
    for (const int64_t number : {int64_t{-1}, int64_t{2}, int64_t{0}, int64_t{0}}) {
      a.bindings.push_back(number);
    }
  }
  CheckFails(Refused(a), {"row 256 of bindings"});
}

// As cuDNN's text tells a tensor of 4-byte numbers.
std::string TensorText(int uid, const char* dims, const char* strides, bool by_value = false) {
  return "{\"name\":\"" + std::to_string(uid) +
         "\",\"dataType\":\"CUDNN_DATA_FLOAT\",\"dim\":" + dims + ",\"stride\":" + strides +
         ",\"isVirtual\":" + (uid == 9 ? "true" : "false") +
         ",\"isByValue\":" + (by_value ? "true" : "false") +
         ",\"reordering\":\"CUDNN_TENSOR_REORDERING_NONE\"}";
}

void TestTensors() {
  Given a = Copy();
  const auto text = [&](const std::string& first, bool by_value = true) {
    a.plan = "copy 32, needs 48, \"tensors\":[" + first + "," + TensorText(2, "[2,4]", "[4,1]") +
             "," + TensorText(3, "[1]", "[1]", by_value) + "," + TensorText(9, "[99]", "[1]") + "]";
  };
  text(TensorText(1, "[4,2]", "[1,4]"));
  Arrays arrays(1);
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  CheckSucceeds(arrays.Run(*site, 1, StreamOf(1)));
  CHECK(arrays.Right());
  a.bindings[4] = -1;
  CheckFails(Refused(a), {"tensor 2 of the plan is in no row"});
  a.plan_workspace_offset = 64;
  a.bindings = {1, 0, 0, kBytes, 2, 2, 48, 0, 3, 3, 16, 4};
  CheckFails(Refused(a), {"tensor 2", "32 bytes", "row 1 of bindings, of kind 2, leads to 16"});
  a.memsets.clear();  // of a result that is gone
  const auto parts = [&](int64_t first, int64_t second) {
    a.bindings = {1, 2, first, 0, 2, 2, second, 0, 3, 3, 16, 4};
    return Refused(a);
  };
  CHECK(parts(0, 32).success() && parts(32, 0).success());
  for (const int64_t second : {0, 16}) {
    CheckFails(parts(second, 0), {"of the plan overlap in the workspace"});
    CheckFails(parts(0, second), {"tensors 1 and 2 of the plan overlap"});
  }
  a.plan_workspace_offset = 16;
  a.bindings = Copy().bindings;
  a.memsets = Copy().memsets;
  text(TensorText(1, "[4,2]", "[2,2]"));
  setenv("LOCPATH", ".", 1);
  if (std::system("localedef -c -i de_DE -f UTF-8 ./comma") != 0 ||
      std::setlocale(LC_ALL, "comma") == nullptr) {
    std::printf("skipped: no locale with decimal commas, in which 4,2 is one number\n");
  }
  CheckFails(Refused(a), {"tensor 1", "36 bytes", "row 0 of bindings, of kind 0, leads to 32"});
  std::setlocale(LC_ALL, "C");
  std::string packed = TensorText(1, "[4,2]", "[2,2]");
  packed.insert(packed.size() - 1, ",\"isRagged\":[" + TensorText(3, "[1]", "[1]", true) + "]");
  text(packed);
  CheckSucceeds(Make(a)->Initialize(1, StreamOf(1)));
  text(TensorText(1, "[9223372036854775807,2]", "[9223372036854775807,1]"));
  CheckFails(Refused(a), {"tensor 1", "1000000000000000 bytes"});
  text(TensorText(1, "[8]", "[1]", true));
  CheckFails(Refused(a), {"tensor 1", "by value", "row 0"});
  text(TensorText(1, "[8]", "[1]"), false);
  CheckFails(Refused(a), {"tensor 3 of the plan, has", "row 2 of bindings, of kind 3"});
}

// As Python calls it: the plan of Copy() without its memsets.
void TestRecording() {
  Given a = Copy();
  a.memsets.clear();
  std::string message;
  const auto made = [&](const Attributes& attributes) {
    std::vector<const char*> names, data;
    std::vector<int64_t> sizes;
    for (const auto& [name, bytes] : attributes) {
      names.push_back(name.c_str());
      data.push_back(bytes.data());
      sizes.push_back(static_cast<int64_t>(bytes.size()));
    }
    CallSite* site = nullptr;
    const char* failure = JaxCudnnNewCallSite(static_cast<int64_t>(names.size()), names.data(),
                                              data.data(), sizes.data(), &site);
    CHECK((failure == nullptr) == (site != nullptr));
    message = failure != nullptr ? failure : "";
    return site;
  };
  const auto said = [&](const char* words) { return message.find(words) != message.npos; };
  CHECK(made(a.Encoded(1)) == nullptr && said("its checksum") && said("(graph 'my_graph')"));
  CHECK(made({{"name", "unfinished"}}) == nullptr && said("it has no plan") && said("unfinished"));
  CallSite* site = made(a.Encoded());

  FakeGraph graph;
  Arrays first(1), second(7);
  const auto record = [&](Arrays& arrays, int64_t bytes, int update) {
    const Buffer buffers[] = {{arrays.in, bytes}, {arrays.out, kBytes}, {arrays.workspace, 64}};
    const char* failure = JaxCudnnRecord(site, 1, StreamOf(1), buffers, 1, 2, &graph, update);
    message = failure != nullptr ? failure : "";
    return failure != nullptr;
  };
  const auto launched = [&](const Arrays& arrays) {
    graph.Launch();
    return std::memcmp(arrays.in, arrays.out, kBytes) == 0;
  };
  CHECK(record(first, kBytes, 1) && said("populate it first"));
  CHECK(record(first, 31, 0) && said("operand 0 has 31 bytes"));
  CHECK(!record(first, kBytes, 0) && launched(first));
  CHECK(record(second, kBytes, 0) && said("cuDNN wants an empty one"));
  CHECK(second.out[0] == 0);
  CHECK(!record(second, kBytes, 1) && launched(second));

  auto filling = Make(Copy());
  CheckSucceeds(filling->Initialize(1, StreamOf(1)));
  FakeGraph other;
  const Recording into{&other, false};
  CheckFails(first.Run(*filling, 1, StreamOf(1), &into), {"sets memory"});
}

void TestClosing() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::atomic<bool> closed{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Arrays a(1);
      for (;;) {
        const bool was_closed = closed;
        const ffi::Error error = a.Run(*site, 1, StreamOf(1));
        if (was_closed) CheckFails(error, {"shutting down"});
        if (error.failure()) return;
        CHECK(a.Right());
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CloseDevices();
  closed = true;
  for (std::thread& thread : threads) thread.join();
  CheckFails(site->Initialize(1, StreamOf(1)), {"shutting down"});
  const int64_t packs = counts.packs_alive;
  site.reset();  // leaks on purpose
  CHECK(counts.plans_alive == 1 && counts.packs_alive == packs);
  CloseDevices();
}

// Executes until the process is gone, as XLA's threads do: exit() must neither hang nor crash.
void TestExit() {
  auto* site = Make(Copy()).release();
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::thread([site] {
    static Arrays a(1);
    while (a.Run(*site, 1, StreamOf(1)).success()) {
    }
  }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::exit(0);
}

void TestFork() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  const pid_t child = fork();
  if (child == 0) {
    CheckFails(site->Initialize(1, StreamOf(1)), {"forked", "spawn"});
    site.reset();
    CloseDevices();
    std::_Exit(counts.plans_alive == 1 ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
}

// A cuDNN 9 without native CUDA graphs executes plans, and says what it lacks.
void TestOlder() {
  Given a = Copy();
  a.memsets.clear();
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays arrays(1);
  CheckSucceeds(arrays.Run(*site, 1, StreamOf(1)));
  CHECK(std::memcmp(arrays.in, arrays.out, kBytes) == 0);
  for (const bool update : {false, true}) {
    FakeGraph graph;
    graph.nodes = update ? 1 : 0;
    const Recording into{&graph, update};
    CheckFails(arrays.Run(*site, 1, StreamOf(1), &into), {"has no native CUDA graphs"});
  }
}

}  // namespace
}  // namespace jax_cudnn

int main(int argc, char** argv) {
  using namespace jax_cudnn;
  const std::map<std::string, std::function<void()>> cases = {
      {"packs", TestPacksAreReused},
      {"plans", TestPlansAreSharedAndReleased},
      {"threads", TestThreads},
      {"refusals", TestRefusals},
      {"initial", TestInitialResults},
      {"views", TestViews},
      {"tensors", TestTensors},
      {"recording", TestRecording},
      {"closing", TestClosing},
      {"exit", TestExit},
      {"fork", TestFork},
      {"older", TestOlder}};
  const auto found = argc == 2 ? cases.find(argv[1]) : cases.end();
  if (found == cases.end()) {
    for (const auto& entry : cases) std::printf("%s\n", entry.first.c_str());
    return 2;
  }
  found->second();
  return 0;
}
