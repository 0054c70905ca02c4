// core/seq_info.h: dense, packed and partly used sequences.
#include "core/seq_info.h"

#include <gtest/gtest.h>

#include <vector>

namespace flash_ext {
namespace {

ForwardArgs make_args(int64_t len_q, int64_t len_k) {
  ForwardArgs args;
  args.problem.len_q = len_q;
  args.problem.len_k = len_k;
  return args;
}

void expect_seq(const SeqInfo& seq, int64_t q_begin, int64_t len_q, int64_t k_begin, int64_t len_k) {
  EXPECT_EQ(seq.q_begin, q_begin);
  EXPECT_EQ(seq.len_q, len_q);
  EXPECT_EQ(seq.k_begin, k_begin);
  EXPECT_EQ(seq.len_k, len_k);
}

TEST(SeqInfo, Dense) {
  const ForwardArgs args = make_args(10, 20);
  for (int64_t b : {0, 1, 7}) expect_seq(make_seq_info(args, b), 0, 10, 0, 20);
}

TEST(SeqInfo, Packed) {
  const std::vector<int32_t> q = {0, 3, 3, 10}, k = {0, 5, 9, 9};
  ForwardArgs args = make_args(7, 5);
  args.cu_seqlens_q = q.data();
  args.cu_seqlens_k = k.data();
  expect_seq(make_seq_info(args, 0), 0, 3, 0, 5);
  expect_seq(make_seq_info(args, 1), 3, 0, 5, 4);
  expect_seq(make_seq_info(args, 2), 3, 7, 9, 0);
}

TEST(SeqInfo, OneSidePacked) {
  const std::vector<int32_t> cu = {0, 4, 6};
  ForwardArgs args = make_args(9, 11);
  args.cu_seqlens_q = cu.data();
  expect_seq(make_seq_info(args, 1), 4, 2, 0, 11);
  args.cu_seqlens_q = nullptr;
  args.cu_seqlens_k = cu.data();
  expect_seq(make_seq_info(args, 1), 0, 9, 4, 2);
}

TEST(SeqInfo, UsedKeysNeverLeaveTheTensor) {
  const std::vector<int32_t> used = {0, 8, 16, 99, -3}, k = {0, 4, 10, 20, 30, 31};
  ForwardArgs args = make_args(2, 16);
  args.seqused_k = used.data();
  const int64_t dense[] = {0, 8, 16, 16, 0};
  for (int64_t b = 0; b < 5; ++b) expect_seq(make_seq_info(args, b), 0, 2, 0, dense[b]);
  args.cu_seqlens_k = k.data();
  const int64_t packed[] = {0, 6, 10, 10, 0};
  for (int64_t b = 0; b < 5; ++b) expect_seq(make_seq_info(args, b), 0, 2, k[b], packed[b]);
}

TEST(SeqInfo, BandBelongsToTheSequence) {
  const std::vector<int32_t> q = {0, 3, 8}, k = {0, 7, 9};
  ForwardArgs args = make_args(5, 7);
  args.cu_seqlens_q = q.data();
  args.cu_seqlens_k = k.data();
  args.problem.causal = true;
  args.problem.bottom_right = true;
  // 3 queries over 7 keys: the last query sees all; 5 over 2: the first three see nothing.
  EXPECT_EQ(make_seq_info(args, 0).band.keys({0, 1}, 7).size(), 5);
  EXPECT_EQ(make_seq_info(args, 0).band.keys({2, 3}, 7).size(), 7);
  EXPECT_EQ(make_seq_info(args, 1).band.keys({0, 3}, 2).size(), 0);
  EXPECT_EQ(make_seq_info(args, 1).band.keys({3, 4}, 2).size(), 1);
  EXPECT_EQ(make_seq_info(args, 1).band.keys({4, 5}, 2).size(), 2);

  // A cache that is not full moves the diagonal with it.
  const std::vector<int32_t> used = {4, 2};
  args.seqused_k = used.data();
  EXPECT_EQ(make_seq_info(args, 0).band.keys({0, 1}, 4).size(), 2);
}

TEST(SeqInfo, BlocksCoverASequenceOnce) {
  for (int64_t len = 0; len < 20; ++len)
    for (int64_t size = 1; size < 8; ++size) {
      const SeqInfo seq = make_seq_info(make_args(len, 19 - len), 0);
      int64_t next = 0, next_key = 0;
      for (int64_t block = 0; block < 20; ++block) {
        const Range queries = seq.queries(block, size), keys = seq.keys(block, size);
        if (!queries.empty()) {
          EXPECT_EQ(queries.first, next);
          EXPECT_LE(queries.size(), size);
          next = queries.last;
        }
        if (!keys.empty()) {
          EXPECT_EQ(keys.first, next_key);
          next_key = keys.last;
        }
      }
      EXPECT_EQ(next, len);
      EXPECT_EQ(next_key, 19 - len);
    }
}

}  // namespace
}  // namespace flash_ext
