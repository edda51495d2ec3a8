// Gathers the arrays of a step from the persistent batch. In numpy that takes twenty calls, whose code a model's weights
// have pushed out of the caches since the last step.
#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {

struct GatherArgs {
  // Of the batch, by row: token ids, how many tokens are computed and known, block ids and how many there are.
  const int32_t* tokens;
  const int64_t *computed, *known;
  const int32_t* tables;
  const int64_t* num_blocks;
  // Of the step, by request: its row, and how many of its tokens the step computes.
  const int64_t *rows, *lengths;
  // Written, as StepInputs holds them; the first `width` columns of block tables as wide as those of the batch.
  int64_t *token_ids, *positions, *slots;
  int32_t *query_starts, *seq_lens, *block_tables;
  int64_t* sampled;
  int64_t num_requests, tokens_stride, tables_stride, block_size;
  int64_t num_rows, num_blocks_in_all, most_requests, most_tokens;  // of the batch, of the cache, and of what is written
  int64_t num_tokens, num_sampled, width;  // written
};

}  // extern "C"

namespace {

// Whether the batch has the row, and the row these tokens and blocks for them. Unsigned, a negative number is too large.
inline bool is_within(const GatherArgs& a, int64_t r) {
  const int64_t row = a.rows[r];
  if ((uint64_t)row >= (uint64_t)a.num_rows) return false;
  const int64_t start = a.computed[row], length = a.lengths[r], blocks = a.num_blocks[row];
  if ((uint64_t)start > (uint64_t)a.tokens_stride || (uint64_t)length - 1 >= (uint64_t)(a.tokens_stride - start)) return false;
  if ((uint64_t)blocks > (uint64_t)a.tables_stride || start + length > blocks * a.block_size) return false;
  const int32_t* table = a.tables + row * a.tables_stride;
  for (int64_t b = start / a.block_size; b <= (start + length - 1) / a.block_size; ++b)
    if ((uint64_t)(int64_t)table[b] >= (uint64_t)a.num_blocks_in_all) return false;
  return true;
}

}  // namespace

// Returns the number of requests, or the first of them that names what is not there, or too much: then nothing is
// written. So whatever the scheduler asks for, no later kernel of the step reads or writes beyond its arrays.
extern "C" int64_t gather(GatherArgs* args) {
  GatherArgs& a = *args;
  a.num_tokens = a.num_sampled = a.width = 0;
  if ((uint64_t)a.num_requests > (uint64_t)a.most_requests) return -1;
  int64_t needed = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    if (!is_within(a, r) || (needed += a.lengths[r]) > a.most_tokens) return r;
    a.width = std::max(a.width, a.num_blocks[a.rows[r]]);
  }
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t row = a.rows[r], start = a.computed[row], end = start + a.lengths[r];
    const int32_t *table = a.tables + row * a.tables_stride, *tokens = a.tokens + row * a.tokens_stride;
    a.query_starts[r] = a.num_tokens;
    a.seq_lens[r] = end;
    memcpy(a.block_tables + r * a.tables_stride, table, a.width * sizeof *table);
    for (int64_t p = start; p < end; ++p, ++a.num_tokens) {
      a.token_ids[a.num_tokens] = tokens[p];
      a.positions[a.num_tokens] = p;
      a.slots[a.num_tokens] = (int64_t)table[p / a.block_size] * a.block_size + p % a.block_size;
    }
    if (end >= a.known[row]) a.sampled[a.num_sampled++] = r;
  }
  a.query_starts[a.num_requests] = a.num_tokens;
  return a.num_requests;
}
