// See nvtx.h. The only file that includes NVTX's headers, which are the whole of NVTX: a tool is found at run time,
// through NVTX_INJECTION64_PATH.
#include "torch/nvtx.h"

#ifdef FLASH_EXT_WITH_NVTX

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace flash_ext::nvtx {
namespace {

// What a tool shows beside the name of an operator's range. A static layout, so that nothing is written as text. Of
// packed sequences: how many, and the longest lengths.
struct CallPayload {
  int64_t batch, heads_q, heads_k, len_q, len_k, head_dim, head_dim_v, causal;
  char dtype[16];
};

// Of dimension `i` from the right; missing ones count once.
int64_t size_from_right(const Tensor& tensor, int64_t i) { return tensor.dim() >= i ? tensor.size(-i) : 1; }

CallPayload payload_of(const Inputs& in, const Options& options) {
  CallPayload payload{};
  payload.batch = 1;
  if (in.packed()) {
    payload.batch = in.cu_seqlens_q.numel() - 1;
    payload.heads_q = size_from_right(in.query, 2);
    payload.heads_k = size_from_right(in.key, 2);
    payload.len_q = options.max_q.maybe_as_int().value_or(0);
    payload.len_k = options.max_k.maybe_as_int().value_or(0);
  } else {
    for (int64_t i = 0; i < in.query.dim() - 3; ++i) payload.batch *= in.query.size(i);
    payload.heads_q = size_from_right(in.query, 3);
    payload.heads_k = size_from_right(in.key, 3);
    payload.len_q = size_from_right(in.query, 2);
    payload.len_k = size_from_right(in.key, 2);
  }
  payload.head_dim = size_from_right(in.query, 1);
  payload.head_dim_v = size_from_right(in.value, 1);
  payload.causal = options.causal;
  c10::getDtypeNames(in.query.scalar_type()).first.copy(payload.dtype, sizeof(payload.dtype) - 1);
  return payload;
}

nvtxPayloadSchemaEntry_t number(const char* name, size_t offset) {
  nvtxPayloadSchemaEntry_t entry{};
  entry.type = NVTX_PAYLOAD_ENTRY_TYPE_INT64;
  entry.name = name;
  entry.offset = offset;
  return entry;
}

// The domain and what is registered with it; made when the first range asks, and never destroyed, because ranges may
// end in threads that outlive main().
struct Registry {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("flash_ext");  // null where no tool was injected
  uint64_t schema = 0;                                         // 0 where the tool does not know extended payloads
  nvtxStringHandle_t ops[5] = {};
  std::mutex mutex;
  std::unordered_map<std::string, nvtxStringHandle_t> names;

  Registry() {
    if (domain == nullptr) return;
    const char* const op_names[] = {"attention", "attention_backward", "attention_double_backward", "dropout_mask",
                                    "attention_with_cache"};
    for (int i = 0; i < 5; ++i) ops[i] = nvtxDomainRegisterStringA(domain, op_names[i]);
    register_schema();
  }

  void register_schema() {
    nvtxPayloadSchemaEntry_t dtype{};
    dtype.type = NVTX_PAYLOAD_ENTRY_TYPE_CSTRING;
    dtype.name = "dtype";
    dtype.arrayOrUnionDetail = sizeof(CallPayload::dtype);
    dtype.offset = offsetof(CallPayload, dtype);
    const nvtxPayloadSchemaEntry_t entries[] = {number("batch", offsetof(CallPayload, batch)),
                                                number("heads_q", offsetof(CallPayload, heads_q)),
                                                number("heads_k", offsetof(CallPayload, heads_k)),
                                                number("len_q", offsetof(CallPayload, len_q)),
                                                number("len_k", offsetof(CallPayload, len_k)),
                                                number("head_dim", offsetof(CallPayload, head_dim)),
                                                number("head_dim_v", offsetof(CallPayload, head_dim_v)),
                                                number("causal", offsetof(CallPayload, causal)),
                                                dtype};
    nvtxPayloadSchemaAttr_t attributes{};
    attributes.fieldMask = NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE |
                           NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES |
                           NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_STATIC_SIZE;
    attributes.name = "flash_ext call";
    attributes.type = NVTX_PAYLOAD_SCHEMA_TYPE_STATIC;
    attributes.entries = entries;
    attributes.numEntries = std::size(entries);
    attributes.payloadStaticSize = sizeof(CallPayload);
    schema = nvtxPayloadSchemaRegister(domain, &attributes);
  }

  nvtxStringHandle_t name(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto [place, is_new] = names.try_emplace(text, nullptr);
    if (is_new) place->second = nvtxDomainRegisterStringA(domain, text.c_str());
    return place->second;
  }
};

Registry& registry() {
  static Registry* const instance = new Registry();
  return *instance;
}

nvtxEventAttributes_t event(nvtxStringHandle_t name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = name;
  return attributes;
}

}  // namespace

bool listening() { return registry().domain != nullptr; }

void Range::push(Op op, const Inputs& in, const Options& options) {
  nvtxEventAttributes_t attributes = event(registry().ops[static_cast<int>(op)]);
  const CallPayload payload = payload_of(in, options);
  const nvtxPayloadData_t data{registry().schema, sizeof(payload), &payload};
  if (registry().schema != 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_EXT;
    attributes.reserved0 = 1;  // how many payloads there are
    attributes.payload.ullValue = reinterpret_cast<uintptr_t>(&data);
  }
  nvtxDomainRangePushEx(registry().domain, &attributes);
}

void Range::push(Op op) {
  const nvtxEventAttributes_t attributes = event(registry().ops[static_cast<int>(op)]);
  nvtxDomainRangePushEx(registry().domain, &attributes);
}

void Range::pop() { nvtx::pop(); }

void push(const std::string& name) {
  const nvtxEventAttributes_t attributes = event(registry().name(name));
  nvtxDomainRangePushEx(registry().domain, &attributes);
}

void pop() { nvtxDomainRangePop(registry().domain); }

}  // namespace flash_ext::nvtx

#else

namespace flash_ext::nvtx {

bool listening() { return false; }
void Range::push(Op, const Inputs&, const Options&) {}
void Range::push(Op) {}
void Range::pop() {}
void push(const std::string&) {}
void pop() {}

}  // namespace flash_ext::nvtx

#endif
