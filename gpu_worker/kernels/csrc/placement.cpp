// Searches the coordinator's index of prefixes, and compares its engines: what services/coordinator/prefixes and
// services/runtime/placement/rules.py say in Python, on the same arrays and with the same results to the last bit.
// Uses no OpenMP: a coordinator has no other kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

// A product and a sum in one rounding would make other costs than NumPy's, and so choose other engines between equals.
#pragma GCC optimize("fp-contract=off")

namespace {

constexpr int64_t kWidth = 8;                // slots of a bucket: HashTable._WIDTH
constexpr int64_t kGroup = int64_t{1} << 31;  // values from here on number groups
constexpr int64_t kOld = int64_t{1} << 40;    // added to values of the old generation
constexpr uint64_t kValueBits = 0xFFFFFFFFull;

// BlockHolders, with the lengths of its arrays.
struct Groups {
    int64_t *runs, *begins, *sizes, *rooms, *num_blocks, *free_rooms, *state;
    int64_t most_groups, most_runs;
};

struct Generation {
    uint64_t* words;
    uint32_t* values;
    uint64_t* buckets;
    int8_t* used;  // slots of each bucket
    int64_t num_buckets;
    int64_t num_blocks;
    Groups groups;
};

struct Index {
    Generation young, old;
    int64_t* owner;          // row of the engine by the number of the run; -1: forgotten
    int64_t* counts;         // its blocks
    const int64_t* leading;  // blocks that the first hashes stand for
    int64_t is_searchable;
    int64_t num_rows;
};

struct Run {
    int64_t begin, end, value, position;
};

uint64_t tag_of(uint64_t word) { return ((word ^ word >> 32) & kValueBits) | 1; }

int64_t bucket_of(const Generation& generation, uint64_t word) {
    return static_cast<int64_t>((word >> 32) * static_cast<uint64_t>(generation.num_buckets) >> 32);
}

int64_t start_of(const Generation& generation, uint64_t word) {
    const uint64_t tag = tag_of(word);
    int64_t bucket = bucket_of(generation, word);
    while (true) {
        const uint64_t* slots = generation.buckets + bucket * kWidth;
        for (int64_t slot = 0; slot < kWidth; ++slot) {
            if (slots[slot] >> 32 == tag) return static_cast<int64_t>(slots[slot] & kValueBits);
        }
        if (!slots[kWidth - 1]) return -1;
        bucket = (bucket + 1) % generation.num_buckets;
    }
}

// Calls piece(begin, end, position) for each part of the leading words that is in one piece in the log.
template <typename Piece>
void for_each_piece(const Generation& generation, const uint64_t* words, int64_t count, Piece&& piece) {
    for (int64_t begin = 0; begin < count;) {
        const int64_t position = start_of(generation, words[begin]);
        if (position < 0) return;
        const int64_t most = std::min(count - begin, generation.num_blocks - position);
        int64_t length = 0;
        while (length < most && generation.words[position + length] == words[begin + length]) ++length;
        if (!length) return;  // the table has found another word
        piece(begin, begin + length, position);
        begin += length;
    }
}

// Appends the runs of equal values among the blocks from `begin` to `end`, which are from `position` on in the log.
Run* add_runs(const Generation& generation, int64_t begin, int64_t end, int64_t position, bool is_old, Run* next) {
    const uint32_t* values = generation.values + position;
    for (int64_t first = 0; first < end - begin;) {
        int64_t last = first + 1;
        while (last < end - begin && values[last] == values[first]) ++last;
        const int64_t value = static_cast<int64_t>(values[first]) + (is_old ? kOld : 0);
        *next++ = {begin + first, begin + last, value, is_old ? -1 : position + first};
        first = last;
    }
    return next;
}

int64_t class_of(int64_t room) { return 63 - __builtin_clzll(static_cast<uint64_t>(room)); }

int64_t room_for(int64_t size) { return size < 2 ? 1 : int64_t{1} << (64 - __builtin_clzll(static_cast<uint64_t>(size - 1))); }

constexpr int64_t kGroupBytes = 32, kRunBytes = 8;
enum { kNumGroups, kNumRuns, kFreeGroup, kNumBytes };  // of BlockHolders.state

void place(Groups& groups, int64_t number, const std::vector<int64_t>& members) {
    const int64_t size = members.size(), room = room_for(size);
    int64_t& free_room = groups.free_rooms[class_of(room)];
    int64_t begin = free_room;
    if (begin >= 0) {
        free_room = groups.runs[begin];
    } else {
        begin = groups.state[kNumRuns];
        groups.state[kNumRuns] += room;
    }
    std::copy(members.begin(), members.end(), groups.runs + begin);
    groups.begins[number] = begin;
    groups.sizes[number] = size;
    groups.rooms[number] = room;
    groups.state[kNumBytes] += kRunBytes * room;
}

void free_room_of(Groups& groups, int64_t number) {
    const int64_t begin = groups.begins[number], room = groups.rooms[number];
    int64_t& free_room = groups.free_rooms[class_of(room)];
    groups.runs[begin] = free_room;
    free_room = begin;
    groups.state[kNumBytes] -= kRunBytes * room;
}

int64_t add_group(Groups& groups, const std::vector<int64_t>& members, int64_t num_blocks) {
    int64_t number = groups.state[kFreeGroup];
    if (number >= 0) {
        groups.state[kFreeGroup] = groups.begins[number];
    } else {
        number = groups.state[kNumGroups]++;
    }
    place(groups, number, members);
    groups.num_blocks[number] = num_blocks;
    groups.state[kNumBytes] += kGroupBytes;
    return number;
}

void leave_group(Groups& groups, int64_t number, int64_t num_blocks) {
    groups.num_blocks[number] -= num_blocks;
    if (groups.num_blocks[number] > 0) return;
    free_room_of(groups, number);
    groups.sizes[number] = 0;
    groups.begins[number] = groups.state[kFreeGroup];
    groups.state[kFreeGroup] = number;
    groups.state[kNumBytes] -= kGroupBytes;
}

void put_into_group(Groups& groups, int64_t number, int64_t at, int64_t run, const int64_t* owner) {
    int64_t* members = groups.runs + groups.begins[number];
    int64_t& size = groups.sizes[number];
    if (at >= 0) {
        members[at] = run;
    } else if (size < groups.rooms[number]) {
        members[size++] = run;
    } else {
        static thread_local std::vector<int64_t> kept;
        kept.clear();
        std::copy_if(members, members + size, std::back_inserter(kept), [&](int64_t each) { return owner[each] >= 0; });
        kept.push_back(run);
        free_room_of(groups, number);
        place(groups, number, kept);
    }
}

// Adds one engine to the blocks of a prompt: PrefixIndex.add.
struct Addition {
    Index& index;
    int64_t row, newest;
    int64_t* emptied;  // runs of the engine that have no blocks any more
    int64_t num_emptied = 0;

