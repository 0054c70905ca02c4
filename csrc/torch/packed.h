// Packed sequences (core/sequences.h) where no kernel takes them as they are: cut out one by one on the CPU, whose
// lengths the host may read, and padded to the longest one for the composite.
//
// Called by ops.cpp, chunked.cpp, chunked_packed.cpp, explain.cpp, sinks.cpp and cache_checks.cpp. Invariant: rows that
// belong to no sequence have results and gradients of 0 and an lse of -inf, and are never read.
#pragma once

#include "core/sequences.h"
#include "torch/checks.h"

namespace flash_ext::packed {

// The options of the dense call that has the same meaning.
Options dense_options(Options options);

// FLASH_EXT_CHECK=1 in the environment.
bool entries_are_checked();

// With it: throws AttentionError for an entry of cu_seqlens or seqused that no kernel
// should be given, and waits for the device to read it.
void check_entries(const Inputs& in, const Shape<int64_t>& shape);

// Why the composite is no batch-invariant one of packed sequences, which it pads; for AttentionError.
inline constexpr const char* kNoInvariantComposite =
    "is True, but no kernel takes these packed sequences, and the composite pads them to the longest; pass "
    "batch_invariant=False";

// ---- one by one -----------------------------------------------------------------------------------------------------

// The sequences of a call on the CPU.
std::vector<Sequence> sequences_of(const Inputs& in, const Shape<int64_t>& shape);

// Rows [first, first + len) of (rows, heads, cols) as (1, heads, len, cols), without a copy.
Tensor cut_rows(const Tensor& tensor, int64_t first, int64_t len);
// Of lse (heads, rows) as (1, heads, len).
Tensor cut_lse(const Tensor& lse, const Sequence& sequence);
// What sequence b has of a tensor that broadcasts to (sequences, heads, queries, keys).
Tensor cut_scores(const Tensor& scores, int64_t b, const Sequence& sequence);
// What it has of slopes (heads,) or (sequences, heads).
Tensor cut_slopes(const Tensor& slopes, int64_t b);
// The dense call of sequence b alone.
Inputs cut(const Inputs& in, int64_t b, const Sequence& sequence);

// ---- padded ---------------------------------------------------------------------------------------------------------

// The same call with a row of padding wherever a sequence is shorter than the longest. All lengths stay on the device.
class Padding {
 public:
  Padding(const Inputs& in, const Options& options);

  // (sequences, heads, longest, cols) of (rows, heads, cols), zeros in the padding; undefined of undefined.
  Tensor pad_queries(const Tensor& rows) const { return queries_.pad(rows); }
  Tensor pad_keys(const Tensor& rows) const { return keys_.pad(rows); }
  // (sequences, heads, longest) of (heads, rows).
  Tensor pad_lse(const Tensor& lse) const;
  // And back.
  Tensor unpad_queries(const Tensor& padded) const { return queries_.unpad(padded, 0.0); }
  Tensor unpad_keys(const Tensor& padded) const { return keys_.unpad(padded, 0.0); }
  Tensor unpad_lse(const Tensor& padded, double empty) const;

  // Rows of query that belong to no sequence, (rows,) bool.
  const Tensor& nobodys_queries() const { return queries_.is_nobodys; }

  // The dense call; its padding is to be hidden, and the diagonal's offset is this object's.
  Inputs inputs(const Inputs& in) const;
  // Pairs of padding, (sequences, 1, queries, keys) of positions i (queries, 1) and j (keys,).
  Tensor hidden(const Tensor& i, const Tensor& j) const;
  // Of the diagonal, (sequences, 1, 1, 1).
  const Tensor& offset() const { return offset_; }

 private:
  // Of queries or of keys.
  struct Side {
    int64_t longest = 0;
    c10::SymInt rows;
    Tensor length;      // (sequences, 1)
    Tensor row;         // (sequences * longest,): of each position
    Tensor position;    // (rows,): the place of each row in (sequences * longest)
    Tensor is_padding;  // (sequences, longest)
    Tensor is_nobodys;  // (rows,)

    Side(const Tensor& cu_seqlens, const Tensor& used, const c10::SymInt& longest, const c10::SymInt& rows);
    Tensor pad(const Tensor& tensor) const;
    Tensor unpad(const Tensor& padded, double empty) const;
  };

  Side queries_, keys_;
  Tensor offset_;
};

}  // namespace flash_ext::packed
