#include "runtime/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace nibble::runtime {
namespace {

std::vector<std::pair<uint64_t, int64_t>> id_rows(const std::vector<BatchItem>& batch) {
  std::vector<std::pair<uint64_t, int64_t>> out;
  for (const BatchItem& item : batch) out.emplace_back(item.id, item.rows);
  return out;
}
using Rows = std::vector<std::pair<uint64_t, int64_t>>;

void submit(Scheduler& scheduler, uint64_t id, const SequenceNeeds& needs) {
  scheduler.submit(id, needs).value();
}

TEST(PageAllocator, TakesAndGivesBack) {
  PageAllocator pages(5);
  EXPECT_EQ(pages.total(), 5);
  const std::vector<int32_t> a = pages.take(2), b = pages.take(3);
  EXPECT_EQ(pages.free(), 0);
  EXPECT_TRUE(pages.take(0).empty());
  std::set<int32_t> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  EXPECT_THAT(all, testing::ElementsAre(0, 1, 2, 3, 4));
  pages.give_back(a);
  EXPECT_EQ(pages.free(), 2);
  EXPECT_THAT(pages.take(2), testing::UnorderedElementsAreArray(a));
}

TEST(PageAllocatorDeathTest, OwnBugsAbort) {
  PageAllocator pages(2);
  const std::vector<int32_t> one = pages.take(1);
  EXPECT_DEATH(pages.take(2), "take 2 of 1 free");
  pages.give_back(one);
  EXPECT_DEATH(pages.give_back(one), "is not held");
  EXPECT_DEATH(pages.give_back(std::vector<int32_t>{7}), "is not held");
}

TEST(Scheduler, DecodeRowsComeFirstThenChunks) {
  Scheduler s({.pages = 100,
               .page_tokens = 4,
               .max_sequences = 8,
               .max_batch_tokens = 6,
               .max_logit_rows = 8});
  submit(s, 1, {.prompt_tokens = 4, .max_tokens = 5});
  submit(s, 2, {.prompt_tokens = 9, .max_tokens = 5});
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 4}, {2, 2}}));
  const std::vector<BatchItem>& second = s.next();
  EXPECT_EQ(id_rows(second), (Rows{{1, 1}, {2, 5}}));
  EXPECT_EQ(second[0].position_begin, 4);
  EXPECT_EQ(second[0].logit_rows, 1);
  EXPECT_TRUE(second[0].samples);
  EXPECT_FALSE(second[0].ends_prompt);
  EXPECT_EQ(second[1].position_begin, 2);
  EXPECT_EQ(second[1].logit_rows, 0);
  EXPECT_FALSE(second[1].samples);
  const std::vector<BatchItem>& third = s.next();
  EXPECT_EQ(id_rows(third), (Rows{{1, 1}, {2, 2}}));
  EXPECT_TRUE(third[1].ends_prompt);
  EXPECT_TRUE(third[1].samples);
  EXPECT_EQ(third[1].logit_rows, 1);
  EXPECT_TRUE(s.end(1));
  EXPECT_FALSE(s.end(1));
  EXPECT_EQ(id_rows(s.next()), (Rows{{2, 1}}));
}

TEST(Scheduler, AllRowsComputedWaitsForItsEndWithItsPages) {
  Scheduler s({.pages = 6,
               .page_tokens = 4,
               .max_sequences = 8,
               .max_batch_tokens = 8,
               .max_logit_rows = 8});
  submit(s, 1, {.prompt_tokens = 3, .max_tokens = 2});
  submit(s, 2, {.prompt_tokens = 4, .max_tokens = 0});
  submit(s, 3, {.prompt_tokens = 9, .max_tokens = 1});
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 3}, {2, 4}, {3, 1}}));
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 1}, {3, 7}}));  // its second token needs no row
  EXPECT_EQ(id_rows(s.next()), (Rows{{3, 1}}));
  EXPECT_TRUE(s.next().empty());
  EXPECT_EQ(s.running(), 3);
  EXPECT_EQ(s.pages().free(), 0);
  for (const uint64_t id : {1, 2, 3}) EXPECT_TRUE(s.end(id));
  EXPECT_EQ(s.pages().free(), 6);
  EXPECT_TRUE(s.idle());
}

