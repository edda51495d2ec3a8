// The threads that kernels share: they claim the pieces of a call that the calling thread publishes.
//
// A call waits for threads that have claimed a piece and not for those that the system has not given a processor: a
// thread that arrives late finds the call closed. Waiting threads spin for a moment and then sleep.
//
// The pool lies in a namespace with a name and in inline functions, so that all libraries of a process that g++ has built
// share one pool, although each was built separately (STB_GNU_UNIQUE). A forked process has no threads in it: there
// the caller claims every piece itself.
#pragma once
#include <linux/futex.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <system_error>
#include <thread>

namespace tokenloom_pool {

// OpenMP waits at the end of each operation for all of its threads. Next to two busy loops on two cores one of them
// nearly always has no processor: 32 requests of the demo model made 186 and 78 tokens/s with it, 753 and 561 with this
// pool.
constexpr int MOST_THREADS = 128;  // the caller included

// The pieces that one thread claims first, before it helps others.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Job {
  void (*work)(void* context, int64_t piece);
  void* context;
  int threads, shares;
  Share share[MOST_THREADS];

  void prepare(int64_t pieces, int count, bool is_near, void (*call)(void*, int64_t), void* with) {
    work = call;
    context = with;
    threads = count;
    shares = is_near ? count : 1;
    for (int i = 0; i < shares; ++i) {
      share[i].next.store(pieces * i / shares, std::memory_order_relaxed);
      share[i].end = pieces * (i + 1) / shares;
    }
  }

  // Claims pieces until none is left: first those of the own share.
  void claim(int thread) {
    for (int i = 0; i < shares; ++i) {
      Share& from = share[(thread + i) % shares];
      while (from.next.load(std::memory_order_relaxed) < from.end) {
        const int64_t piece = from.next.fetch_add(1, std::memory_order_relaxed);
        if (piece < from.end) work(context, piece);
      }
    }
  }
};

struct alignas(64) Sleeper {
  std::atomic<uint32_t> is_asleep;
};

struct Pool {
  // Of the gate: how many threads are inside, whether more may enter, and whether the caller sleeps until all have left.
  static constexpr uint32_t INSIDE = 0xffff, OPEN = 1 << 16, AWAITED = 1 << 17;

  // One word says both how many are inside and whether more may enter, so that closing it and counting cannot be torn
  // apart: a thread that comes late finds it closed and touches no job that is being replaced.
  alignas(64) std::atomic<uint32_t> gate;
  alignas(64) std::atomic<uint32_t> turn;  // counts calls
  alignas(64) std::atomic<bool> is_busy;
  std::atomic<int> started;  // threads, the caller included; 0: none yet
  Job job;
  Sleeper sleepers[MOST_THREADS];
};

// How threads get pieces, which a platform may change at any time.
struct Settings {
  std::atomic<int> most_threads{MOST_THREADS};
  // On a quiet machine OpenMP's threads are awake from torch's operations; a second pool that spins beside them would
  // fight for the same cores.
  std::atomic<bool> uses_openmp{true};    // the threads are those of OpenMP, which torch uses too
  // On shared machines the worker sets 5 µs: spinning longer (50 µs) or not at all made no difference above the noise,
  // and under a CPU limit each turn of the loop is paid for.
  std::atomic<int64_t> spin{100 * 1000};  // ns that threads of the pool wait for a call, or for each other, before they sleep
};

inline Settings settings;

inline Pool& pool() {
  static Pool only;  // zeros: no constructor runs, and none is destroyed at the process's end
  return only;
}

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Returns whether `is_done` became true within `limit` ns.
template <class F>
bool spin_until(int64_t limit, F&& is_done) {
  if (is_done()) return true;
  if (limit <= 0) return false;
  const int64_t end = now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (is_done()) return true;
    }
  } while (now() < end);
  return false;
}

inline bool enter(Pool& p) {
  uint32_t gate = p.gate.load();
  while (gate & Pool::OPEN)
    if (p.gate.compare_exchange_weak(gate, gate + 1)) return true;
  return false;
}

inline void leave(Pool& p) {
  if (p.gate.fetch_sub(1) == (Pool::AWAITED | 1)) wake(p.gate);
}

inline void wait_for_turn(Pool& p, int thread, uint32_t seen) {
  const auto has_come = [&] { return p.turn.load(std::memory_order_relaxed) != seen; };
  if (spin_until(settings.spin.load(std::memory_order_relaxed), has_come)) return;
  std::atomic<uint32_t>& asleep = p.sleepers[thread].is_asleep;
  asleep.store(1);
  while (p.turn.load() == seen && asleep.load()) sleep_while(asleep, 1);
  asleep.store(0);
}

inline void serve(int thread) {
  Pool& p = pool();
  char name[16];
  snprintf(name, sizeof name, "kernels-%d", thread);
  prctl(PR_SET_NAME, name);
  for (uint32_t seen = 0;;) {
    wait_for_turn(p, thread, seen);
    seen = p.turn.load();  // before it enters: the next call may begin as soon as it has left
    if (!enter(p)) continue;
    if (thread < p.job.threads) p.job.claim(thread);
    leave(p);
  }
}

// Functions of pthread.h would need a newer C library than the processes have that load kernels built ahead.
inline void start(Pool& p, int threads) {
  sigset_t all, before;
  // Threads inherit the mask of their creator, so it is set before they start and not by themselves.
  sigfillset(&all);  // signals are for the threads of the program
  sigprocmask(SIG_BLOCK, &all, &before);
  try {
    for (int thread = p.started.load() ? p.started.load() : 1; thread < threads; ++thread) {
      std::thread(serve, thread).detach();
      p.started.store(thread + 1);
    }
  } catch (const std::system_error&) {  // the system has no threads left: those that run compute
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

inline void wait_for_others(Pool& p) {
  uint32_t gate = p.gate.fetch_and(~Pool::OPEN) & ~Pool::OPEN;
  const int64_t limit = settings.spin.load(std::memory_order_relaxed);
  if (!spin_until(limit, [&] { return !(p.gate.load() & Pool::INSIDE); }))
    while ((gate = p.gate.load()) & Pool::INSIDE) {
      if (gate & Pool::AWAITED)
        sleep_while(p.gate, gate);
      else
        p.gate.compare_exchange_weak(gate, gate | Pool::AWAITED);
    }
  p.gate.store(0);
}

// Calls work(context, piece) for each piece, with `threads` threads: 2 to MOST_THREADS, and no more than pieces.
inline void run(int64_t pieces, int threads, bool is_near, void (*work)(void*, int64_t), void* context) {
  Pool& p = pool();
  bool is_free = false;
  if (!p.is_busy.compare_exchange_strong(is_free, true)) {  // busy: another thread's call, or within one
    for (int64_t piece = 0; piece < pieces; ++piece) work(context, piece);
    return;
  }
  if (p.started.load(std::memory_order_relaxed) < threads) start(p, threads);
  p.job.prepare(pieces, threads, is_near, work, context);
  // The job comes first: a thread reads it as soon as it is inside.
  p.gate.store(Pool::OPEN);
  p.turn.fetch_add(1);
  for (int thread = 1; thread < threads; ++thread) {
    std::atomic<uint32_t>& asleep = p.sleepers[thread].is_asleep;
    // Most threads spin when calls follow each other, and a system call for each would cost more than a small kernel.
    if (asleep.load() && asleep.exchange(0)) wake(asleep);
  }
  p.job.claim(0);
  wait_for_others(p);
  p.is_busy.store(false);
}

}  // namespace tokenloom_pool
