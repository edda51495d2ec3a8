// Shares the work of a kernel among threads. A kernel cuts its work into pieces, and threads claim the pieces one after the
// other: a piece waits for no thread that the system has not given a processor.
//
// What a piece computes must not depend on the thread that claims it nor on the number of threads, so that results are
// the same bits whatever that number is. for_pieces returns when every piece is done.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "crew.h"
#include "pool.h"

namespace {

// With `is_near`, a thread begins with the same pieces in each call: it may have read their memory before.
template <class F>
void share_pieces(int64_t pieces, int threads, bool is_near, F& work) {
  // How the work is cut must not depend on this number, which changes while the engine runs: attention's sums follow
  // the cut.
  threads = std::min<int64_t>({threads, pieces, tokenloom_pool::settings.most_threads.load(std::memory_order_relaxed)});
  if (threads <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
    return;
  }
  const auto call = [](void* context, int64_t piece) { (*(F*)context)(piece); };
  if (!tokenloom_pool::settings.uses_openmp.load(std::memory_order_relaxed))
    return tokenloom_pool::run(pieces, threads, is_near, call, (void*)&work);
  tokenloom_pool::Job job;
  job.prepare(pieces, threads, is_near, call, (void*)&work);
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    tokenloom_crew::join(thread);
    job.claim(thread);
  }
}

// Calls work(piece) once for each piece in [0, pieces), with up to `threads` threads. The calling thread is one of them.
template <class F>
void for_pieces(int64_t pieces, int threads, F&& work) {
  share_pieces(pieces, threads, false, work);
}

// Eight: a thread that loses its processor holds back an eighth of its share.
constexpr int64_t PIECES_PER_THREAD = 8;  // of a stretch that for_ranges cuts: the last piece is what others wait for

// Calls work(begin, end) for ranges that together are [0, count): several for each thread, each a multiple of `grain`
// long, but the last. Use it if the result of an item does not depend on where its range begins.
template <class F>
void for_ranges(int64_t count, int64_t grain, int threads, F&& work) {
  if (threads <= 1) {
    if (count > 0) work((int64_t)0, count);
    return;
  }
  const int64_t grains = (count + grain - 1) / grain, wanted = PIECES_PER_THREAD * threads;
  const int64_t length = grain * std::max<int64_t>(1, (grains + wanted - 1) / wanted);
  const auto range = [&](int64_t piece) { work(piece * length, std::min(count, (piece + 1) * length)); };
  share_pieces((count + length - 1) / length, threads, true, range);
}

}  // namespace
