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

// Called by every execution. Once BeginExit() ran on another thread, this never returns.
void EnterExecution();

// Called by the interpreter's exit handler, before it tears anything down. From here on, threads
// other than the caller stop at their next execution, for good: a daemon thread that came back
// from C++ to an interpreter which is gone would abort the process (Python before 3.14 unwinds it
// through frames that must not throw; plain JAX aborts so). Waits `patience` for threads that have
// executed before to get there.
void BeginExit(std::chrono::milliseconds patience);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CSRC_LIFETIME_H_
