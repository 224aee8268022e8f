/* A CUDA driver that records its calls. A tensor map is written as MapDescription in vendor/cuda_driver_abi.py. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int id, padding, value; char rest[60]; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;
typedef struct {
    unsigned kind, grid, threads, shared_bytes, early, byte;
    uint64_t stream, address, nbytes;
    char code[1024], symbol[64];
    unsigned char parameters[4096];
} Call;
typedef struct { char code[1024]; int loaded; } Module;
typedef struct { char code[1024], symbol[64]; int shared_bytes; } Function;

enum { MOST_CALLS = 16, MISUSED = 999 };
Call stub_calls[MOST_CALLS];
unsigned stub_count, stub_modules, stub_multiprocessors = 132, stub_major = 9, stub_minor = 0, stub_parameter_bytes = 4096;
int stub_fails;
static char context;

int cuCtxGetCurrent(void **found) { *found = &context; return 0; }
int cuCtxGetDevice(int *found) { *found = 0; return 0; }
int cuDeviceGetAttribute(int *found, int attribute, int device) {
    if (device || (attribute != 16 && attribute != 75 && attribute != 76)) return MISUSED;
    *found = (int)(attribute == 16 ? stub_multiprocessors : attribute == 75 ? stub_major : stub_minor);
    return 0;
}
int cuModuleLoadData(void **found, const void *content) {
    Module *module = calloc(1, sizeof *module);
    memcpy(module->code, content, strnlen(content, sizeof module->code - 1));
    module->loaded = 1;
    stub_modules++;
    *found = module;
    return stub_fails;
}
int cuModuleUnload(void *module) { stub_modules--; free(module); return 0; }
int cuModuleGetFunction(void **found, void *module, const char *symbol) {
    static Function functions[4096];
    static unsigned used;
    Function *function = functions + used++ % 4096;
    memset(function, 0, sizeof *function);
    strcpy(function->code, ((Module *)module)->code);
    strncpy(function->symbol, symbol, sizeof function->symbol - 1);
    *found = function;
    return ((Module *)module)->loaded ? 0 : MISUSED;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    ((Function *)function)->shared_bytes = value;
    return attribute == 8 ? 0 : MISUSED;
}
static Call *next(void) {
    Call *call = stub_calls + stub_count++ % MOST_CALLS;
    memset(call, 0, sizeof *call);
    return call;
}
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    Call *call = next();
    Function *kernel = function;
    unsigned granted = kernel->shared_bytes > 49152 ? (unsigned)kernel->shared_bytes : 49152;
    if (extra || config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 || config->block[2] != 1) return MISUSED;
    if (config->count > 1 || config->shared_bytes > granted) return MISUSED;
    if (config->count && (config->attributes[0].id != 6 || config->attributes[0].value != 1)) return MISUSED;
    call->grid = config->grid[0];
    call->threads = config->block[0];
    call->shared_bytes = config->shared_bytes;
    call->early = config->count;
    call->stream = (uint64_t)(uintptr_t)config->stream;
    strcpy(call->code, kernel->code);
    strcpy(call->symbol, kernel->symbol);
    memcpy(call->parameters, parameters[0], stub_parameter_bytes);
    return stub_fails;
}
int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t nbytes, void *stream) {
    Call *call = next();
    call->kind = 1;
    call->address = address;
    call->byte = byte;
    call->nbytes = nbytes;
    call->stream = (uint64_t)(uintptr_t)stream;
    return stub_fails;
}
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *pitches,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    unsigned char *at = map;
    uint64_t where = (uint64_t)(uintptr_t)address;
    if ((uintptr_t)map % 64 || interleave || fill || rank < 1 || rank > 5) return MISUSED;
    memset(at, 0, 128);
    memcpy(at, "tiledmap", 8);
    memcpy(at + 8, &where, 8);
    memcpy(at + 16, sizes, 8 * rank);
    memcpy(at + 56, pitches, 8 * (rank - 1));
    for (uint32_t i = 0; i < rank; i++) {
        uint16_t width = (uint16_t)box[i];
        if (steps[i] != 1) return MISUSED;
        memcpy(at + 88 + 2 * i, &width, 2);
    }
    at[98] = (unsigned char)type;
    at[99] = (unsigned char)rank;
    at[100] = (unsigned char)swizzle;
    at[101] = (unsigned char)promotion;
    return stub_fails;
}
