// Shares the work of a kernel among threads. A kernel cuts its work into pieces, and threads claim the pieces one after the
// other: a piece waits for no thread that the system has not given a processor.
//
// What a piece computes must not depend on the thread that claims it nor on the number of threads, so that results are
// the same bits whatever that number is. for_pieces returns when every piece is done.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace {

// Calls work(piece) once for each piece in [0, pieces), with up to `threads` threads. The calling thread is one of them.
template <class F>
void for_pieces(int64_t pieces, int threads, F&& work) {
  if (pieces <= 1 || threads <= 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
}

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
  for_pieces((count + length - 1) / length, threads,
             [&](int64_t piece) { work(piece * length, std::min(count, (piece + 1) * length)); });
}

}  // namespace
