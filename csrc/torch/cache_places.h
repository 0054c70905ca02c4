// Where the sequences of a cache call lie, as the kernels that append and attend are told alike.
#pragma once

#include "torch/cache.h"

namespace flash_ext {

// What the pointers of the kernel's arguments point to.
struct CachePlaces {
  Tensor lengths, slot_of, table;
};

// Args: AppendArgs or DecodeArgs. The result must live until the kernel is launched.
template <class Args>
CachePlaces fill_places(Args& args, const CacheInputs& in, const CacheShape<int64_t>& shape) {
  CachePlaces places{in.cache_seqlens.contiguous(), {}, in.block_table};
  args.fp8 = in.key_cache.scalar_type() == at::kFloat8_e4m3fn;
  args.batch = static_cast<int>(shape.batch);
  args.capacity = static_cast<int>(shape.capacity);
  args.slots = static_cast<int>(shape.slots);
  args.lengths = places.lengths.const_data_ptr<int32_t>();
  if (in.cache_batch_index.defined()) {
    places.slot_of = in.cache_batch_index.contiguous();
    args.slot_of = places.slot_of.const_data_ptr<int32_t>();
  }
  if (places.table.defined()) {
    if (places.table.stride(1) != 1) places.table = places.table.contiguous();
    args.page_rows = static_cast<int>(shape.rows);
    args.table = places.table.const_data_ptr<int32_t>();
    args.table_stride = places.table.stride(0);
  }
  return places;
}

}  // namespace flash_ext
