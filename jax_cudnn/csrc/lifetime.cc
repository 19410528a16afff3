#include "lifetime.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <thread>

namespace jax_cudnn {
namespace {

using std::chrono::steady_clock;

// Constant-initialised and trivially destroyed, so that all are readable at any point of exit.
std::atomic<bool> g_closed{false};
std::atomic<bool> g_forked{false};
std::atomic<bool> g_exiting{false};
std::atomic<int> g_threads{0};  // of the interpreter: alive, and have called
std::atomic<int> g_parked{0};
pthread_t g_exiting_thread;  // written before g_exiting

// Counts a thread of the interpreter from its first call to its end.
struct Presence {
  Presence() : counted(IsInterpreterThread()) { g_threads += counted ? 1 : 0; }
  ~Presence() { g_threads -= counted ? 1 : 0; }
  const bool counted;
};
thread_local Presence t_presence;

// Python gives each thread that runs its code a state of its own, and tells so without the GIL.
bool HasPythonState() {
  using GetThreadState = void* (*)();
  static const auto get =
      reinterpret_cast<GetThreadState>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  return get != nullptr && get() != nullptr;
}

// How many shared libraries this process has ever loaded.
unsigned long long LibrariesLoaded() {
  unsigned long long loaded = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<unsigned long long*>(out) = info->dlpi_adds;
        return 1;  // every entry carries the same count
      },
      &loaded);
  return loaded;
}

}  // namespace

bool (*IsInterpreterThread)() = HasPythonState;

bool Closed() { return g_closed.load(std::memory_order_relaxed); }
bool Forked() { return g_forked.load(std::memory_order_relaxed); }
bool Close() { return !g_closed.exchange(true); }

void WatchForks() {
  pthread_atfork(nullptr, nullptr, [] { g_forked.store(true); });
}

void RunAtExit(void (*handler)()) {
  static std::atomic<unsigned long long> registered_at{0};
  const unsigned long long loaded = LibrariesLoaded();
  if (registered_at.exchange(loaded) != loaded) std::atexit(handler);
}

void EnterCall() {
  if (!t_presence.counted || !g_exiting.load(std::memory_order_acquire)) return;
  if (pthread_equal(g_exiting_thread, pthread_self())) return;
  ++g_parked;
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

void BeginExit(std::chrono::milliseconds patience) {
  if (g_forked.load() || g_exiting.load()) return;
  g_exiting_thread = pthread_self();
  g_exiting.store(true, std::memory_order_release);
  const int own = t_presence.counted ? 1 : 0;  // touching it counted this thread
  const auto deadline = steady_clock::now() + patience;
  while (g_threads.load() - own > g_parked.load() && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace jax_cudnn