TEST(Scheduler, PromptLogitsLimitTheChunk) {
  Scheduler s({.pages = 100,
               .page_tokens = 4,
               .max_sequences = 8,
               .max_batch_tokens = 100,
               .max_logit_rows = 3});
  submit(s, 1, {.prompt_tokens = 2, .max_tokens = 5});
  submit(s, 2, {.prompt_tokens = 6, .max_tokens = 0, .prompt_logits = true});
  submit(s, 3, {.prompt_tokens = 10, .max_tokens = 1});
  // 1 takes a logit row, 2 the other two; 3 may run all but its last row.
  const std::vector<BatchItem>& first = s.next();
  EXPECT_EQ(id_rows(first), (Rows{{1, 2}, {2, 2}, {3, 9}}));
  EXPECT_EQ(first[1].logit_rows, 2);
  EXPECT_EQ(first[2].logit_rows, 0);
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 1}, {2, 2}}));
  const std::vector<BatchItem>& third = s.next();
  EXPECT_EQ(id_rows(third), (Rows{{1, 1}, {2, 2}}));
  EXPECT_TRUE(third[1].ends_prompt);
  EXPECT_FALSE(third[1].samples);
  s.end(2);
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 1}, {3, 1}}));
}

TEST(Scheduler, NobodyOvertakes) {
  Scheduler s({.pages = 4,
               .page_tokens = 4,
               .max_sequences = 8,
               .max_batch_tokens = 64,
               .max_logit_rows = 8});
  submit(s, 1, {.prompt_tokens = 5, .max_tokens = 3});   // 2 pages
  submit(s, 2, {.prompt_tokens = 10, .max_tokens = 3});  // 4 pages
  submit(s, 3, {.prompt_tokens = 1, .max_tokens = 1});   // 1 page, would fit at once
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 5}}));
  EXPECT_EQ(s.waiting(), 2);
  s.end(1);
  EXPECT_EQ(id_rows(s.next()), (Rows{{2, 10}}));
  EXPECT_EQ(s.pages().free(), 0);
  EXPECT_TRUE(s.end(2));
  EXPECT_EQ(id_rows(s.next()), (Rows{{3, 1}}));
  EXPECT_TRUE(s.end(3));
  EXPECT_TRUE(s.idle());
  EXPECT_TRUE(s.next().empty());
  EXPECT_EQ(s.pages().free(), 4);
}

TEST(Scheduler, RejectsWhatCanNeverFit) {
  Scheduler s({.pages = 4,
               .page_tokens = 4,
               .max_sequences = 8,
               .max_batch_tokens = 64,
               .max_logit_rows = 8});
  EXPECT_TRUE(s.check_fits({.prompt_tokens = 10, .max_tokens = 6}));
  for (const SequenceNeeds& needs : {SequenceNeeds{.prompt_tokens = 10, .max_tokens = 7},
                                     {.prompt_tokens = 17, .max_tokens = 0},
                                     {.prompt_tokens = 1, .max_tokens = INT64_MAX}}) {
    const Result<void> got = s.submit(1, needs);
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
    EXPECT_THAT(got.error().message(), testing::HasSubstr(cat(needs.max_tokens)));
    EXPECT_THAT(got.error().message(), testing::HasSubstr("16 positions"));
  }
  EXPECT_TRUE(s.idle());
}

TEST(Scheduler, CancelOfTheWaiting) {
  Scheduler s({.pages = 4,
               .page_tokens = 4,
               .max_sequences = 1,
               .max_batch_tokens = 64,
               .max_logit_rows = 8});
  for (uint64_t id = 1; id <= 3; ++id) submit(s, id, {.prompt_tokens = 1, .max_tokens = 1});
  EXPECT_EQ(id_rows(s.next()), (Rows{{1, 1}}));
  EXPECT_TRUE(s.end(2));
  s.end(1);
  EXPECT_EQ(id_rows(s.next()), (Rows{{3, 1}}));
}

// Random events against a model of what must hold after each of them.
class Checker {
 public:
  explicit Checker(const SchedulerLimits& limits) : limits_(limits), scheduler_(limits) {}