    void move(int64_t num_blocks, int64_t from) {
        index.counts[newest] += num_blocks;
        if (index.owner[from] != row) return;
        index.counts[from] -= num_blocks;
        if (index.counts[from] > 0 || from == newest) return;
        index.owner[from] = -1;
        emptied[num_emptied++] = from;
    }

    int64_t with(int64_t value, int64_t num_blocks) {
        const bool is_old = value >= kOld;
        value %= kOld;
        if (value >= kGroup) return with_group(value - kGroup, num_blocks, is_old);
        const int64_t owner = index.owner[value];
        if (value != newest) move(num_blocks, value);
        if (owner == -1 || owner == row) return newest;
        return kGroup + add_group(index.young.groups, {value, newest}, num_blocks);
    }

    int64_t with_group(int64_t number, int64_t num_blocks, bool is_old) {
        static thread_local std::vector<int64_t> others;
        Groups &groups = index.young.groups, &of_number = is_old ? index.old.groups : groups;
        const int64_t* members = of_number.runs + of_number.begins[number];
        int64_t at = -1, before = 0;
        others.clear();
        for (int64_t each = 0; each < of_number.sizes[number]; ++each) {
            const int64_t owner = index.owner[members[each]];
            if (owner == row && at < 0) {
                at = each;
                before = members[each];
            } else if (owner >= 0 && owner != row) {
                others.push_back(members[each]);
            }
        }
        if (before != newest) move(num_blocks, before);
        if (!is_old) {
            if (before == newest) return kGroup + number;
            if (num_blocks == groups.num_blocks[number]) {
                put_into_group(groups, number, at, newest, index.owner);
                return kGroup + number;
            }
            leave_group(groups, number, num_blocks);
        }
        others.push_back(newest);
        return kGroup + add_group(groups, others, num_blocks);
    }
};

void append(Generation& generation, const uint64_t* words, int64_t count) {
    const int64_t position = generation.num_blocks;
    std::copy_n(words, count, generation.words + position);
    int64_t bucket = bucket_of(generation, words[0]);
    while (generation.used[bucket] == kWidth) bucket = (bucket + 1) % generation.num_buckets;
    generation.buckets[bucket * kWidth + generation.used[bucket]++] = tag_of(words[0]) << 32 | position;
}

int64_t& count_of(int64_t* counts, int64_t row, int64_t num_rows) { return counts[row < 0 ? num_rows : row]; }

}  // namespace

