// Adds and gathers the tensors of ranks on one machine, or takes the largest of their numbers, through memory that their
// processes share.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>

#include "vec.h"

namespace {

// Two halves of so many bytes for each rank, used in turn, so that writing the next part waits for no reader of this
// one.
constexpr int64_t PART_BYTES = 1 << 18;  // of a tensor that a rank shows to the others at once
constexpr int SPINS = 2000;              // about 0.1 ms; a rank that waits longer sleeps, because others need the core

// What a rank has shown so far, in a cache line of its own.
struct Line {
  std::atomic<uint32_t> shown;     // parts, modulo 2^32
  std::atomic<uint32_t> sleepers;  // ranks that wait for the next one
  char padding[56];
};

static_assert(sizeof(Line) == 64, "a line of the cache");

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  return syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

void show(Line& own, uint32_t number) {
  own.shown.store(number);
  if (own.sleepers.load()) futex(own.shown, FUTEX_WAKE, INT_MAX);
}

void wait_until_shown(Line& line, uint32_t number) {
  for (int i = 0; i < SPINS; ++i) {
    if ((int32_t)(line.shown.load(std::memory_order_acquire) - number) >= 0) return;
    pause();
  }
  line.sleepers.fetch_add(1);
  for (uint32_t seen = line.shown.load(); (int32_t)(seen - number) < 0; seen = line.shown.load())
    futex(line.shown, FUTEX_WAIT, seen);
  line.sleepers.fetch_sub(1);
}

// In order of the ranks, so that every rank gets the same bits.
template <class T>
void add_parts(T* to, const char* parts, int64_t n, int size) {
  for (int64_t i = 0; i < n; i += LANES) {
    Vec sum = load((const T*)parts + i, n - i);
    for (int rank = 1; rank < size; ++rank) sum += load((const T*)(parts + rank * PART_BYTES) + i, n - i);
    store(to + i, sum, n - i);
  }
}

// The same of integers, or the largest of them.
template <bool IS_MAXIMUM>
void join_parts(int32_t* to, const char* parts, int64_t n, int size) {
  memcpy(to, parts, n * sizeof *to);
  for (int rank = 1; rank < size; ++rank) {
    const int32_t* part = (const int32_t*)(parts + rank * PART_BYTES);
    for (int64_t i = 0; i < n; ++i) to[i] = IS_MAXIMUM ? std::max(to[i], part[i]) : to[i] + part[i];
  }
}

template <class T>
void exchange(char* shared, T* x, int64_t n, int rank, int size, void (*join)(T*, const char*, int64_t, int)) {
  Line* lines = (Line*)shared;
  char* memory = shared + size * sizeof(Line);
  constexpr int64_t most = PART_BYTES / sizeof(T);
  for (int64_t begin = 0; begin < n; begin += most) {
    int64_t count = std::min(most, n - begin);
    uint32_t number = lines[rank].shown.load(std::memory_order_relaxed) + 1;
    // A rank that writes to this half again has seen the part behind this one of every rank, so all have read this one.
    char* parts = memory + (number & 1) * size * PART_BYTES;
    memcpy(parts + rank * PART_BYTES, x + begin, count * sizeof(T));
    show(lines[rank], number);
    for (int other = 0; other < size; ++other) wait_until_shown(lines[other], number);
    join(x + begin, parts, count, size);
  }
}

// Copies floats [from, from + count) of a part [rows, own], without gaps, to where its columns begin in [rows, width].
void place(const float* part, float* out, int64_t from, int64_t count, int64_t own, int64_t width) {
  for (int64_t i = from; i < from + count;) {
    int64_t column = i % own, run = std::min(own - column, from + count - i);
    memcpy(out + i / own * width + column, part + (i - from), run * sizeof(float));
    i += run;
  }
}

int64_t first_column(int64_t width, int rank, int size) { return width * rank / size; }

// Every rank shows its columns, part after part; the first one copies those of all.
void gather(char* shared, const float* x, float* out, int64_t rows, int64_t width, int rank, int size) {
  Line* lines = (Line*)shared;
  char* memory = shared + size * sizeof(Line);
  constexpr int64_t most = PART_BYTES / sizeof(float);
  auto own = [=](int of) { return first_column(width, of + 1, size) - first_column(width, of, size); };
  auto share = [=](int of, int64_t begin) { return std::max<int64_t>(0, std::min(most, rows * own(of) - begin)); };
  if (rank == 0) place(x, out, 0, rows * own(0), own(0), width);
  int64_t longest = rows * ((width + size - 1) / size);  // of all parts: ranks make equally many turns
  for (int64_t begin = 0; begin < longest; begin += most) {
    uint32_t number = lines[rank].shown.load(std::memory_order_relaxed) + 1;
    char* parts = memory + (number & 1) * size * PART_BYTES;  // as in `exchange`
    if (rank) memcpy(parts + rank * PART_BYTES, x + begin, share(rank, begin) * sizeof(float));
    show(lines[rank], number);
    for (int other = 0; other < size; ++other) wait_until_shown(lines[other], number);
    for (int other = 1; other < size && rank == 0; ++other)
      if (int64_t count = share(other, begin))
        place((const float*)(parts + other * PART_BYTES), out + first_column(width, other, size), begin, count,
              own(other), width);
  }
}

}  // namespace

// Bytes of the zeroed memory that `size` ranks share.
extern "C" int64_t shared_bytes(int64_t size) { return size * (sizeof(Line) + 2 * PART_BYTES); }

// Replaces x by the sum, or the largest, of what all ranks give. Each makes the same calls, with tensors of one length.
// `kind`: 0 adds float32, 1 bfloat16, 2 int32; 3 takes the largest int32.
extern "C" void sum_ranks(void* shared, void* x, int64_t n, int32_t rank, int32_t size, int32_t kind) {
  char* memory = (char*)shared;
  switch (kind) {
    case 0: return exchange(memory, (float*)x, n, rank, size, add_parts<float>);
    case 1: return exchange(memory, (BF16*)x, n, rank, size, add_parts<BF16>);
    case 2: return exchange(memory, (int32_t*)x, n, rank, size, join_parts<false>);
    case 3: return exchange(memory, (int32_t*)x, n, rank, size, join_parts<true>);
  }
}

// Gathers [rows, width] on the first rank, in `out`, which the others do not write. Rank r gives x: the columns from
// width * r / size up to those of the next rank.
extern "C" void gather_ranks(void* shared, const void* x, void* out, int64_t rows, int64_t width, int32_t rank,
                             int32_t size) {
  gather((char*)shared, (const float*)x, (float*)out, rows, width, rank, size);
}
