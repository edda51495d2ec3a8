// Keeps OpenMP's threads off the core of the thread that calls kernels.
//
// A thread that has slept is often woken on its caller's core although another one is free. The caller then spins at the
// kernel's end on the core that the other thread waits for, until the system moves one of them: a prompt's step took
// three times as long after a rest of 0.1 s. So the other threads may use every core but the caller's. The caller itself
// stays free to move, because threads that it starts inherit where it may run.
//
// As in pool.h, one crew belongs to all libraries of a process.
#pragma once
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "pool.h"

namespace tokenloom_crew {

constexpr int MOST_THREADS = tokenloom_pool::MOST_THREADS;

struct Crew {
  std::atomic<pid_t> threads[MOST_THREADS];  // by OpenMP's number; 0: not seen yet
  std::atomic<bool> has_new;
  std::atomic<int> caller_cpu{-1};  // which they keep off; -1: none
};

inline Crew crew;

// For a thread of OpenMP at the beginning of its part of a kernel.
inline void join(int thread) {
  static thread_local int joined = 0;  // the caller is number 0
  if (thread == joined || thread >= MOST_THREADS) return;
  joined = thread;
  crew.threads[thread].store((pid_t)syscall(SYS_gettid));
  crew.has_new.store(true);
}

// Lets the threads use `cpus`. Those that have ended, or that another process has since a fork, are passed over.
inline void let_use(const cpu_set_t& cpus) {
  // tgkill with signal 0 asks whether the number is still a thread of this process: the system gives numbers away
  // again.
  for (std::atomic<pid_t>& each : crew.threads)
    if (const pid_t thread = each.load(); thread && !syscall(SYS_tgkill, getpid(), thread, 0))
      sched_setaffinity(thread, sizeof cpus, &cpus);
}

// For the caller of kernels, at any time. Two system calls if it has been moved since the last time, otherwise none.
// A prompt of 64 tokens took 18 ms after a rest of 0.1 s and 6 ms a step later (tiny model, two cores). OMP_PROC_BIND
// would help too, and would bind every thread that the program starts later.
inline void keep_off_caller() {
  const int cpu = sched_getcpu();
  if (cpu < 0 || (cpu == crew.caller_cpu.load() && !crew.has_new.load())) return;
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus)) return;
  if (CPU_COUNT(&cpus) < 2) return;
  crew.has_new.store(false);
  crew.caller_cpu.store(cpu);
  CPU_CLR(cpu, &cpus);
  let_use(cpus);
}

// Lets the threads use every core that the caller may use.
inline void let_go() {
  cpu_set_t cpus;
  if (crew.caller_cpu.exchange(-1) >= 0 && !sched_getaffinity(0, sizeof cpus, &cpus)) let_use(cpus);
}

}  // namespace tokenloom_crew
