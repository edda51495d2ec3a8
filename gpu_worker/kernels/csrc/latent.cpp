// Attention over a paged cache of compressed vectors, of which all heads of a token share one (latent.h).
//
// A call is cut into pieces: a token, up to 64 of its heads, and a stretch of positions. Stretches have one length
// whatever the batch and the number of threads, so that a token's result depends on nothing but its request. Tokens with
// several stretches have partial results, which are merged.
#include <vector>

#include "latent.h"
#include "parallel.h"

extern "C" {

struct LatentArgs {
  const void* query;            // [num_rows, num_heads, WIDTH]
  const void* cache;            // [num_blocks * block_size, WIDTH]
  void* out;                    // [num_rows, num_heads, RANK]
  const int32_t* block_tables;  // [num_requests, table_stride]
  const int32_t* requests;      // [num_rows]: whose token each row is
  const int32_t* lengths;       // [num_rows]: how many positions it sees
  int64_t num_rows, num_heads, block_size, table_stride;
  float scale;
  int32_t is_bf16, num_threads;
};
}

namespace {

constexpr int STRETCH = 1024;  // positions of a piece
constexpr int MOST_HEADS = 64;

struct Piece {
  int32_t row, first_head, num_heads, begin, end;
  int64_t partial;  // of its first head; -1: written to out
};

template <class T>
class Call {
 public:
  explicit Call(const LatentArgs& args) : a(args) {
    for (int r = 0; r < a.num_rows; ++r) cut(r);
    // Stable: the pieces of a token, which share its vectors, stay next to each other.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return cost(x) > cost(y); });
    partials.resize(num_partials * PARTIAL);
  }

  void run() {
    // The vectors that a thread will most likely read next, if threads are equally fast.
    const auto after = [&](int64_t i) {
      return i + a.num_threads < (int64_t)pieces.size() ? &pieces[i + a.num_threads] : nullptr;
    };
    for_pieces(pieces.size(), a.num_threads, [&](int64_t i) { compute(pieces[i], after(i)); });
    const int64_t merges = merged.size() * a.num_heads;
    for_ranges(merges, 16, merges > 16 ? a.num_threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge(merged[i / a.num_heads], i % a.num_heads);
    });
  }

 private:
  struct Merged {
    int32_t row, parts;
    int64_t first;  // of its partials [parts, num_heads]
  };
  const LatentArgs& a;
  std::vector<Piece> pieces;
  std::vector<Merged> merged;
  std::vector<float> partials;
  int64_t num_partials = 0;

  static int64_t cost(const Piece& piece) { return (int64_t)piece.num_heads * (piece.end - piece.begin); }

  void cut(int r) {
    const int length = a.lengths[r], parts = (length + STRETCH - 1) / STRETCH;
    if (parts > 1) merged.push_back({r, parts, num_partials});
    for (int part = 0; part < parts; ++part)
      for (int h = 0; h < a.num_heads; h += MOST_HEADS) {
        const int begin = part * STRETCH, n = std::min<int>(MOST_HEADS, a.num_heads - h);
        const int64_t partial = parts > 1 ? num_partials + part * a.num_heads + h : -1;
        pieces.push_back({r, h, n, begin, std::min(begin + STRETCH, length), partial});
      }
    if (parts > 1) num_partials += parts * a.num_heads;
  }

  T* out(int64_t row, int64_t head) const { return (T*)a.out + (row * a.num_heads + head) * RANK; }

  void compute(const Piece& piece, const Piece* next) {
    if (piece.num_heads <= LANES) return compute<1>(piece, next);
    if (piece.num_heads <= 2 * LANES) return compute<2>(piece, next);
    if (piece.num_heads <= 4 * LANES) return compute<4>(piece, next);
    for (int first = 0; first < piece.num_heads; first += 4 * LANES) {  // narrow registers
      Piece part = piece;
      part.first_head += first;
      part.num_heads = std::min(4 * LANES, piece.num_heads - first);
      if (part.partial >= 0) part.partial += first;
      compute<4>(part, first + part.num_heads < piece.num_heads ? &piece : next);
    }
  }

  // Where the vector of a position of a row's request lies.
  const T* vector(int32_t row, int t) const {
    const int32_t* table = a.block_tables + a.requests[row] * a.table_stride;
    return (const T*)a.cache + ((int64_t)table[t / a.block_size] * a.block_size + t % a.block_size) * WIDTH;
  }

  template <int V>
  void compute(const Piece& piece, const Piece* next) {
    const T* query = (const T*)a.query + ((int64_t)piece.row * a.num_heads + piece.first_head) * WIDTH;
    // Up to 1 MB: more than a thread's stack should carry.
    static thread_local std::vector<char> memory(sizeof(LatentHeads<T, V>) + 64);
    void* place = (void*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    auto& heads = *new (place) LatentHeads<T, V>(query, piece.num_heads, a.scale);
    const auto later = [&](int run) {
      const int t = next ? next->begin + run * RUN : 0;
      return next && t < next->end ? vector(next->row, t) : nullptr;
    };
    heads.run(piece.begin, piece.end, [&](int t) { return vector(piece.row, t); }, later);
    for (int h = 0; h < piece.num_heads; ++h) {
      const float largest = heads.largest_of(h), weights = heads.weight_of_head(h);
      float* partial = piece.partial < 0 ? nullptr : partials.data() + (piece.partial + h) * PARTIAL;
      for (int d = 0; d < RANK; d += LANES) {
        const Vec x = load(heads.output_of(h, d / TILE) + d % TILE);
        partial ? store(partial + d, x) : store(out(piece.row, piece.first_head + h) + d, x / weights);
      }
      if (partial) partial[RANK] = largest, partial[RANK + 1] = weights;
    }
  }

  void merge(const Merged& row, int64_t head) {
    const float* first = partials.data() + (row.first + head) * PARTIAL;
    const int64_t stride = a.num_heads * PARTIAL;
    float top = LOWEST, weights = 0;
    for (int i = 0; i < row.parts; ++i) top = std::max(top, first[i * stride + RANK]);
    for (int i = 0; i < row.parts; ++i)
      weights += first[i * stride + RANK + 1] * std::exp(first[i * stride + RANK] - top);
    for (int d = 0; d < RANK; d += LANES) {
      Vec sum = {};
      for (int i = 0; i < row.parts; ++i)
        sum += load(first + i * stride + d) * (std::exp(first[i * stride + RANK] - top) / weights);
      store(out(row.row, head) + d, sum);
    }
  }
};

}  // namespace

extern "C" void attend_latents(const LatentArgs* args) {
  args->is_bf16 ? Call<BF16>(*args).run() : Call<float>(*args).run();
}
