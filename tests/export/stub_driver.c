/* A CUDA driver that records its calls. A tensor map is written as MapDescription in vendor/cuda_driver_abi.py.
 *
 * With PROGRAMS, for whole programs, it has memory, which is the host's, and graphs. A launch gives what the file RESULTS/NBYTES holds,
 * RESULTS being $STUB_RESULTS, to each allocation of so many bytes that its parameters point to; without the file it
 * writes nothing. A program that ends well but doesn't free what it made gets the status LEAKED. */
#include "stub_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int id, padding, value; char rest[60]; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;
typedef struct { char code[1024]; int loaded; } Module;
typedef struct { void *module; char code[1024], symbol[64]; unsigned shared_bytes; } Function;

enum { MAX_MEMORY = 32, MAX_FUNCTIONS = 4096, MISUSED = 999, CAPTURING = 900, LEAKED = 98 };
BY_THREAD StubCall stub_calls[MAX_CALLS];
BY_THREAD unsigned stub_count, stub_driver_calls;
unsigned stub_modules, stub_multiprocessors = 132, stub_major = 9, stub_minor = 0, stub_parameter_bytes = 4096;
int stub_fails, stub_idle;
static char context;
static struct { unsigned char *at; size_t nbytes; } memory[MAX_MEMORY];
static int capturing;

int cuCtxGetCurrent(void **found) { stub_driver_calls++; *found = &context; return 0; }
int cuCtxGetDevice(int *found) { stub_driver_calls++; *found = 0; return 0; }
int cuDeviceGetAttribute(int *found, int attribute, int device) {
    stub_driver_calls++;
    if (device || (attribute != 16 && attribute != 75 && attribute != 76)) return MISUSED;
    *found = (int)(attribute == 16 ? stub_multiprocessors : attribute == 75 ? stub_major : stub_minor);
    return 0;
}
int cuModuleLoadData(void **found, const void *content) {
    stub_driver_calls++;
    if (capturing) return CAPTURING;
    Module *module = calloc(1, sizeof *module);
    memcpy(module->code, content, strnlen(content, sizeof module->code - 1));
    module->loaded = 1;
    stub_modules++;
    *found = module;
    return stub_fails;
}
static Function functions[MAX_FUNCTIONS];
int cuModuleUnload(void *module) {
    stub_modules--;
    for (int i = 0; i < MAX_FUNCTIONS; i++)
        if (functions[i].module == module) functions[i].module = NULL;
    free(module);
    return 0;
}
int cuModuleGetFunction(void **found, void *module, const char *symbol) {
    Function *function = NULL;
    stub_driver_calls++;
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        Function *one = functions + i;
        if (one->module == module && !strcmp(one->symbol, symbol)) return *found = one, 0;
        if (!one->module) function = one;
    }
    if (!function || !((Module *)module)->loaded) return MISUSED;
    memset(function, 0, sizeof *function);
    function->module = module;
    function->shared_bytes = 48 << 10;
    strcpy(function->code, ((Module *)module)->code);
    strncpy(function->symbol, symbol, sizeof function->symbol - 1);
    *found = function;
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    stub_driver_calls++;
    *value = (int)((Function *)function)->shared_bytes;
    return attribute == 8 ? 0 : MISUSED;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    stub_driver_calls++;
    ((Function *)function)->shared_bytes = (unsigned)value;
    return attribute == 8 ? 0 : MISUSED;
}
static StubCall *next(void) {
    StubCall *call = stub_calls + stub_count++ % MAX_CALLS;
    memset(call, 0, sizeof *call);
    return call;
}
static void compute(const StubCall *call) {
    const char *results = getenv("STUB_RESULTS");
    for (unsigned at = 0; results && at < sizeof call->parameters; at += 8) {
        uint64_t address;
        memcpy(&address, call->parameters + at, 8);
        for (int i = 0; i < MAX_MEMORY; i++) {
            char path[4096];
            FILE *file;
            uint64_t begin = (uint64_t)(uintptr_t)memory[i].at;
            if (!begin || address < begin || address >= begin + memory[i].nbytes) continue;
            snprintf(path, sizeof path, "%s/%zu", results, memory[i].nbytes);
            if (!(file = fopen(path, "rb"))) continue;
            if (fread(memory[i].at, 1, memory[i].nbytes, file) != memory[i].nbytes) abort();
            fclose(file);
        }
    }
}
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    stub_driver_calls++;
    if (stub_idle) return 0;
    StubCall *call = next();
    Function *kernel = function;
    if (extra || config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 || config->block[2] != 1) return MISUSED;
    if (config->count > 1 || config->shared_bytes > kernel->shared_bytes) return MISUSED;
    if (config->count && (config->attributes[0].id != 6 || config->attributes[0].value != 1)) return MISUSED;
    call->grid = config->grid[0];
    call->threads = config->block[0];
    call->shared_bytes = config->shared_bytes;
    call->early = config->count;
    call->stream = (uint64_t)(uintptr_t)config->stream;
    strcpy(call->code, kernel->code);
    strcpy(call->symbol, kernel->symbol);
    memcpy(call->parameters, parameters[0], stub_parameter_bytes);
    if (!capturing) compute(call);
    return stub_fails;
}
int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t nbytes, void *stream) {
    stub_driver_calls++;
    if (stub_idle) return 0;
    StubCall *call = next();
    call->kind = 1;
    call->address = address;
    call->byte = byte;
    call->nbytes = nbytes;
    call->stream = (uint64_t)(uintptr_t)stream;
    return stub_fails;
}
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *pitches,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    stub_driver_calls++;
    if (stub_idle) return 0;
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
int cuTensorMapEncodeIm2col(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *pitches,
                            const int *lower, const int *upper, uint32_t channels, uint32_t pixels, const uint32_t *steps, int interleave,
                            int swizzle, int promotion, int fill) {
    const uint32_t box[4] = {channels, pixels, 0, 0}, ones[4] = {1, 1, 1, 1};
    unsigned char *at = map;
    int status = rank == 4 ? cuTensorMapEncodeTiled(map, type, rank, address, sizes, pitches, box, ones, interleave, swizzle, promotion, fill) : MISUSED;
    memcpy(at, "im2col__", 8);
    for (int i = 0; i < 4; i++) {
        int16_t corner = (int16_t)(i < 2 ? lower[i] : upper[i - 2]);
        memcpy(at + 102 + 2 * i, &corner, 2);
        at[110 + i] = (unsigned char)steps[i];
    }
    return status;
}

