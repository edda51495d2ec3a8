// Attention over the paged KV cache: prefill and decode in one call, grouped queries, sliding windows, limited scores,
// sinks, and tokens that see later ones of their image.
//
// A call is cut into pieces of work (some queries, one KV head, a range of positions) that threads draw, dearest first.
// Results of pieces that share queries are partial (an output, its largest score, its sum of weights) and merged.
// Sums are float32 whatever the dtype. With `span` they have one order: a token of a prompt or draft has the bits that
// it would have if it was decoded alone. Build as attention.h says.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention_decode_amx.h"
#include "attention_decode_heads.h"
#include "attention_decode_int8.h"
#include "attention_decode_words.h"
#include "attention_pairs.h"
#include "attention_tile.h"
#include "parallel.h"

namespace {

constexpr int64_t SHORTEST_PIECE = 256;  // positions of a long decode; other pieces have a multiple of it
constexpr int MOST_TILES = 4;            // of a prompt's tokens that one piece has: a second-level cache holds them
constexpr int RUN_TOKENS = 8;            // that are computed as decodes side by side: their sums stay in the L1 cache

struct Piece {
  int32_t request;  // whose queries, or (group) a member, for its block table
  int32_t group;    // set: queries first … first + count are members of it, a token each; -1: tokens of the request
  int32_t first, count, begin, end, head;
  int32_t num_heads;  // KV heads, from `head` on: all or one
  int64_t partial;    // first of the request's partials for this range and head; -1: written to out
  int64_t cost;
};

template <class T>
class Call {
 public:
  explicit Call(const Args& args) : a(args), heads(a.num_heads / a.num_kv_heads), tokens(max_rows() / heads) {
    cut();
    partials.resize(num_partials * PARTIAL);
  }

  void run() {
    const int64_t n = pieces.size(), merges = merged.size() * a.num_heads;
    for_pieces(n, a.num_threads, [&](int64_t i) { compute(pieces[i]); });
    for_ranges(merges, 16, merges > 16 ? a.num_threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge(merged[i / a.num_heads], i % a.num_heads);
    });
  }

 private:
  const Args& a;
  const int heads;               // query heads of a KV head
  const int tokens;              // in one tile
  int side_by_side = 1;          // tiles in a piece of a prompt
  bool takes_all_heads = false;  // KV heads, in a piece of a decode
  std::vector<Piece> pieces;
  std::vector<float> partials;
  int64_t num_partials = 0;
  std::vector<int32_t> merged, parts, shared;
  std::vector<int64_t> first_partial;  // of each request: [parts, num_heads]

  int context(int r) const { return a.seq_lens[r] - (a.query_starts[r + 1] - a.query_starts[r]); }
  int first_seen(int position) const { return a.window ? std::max<int>(0, position - a.window + 1) : 0; }
  int last_seen(int token, int position) const { return a.limits ? a.limits[token] : position; }
  int decode_end(int r) const { return last_seen(a.query_starts[r], a.seq_lens[r] - 1) + 1; }

  void cut() {
    parts.assign(a.num_requests, 1);
    shared.assign(a.num_requests, 0);
    first_partial.assign(a.num_requests, -1);
    for (int g = 0; g < a.num_groups; ++g)
      for (int m = a.group_starts[g]; m < a.group_starts[g + 1]; ++m) shared[a.members[m]] = a.shared_lens[g];
    int64_t positions = 0;
    for (int r = 0; r < a.num_requests; ++r)
      if (is_decode(r)) positions += decode_range(r);
    // So that the longest request keeps no thread busy alone: at least four pieces a thread.
    // By the number of threads that kernels get at most, which stays the same while fewer of them compute: the cut
    // decides the order of sums.
    const int64_t wanted = 4 * a.num_threads;
    takes_all_heads = can_take_all_heads() && positions >= wanted * SHORTEST_PIECE;
    const int64_t fair = positions * (takes_all_heads ? 1 : a.num_kv_heads) / wanted;
    const int suiting = std::max<int64_t>((fair + SHORTEST_PIECE - 1) / SHORTEST_PIECE, 1) * SHORTEST_PIECE;
    const int span = a.span ? a.span : suiting;
    side_by_side = tiles_at_once();
    for (int r = 0; r < a.num_requests; ++r) is_decode(r) ? cut_decode(r, span) : cut_prefill(r);
    for (int g = 0; g < a.num_groups; ++g) cut_group(g);
    // Stable: neighbouring heads, whose keys and values lie side by side, follow each other.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return x.cost > y.cost; });
  }

