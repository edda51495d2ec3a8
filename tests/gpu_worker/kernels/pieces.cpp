// Counts what parallel.h calls, for test_pool.py.
#include "parallel.h"

#include <unistd.h>

extern "C" {

// Adds 1 to counts[piece] for each piece.
void count_pieces(int64_t pieces, int32_t threads, int64_t* counts) {
  for_pieces(pieces, threads, [&](int64_t piece) { ++counts[piece]; });
}

void count_ranges(int64_t count, int64_t grain, int32_t threads, int64_t* counts) {
  for_ranges(count, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++counts[i];
  });
}

// Pieces that call for_pieces themselves.
void count_nested(int64_t pieces, int32_t threads, int64_t* counts) {
  for_pieces(pieces, threads, [&](int64_t outer) {
    for_pieces(pieces, threads, [&](int64_t inner) { ++counts[outer * pieces + inner]; });
  });
}

// Returns how many threads computed two pieces, the first of which waits until the second has begun.
int32_t threads_that_meet(int32_t threads) {
  std::atomic<int> begun{0}, callers{0};
  const auto caller = std::this_thread::get_id();
  for_pieces(2, threads, [&](int64_t) {
    ++begun;
    while (begun.load() < 2) usleep(50);
    callers += std::this_thread::get_id() == caller ? 1 : 0;
  });
  return 3 - callers.load();
}

// Returns whether the second of two threads may use a core.
int32_t second_may_use(int32_t cpu) {
  std::atomic<int> begun{0}, answer{0};
  const auto caller = std::this_thread::get_id();
  for_pieces(2, 2, [&](int64_t) {
    ++begun;
    while (begun.load() < 2) usleep(50);
    cpu_set_t cpus;
    if (std::this_thread::get_id() != caller && !sched_getaffinity(0, sizeof cpus, &cpus)) answer = CPU_ISSET(cpu, &cpus);
  });
  return answer.load();
}
}