#ifdef PROGRAMS /* Memory, streams and graphs. NVRTC would call these as well, in a process that has the stub. */

static int made; /* Handles that are to be freed. */
static int unordered; /* Whether a stream doesn't wait for what the default stream copies and fills, nor it for the stream. */
int on_exit(void (*function)(int, void *), void *argument); /* C99 hides this function of glibc. */

static void end(int status, void *unused) {
    (void)unused;
    if (status > 1 || (!made && !stub_modules)) return;
    fprintf(stderr, "stub driver: %d handles and %u modules are left\n", made, stub_modules);
    _Exit(LEAKED);
}
int cuInit(unsigned flags) { return flags || on_exit(end, NULL) ? MISUSED : 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) { made++; *found = &context; return device ? MISUSED : 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { made--; return device ? MISUSED : 0; }
int cuCtxSetCurrent(void *given) { return given == &context ? 0 : MISUSED; }
int cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    int i = 0;
    if (capturing) return CAPTURING;
    while (i < MAX_MEMORY && memory[i].at) i++;
    if (!nbytes || i == MAX_MEMORY) return MISUSED;
    memory[i].nbytes = nbytes;
    if (posix_memalign((void **)&memory[i].at, 256, nbytes)) return MISUSED;
    *address = (uint64_t)(uintptr_t)memory[i].at;
    made++;
    return 0;
}
/* Whether the bytes are all in one allocation. */
static int is_memory(uint64_t address, size_t nbytes) {
    for (int i = 0; i < MAX_MEMORY; i++) {
        uint64_t begin = (uint64_t)(uintptr_t)memory[i].at;
        if (begin && address >= begin && address + nbytes <= begin + memory[i].nbytes) return 1;
    }
    return 0;
}
int cuMemFree_v2(uint64_t address) {
    for (int i = 0; i < MAX_MEMORY; i++) {
        if (!address || (uint64_t)(uintptr_t)memory[i].at != address) continue;
        free(memory[i].at);
        memory[i].at = NULL;
        made--;
        return capturing ? CAPTURING : 0;
    }
    return MISUSED;
}
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t nbytes) {
    if (capturing || unordered || !is_memory(target, nbytes)) return MISUSED;
    memcpy((void *)(uintptr_t)target, source, nbytes);
    return 0;
}
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t nbytes) {
    if (capturing || !is_memory(source, nbytes)) return MISUSED;
    memcpy(target, (void *)(uintptr_t)source, nbytes);
    return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t nbytes) {
    if (capturing || unordered || !is_memory(address, nbytes)) return MISUSED;
    memset((void *)(uintptr_t)address, byte, nbytes);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) {
    made++;
    unordered |= flags == 1;
    *stream = malloc(1);
    return flags > 1 ? MISUSED : 0;
}
int cuStreamSynchronize(void *stream) { return !stream ? MISUSED : capturing ? CAPTURING : 0; }
int cuStreamDestroy_v2(void *stream) { made--; free(stream); return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) {
    if (!stream || mode > 2 || capturing) return MISUSED;
    capturing = 1;
    stub_count = 0;
    return 0;
}
typedef struct { unsigned count; StubCall calls[MAX_CALLS]; } Graph;
int cuStreamEndCapture(void *stream, void **found) {
    Graph *graph = malloc(sizeof *graph);
    if (!stream || !capturing) return MISUSED;
    capturing = 0;
    graph->count = stub_count;
    memcpy(graph->calls, stub_calls, sizeof stub_calls);
    made++;
    *found = graph;
    return 0;
}
int cuGraphInstantiateWithFlags(void **found, void *graph, unsigned long long flags) {
    made++;
    *found = memcpy(malloc(sizeof(Graph)), graph, sizeof(Graph));
    return flags ? MISUSED : 0;
}
int cuGraphLaunch(void *executable, void *stream) {
    Graph *graph = executable;
    for (unsigned i = 0; i < graph->count; i++)
        if (!graph->calls[i].kind) compute(graph->calls + i);
    return !stream ? MISUSED : capturing ? CAPTURING : 0;
}
int cuGraphExecDestroy(void *executable) { made--; free(executable); return 0; }
int cuGraphDestroy(void *graph) { made--; free(graph); return 0; }
#endif
