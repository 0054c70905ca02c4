/* An NVTX tool as small as can be, for tests/tools/test_nvtx.py: writes what it is told to the file NVTX_LOG, one line an
   event. NVTX loads the library that NVTX_INJECTION64_PATH names and asks it for functions to call. */
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* out;

static nvtxDomainHandle_t create_domain(const char* name) {
  fprintf(out, "domain %s\n", name);
  return (nvtxDomainHandle_t)1;
}

static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char* text) {
  static int count;
  (void)domain;
  fprintf(out, "string %d %s\n", ++count, text);
  return (nvtxStringHandle_t)(size_t)count;
}

static uint64_t register_schema(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t* schema) {
  (void)domain;
  fprintf(out, "schema %s size %zu:", schema->name, schema->payloadStaticSize);
  for (size_t i = 0; i < schema->numEntries; ++i) {
    const nvtxPayloadSchemaEntry_t* entry = schema->entries + i;
    fprintf(out, " %s@%d/%d", entry->name, (int)entry->offset, (int)entry->type);
  }
  fprintf(out, "\n");
  return 77;
}

/* Payloads as hexadecimal bytes: the test reads them by the schema. */
static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  fprintf(out, "push %d %d %d", (int)(size_t)domain, (int)event->messageType, (int)(size_t)event->message.registered);
  if (event->payloadType == NVTX_PAYLOAD_TYPE_EXT) {
    const nvtxPayloadData_t* data = (const nvtxPayloadData_t*)(size_t)event->payload.ullValue;
    fprintf(out, " %d ", (int)data->schemaId);
    for (size_t i = 0; i < data->size; ++i) fprintf(out, "%02x", ((const unsigned char*)data->payload)[i]);
  }
  fprintf(out, "\n");
  return 0;
}

static int pop(nvtxDomainHandle_t domain) {
  fprintf(out, "pop %d\n", (int)(size_t)domain);
  fflush(out);
  return 0;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const NvtxExportTableCallbacks* tables = (const NvtxExportTableCallbacks*)export_table(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable core2;
  unsigned int size = 0;
  out = fopen(getenv("NVTX_LOG"), "w");
  if (!out || !tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &core2, &size)) return 0;
  *core2[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
  *core2[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
  *core2[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *core2[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}

int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t* module) {
  if (module->moduleId != NVTX_EXT_PAYLOAD_MODULEID) return 0;
  module->segments->functionSlots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] = (intptr_t)register_schema;
  return 1;
}
