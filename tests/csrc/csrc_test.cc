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

#include "fake_cudnn/fake_graph.h"
#include "plan.h"
#include "recording.h"

namespace jax_cudnn {
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

void CheckSucceeds(const ffi::Error& error) {
  if (error.failure()) std::fprintf(stderr, "%s\n", error.message().c_str());
  CHECK(error.success());
}

Stream StreamOf(int device, int number = 1) {
  return reinterpret_cast<Stream>(static_cast<uintptr_t>(device * 100 + number));
}

constexpr int64_t kBytes = 32;

// Copies operand 0 to result 0; the fill writes 5 where the plan's workspace begins. Plans with
// another `comment` are not the same.
Attributes Copy(const std::string& comment = "") {
  Attributes a;
  a.plan = "copy 32, needs 48" + comment;
  a.name = "my_graph";
  a.device_name = "Fake GPU";
  a.cudnn_version = 91900;
  a.bindings = {1, 0, 0, kBytes, 2, 1, 0, kBytes, 3, 3, 16, 4};
  a.scalars = std::vector<uint8_t>(32, 7);
  a.fills = {16, 1, 1, 5, 0, 4, 2, 0x01020304};
  a.workspace_bytes = 64;
  a.plan_workspace_offset = 16;
  return a;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> TryMake(Attributes attributes) {
  attributes.checksum = Checksum(attributes);
  return CallSite::Create(std::move(attributes));
}

std::unique_ptr<CallSite> Make(Attributes attributes) {
  auto site = TryMake(std::move(attributes));
  if (!site.has_value()) CheckSucceeds(site.error());
  return std::move(*site);
}

struct Arrays {
  explicit Arrays(char seed) {
    for (int i = 0; i < kBytes; ++i) in[i] = static_cast<char>(seed + i);
  }
  ffi::Error Run(CallSite& site, int device, Stream stream) {
    const Buffer operands[] = {{in, kBytes}};
    const Buffer results[] = {{out, kBytes}, {workspace, 64}};
    return site.Execute<true>(device, stream, operands, 1, results, 2);
  }
  bool Right() const {
    return out[0] == in[0] + 5 && std::memcmp(in + 1, out + 1, kBytes - 1) == 0;
  }
  alignas(16) char in[kBytes], out[kBytes] = {};
  alignas(16) char workspace[64] = {};
};

void TestPacksAreReused() {
  auto site = Make(Copy());
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  std::vector<Arrays> arrays(4, Arrays(1));
  for (int round = 0; round < 100; ++round) {
    for (Arrays& a : arrays) CheckSucceeds(a.Run(*site, 1, StreamOf(1, 1 + round % 2)));
  }
  for (Arrays& a : arrays) CHECK(a.Right());
  for (const Arrays& a : arrays) CHECK(a.workspace[0] == 4 && a.workspace[7] == 1);
  CHECK(counters().packs_built == 4 && counters().packs_alive == 4);
  Arrays fifth(9);
  CheckSucceeds(fifth.Run(*site, 1, StreamOf(1)));
  CHECK(fifth.Right() && counters().packs_built == 5 && counters().packs_alive == 4);
  CHECK(timings().executions == 401);
  site.reset();
  CHECK(counters().packs_alive == 0 && counters().call_sites_alive == 0);

  // Pointers of equal hash: operand 1, which the plan does not read, makes up for operand 0.
  Attributes attributes = Copy();
  attributes.bindings = {1, 0, 0, kBytes, 2, 1, 0, kBytes, 3, 0, 1, 0};
  site = Make(attributes);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays to(0), from[] = {Arrays(10), Arrays(50)};
  uint64_t hashes[2] = {};
  for (int i = 0; i < 2; ++i) {
    for (void* pointer : {from[i].in, to.out}) {
      hashes[i] = (hashes[i] ^ reinterpret_cast<uintptr_t>(pointer)) * 0x9e3779b97f4a7c15u;
      hashes[i] ^= hashes[i] >> 32;
    }
    void* const unread = reinterpret_cast<void*>(hashes[i]);
    const Buffer operands[] = {{from[i].in, kBytes}, {unread, 0}};
    const Buffer results[] = {{to.out, kBytes}, {to.workspace, 64}};
    CheckSucceeds(site->Execute<false>(1, StreamOf(1), operands, 2, results, 2));
    CHECK(to.out[1] == from[i].in[1]);
  }
}

void TestPlansAreSharedAndReleased() {
  for (int round = 0; round < 50; ++round) {
    auto first = Make(Copy()), second = Make(Copy()), other = Make(Copy("other"));
    for (int device : {1, 2}) {
      for (CallSite* site : {first.get(), second.get(), other.get()}) {
        for (int again = 0; again < 3; ++again)
          CheckSucceeds(site->Initialize(device, StreamOf(device)));
        Arrays a(1);
        CheckSucceeds(a.Run(*site, device, StreamOf(device)));
        CHECK(a.Right());
      }
    }
    CHECK(counters().plans_alive == 4);  // two texts on two devices
    first.reset();
    CHECK(counters().plans_alive == 4);
  }
  CHECK(counters().plans_finalized == 200 && counters().plans_alive == 0);
  CHECK(counters().handles_created == 2);
}

void TestThreads() {
  auto site = Make(Copy()), twin = Make(Copy());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Arrays a(static_cast<char>(t)), b(static_cast<char>(t + 1));
      for (int i = 0; i < 1000; ++i) {
        CallSite& which = i % 3 == 0 ? *twin : *site;
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
  CHECK(timings().executions == 8 * 1010);
  CHECK(counters().plans_alive == 2 && counters().packs_alive <= 16);
  CHECK(counters().handles_created <= 2 * Device::kMaxHandles);
  std::printf("%lld handles, %lld packs built\n", (long long)counters().handles_created,
              (long long)counters().packs_built);
}

void TestRefusals() {
  Attributes a = Copy();
  a.cudnn_version = 92800;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"9.28.0", "9.19.0", "libcudnn.so.9", "my_graph"});
  auto site = Make(Copy());
  CheckFails(site->Initialize(9, StreamOf(9)), {"Fake GPU", "Another GPU", "jax_cudnn.target"});
  CheckFails(site->Initialize(64, StreamOf(1)), {"device 64"});
  CheckFails(site->Initialize(3, StreamOf(0)), {"stream's context", "a fake driver's error"});
  Arrays arrays(1);
  CheckFails(arrays.Run(*site, 1, StreamOf(1)), {"without being initialized", "CUDA"});
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  const Buffer small{arrays.in, 31}, right{arrays.in, 32}, work{arrays.workspace, 64};
  auto run = [&](std::vector<Buffer> in, std::vector<Buffer> out) {
    return site->Execute<false>(1, StreamOf(1), in.data(), in.size(), out.data(), out.size());
  };
  CheckFails(run({small}, {right, work}), {"operand 0 has 31 bytes", "32", "my_graph"});
  CheckFails(run({right}, {small, work}), {"result 0 has 31 bytes"});
  CheckFails(run({right}, {right, small}), {"31 bytes of workspace", "64"});
  CheckFails(run({}, {right, work}), {"0 operands"});
  CheckFails(run({right}, {work}), {"1 results"});
  a = Copy();
  a.checksum = Checksum(a);
  a.scalars[0] ^= 1;
  CheckFails(CallSite::Create(a).error(), {"checksum", "Lower the function again", "my_graph"});
  a = Copy();
  a.plan_workspace_offset = 17;
  CheckFails(TryMake(a).error(), {"17 is not a multiple of 16"});
  a.plan_workspace_offset = 32;
  CheckFails(Make(a)->Initialize(1, StreamOf(1)),
             {"32 bytes of workspace", "needs 48", "cache clear"});
  a.plan = "nonsense";
  CheckFails(Make(a)->Initialize(1, StreamOf(1)), {"finalize a plan", "CUDNN_STATUS_BAD_PARAM",
                                                   "2000", "fake: unreadable plan", "my_graph"});
  a = Copy();
  a.bindings[0] = -1;
  auto unbound = Make(a);
  CheckSucceeds(unbound->Initialize(1, StreamOf(1)));
  CheckFails(arrays.Run(*unbound, 1, StreamOf(1)), {"execute a plan", "lacks uid 1"});
  CHECK(counters().plans_alive == 1);
}

void TestInitialResults() {
  Attributes a = Copy();
  a.plan = "copy 16";  // half of result 0
  a.initial = {0, 0xff800000};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[kBytes], workspace[64] = {};
  alignas(16) float out[kBytes / 4];
  std::memset(in, 3, kBytes);
  const Buffer operand{in, kBytes}, results[] = {{out, kBytes}, {workspace, 64}};
  CheckSucceeds(site->Execute<false>(1, StreamOf(1), &operand, 1, results, 2));
  CHECK(std::memcmp(reinterpret_cast<char*>(out) + 1, in + 1, 15) == 0);
  CHECK(out[4] == -INFINITY && out[7] == -INFINITY);
  const std::vector<std::pair<std::vector<int64_t>, std::string>> wrong = {
      {{0}, "odd number"},
      {{1, 0}, "names result 1"},
      {{-1, 0}, "names result -1"},
      {{0, -1}, "the word -1"},
      {{0, int64_t{1} << 32}, "the word 4294967296"},
  };
  for (const auto& [initial, why] : wrong) {
    a.initial = initial;
    CheckFails(TryMake(a).error(), {"malformed", why});
  }
}

void TestViews() {
  Attributes a = Copy();
  // uid 5 is 32 bytes at 32 of an operand of 64, itself not the plan's; uid 6 lies in the
  // workspace.
  a.plan += ", from 5";
  a.workspace_bytes = 128;
  a.plan_workspace_offset = 64;
  a.fills = {64, 1, 1, 5};
  a.bindings = {-1, 0, 0, 64, -1, 4, 0, 16, 5, 4, 1, 16, 6, 2, 32, 32};
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  alignas(16) char in[64], workspace[128] = {};
  for (int i = 0; i < 64; ++i) in[i] = static_cast<char>(i);
  const Buffer operand{in, 64}, result{workspace, 128};
  CheckSucceeds(site->Execute<false>(1, StreamOf(1), &operand, 1, &result, 1));
  CHECK(workspace[32] == 32 + 5 && workspace[63] == 63);
  // Rows that lead outside of the memory are refused before anything runs.
  const std::vector<std::pair<std::vector<int64_t>, std::string>> wrong = {
      {{-1, 0, 0, 48, 5, 4, 0, 48}, "48 bytes into 48"},
      {{-1, 0, 0, 48, -1, 4, 0, 32, 5, 4, 1, 16}, "16 bytes into 16"},
      {{1, 0, 0, 48, 2, 4, 0, 8}, "not a multiple of 16"},
      {{1, 0, 0, 48, 2, 2, 8, 8}, "not a multiple of 16"},
      {{-1, 3, 0, 4, 1, 4, 0, 0}, "view of a constant"},
      {{1, 4, 0, 0}, "not an earlier one"},
      {{1, 0, 0, -1}, "negative"},
      {{1, 0, 1 << 20, 0}, "operand 1048576"},
      {{2, 2, 48, 32}, "outside the 64 bytes of workspace"},
      {{2, 2, 80, 0}, "outside the 64 bytes of workspace"},
      {{3, 3, 32, 0}, "outside the 32 bytes of scalars"},
      {{3, 3, 8, 4}, "not a multiple of 16"},
      {{3, 3, 0, 4, 3, 3, 16, 4}, "binds uid 3 again"},
      {{2, 0, 0, 32, 1, 1, 0, 32}, "row 0 of bindings is not in the order"},
      {{1, 0, 0, 32, 2, 0, 0, 32, 2, 1, 0, 32}, "row 2 of bindings is not in the order"},
      {{1, 0, 0, 32, 2, 1, 1, 32}, "row 1 of bindings is not in the order"},
      {{1, 0, 0, 32, -1, 1, 0, 32, 2, 4, 0, 0}, "row 2 of bindings is not in the order"},
      {{1, 9, 0, 0}, "unknown kind 9"},
  };
  for (const auto& [bindings, words] : wrong) {
    a.bindings = bindings;
    CheckFails(TryMake(a).error(), {words, "my_graph"});
  }
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
  Attributes a = Copy();
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
  CheckFails(TryMake(a).error(), {"tensor 2 of the plan is in no row", "my_graph"});
  a.plan_workspace_offset = 64;
  a.bindings = {1, 0, 0, kBytes, 2, 2, 48, 0, 3, 3, 16, 4};
  CheckFails(TryMake(a).error(), {"tensor 2", "32 bytes", "row 1 of bindings leads to 16"});
  const auto parts = [&](int64_t first, int64_t second) {
    a.bindings = {1, 2, first, 0, 2, 2, second, 0, 3, 3, 16, 4};
    return TryMake(a);
  };
  CHECK(parts(0, 32).has_value() && parts(32, 0).has_value());
  for (const int64_t second : {0, 16}) {
    CheckFails(parts(second, 0).error(), {"of the plan overlap in the workspace", "my_graph"});
    CheckFails(parts(0, second).error(), {"tensors 1 and 2 of the plan overlap"});
  }
  a.plan_workspace_offset = 16;
  a.bindings = Copy().bindings;
  text(TensorText(1, "[4,2]", "[2,2]"));
  setenv("LOCPATH", ".", 1);
  if (std::system("localedef -c -i de_DE -f UTF-8 ./comma") != 0 ||
      std::setlocale(LC_ALL, "comma") == nullptr) {
    std::printf("skipped: no locale with decimal commas, in which 4,2 is one number\n");
  }
  CheckFails(TryMake(a).error(), {"tensor 1", "36 bytes", "row 0 of bindings leads to 32"});
  std::setlocale(LC_ALL, "C");
  std::string packed = TensorText(1, "[4,2]", "[2,2]");
  packed.insert(packed.size() - 1, ",\"isRagged\":[" + TensorText(3, "[1]", "[1]", true) + "]");
  text(packed);
  CheckSucceeds(Make(a)->Initialize(1, StreamOf(1)));
  text(TensorText(1, "[9223372036854775807,2]", "[9223372036854775807,1]"));
  CheckFails(TryMake(a).error(), {"tensor 1", "1000000000000000 bytes"});
  text(TensorText(1, "[8]", "[1]", true));
  CheckFails(TryMake(a).error(), {"tensor 1", "read on the host", "row 0"});
  text(TensorText(1, "[8]", "[1]"), false);
  CheckFails(TryMake(a).error(), {"tensor 3", "in the GPU's memory", "row 2"});
}

// As Python calls it: the plan of Copy() without its fills.
void TestRecording() {
  Attributes a = Copy();
  char message[256] = "";
  JaxCudnnPlan plan{a.plan.c_str(),
                    a.name.c_str(),
                    a.device_name.c_str(),
                    0,
                    a.cudnn_version,
                    a.bindings.data(),
                    static_cast<int64_t>(a.bindings.size()),
                    a.scalars.data(),
                    static_cast<int64_t>(a.scalars.size()),
                    nullptr,
                    0,
                    a.workspace_bytes,
                    a.plan_workspace_offset};
  const auto said = [&](const char* words) { return std::strstr(message, words) != nullptr; };
  CHECK(JaxCudnnNewCallSite(&plan, message, sizeof(message)) == nullptr && said("its checksum"));
  a.fills.clear();
  plan.checksum = Checksum(a);
  void* site = JaxCudnnNewCallSite(&plan, message, sizeof(message));
  CHECK(site != nullptr);

  FakeGraph graph;
  Arrays first(1), second(7);
  const auto record = [&](Arrays& arrays, int64_t bytes, int update) {
    void* in[] = {arrays.in};
    void* out[] = {arrays.out, arrays.workspace};
    const int64_t in_bytes[] = {bytes}, out_bytes[] = {kBytes, 64};
    const JaxCudnnBuffers operands{in, in_bytes, 1}, results{out, out_bytes, 2};
    return JaxCudnnRecord(site, 1, StreamOf(1), &operands, &results, &graph, update, message,
                          sizeof(message));
  };
  const auto launched = [&](const Arrays& arrays) {
    graph.Launch();
    return std::memcmp(arrays.in, arrays.out, kBytes) == 0;
  };
  CHECK(record(first, kBytes, 1) == 1 && said("populate it first"));
  CHECK(record(first, 31, 0) == 1 && said("operand 0 has 31 bytes"));
  CHECK(record(first, kBytes, 0) == 0 && launched(first));
  CHECK(record(second, kBytes, 0) == 1 && said("cuDNN wants an empty one"));
  CHECK(second.out[0] == 0);
  CHECK(record(second, kBytes, 1) == 0 && launched(second));

  const Buffer operand{first.in, kBytes}, results[] = {{first.out, kBytes}, {first.workspace, 64}};
  auto filling = Make(Copy());
  CheckSucceeds(filling->Initialize(1, StreamOf(1)));
  FakeGraph other;
  CheckFails(filling->Record(1, StreamOf(1), &operand, 1, results, 2, &other, false),
             {"sets memory", "my_graph"});
  char brief[8];
  const JaxCudnnBuffers none{nullptr, nullptr, 0};
  CHECK(JaxCudnnRecord(site, 1, StreamOf(1), &none, &none, &graph, 1, brief, sizeof(brief)) == 1);
  CHECK(std::strlen(brief) == 7);
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
  const int64_t packs = counters().packs_alive;
  site.reset();  // leaks on purpose
  CHECK(counters().plans_alive == 1 && counters().packs_alive == packs);
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
    std::_Exit(counters().plans_alive == 1 ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
}

// A cuDNN 9 without native CUDA graphs executes plans, and says what it lacks.
void TestOlder() {
  Attributes a = Copy();
  a.fills.clear();
  auto site = Make(a);
  CheckSucceeds(site->Initialize(1, StreamOf(1)));
  Arrays arrays(1);
  const Buffer operand{arrays.in, kBytes};
  const Buffer results[] = {{arrays.out, kBytes}, {arrays.workspace, 64}};
  CheckSucceeds(site->Execute<false>(1, StreamOf(1), &operand, 1, results, 2));
  CHECK(std::memcmp(arrays.in, arrays.out, kBytes) == 0);
  for (const bool update : {false, true}) {
    FakeGraph graph;
    graph.nodes = update ? 1 : 0;
    CheckFails(site->Record(1, StreamOf(1), &operand, 1, results, 2, &graph, update),
               {"has no native CUDA graphs"});
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