  bool is_decode(int r) const { return a.query_starts[r + 1] - a.query_starts[r] == 1; }
  int decode_begin(int r) const { return std::max(shared[r], first_seen(a.seq_lens[r] - 1) / RUN * RUN); }
  int decode_range(int r) const { return decode_end(r) - decode_begin(r); }

  void cut_decode(int r, int span) {
    const int begin = decode_begin(r), range = decode_range(r), own = (range + span - 1) / span;
    parts[r] = own + (shared[r] > 0);
    if (parts[r] > 1) {
      merged.push_back(r);
      first_partial[r] = num_partials;
      num_partials += parts[r] * a.num_heads;
    }
    const int n = takes_all_heads ? a.num_kv_heads : 1;
    for (int part = 0; part < own; ++part)
      for (int head = 0; head < a.num_kv_heads; head += n) {
        const int from = begin + part * span, to = std::min(from + span, begin + range);
        pieces.push_back({r, -1, 0, 1, from, to, head, n, partial(r, part, head), (int64_t)n * (to - from)});
      }
  }

  void cut_prefill(int r) {
    const int count = a.query_starts[r + 1] - a.query_starts[r], before = context(r), at_once = tokens_at_once();
    for (int first = 0, n; first < count; first += n)
      for (int head = 0; head < a.num_kv_heads; ++head) {
        n = std::min(at_once, count - first);
        if (n > tokens) n -= n % tokens;  // whole tiles: a last one with few rows is narrower by itself
        const int most = first + n - 1;
        const int end = last_seen(a.query_starts[r] + most, before + most) + 1;  // no earlier one sees more
        const int begin = first_seen(before + first) / RUN * RUN;
        // A tile of rows is taken for eight times as dear as a decode over as many positions; threads begin with the
        // dearest pieces, so that the last ones are short.
        const int64_t tiles = (n + tokens - 1) / tokens;
        pieces.push_back({r, -1, first, n, begin, end, head, 1, -1, 8 * tiles * (end - begin)});
      }
  }

  // Tiles of a prompt's tokens side by side, which read keys and values once for all. With one tile, a prompt's last 256
  // of 32,768 tokens had 41 % of the products' rate, because memory is read for every 64 rows.
  // At least four pieces a thread. With a window tiles begin at positions of their own, and read little.
  int tiles_at_once() const {
    if (a.span || a.window) return 1;
    int64_t tiles = 0;
    for (int r = 0; r < a.num_requests; ++r) tiles += (a.query_starts[r + 1] - a.query_starts[r]) / tokens;
    return std::clamp<int64_t>(tiles * a.num_kv_heads / (4 * a.num_threads), 1, MOST_TILES);
  }

  // In the order of decodes, those with a window begin at positions of their own.
  int tokens_at_once() const {
    return !a.span ? tokens * side_by_side : a.window ? 1 : can_decode() ? RUN_TOKENS : tokens;
  }

  void cut_group(int g) {
    const int count = a.group_starts[g + 1] - a.group_starts[g];
    for (int first = 0; first < count; first += tokens)
      for (int head = 0; head < a.num_kv_heads; ++head) {
        const int n = std::min(tokens, count - first), r = a.members[a.group_starts[g]];
        pieces.push_back({r, g, first, n, 0, a.shared_lens[g], head, 1, 0, (int64_t)8 * a.shared_lens[g]});
      }
  }

  int64_t partial(int r, int part, int head) const {
    return first_partial[r] < 0 ? -1 : first_partial[r] + part * a.num_heads + head * heads;
  }

  const T* query(int64_t token, int head) const { return (const T*)a.query + token * a.query_stride + head * D; }
  T* out(int64_t token, int head) const { return (T*)a.out + (token * a.num_heads + head) * D; }
  const float* sink(int head) const { return a.sinks ? a.sinks + head : nullptr; }
  float* partial_at(int64_t index) { return index < 0 ? nullptr : partials.data() + index * PARTIAL; }