extern "C" {

// Looks up the blocks of a prompt by their mixed hashes. Writes its runs, at most count + 1, and the number of leading
// blocks that the young generation has. Returns the number of runs.
int64_t find_prefix(const Index* index, const uint64_t* words, int64_t count, Run* runs, int64_t* num_known) {
    Run* next = runs;
    int64_t found = 0;
    for_each_piece(index->young, words, count, [&](int64_t begin, int64_t end, int64_t position) {
        next = add_runs(index->young, begin, end, position, false, next);
        found = end;
    });
    *num_known = found;
    if (found < count) {
        if (index->old.num_blocks) {
            for_each_piece(index->old, words, count, [&](int64_t begin, int64_t end, int64_t position) {
                if (end <= found) return;
                const int64_t skipped = std::max<int64_t>(*num_known - begin, 0);
                next = add_runs(index->old, begin + skipped, end, position + skipped, true, next);
                found = end;
            });
        }
        if (found < count) *next++ = {found, count, kOld, -1};
    }
    return next - runs;
}

// Writes how many leading blocks each engine has, by row, num_rows + 1 numbers of which the last one is of no use.
// Returns whether any engine has one.
int64_t count_prefix(const Index* index, const Run* runs, int64_t num_runs, int64_t* counts) {
    const int64_t num_rows = index->num_rows;
    if (!num_runs || runs->value % kOld == 0) return 0;
    std::fill_n(counts, num_rows + 1, 0);
    for (const Run* run = runs; run < runs + num_runs; ++run) {
        const Generation& generation = run->value >= kOld ? index->old : index->young;
        const int64_t value = run->value % kOld, before = index->leading[run->begin], after = index->leading[run->end];
        if (value == 0) break;
        if (value < kGroup) {
            int64_t& of_row = count_of(counts, index->owner[value], num_rows);
            if (of_row != before) break;
            of_row = after;
            continue;
        }
        const Groups& groups = generation.groups;
        const int64_t* members = groups.runs + groups.begins[value - kGroup];
        const bool must_follow = run->begin && index->is_searchable;
        for (int64_t at = 0; at < groups.sizes[value - kGroup]; ++at) {
            int64_t& of_row = count_of(counts, index->owner[members[at]], num_rows);
            if (!must_follow || of_row == before) of_row = after;
        }
    }
    return 1;
}

// Adds the engine in a row to the first blocks of a prompt, whose newest run is given and whose runs are those that
// find_prefix wrote, and appends those of the blocks that the young generation does not know: it has room for them.
// Writes the runs of the engine that have no blocks any more, and returns how many; -1: groups need more room first, and
// nothing has changed.
int64_t add_prefix(Index* index, const uint64_t* words, const Run* runs, int64_t num_runs, int64_t num_known,
                   int64_t num_blocks, int64_t row, int64_t newest, int64_t* emptied) {
    Generation& young = index->young;
    const Groups& groups = young.groups;
    int64_t most_runs = groups.state[kNumRuns];
    for (const Run* run = runs; run < runs + num_runs && run->begin < num_blocks; ++run) {
        const Groups& of_run = run->value >= kOld ? index->old.groups : groups;
        const int64_t value = run->value % kOld;
        most_runs += value < kGroup ? 2 : room_for(of_run.sizes[value - kGroup] + 1);
    }
    if (groups.state[kNumGroups] + num_runs > groups.most_groups || most_runs > groups.most_runs) return -1;
    Addition addition{*index, row, newest, emptied};
    const int64_t appended = young.num_blocks;
    if (num_blocks > num_known) append(young, words + num_known, num_blocks - num_known);
    for (const Run* run = runs; run < runs + num_runs && run->begin < num_blocks; ++run) {
        const int64_t end = std::min(run->end, num_blocks);
        const int64_t after = addition.with(run->value, end - run->begin);
        int64_t position = run->position;
        if (position < 0) {
            position = appended + run->begin - num_known;
        } else if (after == run->value) {
            continue;
        }
        std::fill(young.values + position, young.values + position + end - run->begin, static_cast<uint32_t>(after));
    }
    return addition.num_emptied;
}

// Columns of the engines, by row, and what some of them need for their work, by position.
struct Engines {
    const int64_t *waiting, *running, *free_tokens, *seats, *last_turn;
    const double *uncached_tokens, *session_share;
    const double *computed_rate, *step_seconds;
    const uint8_t* is_late;
    const int64_t* rows;  // of those that are compared
    int64_t first;        // of these, if they follow each other; -1: they do not
    int64_t num_rows;
    const double *seconds_per_request, *seconds_per_token;
    double mean_step_seconds;
};

// A leg to place. Rows below 0: there is none.
struct Leg {
    int64_t is_by_cost, is_decode, prompt_tokens;
    const int64_t* cached_tokens;  // by row; null: no engine has any
    int64_t homes[2];
    int64_t has_session, session_row, session_tokens;
    double session_share;
};

// The numbers of rules.py, which gives them once.
struct Weights {
    double waiting, home_share, excess, excess_steps, session_tokens, most_session, most_pressure, tie, brought_back,
        recomputed, batch_steps, unknown_step, unknown_rate;
};
}

