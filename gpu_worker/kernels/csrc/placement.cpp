// Searches the coordinator's index of prefixes, and compares its engines: what services/coordinator/prefixes and
// services/runtime/placement/rules.py say in Python, on the same arrays and with the same results to the last bit.
// Uses no OpenMP: a coordinator has no other kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

// A product and a sum in one rounding would make other costs than NumPy's, and so choose other engines between equals.
#pragma GCC optimize("fp-contract=off")

namespace {

constexpr int64_t kWidth = 8;                // slots of a bucket: HashTable._WIDTH
constexpr int64_t kGroup = int64_t{1} << 31;  // values from here on number groups
constexpr int64_t kOld = int64_t{1} << 40;    // added to values of the old generation
constexpr uint64_t kValueBits = 0xFFFFFFFFull;

struct Generation {
    const uint64_t* words;
    const uint32_t* values;
    const uint64_t* buckets;
    int64_t num_buckets;
    int64_t num_blocks;
    const int64_t* const* group_runs;  // of each group, the runs of the engines that hold its blocks
    const int64_t* group_sizes;
};

struct Index {
    Generation young, old;
    const int64_t* owner;    // row of the engine by the number of the run; -1: forgotten
    const int64_t* leading;  // blocks that the first hashes stand for
    int64_t is_searchable;
    int64_t num_rows;
};

struct Run {
    int64_t begin, end, value, position;
};

int64_t start_of(const Generation& generation, uint64_t word) {
    const uint64_t upper = word >> 32;
    const uint64_t tag = ((word ^ upper) & kValueBits) | 1;
    int64_t bucket = static_cast<int64_t>(upper * static_cast<uint64_t>(generation.num_buckets) >> 32);
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
        const int64_t* members = generation.group_runs[value - kGroup];
        const bool must_follow = run->begin && index->is_searchable;
        for (int64_t at = 0; at < generation.group_sizes[value - kGroup]; ++at) {
            int64_t& of_row = count_of(counts, index->owner[members[at]], num_rows);
            if (!must_follow || of_row == before) of_row = after;
        }
    }
    return 1;
}

// Columns of the engines, by row, and what some of them need for their work, by position.
struct Engines {
    const int64_t *waiting, *running, *free_tokens, *seats, *last_turn;
    const double *uncached_tokens, *session_share;
    const double *computed_rate, *step_seconds;
    const uint8_t* is_late;
    const int64_t* rows;  // of those that are compared
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

    Engines take(const Engines& all, const std::vector<int64_t>& tiers, int64_t tier) {
        rows.clear();
        for (int64_t at = 0; at < all.num_rows; ++at) {
            if (tiers[at] == tier) rows.push_back(all.rows[at]);
        }
        Engines part = all;
        part.rows = rows.data();
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

void by_cost(const Engines& engines, const Leg& leg, const Weights& weights, double* costs) {
    const int64_t count = engines.num_rows;
    const bool has_session = leg.has_session && !leg.is_decode;
    const double prompt = static_cast<double>(leg.prompt_tokens);
    int64_t total = 0, most = 0;
    bool is_at_home = false;
    for (int64_t at = 0; at < count; ++at) {
        const int64_t row = engines.rows[at];
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
        const int64_t row = engines.rows[at];
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

}  // namespace

extern "C" {

// Returns the row of the best engine, as pairing.best does.
int64_t best_engine(const Engines* all, const Leg* leg, const Weights* weights) {
    static thread_local std::vector<int64_t> tiers;
    static thread_local std::vector<double> costs;
    static thread_local Part part;
    Engines engines = *all;
    tiers.resize(engines.num_rows);
    int64_t least_tier = 3, most_tier = 0;
    for (int64_t at = 0; at < engines.num_rows; ++at) {
        tiers[at] = tier_of(engines, *leg, engines.rows[at]);
        least_tier = std::min(least_tier, tiers[at]);
        most_tier = std::max(most_tier, tiers[at]);
    }
    if (least_tier < most_tier) {
        engines = part.take(engines, tiers, least_tier);
        if (leg->is_by_cost) part.measure(engines, *weights);
    }
    costs.resize(engines.num_rows);
    if (leg->is_by_cost) {
        by_cost(engines, *leg, *weights, costs.data());
    } else {
        for (int64_t at = 0; at < engines.num_rows; ++at) {
            costs[at] = by_score(engines, *leg, *weights, engines.rows[at]);
        }
    }
    int64_t best = 0;
    for (int64_t at = 1; at < engines.num_rows; ++at) {
        if (costs[at] < costs[best]) {
            best = at;
        } else if (costs[at] == costs[best]) {
            const int64_t row = engines.rows[at], other = engines.rows[best];
            const int64_t more = leg->cached_tokens ? leg->cached_tokens[row] - leg->cached_tokens[other] : 0;
            if (more > 0 || (more == 0 && engines.last_turn[row] < engines.last_turn[other])) best = at;
        }
    }
    return engines.rows[best];
}
}