  void compute(const Piece& piece) {
    const int32_t* table = a.block_tables + piece.request * a.table_stride;
    if (piece.group < 0 && is_decode(piece.request) && can_decode()) return compute_decode(piece, table);
    std::vector<Row<T>> rows(piece.count * heads);
    const int num_rows = rows.size();
    for (int i = 0; i < num_rows; ++i) rows[i] = row(piece, piece.first + i / heads, i % heads);
    if (a.span && piece.group < 0 && !is_decode(piece.request)) return compute_run(piece, table, rows);
    compute_tile(piece, table, rows);
  }

  void compute_tile(const Piece& piece, const int32_t* table, const std::vector<Row<T>>& rows) {
#ifdef ATTEND_WITH_AMX
    if constexpr (std::is_same_v<T, BF16>)
      if (may_use_amx()) return compute_tile<AmxTile, 2, 4>(piece, table, rows);
#endif
#ifdef ATTEND_IN_PAIRS
    if constexpr (std::is_same_v<T, BF16>) return compute_tile<PairTile, 1, 2, 4>(piece, table, rows);
#endif
    compute_tile<FloatTile, MAX_ROWS / 2 / LANES, MAX_ROWS / LANES>(piece, table, rows);
  }

  template <int V>
  using FloatTile = Tile<T, V * LANES>;

  // In tiles of the first of these kinds that has enough vectors for the rows, or of the last.
  template <template <int> class AnyTile, int V, int... MORE>
  void compute_tile(const Piece& piece, const int32_t* table, const std::vector<Row<T>>& rows) {
    if constexpr (sizeof...(MORE) > 0)
      if ((int)rows.size() > V * LANES) return compute_tile<AnyTile, MORE...>(piece, table, rows);
    compute_tiles<AnyTile<V>>(piece, table, rows);
  }

  template <class AnyTile>
  void compute_tiles(const Piece& piece, const int32_t* table, const std::vector<Row<T>>& rows) {
    static thread_local std::vector<AnyTile> tiles;  // so large that each piece would get its memory from the system
    tiles.clear();
    const int of_tile = AnyTile::ROWS / heads * heads, n = (rows.size() + of_tile - 1) / of_tile;
    tiles.reserve(n);
    std::vector<int> ends(n);  // what is behind them no row of the tile sees
    for (int i = 0; i < n; ++i) {
      const int first = i * of_tile, count = std::min<int>(of_tile, rows.size() - first);
      tiles.emplace_back(a, rows.data() + first, count);
      ends[i] = std::min(piece.end, rows[first + count - 1].last + 1);
    }
    typename AnyTile::Shared shared;
    for (int start = piece.begin; start < piece.end; start += AnyTile::POSITIONS) {
      shared.read(a, table, piece.head, start, piece.end);
      for (int i = 0; i < n; ++i)
        if (start < ends[i]) tiles[i].step(shared, table, piece.head, start, ends[i], {i, n, piece.end});
    }
    for (const AnyTile& tile : tiles) tile.write();
  }

  // Otherwise the token is one of a tile of rows.
  bool can_decode() const { return heads <= 4 || decodes_with_amx(); }

  bool can_take_all_heads() const {
#ifdef DECODE_IN_PAIRS
    return std::is_same_v<T, BF16> && can_decode() && !decodes_with_amx();
#else
    return false;
#endif
  }

  bool decodes_with_amx() const {
#ifdef ATTEND_WITH_AMX
    return std::is_same_v<T, BF16> && heads >= FEWEST_AMX_HEADS && heads <= MOST_AMX_HEADS && may_use_amx();
#else
    return false;
#endif
  }

  void compute_decode_amx(const Piece& piece, const int32_t* table, const T* q, int visible, const Target<T>* targets) {
#ifdef ATTEND_WITH_AMX
    if constexpr (std::is_same_v<T, BF16>) {
      auto go = [&](auto columns) {
        AmxDecode<columns>(a, table, piece.head, q, heads, visible).run(piece.begin, piece.end, targets);
      };
      if (heads <= 4) return go(std::integral_constant<int, 4>());
      if (heads <= 8) return go(std::integral_constant<int, 8>());
      go(std::integral_constant<int, 16>());
    }
#endif
  }