namespace {

// The rows that are compared. Where they follow each other, loops over them need no gathers.
struct Following {
    int64_t first;
    int64_t operator[](int64_t at) const { return first + at; }
};

int64_t tier_of(const Engines& engines, const Leg& leg, int64_t row) {
    const int64_t tier = engines.is_late[row] * 2 + (engines.free_tokens[row] <= leg.prompt_tokens);
    return leg.has_session && leg.session_row == row ? tier & 2 : tier;
}

// The sum in the order in which NumPy adds.
double sum_of(const double* values, int64_t count) {
    if (count < 8) {
        double sum = 0.0;
        for (int64_t at = 0; at < count; ++at) sum += values[at];
        return sum;
    }
    if (count > 128) {
        const int64_t half = count / 2 - count / 2 % 8;
        return sum_of(values, half) + sum_of(values + half, count - half);
    }
    double sums[8];
    std::copy_n(values, 8, sums);
    int64_t at = 8;
    for (; at < count - count % 8; at += 8) {
        for (int64_t lane = 0; lane < 8; ++lane) sums[lane] += values[at + lane];
    }
    double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    for (; at < count; ++at) sum += values[at];
    return sum;
}

double mean_of(const std::vector<double>& values) {
    return sum_of(values.data(), values.size()) / static_cast<double>(values.size());
}

// Puts the mean of those that are above 0, or `unknown` if none is, in place of the others.
void fill_unknown(std::vector<double>& values, double unknown) {
    std::vector<double> known;
    std::copy_if(values.begin(), values.end(), std::back_inserter(known), [](double each) { return each > 0; });
    if (!known.empty()) unknown = mean_of(known);
    std::replace_if(values.begin(), values.end(), [](double each) { return !(each > 0); }, unknown);
}

// Some of the engines, with speeds whose means are theirs: those that are late or full are not compared.
struct Part {
    std::vector<int64_t> rows;
    std::vector<double> seconds_per_request, seconds_per_token;