  void submit(uint64_t id, const SequenceNeeds& needs) {
    const int64_t pages =
        (needs.prompt_tokens + needs.max_tokens + limits_.page_tokens - 1) / limits_.page_tokens;
    const bool taken = scheduler_.submit(id, needs).has_value();
    EXPECT_EQ(taken, pages <= limits_.pages);
    if (taken) sequences_[id] = {.needs = needs, .pages_needed = pages};
  }
  void end(uint64_t id) {
    EXPECT_EQ(scheduler_.end(id), sequences_.erase(id) == 1);
    EXPECT_FALSE(scheduler_.end(id));
  }
  std::vector<uint64_t> ids() const {
    std::vector<uint64_t> out;
    for (const auto& [id, s] : sequences_) out.push_back(id);
    return out;
  }

  /// One step: every invariant. Sequences that got their last token end.
  void step() {
    const std::vector<uint64_t> owed = decoding();
    const std::vector<BatchItem> batch = scheduler_.next();
    int64_t rows = 0, logit_rows = 0;
    bool in_prompts = false;
    std::vector<uint64_t> done;
    for (const BatchItem& item : batch) {
      State& s = sequences_.at(item.id);
      rows += item.rows;
      logit_rows += item.logit_rows;
      ASSERT_GE(item.rows, 1);
      EXPECT_EQ(item.position_begin, s.computed) << "a gap or an overlap";
      const bool decodes = s.computed >= s.needs.prompt_tokens;
      if (decodes) {
        EXPECT_FALSE(in_prompts) << "decode rows come first";
        EXPECT_EQ(item.rows, 1);
      }
      in_prompts = !decodes;
      s.computed += item.rows;
      check_item(item, s, decodes);
      s.started = true;
      s.pages.assign(item.pages, item.pages + s.pages_needed);
      s.tokens += item.samples;
      if (s.computed >= s.needs.prompt_tokens && s.tokens == s.needs.max_tokens) {
        done.push_back(item.id);
      }
    }
    EXPECT_LE(rows, limits_.max_batch_tokens);
    EXPECT_LE(logit_rows, limits_.max_logit_rows);
    check_fairness(batch, owed);
    check_pages();
    for (uint64_t id : done) end(id);
  }

  bool drained() const {
    return scheduler_.idle() && scheduler_.pages().free() == limits_.pages && sequences_.empty();
  }
  int64_t submitted_left() const { return static_cast<int64_t>(sequences_.size()); }

 private:
  struct State {
    SequenceNeeds needs;
    int64_t pages_needed = 0, computed = 0, tokens = 0;
    bool started = false;
    std::vector<int32_t> pages = {};
  };

  static void check_item(const BatchItem& item, const State& s, bool decodes) {
    const int64_t prompt = s.needs.prompt_tokens;
    EXPECT_EQ(item.ends_prompt, !decodes && s.computed == prompt);
    EXPECT_EQ(item.samples, s.computed >= prompt && s.needs.max_tokens > 0);
    EXPECT_TRUE(decodes || s.computed <= prompt);
    if (s.needs.prompt_logits && !decodes) {
      EXPECT_EQ(item.logit_rows, item.rows);
    } else {
      EXPECT_EQ(item.logit_rows, item.samples ? 1 : 0);
    }
    if (s.started) {
      EXPECT_TRUE(std::equal(s.pages.begin(), s.pages.end(), item.pages)) << "the pages moved";
    }
  }

  /// Before a step: everyone past the prompt is owed a row.
  std::vector<uint64_t> decoding() const {
    std::vector<uint64_t> out;
    for (const auto& [id, s] : sequences_) {
      if (s.computed >= s.needs.prompt_tokens) out.push_back(id);
    }
    return out;
  }

  void check_fairness(const std::vector<BatchItem>& batch, const std::vector<uint64_t>& owed) {
    std::set<uint64_t> in_batch;
    for (const BatchItem& item : batch) in_batch.insert(item.id);
    EXPECT_EQ(in_batch.size(), batch.size());
    for (uint64_t id : owed) EXPECT_TRUE(in_batch.contains(id)) << id << " starves";
    if (sequences_.empty()) return;
    // Ids ascend with age, so exactly the first running() of them are admitted.
    EXPECT_TRUE(in_batch.contains(sequences_.begin()->first)) << "the oldest starves";
    const auto first_waiting = std::next(sequences_.begin(), scheduler_.running());
    if (first_waiting == sequences_.end()) return;
    EXPECT_LT(*in_batch.rbegin(), first_waiting->first) << "overtaken";
    const int64_t max_running =
        std::min({limits_.max_sequences, limits_.max_batch_tokens, limits_.max_logit_rows});
    EXPECT_TRUE(scheduler_.running() == max_running ||
                scheduler_.pages().free() < first_waiting->second.pages_needed)
        << "waits for nothing";
  }

