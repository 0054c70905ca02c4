// What lies between q k^T and the softmax, beside the band, in what a kernel was compiled for.
//
// Called by the traits of sm80's and sm90's kernels, and by their rows, which choose. Invariant: a kernel of one kind
// serves whatever needs less; each backend says beside its traits which kinds it has, and what they hold there.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class ScoreKind : uint8_t {
  kNone,
  kSoftcap,  // a softcap, alone
  kScores,   // a bias, slopes or a mask
  kDropout,  // dropout; sm90: with these or without, sm80: alone
  kAny,      // whatever there is
};

}  // namespace flash_ext