    Engines take(const Engines& all, const Leg& leg, int64_t tier) {
        rows.clear();
        for (int64_t at = 0; at < all.num_rows; ++at) {
            if (tier_of(all, leg, all.rows[at]) == tier) rows.push_back(all.rows[at]);
        }
        Engines part = all;
        part.rows = rows.data();
        part.first = -1;
        part.num_rows = rows.size();
        return part;
    }

    void measure(Engines& part, const Weights& weights) {
        std::vector<double> steps;
        seconds_per_token.clear();
        seconds_per_request.clear();
        for (const int64_t row : rows) {
            steps.push_back(part.step_seconds[row]);
            seconds_per_token.push_back(part.computed_rate[row]);
        }
        fill_unknown(steps, weights.unknown_step);
        fill_unknown(seconds_per_token, weights.unknown_rate);
        part.mean_step_seconds = mean_of(steps);
        const double full = weights.batch_steps * part.mean_step_seconds;
        for (const int64_t row : rows) {
            seconds_per_request.push_back(full / static_cast<double>(std::max<int64_t>(part.seats[row], 1)));
        }
        for (double& each : seconds_per_token) each = 1.0 / each;
        part.seconds_per_request = seconds_per_request.data();
        part.seconds_per_token = seconds_per_token.data();
    }
};

double by_score(const Engines& engines, const Leg& leg, const Weights& weights, int64_t row) {
    const double scores = static_cast<double>(
        engines.waiting[row] * static_cast<int64_t>(weights.waiting) + engines.running[row]);
    if (leg.is_decode || (!leg.cached_tokens && !leg.has_session)) return scores;
    const double cached = leg.cached_tokens ? static_cast<double>(leg.cached_tokens[row]) : 0.0;
    const double prompt = static_cast<double>(leg.prompt_tokens);
    double reduced = std::max(scores - std::nearbyint(cached / (prompt / weights.waiting)), 0.0);
    if (!leg.has_session) return reduced;
    double pressure = std::min(engines.session_share[row], weights.most_pressure);
    if (leg.session_row == row) {
        pressure -= std::min(leg.session_share, pressure);
        const double saved = std::max(cached, weights.brought_back * static_cast<double>(leg.session_tokens));
        const double weight = weights.waiting * saved / std::min(prompt, weights.session_tokens);
        reduced = scores - std::min(weight, weights.most_session) - weights.tie;
    }
    return reduced + weights.waiting * pressure;
}

int64_t without_room(const Engines& engines, const Leg& leg, int64_t row) {
    const int64_t running = engines.running[row], waiting = engines.waiting[row], seats = engines.seats[row];
    const bool has_seat = !seats || waiting + running < seats;
    return !running || (has_seat && engines.free_tokens[row] > leg.prompt_tokens) ? 0 : waiting;
}

template <typename Rows>
void by_cost(const Engines& engines, const Rows& rows, const Leg& leg, const Weights& weights, double* costs) {
    const int64_t count = engines.num_rows;
    const bool has_session = leg.has_session && !leg.is_decode;
    const double prompt = static_cast<double>(leg.prompt_tokens);
    int64_t total = 0, most = 0;
    bool is_at_home = false;
    for (int64_t at = 0; at < count; ++at) {
        const int64_t row = rows[at];
        int64_t requests = engines.waiting[row] + engines.running[row];
        if (has_session && row == leg.session_row) {
            requests = without_room(engines, leg, row);
            is_at_home = true;
        }
        total += requests;
        most = at ? std::max(most, requests) : requests;
        costs[at] = static_cast<double>(requests);
    }
    const double limit = weights.excess / static_cast<double>(count) * static_cast<double>(total);
    const bool has_excess = static_cast<double>(most) > limit;
    const double steps = weights.excess_steps * engines.mean_step_seconds;
    for (int64_t at = 0; at < count; ++at) {
        const int64_t row = rows[at];
        double seconds = costs[at] * engines.seconds_per_request[at];
        if (has_excess) seconds += (std::max(costs[at], limit) - limit) * steps;
        if (!leg.is_decode) {
            const double cached = leg.cached_tokens ? static_cast<double>(leg.cached_tokens[row]) : 0.0;
            double tokens;
            if (has_session) {
                tokens = prompt - cached;
                const double share = engines.session_share[row];
                if (is_at_home) {
                    const bool is_home = row == leg.session_row;
                    const double brought = weights.brought_back * static_cast<double>(leg.session_tokens);
                    if (is_home) tokens = std::min(tokens, prompt - brought);
                    tokens *= weights.recomputed;
                    const double evicted = std::min(std::max(share - 1.0, 0.0), weights.most_pressure);
                    tokens += (is_home ? 0.0 : evicted) * prompt;
                } else {
                    tokens += std::min(share, weights.most_pressure) * prompt;
                }
                tokens += engines.uncached_tokens[row];
            } else {
                tokens = engines.uncached_tokens[row] + prompt - cached;
            }
            if (row == leg.homes[0] || row == leg.homes[1]) tokens -= weights.home_share * prompt;
            seconds += tokens * engines.seconds_per_token[at];
        }
        costs[at] = seconds;
    }
}

// Returns the least and the highest tier.
template <typename Rows>
std::pair<int64_t, int64_t> tiers_of(const Engines& engines, const Rows& rows, const Leg& leg) {
    int64_t least = 3, most = 0;
    for (int64_t at = 0; at < engines.num_rows; ++at) {
        const int64_t tier = tier_of(engines, leg, rows[at]);
        least = std::min(least, tier);
        most = std::max(most, tier);
    }
    return {least, most};
}

template <typename Rows>
int64_t best_of(const Engines& engines, const Rows& rows, const Leg& leg, const Weights& weights) {
    static thread_local std::vector<double> costs;
    costs.resize(engines.num_rows);
    if (leg.is_by_cost) {
        by_cost(engines, rows, leg, weights, costs.data());
    } else {
        double* next = costs.data();
        for (int64_t at = 0; at < engines.num_rows; ++at) next[at] = by_score(engines, leg, weights, rows[at]);
    }
    int64_t best = 0;
    for (int64_t at = 1; at < engines.num_rows; ++at) {
        if (costs[at] > costs[best]) continue;
        const int64_t row = rows[at], other = rows[best];
        const int64_t more = leg.cached_tokens ? leg.cached_tokens[row] - leg.cached_tokens[other] : 0;
        const bool is_before = more > 0 || (more == 0 && engines.last_turn[row] < engines.last_turn[other]);
        if (costs[at] < costs[best] || is_before) best = at;
    }
    return rows[best];
}

}  // namespace

extern "C" {

// Returns the row of the best engine, as pairing.best does.
int64_t best_engine(const Engines* engines, const Leg* leg, const Weights* weights) {
    const Following following{engines->first};
    const bool follow = engines->first >= 0;
    const auto [least, most] =
        follow ? tiers_of(*engines, following, *leg) : tiers_of(*engines, engines->rows, *leg);
    if (least == most) {
        return follow ? best_of(*engines, following, *leg, *weights) : best_of(*engines, engines->rows, *leg, *weights);
    }
    static thread_local Part part;
    Engines some = part.take(*engines, *leg, least);
    if (leg->is_by_cost) part.measure(some, *weights);
    return best_of(some, some.rows, *leg, *weights);
}
}