  // Some tokens of a request, cut and merged as if each was decoded.
  void compute_run(const Piece& piece, const int32_t* table, std::vector<Row<T>>& rows) {
    if (piece.end - piece.begin <= a.span) return compute_part(piece, table, rows);
    const int64_t num_rows = rows.size();
    const std::vector<Row<T>> whole = rows;
    std::vector<float> sums(2 * num_rows * PARTIAL);
    float* part = sums.data() + num_rows * PARTIAL;
    for (int64_t begin = piece.begin, i = 0; begin < piece.end; begin += a.span) {
      while (whole[i].last < begin) i += heads;  // later tokens see more
      rows.assign(whole.begin() + i, whole.end());
      float* to = begin == piece.begin ? sums.data() : part;
      for (int64_t r = i; r < num_rows; ++r) rows[r - i].target.partial = to + r * PARTIAL;
      Piece range = piece;
      range.begin = begin;
      range.end = std::min<int64_t>(begin + a.span, piece.end);
      compute_part(range, table, rows);
      if (to == part)
        for (int64_t r = i; r < num_rows; ++r) join(sums.data() + r * PARTIAL, part + r * PARTIAL);
    }
    for (int64_t r = 0; r < num_rows; ++r) write(sums.data() + r * PARTIAL, whole[r].target);
  }

  // A range of positions no longer than `span`, which the last row sees to its end.
  void compute_part(const Piece& piece, const int32_t* table, const std::vector<Row<T>>& rows) {
    if (!can_decode()) return compute_tile(piece, table, rows);
    auto go = [&](auto g) { compute_part<g>(piece, table, rows); };
    switch (decodes_with_amx() ? 0 : heads) {
      case 0: return compute_part<0>(piece, table, rows);
      case 1: return go(std::integral_constant<int, 1>());
      case 2: return go(std::integral_constant<int, 2>());
      case 3: return go(std::integral_constant<int, 3>());
      default: return go(std::integral_constant<int, 4>());
    }
  }

  // G: query heads of a KV head; 0: any number, with the matrix unit.
  template <int G>
  void compute_part(const Piece& piece, const int32_t* table, const std::vector<Row<T>>& rows) {
    const int num_tokens = rows.size() / heads;
#ifdef DECODE_IN_PAIRS
    if constexpr (std::is_same_v<T, BF16> && G > 0)
      return RunDecode<G>(a, table, piece.head, rows.data(), num_tokens).run(piece.begin, piece.end);
#endif
    std::vector<Target<T>> targets(heads);
    Piece token = piece;
    for (int t = 0; t < num_tokens; ++t) {
      const Row<T>* own = rows.data() + t * heads;
      for (int g = 0; g < heads; ++g) targets[g] = own[g].target;
      token.end = std::min(own->last + 1, piece.end);
      if constexpr (G > 0)
        compute_decode<G>(token, table, own->query, own->first, targets.data());
      else
        compute_decode_amx(token, table, own->query, own->first, targets.data());
    }
  }

  static int max_rows() {
#ifdef ATTEND_IN_PAIRS
    if (std::is_same_v<T, BF16>) return MAX_PAIR_ROWS;
#endif
    return MAX_ROWS;
  }

  Row<T> row(const Piece& piece, int index, int g) {
    const int head = piece.head * heads + g;
    const int r = piece.group < 0 ? piece.request : a.members[a.group_starts[piece.group] + index];
    const int token = a.query_starts[r] + (piece.group < 0 ? index : 0);
    const int position = context(r) + (piece.group < 0 ? index : 0);
    int64_t target = piece.partial < 0 ? -1 : piece.partial + g;
    if (piece.group >= 0) target = partial(r, parts[r] - 1, piece.head) + g;
    const Target<T> to{out(token, head), partial_at(target), sink(head)};
    return {query(token, head), first_seen(position), last_seen(token, position), to};
  }

