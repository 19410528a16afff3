// The end of a process: when cuDNN may no longer be used, and threads that must not come back.
#ifndef JAX_CUDNN_CSRC_LIFETIME_H_
#define JAX_CUDNN_CSRC_LIFETIME_H_

#include <chrono>

namespace jax_cudnn {

// Whether this process may no longer use cuDNN: after its exit handlers ran, and in a child forked
// from a process that had used it (CUDA contexts do not survive a fork).
bool Closed();
bool Forked();
inline bool Ended() { return Closed() || Forked(); }

// Marks the process as closed; true for the first caller.
bool Close();

// Watches for forks from now on.
void WatchForks();

// Has `handler` run at exit before the destructors of every library loaded so far. Exit handlers
// run in reverse order of registration, and cuDNN loads parts of itself when plans first need
// them; so this is called again after each use of cuDNN that may have loaded something.
void RunAtExit(void (*handler)());

// Called when a call is initialized and when it is executed (a replayed command buffer does the
// former only). Once BeginExit() ran on another thread, this never returns to a thread of the
// interpreter. Nothing may be leased or locked by the caller.
void EnterCall();

// Called by the interpreter's exit handler, before it tears anything down. From here on, threads
// of the interpreter other than the caller stop at their next call, for good: a daemon thread that
// came back from C++ to an interpreter which is gone would abort the process (Python before 3.14
// unwinds it through frames that must not throw; plain JAX aborts so). XLA's own threads go on, so
// that pending work ends. Waits `patience` for threads that have called before to get there.
void BeginExit(std::chrono::milliseconds patience);

// Whether this thread belongs to the interpreter. Replaceable for tests, which have none.
extern bool (*IsInterpreterThread)();

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_LIFETIME_H_