  void check_pages() {
    std::set<int32_t> used;
    int64_t count = 0;
    for (const auto& [id, s] : sequences_) {
      used.insert(s.pages.begin(), s.pages.end());
      count += static_cast<int64_t>(s.pages.size());
    }
    EXPECT_EQ(static_cast<int64_t>(used.size()), count) << "a page has two owners";
    EXPECT_LE(count, limits_.pages - scheduler_.pages().free());
    for (int32_t page : used) EXPECT_TRUE(page >= 0 && page < limits_.pages);
    EXPECT_LE(scheduler_.running(), limits_.max_sequences);
    EXPECT_EQ(scheduler_.running() + scheduler_.waiting(), static_cast<int64_t>(sequences_.size()));
  }

  SchedulerLimits limits_;
  Scheduler scheduler_;
  std::map<uint64_t, State> sequences_;
};

class SchedulerProperty : public testing::TestWithParam<SchedulerLimits> {};

TEST_P(SchedulerProperty, RandomEventsKeepTheInvariants) {
  Checker checker(GetParam());
  std::mt19937 random(17);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  uint64_t next_id = 1;
  for (int event = 0; event < 10000 && !testing::Test::HasFailure(); ++event) {
    const int64_t kind = below(10);
    if (kind < 3 && checker.submitted_left() < 30) {
      checker.submit(next_id++, {.prompt_tokens = 1 + below(below(4) == 0 ? 120 : 12),
                                 .max_tokens = below(20),
                                 .prompt_logits = below(4) == 0});
    } else if (kind == 3) {
      const std::vector<uint64_t> ids = checker.ids();
      if (!ids.empty())
        checker.end(ids[static_cast<size_t>(below(static_cast<int64_t>(ids.size())))]);
    } else {
      checker.step();
    }
  }
  // Nobody starves: what is left ends without new events.
  for (int i = 0; i < 10000 && checker.submitted_left() > 0; ++i) checker.step();
  EXPECT_TRUE(checker.drained());
}

INSTANTIATE_TEST_SUITE_P(Limits, SchedulerProperty,
                         testing::Values(SchedulerLimits{.pages = 40,
                                                         .page_tokens = 4,
                                                         .max_sequences = 8,
                                                         .max_batch_tokens = 16,
                                                         .max_logit_rows = 8},
                                         SchedulerLimits{.pages = 40,
                                                         .page_tokens = 4,
                                                         .max_sequences = 8,
                                                         .max_batch_tokens = 1,
                                                         .max_logit_rows = 8},
                                         SchedulerLimits{.pages = 40,
                                                         .page_tokens = 4,
                                                         .max_sequences = 8,
                                                         .max_batch_tokens = 16,
                                                         .max_logit_rows = 1},
                                         SchedulerLimits{.pages = 40,
                                                         .page_tokens = 4,
                                                         .max_sequences = 1,
                                                         .max_batch_tokens = 7,
                                                         .max_logit_rows = 3},
                                         SchedulerLimits{.pages = 9,
                                                         .page_tokens = 16,
                                                         .max_sequences = 64,
                                                         .max_batch_tokens = 512,
                                                         .max_logit_rows = 64},
                                         SchedulerLimits{.pages = 400,
                                                         .page_tokens = 1,
                                                         .max_sequences = 5,
                                                         .max_batch_tokens = 5,
                                                         .max_logit_rows = 5}));

TEST(Scheduler, SameEventsSameBatches) {
  std::vector<Rows> runs[2];
  for (auto& batches : runs) {
    Scheduler s({.pages = 90,
                 .page_tokens = 4,
                 .max_sequences = 6,
                 .max_batch_tokens = 9,
                 .max_logit_rows = 6});
    for (uint64_t id = 1; id <= 40; ++id) {
      submit(s, id, {.prompt_tokens = static_cast<int64_t>(1 + id * 7 % 23), .max_tokens = 60});
      batches.push_back(id_rows(s.next()));
      if (id % 3 == 0) s.end(id / 2);
    }
  }
  EXPECT_EQ(runs[0], runs[1]);
}

}  // namespace
}  // namespace nibble::runtime