  void compute_decode(const Piece& piece, const int32_t* table) {
    const int r = piece.request, token = a.query_starts[r], head = piece.head * heads;
    std::vector<Target<T>> targets(piece.num_heads * heads);
    for (int g = 0; g < piece.num_heads * heads; ++g)
      targets[g] = {out(token, head + g), partial_at(piece.partial < 0 ? -1 : piece.partial + g), sink(head + g)};
    const int visible = first_seen(a.seq_lens[r] - 1);
    if (decodes_with_amx()) return compute_decode_amx(piece, table, query(token, head), visible, targets.data());
    auto go = [&](auto g) { compute_decode<g>(piece, table, query(token, head), visible, targets.data()); };
    switch (heads) {
      case 1: return go(std::integral_constant<int, 1>());
      case 2: return go(std::integral_constant<int, 2>());
      case 3: return go(std::integral_constant<int, 3>());
      default: return go(std::integral_constant<int, 4>());
    }
  }

  template <int G>
  void compute_decode(const Piece& piece, const int32_t* table, const T* q, int visible, const Target<T>* targets) {
#ifdef DECODE_IN_PAIRS
    if constexpr (std::is_same_v<T, BF16>)
      return HeadsDecode<G>(a, table, piece.head, piece.num_heads, q, piece.end, visible).run(piece.begin, targets);
#endif
    decode_kernel<G>()(a, table, piece.head, q, piece.begin, piece.end, visible, targets);
  }

  template <int G>
  static auto decode_kernel() {
#ifdef KV_INT8
    return decode_int8<T, G>;
#elif defined(DECODE_IN_WORDS)
    if constexpr (std::is_same_v<T, BF16>)
      return decode_words<G>;
    else
      return decode<T, G>;
#else
    return decode<T, G>;
#endif
  }

  void merge(int r, int head) {
    float* sum = partials.data() + (first_partial[r] + head) * PARTIAL;
    for (int i = 1; i < parts[r]; ++i) join(sum, sum + i * a.num_heads * PARTIAL);
    write(sum, {out(a.query_starts[r], head), nullptr, sink(head)});
  }

  // Adds a part's result to those before it. One after the other, so that a run need not keep those of all parts.
  static void join(float* sum, const float* part) {
    const float top = std::max(sum[D], part[D]), kept = std::exp(sum[D] - top), share = std::exp(part[D] - top);
    for (int i = 0; i < D; i += LANES) store(sum + i, load(sum + i) * kept + load(part + i) * share);
    sum[D] = top;
    sum[D + 1] = sum[D + 1] * kept + part[D + 1] * share;
  }

  static void write(const float* sum, const Target<T>& target) {
    Vec row[VECS];
    for (int i = 0; i < VECS; ++i) row[i] = load(sum + i * LANES);
    target.write(row, sum[D], sum[D + 1]);
  }
};

template <class T>
void write_rows(const void* key, const void* value, void* keys, void* values, const int64_t* slots, int64_t num_tokens,
                int64_t num_kv_heads, int64_t block_size, int64_t key_stride, int64_t value_stride) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t place = slots[t] / block_size * num_kv_heads * block_size + slots[t] % block_size;
    for (int64_t h = 0; h < num_kv_heads; ++h) {
      const T *k = (const T*)key + t * key_stride + h * D, *v = (const T*)value + t * value_stride + h * D;
      if constexpr (READS_INT8) {
        store_int8_row(k, D, (int8_t*)keys, slots[t], num_kv_heads, h, block_size, D);
        store_int8_row(v, D, (int8_t*)values, slots[t], num_kv_heads, h, block_size, D);
      } else {
        memcpy((T*)keys + (place + h * block_size) * D, k, D * sizeof(T));
        memcpy((T*)values + (place + h * block_size) * D, v, D * sizeof(T));
      }
    }
  }
}

}  // namespace

extern "C" void attend(const AttentionArgs* args) {
  args->is_bf16 ? Call<BF16>(*args).run() : Call<float>(*args).run();
}

// Slot s is row s % block_size of block s / block_size. Strides, in elements, are between tokens.
extern "C" void write_kv(int32_t is_bf16, const void* key, const void* value, void* keys, void* values,
                         const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                         int64_t key_stride, int64_t value_stride) {
  const auto write = is_bf16 ? write_rows<BF16> : write_rows<float>;
  write(key, value, keys, values, slots, num_tokens, num_kv_heads, block_size, key_stride, value_stride);
}
