// The ranges of core/mask_ranges.h, found on the device; host functions that launch on args.stream.
#pragma once

#include "core/mask_ranges.h"

namespace flash_ext::cuda {

enum class RangesOf : uint8_t { kQueries, kKeys };

// For tiles of `block` queries of a query head, or keys of a key head. 0 without a mask, and of packed sequences.
int64_t mask_ranges_bytes(const Problem& problem, RangesOf of, int64_t block);

// scratch: of mask_ranges_bytes, aligned to 8; read when the kernel has ended, behind which launch_dependent may begin.
// counter: becomes 0, where it is not null.
MaskRanges find_mask_ranges(const ForwardArgs& args, RangesOf of, int block, void* scratch,
                            uint32_t* counter = nullptr);

}  // namespace flash_ext::cuda
