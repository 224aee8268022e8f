/* Reads plans.bin, whose tables sparse24_plans/export/tables.py writes, and makes the launches that they say. */
#define _POSIX_C_SOURCE 200809L
#include "sparse24_export.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The tables ----------------------------------------------------------------------------------------------- */

enum { SCHEMA = 1, MAX_OPERANDS = 32, MAX_PARAMETERS = 4096, MAP_BYTES = 128, MAX_RANK = 5, IM2COL_RANK = 4, VECTOR = 16, WORKSPACE = -1 };
static const uint32_t NO_PLAN = UINT32_MAX; /* The plan of a range that no kernel serves. */
enum { NUMBER, ADDRESS, STRIDE, LAUNCH_ID, ALIGNED };

typedef struct { int64_t constant, by_n; uint32_t column, zero; } Number;
typedef struct { uint32_t at, size, kind; int32_t operand; int64_t factor; Number number; } Place;
typedef struct {
    uint32_t at, data_type, rank, swizzle, promotion;
    int32_t only_if_aligned;
    uint32_t im2col;
    int32_t walk[8]; /* In im2col mode the lower corner, the upper corner and the element strides: 2, 2 and 4 numbers. */
    uint32_t zero;
    Place address, pitch[MAX_RANK - 1];
    Number size[MAX_RANK], box[MAX_RANK];
} Map;
typedef struct {
    uint32_t fill, cubin, symbol, threads, shared_bytes, overlapping, parameter_bytes, byte;
    Number size; /* CTAs, or bytes of a fill. */
    uint32_t first_place, places, first_map, maps;
} Launch;
typedef struct {
    uint32_t name, written, optional, itemsize, strided, alignment, line_alignment;
    int32_t may_be;
    Number lines, width;
} Operand;
typedef struct {
    uint32_t kernel, guarantee, promises, workspace_alignment;
    Number workspace;
    uint32_t first_operand, operands, first_launch, launches;
} Plan;
typedef struct { int64_t first_n; uint32_t plan, row; } Range;
typedef struct { uint32_t name, descriptor, first_range, ranges; int64_t least_n, most_n; } Problem;
typedef struct { uint32_t file, zero; uint64_t nbytes; uint8_t sha256[32]; } Cubin;
typedef struct { uint64_t offset, count; } Section;
enum { PROBLEMS, RANGES, NUMBERS, PLANS, OPERANDS, LAUNCHES, PLACES, MAPS, CUBINS, TEXT, SECTIONS };
static const size_t RECORD_BYTES[SECTIONS] = {sizeof(Problem), sizeof(Range),  sizeof(int64_t), sizeof(Plan), sizeof(Operand),
                                              sizeof(Launch),  sizeof(Place), sizeof(Map),     sizeof(Cubin), 1};
typedef struct {
    char magic[8];
    uint32_t schema, header_bytes;
    uint64_t file_bytes;
    uint8_t sha256[32];
    uint32_t major, minor, multiprocessors, zero;
    Section sections[SECTIONS];
} Header;
enum { HASHED_FROM = offsetof(Header, major) };

/* The driver ----------------------------------------------------------------------------------------------- */

typedef struct { int id, padding, value; char rest[60]; } LaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    LaunchAttribute *attributes;
    unsigned count;
} LaunchConfig;

typedef struct {
    void *library;
    int (*context_get)(void **);
    int (*context_device)(int *);
    int (*attribute)(int *, int, int);
    int (*load)(void **, const void *);
    int (*unload)(void *);
    int (*function)(void **, void *, const char *);
    int (*get)(int *, int, void *);
    int (*set)(void *, int, int);
    int (*launch)(const LaunchConfig *, void *, void **, void **);
    int (*fill)(uint64_t, unsigned char, size_t, void *);
    int (*encode)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *, int,
                  int, int, int);
    int (*encode_im2col)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const int *, const int *, uint32_t, uint32_t,
                         const uint32_t *, int, int, int, int);
} Driver;

enum { ATTRIBUTE_MULTIPROCESSORS = 16, ATTRIBUTE_MAJOR = 75, ATTRIBUTE_MINOR = 76 };
enum { FUNCTION_SHARED_BYTES = 8, EARLY_LAUNCH = 6 };

struct s24_library {
    Driver driver;
    char *folder;
    uint8_t *content;
    const Header *header;
    void *context;
    void **modules;   /* By cubin. */
    void **functions; /* By launch. */
    uint8_t *ready;   /* By plan: whether its functions are loaded. */
    uint64_t launch_id;
    pthread_mutex_t loading;
    uint64_t *tags; /* By entry. */
    uint8_t *entries;
    uint64_t entry_bytes, turn;
};

static int fail(s24_error *error, int code, const char *format, ...) {
    if (error) {
        va_list given;
        va_start(given, format);
        error->code = code;
        vsnprintf(error->text, sizeof error->text, format, given);
        va_end(given);
    }
    return code;
}

/* The end of a text that the caller chose, as far as a message has room for it beside its reason. It begins with a whole
 * character of UTF-8. */
static const char *end_of_text(const char *text) {
    enum { MAX_SHOWN = 160 };
    size_t length = strlen(text);
    if (length <= MAX_SHOWN) return text;
    for (text += length - MAX_SHOWN; (*text & 0xc0) == 0x80; text++)
        ;
    return text;
}

static const void *table(const s24_library *library, int section) {
    return library->content + library->header->sections[section].offset;
}
static uint64_t count(const s24_library *library, int section) { return library->header->sections[section].count; }
static const char *text(const s24_library *library, uint32_t offset) { return (const char *)table(library, TEXT) + offset; }

/* SHA-256 (FIPS 180-4) ------------------------------------------------------------------------------------- */

static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void add_block(uint32_t state[8], const uint8_t *block) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t one = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + ROUNDS[i] + w[i];
        uint32_t two = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

static void sha256(const uint8_t *bytes, uint64_t length, uint8_t found[32]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t last[128] = {0};
    uint64_t whole = length / 64 * 64, rest = length - whole, size = rest < 56 ? 64 : 128;
    for (uint64_t at = 0; at < whole; at += 64) add_block(state, bytes + at);
    if (rest) memcpy(last, bytes + whole, rest);
    last[rest] = 0x80;
    for (int i = 0; i < 8; i++) last[size - 1 - i] = (uint8_t)(length * 8 >> (8 * i));
    for (uint64_t at = 0; at < size; at += 64) add_block(state, last + at);
    for (int i = 0; i < 32; i++) found[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

static int has_sha256(const uint8_t *bytes, uint64_t length, const uint8_t expected[32]) {
    uint8_t found[32];
    sha256(bytes, length, found);
    return memcmp(found, expected, sizeof found) == 0;
}

/* The cache of launches ------------------------------------------------------------------------------------ */

/* A launch that lacks only its stream, and its own numbers where kernels want numbers that no two launches share. */
typedef struct {
    void *function;
    uint64_t address, nbytes; /* The memory that a fill writes. */
    LaunchConfig config;
    uint32_t numbered; /* Whether its parameters hold such numbers. */
    uint8_t parameters[] __attribute__((aligned(64))); /* cuTensorMapEncodeTiled needs maps at multiples of 64 bytes. */
} Prepared;
typedef union { Prepared prepared; uint8_t room[sizeof(Prepared) + MAX_PARAMETERS]; } Block;

/* A call that was checked. Its prepared launches follow behind its operands. */
typedef struct {
    s24_plan plan;
    uint64_t workspace, workspace_bytes;
    s24_operand operands[]; /* Their strides are those of Given. */
} Entry;

/* Entries are in sets of WAYS, by a hash of their calls. An entry's tag is EMPTY, the hash, or BUSY while a thread
 * has the entry to itself. No thread waits for another: for one that finds a tag BUSY, the entry isn't there. */
enum { SETS = 256, WAYS = 4, ENTRIES = SETS * WAYS, MAX_ENTRY_BYTES = 4096 };
enum { EMPTY, BUSY, HASHED };

static uint64_t key_bytes(const Plan *plan) { return sizeof(Entry) + plan->operands * sizeof(s24_operand); }
static uint64_t prepared_bytes(const Launch *launch) { return sizeof(Prepared) + (launch->fill ? 0 : (launch->parameter_bytes + 7) / 8 * 8); }

static uint64_t entry_bytes(const s24_library *library, const Plan *plan) {
    const Launch *launches = (const Launch *)table(library, LAUNCHES) + plan->first_launch;
    uint64_t found = key_bytes(plan);
    for (uint32_t i = 0; i < plan->launches && found <= MAX_ENTRY_BYTES; i++) found += prepared_bytes(launches + i);
    return found;
}

/* Make room for the largest plan's entries. Plans beyond MAX_ENTRY_BYTES have none. */
static int make_cache(s24_library *library, s24_error *error) {
    const Plan *plans = table(library, PLANS);
    for (uint64_t i = 0; i < count(library, PLANS); i++) {
        uint64_t nbytes = entry_bytes(library, plans + i);
        if (nbytes > library->entry_bytes && nbytes <= MAX_ENTRY_BYTES) library->entry_bytes = nbytes;
    }
    library->tags = calloc(ENTRIES, sizeof *library->tags);
    library->entries = calloc(ENTRIES, (size_t)library->entry_bytes + 1);
    return library->tags && library->entries ? S24_OK : fail(error, S24_STORAGE, "no memory for a library");
}

/* Opening a folder ----------------------------------------------------------------------------------------- */

static const long MAX_FILE = 1l << 30;

static int read_file(const char *folder, const char *name, uint8_t **content, uint64_t *length, s24_error *error) {
    int code = S24_STORAGE;
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = malloc(size);
    FILE *file = NULL;
    long end;
    *content = NULL;
    if (!path) return fail(error, code, "no memory for a path");
    snprintf(path, size, "%s/%s", folder, name);
    if (!(file = fopen(path, "rb")) || fseek(file, 0, SEEK_END) || (end = ftell(file)) < 0 || fseek(file, 0, SEEK_SET))
        fail(error, code, "%s: %s", end_of_text(path), strerror(errno));
    else if (end > MAX_FILE) /* A folder's end is the largest number. */
        fail(error, code, "%s: expected a file of at most %ld bytes, got another", end_of_text(path), MAX_FILE);
    else if (!(*content = malloc((size_t)end + 1)))
        fail(error, code, "%s: no memory for %ld bytes", end_of_text(path), end);
    else if (fread(*content, 1, (size_t)end, file) != (size_t)end)
        fail(error, code, "%s: can't be read", end_of_text(path));
    else {
        *length = (uint64_t)end;
        code = S24_OK;
    }
    if (code) {
        free(*content);
        *content = NULL;
    }
    if (file) fclose(file);
    free(path);
    return code;
}

static int load_driver(Driver *driver, s24_error *error) {
    const struct { const char *name; void *target; } calls[] = {
        {"cuCtxGetCurrent", &driver->context_get}, {"cuCtxGetDevice", &driver->context_device},
        {"cuDeviceGetAttribute", &driver->attribute}, {"cuModuleLoadData", &driver->load},
        {"cuModuleUnload", &driver->unload}, {"cuModuleGetFunction", &driver->function},
        {"cuFuncGetAttribute", &driver->get}, {"cuFuncSetAttribute", &driver->set},
        {"cuLaunchKernelEx", &driver->launch}, {"cuMemsetD8Async", &driver->fill},
        {"cuTensorMapEncodeTiled", &driver->encode}, {"cuTensorMapEncodeIm2col", &driver->encode_im2col}};
    if (!(driver->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)))
        return fail(error, S24_DRIVER, "libcuda.so.1: expected NVIDIA's driver, got %s", dlerror());
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *found = dlsym(driver->library, calls[i].name);
        if (!found) return fail(error, S24_DRIVER, "libcuda.so.1: expected CUDA 12 or later, got one without %s", calls[i].name);
        memcpy(calls[i].target, &found, sizeof found);
    }
    return S24_OK;
}

static int is_text(const s24_library *library, uint32_t offset) { return offset < count(library, TEXT); }
static int is_part(const s24_library *library, int section, uint32_t first, uint32_t records) {
    return (uint64_t)first + records <= count(library, section);
}

/* The most columns that a number reads; all plans' rows are checked to have them. */
static void note(const Number *number, uint32_t *columns) {
    if (number->column > *columns) *columns = number->column;
}

static int is_place(const Place *place, const Plan *plan, uint32_t room, uint32_t *columns) {
    int64_t operand = place->operand;
    note(&place->number, columns);
    if (place->kind > ALIGNED || (place->size != 4 && place->size != 8) || place->at > room || room - place->at < place->size) return 0;
    if (place->kind == NUMBER || place->kind == LAUNCH_ID) return 1;
    return operand < (int64_t)plan->operands && operand >= (place->kind == ADDRESS ? WORKSPACE : 0);
}

static int is_map(const Map *map, const Plan *plan, uint32_t room, uint32_t *columns) {
    if (map->at % 64 || map->at > room || room - map->at < MAP_BYTES || map->rank < 1 || map->rank > MAX_RANK) return 0;
    if (map->im2col && map->rank != IM2COL_RANK) return 0;
    if (map->only_if_aligned < WORKSPACE || map->only_if_aligned >= (int64_t)plan->operands) return 0;
    if (map->address.kind != ADDRESS || !is_place(&map->address, plan, MAX_PARAMETERS, columns)) return 0;
    for (uint32_t i = 0; i < map->rank; i++) {
        note(&map->size[i], columns);
        note(&map->box[i], columns);
        if (i + 1 == map->rank) break;
        if (map->pitch[i].kind != NUMBER && map->pitch[i].kind != STRIDE) return 0;
        if (!is_place(&map->pitch[i], plan, MAX_PARAMETERS, columns)) return 0;
    }
    return 1;
}

static int is_launch(const s24_library *library, const Launch *launch, const Plan *plan, uint32_t *columns) {
    const Place *places = table(library, PLACES);
    const Map *maps = table(library, MAPS);
    if (!is_part(library, PLACES, launch->first_place, launch->places) || !is_part(library, MAPS, launch->first_map, launch->maps)) return 0;
    note(&launch->size, columns);
    if (launch->fill) {
        const Place *place = places + launch->first_place;
        return launch->places == 1 && launch->byte < 256 && place->kind == ADDRESS && is_place(place, plan, 8, columns);
    }
    if (launch->cubin >= count(library, CUBINS) || !is_text(library, launch->symbol) || launch->parameter_bytes > MAX_PARAMETERS) return 0;
    for (uint32_t i = 0; i < launch->places; i++)
        if (!is_place(places + launch->first_place + i, plan, launch->parameter_bytes, columns)) return 0;
    for (uint32_t i = 0; i < launch->maps; i++)
        if (!is_map(maps + launch->first_map + i, plan, launch->parameter_bytes, columns)) return 0;
    return 1;
}

/* Whether a plan's references are sound; gives the columns that its ranges' rows must have. */
static int is_plan(const s24_library *library, const Plan *plan, uint32_t *columns) {
    const Operand *operands = table(library, OPERANDS);
    const Launch *launches = table(library, LAUNCHES);
    *columns = 0;
    if (!is_text(library, plan->kernel) || !is_text(library, plan->guarantee) || !plan->workspace_alignment) return 0;
    if (plan->operands > MAX_OPERANDS || !is_part(library, OPERANDS, plan->first_operand, plan->operands)) return 0;
    if (!is_part(library, LAUNCHES, plan->first_launch, plan->launches)) return 0;
    note(&plan->workspace, columns);
    for (uint32_t i = 0; i < plan->operands; i++) {
        const Operand *one = operands + plan->first_operand + i;
        note(&one->lines, columns);
        note(&one->width, columns);
        if (!is_text(library, one->name) || !one->alignment || !one->line_alignment || !one->itemsize) return 0;
        if (one->may_be < WORKSPACE || one->may_be >= (int64_t)plan->operands) return 0;
    }
    for (uint32_t i = 0; i < plan->launches; i++)
        if (!is_launch(library, launches + plan->first_launch + i, plan, columns)) return 0;
    return 1;
}

static int is_problem(const s24_library *library, const Problem *problem, const uint32_t *columns) {
    const Range *ranges = table(library, RANGES);
    if (!is_text(library, problem->name) || !is_text(library, problem->descriptor)) return 0;
    if (!problem->ranges || !is_part(library, RANGES, problem->first_range, problem->ranges)) return 0;
    ranges += problem->first_range;
    if (ranges[0].first_n != problem->least_n || problem->most_n < ranges[problem->ranges - 1].first_n) return 0;
    for (uint32_t i = 0; i < problem->ranges; i++) {
        if (i && ranges[i].first_n <= ranges[i - 1].first_n) return 0;
        if (ranges[i].plan == NO_PLAN) continue;
        if (ranges[i].plan >= count(library, PLANS)) return 0;
        if (!is_part(library, NUMBERS, ranges[i].row, columns[ranges[i].plan])) return 0;
    }
    return 1;
}

static int check_tables(const s24_library *library, s24_error *error) {
    const Plan *plans = table(library, PLANS);
    const Problem *problems = table(library, PROBLEMS);
    const Cubin *cubins = table(library, CUBINS);
    uint64_t texts = count(library, TEXT);
    uint32_t *columns = NULL;
    int sound = texts && !text(library, 0)[texts - 1];
    if (sound && !(columns = calloc((size_t)count(library, PLANS) + 1, sizeof *columns)))
        return fail(error, S24_STORAGE, "plans.bin: no memory for its tables");
    for (uint64_t i = 0; sound && i < count(library, PLANS); i++) sound = is_plan(library, plans + i, columns + i);
    for (uint64_t i = 0; sound && i < count(library, PROBLEMS); i++) sound = is_problem(library, problems + i, columns);
    for (uint64_t i = 0; sound && i < count(library, CUBINS); i++) {
        sound = is_text(library, cubins[i].file) && !strchr(text(library, cubins[i].file), '/');
    }
    free(columns);
    return sound ? S24_OK : fail(error, S24_DAMAGED, "plans.bin: expected sound tables, got a reference outside of them");
}

static int check_header(s24_library *library, uint64_t length, s24_error *error) {
    const Header *header = library->header;
    if (length < sizeof *header || memcmp(header->magic, "S24PLANS", 8))
        return fail(error, S24_DAMAGED, "plans.bin: expected exported plans, got another file");
    if (header->schema != SCHEMA || header->header_bytes != sizeof *header)
        return fail(error, S24_UNSUPPORTED, "plans.bin: expected schema %d, got %" PRIu32, SCHEMA, header->schema);
    if (header->file_bytes != length || !has_sha256(library->content + HASHED_FROM, length - HASHED_FROM, header->sha256))
        return fail(error, S24_DAMAGED, "plans.bin: expected the bytes that its SHA-256 is of, got others");
    for (int i = 0; i < SECTIONS; i++) {
        Section one = header->sections[i];
        if (one.offset > length || one.offset % (i == TEXT ? 1 : 8) || one.count > (length - one.offset) / RECORD_BYTES[i] ||
            one.count > UINT32_MAX)
            return fail(error, S24_DAMAGED, "plans.bin: expected tables inside of the file, got one outside");
    }
    return check_tables(library, error);
}

static int driver_call(int status, const char *call, s24_error *error) {
    return status ? fail(error, S24_DRIVER, "%s: CUDA error %d", call, status) : S24_OK;
}

static int check_device(s24_library *library, s24_error *error) {
    const Driver *cuda = &library->driver;
    const Header *header = library->header;
    int device, major, minor, multiprocessors, code;
    if ((code = driver_call(cuda->context_get(&library->context), "cuCtxGetCurrent", error))) return code;
    if (!library->context) return fail(error, S24_INVALID, "context: expected a current CUDA context, got none");
    if ((code = driver_call(cuda->context_device(&device), "cuCtxGetDevice", error))) return code;
    if ((code = driver_call(cuda->attribute(&major, ATTRIBUTE_MAJOR, device) | cuda->attribute(&minor, ATTRIBUTE_MINOR, device) |
                                cuda->attribute(&multiprocessors, ATTRIBUTE_MULTIPROCESSORS, device),
                            "cuDeviceGetAttribute", error)))
        return code;
    if ((uint32_t)major != header->major || (uint32_t)minor != header->minor || (uint32_t)multiprocessors != header->multiprocessors)
        return fail(error, S24_UNSUPPORTED,
                    "device: expected compute capability %" PRIu32 ".%" PRIu32 " with %" PRIu32
                    " multiprocessors, as exported, got %d.%d with %d",
                    header->major, header->minor, header->multiprocessors, major, minor, multiprocessors);
    return S24_OK;
}

int s24_open(const char *folder, s24_library **opened, s24_error *error) {
    s24_library *library;
    struct timespec now = {0, 0};
    uint64_t length;
    int code;
    if (!folder || !opened) return fail(error, S24_INVALID, "%s: expected a pointer, got NULL", folder ? "library" : "folder");
    *opened = NULL;
    if (!(library = calloc(1, sizeof *library)) || !(library->folder = malloc(strlen(folder) + 1))) {
        free(library);
        return fail(error, S24_STORAGE, "no memory for a library");
    }
    strcpy(library->folder, folder);
    pthread_mutex_init(&library->loading, NULL);
    /* A number that no workspace holds by chance: the time, the process's memory layout, and a mixing factor. */
    clock_gettime(CLOCK_REALTIME, &now);
    library->launch_id = ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + (uintptr_t)library) * 0x9e3779b97f4a7c15u | 1;
    if ((code = read_file(folder, "plans.bin", &library->content, &length, error))) goto failed;
    library->header = (const Header *)library->content;
    if ((code = check_header(library, length, error))) goto failed;
    if ((code = load_driver(&library->driver, error))) goto failed;
    if ((code = check_device(library, error))) goto failed;
    library->modules = calloc((size_t)count(library, CUBINS) + 1, sizeof(void *));
    library->functions = calloc((size_t)count(library, LAUNCHES) + 1, sizeof(void *));
    library->ready = calloc((size_t)count(library, PLANS) + 1, 1);
    if (!library->modules || !library->functions || !library->ready) {
        code = fail(error, S24_STORAGE, "no memory for a library");
        goto failed;
    }
    if ((code = make_cache(library, error))) goto failed;
    *opened = library;
    return S24_OK;
failed:
    s24_close(library);
    return code;
}

void s24_close(s24_library *library) {
    if (!library) return;
    for (uint64_t i = 0; library->modules && i < count(library, CUBINS); i++)
        if (library->modules[i]) library->driver.unload(library->modules[i]);
    if (library->driver.library) dlclose(library->driver.library);
    pthread_mutex_destroy(&library->loading);
    free(library->modules);
    free(library->functions);
    free(library->ready);
    free(library->tags);
    free(library->entries);
    free(library->content);
    free(library->folder);
    free(library);
}

/* Finding a plan ------------------------------------------------------------------------------------------- */

static int load_function(s24_library *library, uint32_t at, s24_error *error) {
    const Launch *launch = (const Launch *)table(library, LAUNCHES) + at;
    const Cubin *cubin = (const Cubin *)table(library, CUBINS) + launch->cubin;
    const char *file = text(library, cubin->file);
    void **module = library->modules + launch->cubin, *function;
    int code, granted;
    if (!*module) {
        uint8_t *content;
        uint64_t length;
        if ((code = read_file(library->folder, file, &content, &length, error))) return code;
        if (length != cubin->nbytes || !has_sha256(content, length, cubin->sha256))
            code = fail(error, S24_DAMAGED, "%s: expected the bytes that its SHA-256 is of, got others", file);
        else
            code = driver_call(library->driver.load(module, content), "cuModuleLoadData", error);
        free(content);
        if (code) return code;
    }
    if ((code = driver_call(library->driver.function(&function, *module, text(library, launch->symbol)), "cuModuleGetFunction", error))) return code;
    if ((code = driver_call(library->driver.get(&granted, FUNCTION_SHARED_BYTES, function), "cuFuncGetAttribute", error))) return code;
    if ((int64_t)launch->shared_bytes > granted && /* Other launches share the function. */
        (code = driver_call(library->driver.set(function, FUNCTION_SHARED_BYTES, (int)launch->shared_bytes), "cuFuncSetAttribute", error)))
        return code;
    library->functions[at] = function;
    return S24_OK;
}

static int load_plan(s24_library *library, uint32_t at, s24_error *error) {
    const Plan *plan = (const Plan *)table(library, PLANS) + at;
    const Launch *launches = table(library, LAUNCHES);
    int code = S24_OK;
    if (__atomic_load_n(library->ready + at, __ATOMIC_ACQUIRE)) return S24_OK;
    pthread_mutex_lock(&library->loading);
    if (!library->ready[at]) {
        void *context = NULL;
        code = driver_call(library->driver.context_get(&context), "cuCtxGetCurrent", error);
        if (!code && context != library->context) code = fail(error, S24_INVALID, "context: expected that of s24_open, got another");
        for (uint32_t i = plan->first_launch; !code && i < plan->first_launch + plan->launches; i++)
            if (!launches[i].fill && !library->functions[i]) code = load_function(library, i, error);
        __atomic_store_n(library->ready + at, !code, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&library->loading);
    return code;
}

int s24_find(s24_library *library, const char *name, int64_t n, s24_plan *plan, s24_error *error) {
    const Problem *problem, *end;
    const Range *ranges, *plan_range;
    uint32_t low = 0, high;
    int code;
    if (!library || !name || !plan) return fail(error, S24_INVALID, "%s: expected a pointer, got NULL", !library ? "library" : !name ? "problem" : "plan");
    problem = table(library, PROBLEMS);
    for (end = problem + count(library, PROBLEMS); problem < end && strcmp(text(library, problem->name), name); problem++)
        ;
    if (problem == end) return fail(error, S24_UNSUPPORTED, "problem: expected one that was exported, got %s", end_of_text(name));
    if (n < problem->least_n || n > problem->most_n)
        return fail(error, S24_UNSUPPORTED, "n: expected %" PRId64 " to %" PRId64 " tokens, got %" PRId64, problem->least_n, problem->most_n, n);
    ranges = (const Range *)table(library, RANGES) + problem->first_range;
    for (high = problem->ranges; high - low > 1;) {
        uint32_t middle = low + (high - low) / 2;
        if (ranges[middle].first_n <= n) low = middle;
        else high = middle;
    }
    plan_range = ranges + low;
    if (plan_range->plan == NO_PLAN)
        return fail(error, S24_UNSUPPORTED, "n: expected a number of tokens that a kernel serves, got %" PRId64 " of %s", n, end_of_text(name));
    if ((code = load_plan(library, plan_range->plan, error))) return code;
    plan->library = library;
    plan->plan = (const Plan *)table(library, PLANS) + plan_range->plan;
    plan->row = (const int64_t *)table(library, NUMBERS) + plan_range->row;
    plan->n = n;
    return S24_OK;
}

const char *s24_problem(const s24_library *library, uint32_t index, const char **descriptor) {
    const Problem *problem = (const Problem *)table(library, PROBLEMS) + index;
    if (index >= count(library, PROBLEMS)) return NULL;
    if (descriptor) *descriptor = text(library, problem->descriptor);
    return text(library, problem->name);
}

/* A plan --------------------------------------------------------------------------------------------------- */

static uint64_t number_of(const s24_plan *given, const Number *number) {
    uint64_t found = (uint64_t)number->constant + (uint64_t)number->by_n * (uint64_t)given->n;
    return number->column ? found + (uint64_t)given->row[number->column - 1] : found;
}

static const Operand *operands_of(const s24_plan *given) {
    return (const Operand *)table(given->library, OPERANDS) + ((const Plan *)given->plan)->first_operand;
}

uint32_t s24_operand_count(const s24_plan *given) { return ((const Plan *)given->plan)->operands; }

const char *s24_operand_name(const s24_plan *given, uint32_t index) {
    return index < s24_operand_count(given) ? text(given->library, operands_of(given)[index].name) : NULL;
}

uint64_t s24_workspace(const s24_plan *given, uint32_t *alignment) {
    const Plan *plan = given->plan;
    if (alignment) *alignment = plan->workspace_alignment;
    return number_of(given, &plan->workspace);
}

s24_promises s24_guarantee(const s24_plan *given) {
    const Plan *plan = given->plan;
    s24_promises found = {plan->promises, text(given->library, plan->kernel), text(given->library, plan->guarantee)};
    return found;
}

/* Checks --------------------------------------------------------------------------------------------------- */

/* Addresses and sizes end here, so that no sum of three of them overflows. */
static const uint64_t MAX_BYTES = (uint64_t)1 << 61 | (uint64_t)1 << 60;

/* An operand's lines. The stride of a single line is its width. */
typedef struct {
    const Operand *about;
    uint64_t address, lines, width, stride; /* Width and stride are in elements. */
} Given;

typedef struct {
    s24_plan plan;
    const Plan *about;
    uint64_t workspace, workspace_bytes;
    Given given[MAX_OPERANDS];
} Call;

static int resolve(Call *call, const s24_plan *plan, const s24_operand *operands, uint64_t workspace, uint64_t nbytes, s24_error *error) {
    const Operand *all;
    if (!plan || !plan->plan || !operands) return fail(error, S24_INVALID, "%s: expected a pointer, got NULL", operands ? "plan" : "operands");
    call->plan = *plan;
    call->about = plan->plan;
    call->workspace = workspace;
    call->workspace_bytes = nbytes;
    all = operands_of(plan);
    for (uint32_t i = 0; i < call->about->operands; i++) {
        Given *one = call->given + i;
        one->about = all + i;
        one->address = operands[i].address;
        one->lines = number_of(plan, &all[i].lines);
        one->width = number_of(plan, &all[i].width);
        one->stride = all[i].strided && one->lines > 1 ? (uint64_t)operands[i].stride : one->width;
    }
    return S24_OK;
}

static const char *name_of(const Call *call, uint32_t at) { return text(call->plan.library, call->given[at].about->name); }
static int is_present(const Given *one) { return one->address && one->lines && one->width; }

/* Pieces of width bytes that begin pitch bytes apart. */
typedef struct { uint64_t address, lines, pitch, width; } Span;

static uint64_t end_of(Span span) { return span.address + (span.lines - 1) * span.pitch + span.width; }

static Span span_of(const Given *one) {
    uint64_t width = one->width * one->about->itemsize, pitch = one->stride * one->about->itemsize;
    Span gaps = {one->address, one->lines, pitch, width}, whole = {one->address, 1, one->lines * width, one->lines * width};
    return pitch > width ? gaps : whole;
}

static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* Whether a piece has a byte of the width bytes from start. */
static int shares(Span span, uint64_t start, uint64_t width) {
    int64_t pitch = (int64_t)span.pitch, last = (int64_t)span.lines - 1;
    int64_t first = floor_of((int64_t)(start - span.width - span.address), pitch) + 1;
    int64_t behind = -floor_of(-(int64_t)(start + width - span.address), pitch);
    return (first > 0 ? first : 0) <= (behind - 1 < last ? behind - 1 : last);
}

static int overlap(Span one, Span other) {
    enum { MAX_LINES = 1 << 16 };
    Span few = one.lines <= other.lines ? one : other, many = one.lines <= other.lines ? other : one;
    if (one.address >= end_of(other) || other.address >= end_of(one)) return 0;
    if (few.lines == 1) return shares(many, few.address, few.width);
    if (few.pitch == many.pitch) {
        Span spread = {many.address - (few.lines - 1) * many.pitch, many.lines + few.lines - 1, many.pitch, many.width};
        return shares(spread, few.address, few.width);
    }
    if (few.lines > MAX_LINES) return 1;
    for (uint64_t i = 0; i < few.lines; i++)
        if (shares(many, few.address + i * few.pitch, few.width)) return 1;
    return 0;
}

/* Whether memory has room for so many lines of so many elements. */
static int has_room(uint64_t lines, uint64_t width, uint64_t itemsize) {
    uint64_t elements, nbytes;
    return !__builtin_mul_overflow(lines, width, &elements) && !__builtin_mul_overflow(elements, itemsize, &nbytes) && nbytes <= MAX_BYTES;
}

static int check_stride(const Given *one, const char *name, s24_error *error) {
    uint64_t nbytes = one->stride * one->about->itemsize;
    if (one->stride > INT64_MAX || one->stride < one->width)
        return fail(error, S24_INVALID, "%s: expected a stride of at least %" PRIu64 " elements, got %" PRId64, name, one->width, (int64_t)one->stride);
    if (!has_room(one->lines, one->stride, one->about->itemsize))
        return fail(error, S24_INVALID, "%s: expected a stride that memory has room for, got %" PRIu64, name, one->stride);
    if (nbytes % one->about->line_alignment)
        return fail(error, S24_MISALIGNED, "%s stride: expected a multiple of %" PRIu32 " bytes, got %" PRIu64, name, one->about->line_alignment, nbytes);
    return S24_OK;
}

static int check_operand(const Call *call, uint32_t at, s24_error *error) {
    const Given *one = call->given + at;
    const char *name = name_of(call, at);
    int code;
    if (!one->lines || !one->width) return S24_OK;
    if (!one->address) return one->about->optional ? S24_OK : fail(error, S24_INVALID, "%s: expected memory, got a null address", name);
    if (!has_room(one->lines, one->width, one->about->itemsize))
        return fail(error, S24_DAMAGED, "%s: expected a size that memory has room for, got %" PRIu64 " x %" PRIu64, name, one->lines, one->width);
    if (one->about->strided && one->lines > 1 && (code = check_stride(one, name, error))) return code;
    if (one->address % one->about->alignment)
        return fail(error, S24_MISALIGNED, "%s: expected an address that is a multiple of %" PRIu32 " bytes, got %#" PRIx64, name, one->about->alignment, one->address);
    if (one->address > MAX_BYTES || end_of(span_of(one)) > MAX_BYTES)
        return fail(error, S24_INVALID, "%s: expected an address of the device's memory, got %#" PRIx64, name, one->address);
    return S24_OK;
}

/* Whether the elements of two operands of one shape lie at the same addresses. */
static int lie_alike(const Given *one, const Given *other) {
    return one->address == other->address && one->about->itemsize == other->about->itemsize && one->stride == other->stride;
}

static int check_apart(const Call *call, s24_error *error) {
    const Given *all = call->given;
    uint32_t number = call->about->operands, results = 0, present = 0;
    for (uint32_t i = 0; i < number; i++) {
        int here = is_present(all + i);
        if (!all[i].about->written) continue;
        results++;
        present += all[i].address || !all[i].about->optional; /* An empty result is one, too. */
        for (uint32_t j = 0; here && j < number; j++) {
            int same = all[i].about->may_be == (int32_t)j && lie_alike(all + i, all + j);
            if (j == i || (all[j].about->written && j > i) || same || !is_present(all + j)) continue;
            if (overlap(span_of(all + i), span_of(all + j)))
                return fail(error, S24_INVALID, "%s: expected memory apart from %s, got an overlap", name_of(call, i), name_of(call, j));
        }
    }
    return results && !present ? fail(error, S24_INVALID, "results: expected at least one, got none") : S24_OK;
}

static int check_workspace(const Call *call, s24_error *error) {
    uint32_t alignment;
    uint64_t needed = s24_workspace(&call->plan, &alignment), address = call->workspace;
    Span scratch = {address, 1, needed, needed};
    if (!needed) return S24_OK;
    if (needed > MAX_BYTES || address > MAX_BYTES)
        return fail(error, S24_INVALID, "workspace: expected an address of the device's memory, got %#" PRIx64, address);
    if (!address || call->workspace_bytes < needed)
        return fail(error, S24_WORKSPACE_TOO_SMALL, "workspace: expected %" PRIu64 " bytes, got %" PRIu64, needed, address ? call->workspace_bytes : 0);
    if (address % alignment)
        return fail(error, S24_MISALIGNED, "workspace: expected an address that is a multiple of %" PRIu32 " bytes, got %#" PRIx64, alignment, address);
    for (uint32_t i = 0; i < call->about->operands; i++)
        if (is_present(call->given + i) && overlap(scratch, span_of(call->given + i)))
            return fail(error, S24_INVALID, "workspace: expected memory apart from %s, got an overlap", name_of(call, i));
    return S24_OK;
}

static int check(const Call *call, s24_error *error) {
    int code;
    for (uint32_t i = 0; i < call->about->operands; i++)
        if ((code = check_operand(call, i, error))) return code;
    if ((code = check_apart(call, error))) return code;
    return check_workspace(call, error);
}

int s24_check(const s24_plan *given, const s24_operand *operands, uint64_t workspace, uint64_t workspace_bytes, s24_error *error) {
    Call call;
    int code = resolve(&call, given, operands, workspace, workspace_bytes, error);
    return code ? code : check(&call, error);
}

/* Launches ------------------------------------------------------------------------------------------------- */

static int is_aligned(const Given *one) { return (one->address | one->stride * one->about->itemsize) % VECTOR == 0; }

static uint64_t value_of(const Call *call, const Place *place) {
    uint64_t number = number_of(&call->plan, &place->number), address;
    switch (place->kind) {
    case ADDRESS:
        if (place->operand == WORKSPACE) return call->workspace ? call->workspace + number : 0;
        address = call->given[place->operand].address;
        return address ? address + number + call->given[place->operand].stride * (uint64_t)place->factor : 0;
    case STRIDE:
        return call->given[place->operand].stride * (uint64_t)place->factor;
    case ALIGNED:
        return (uint64_t)is_aligned(call->given + place->operand);
    default:
        return number;
    }
}

static int encode(const Call *call, const Map *map, uint8_t *target, s24_error *error) {
    const Driver *driver = &call->plan.library->driver;
    void *address = (void *)(uintptr_t)value_of(call, &map->address);
    uint64_t sizes[MAX_RANK], pitches[MAX_RANK];
    uint32_t box[MAX_RANK], steps[MAX_RANK];
    int type = (int)map->data_type, swizzle = (int)map->swizzle, promotion = (int)map->promotion;
    enum { NO_INTERLEAVE = 0, FILL_ZEROS = 0 };
    if (map->only_if_aligned != WORKSPACE && !is_aligned(call->given + map->only_if_aligned)) return S24_OK;
    for (uint32_t i = 0; i < map->rank; i++) {
        sizes[i] = number_of(&call->plan, map->size + i);
        box[i] = (uint32_t)number_of(&call->plan, map->box + i);
        steps[i] = map->im2col ? (uint32_t)map->walk[4 + i] : 1;
        if (i + 1 < map->rank) pitches[i] = value_of(call, map->pitch + i);
    }
    if (map->im2col)
        return driver_call(driver->encode_im2col(target, type, map->rank, address, sizes, pitches, map->walk, map->walk + 2, box[0], box[1], steps,
                                                 NO_INTERLEAVE, swizzle, promotion, FILL_ZEROS),
                           "cuTensorMapEncodeIm2col", error);
    return driver_call(driver->encode(target, type, map->rank, address, sizes, pitches, box, steps, NO_INTERLEAVE, swizzle, promotion, FILL_ZEROS),
                       "cuTensorMapEncodeTiled", error);
}

static void put(uint8_t *parameters, const Place *place, uint64_t value) {
    if (place->size == 8) memcpy(parameters + place->at, &value, 8);
    else memcpy(parameters + place->at, &value, 4);
}

static int prepare(const Call *call, const Launch *launch, Prepared *prepared, s24_error *error) {
    static LaunchAttribute early = {EARLY_LAUNCH, 0, 1, {0}};
    const s24_library *library = call->plan.library;
    const Place *places = (const Place *)table(library, PLACES) + launch->first_place;
    const Map *maps = (const Map *)table(library, MAPS) + launch->first_map;
    uint64_t size = number_of(&call->plan, &launch->size);
    int code = S24_OK;
    if (launch->fill) {
        prepared->address = value_of(call, places);
        prepared->nbytes = size;
        return S24_OK;
    }
    prepared->function = library->functions[launch - (const Launch *)table(library, LAUNCHES)];
    prepared->config = (LaunchConfig){{(unsigned)size, 1, 1}, {launch->threads, 1, 1}, launch->shared_bytes, NULL, &early, launch->overlapping ? 1 : 0};
    prepared->numbered = 0;
    memset(prepared->parameters, 0, launch->parameter_bytes);
    for (uint32_t i = 0; i < launch->places; i++) {
        put(prepared->parameters, places + i, value_of(call, places + i));
        prepared->numbered |= places[i].kind == LAUNCH_ID;
    }
    for (uint32_t i = 0; !code && i < launch->maps; i++) code = encode(call, maps + i, prepared->parameters + maps[i].at, error);
    return code;
}

static int enqueue(s24_library *library, const Launch *launch, Prepared *prepared, void *stream, s24_error *error) {
    void *parameters[1] = {prepared->parameters};
    if (launch->fill)
        return driver_call(library->driver.fill(prepared->address, (unsigned char)launch->byte, prepared->nbytes, stream), "cuMemsetD8Async", error);
    for (uint32_t i = 0; prepared->numbered && i < launch->places; i++) {
        const Place *place = (const Place *)table(library, PLACES) + launch->first_place + i;
        if (place->kind == LAUNCH_ID) put(parameters[0], place, __atomic_fetch_add(&library->launch_id, 1, __ATOMIC_RELAXED));
    }
    prepared->config.stream = stream;
    return driver_call(library->driver.launch(&prepared->config, prepared->function, parameters, NULL), "cuLaunchKernelEx", error);
}

/* Running -------------------------------------------------------------------------------------------------- */

static uint64_t hash_of(const Call *call) {
    const uint64_t factor = 0x9e3779b97f4a7c15u;
    uint64_t hash = (uint64_t)(uintptr_t)call->plan.row * factor + (uint64_t)call->plan.n;
    hash = (hash * factor + (uintptr_t)call->about) * factor + call->workspace;
    for (uint32_t i = 0; i < call->about->operands; i++) hash = hash * factor + call->given[i].address;
    return (hash ^ hash >> 32) * factor | HASHED;
}

/* Whether the entry's call has this call's launches: all that a launch follows from but the stream is the same. */
static int is_of(const Entry *entry, const Call *call) {
    const s24_plan *one = &entry->plan, *other = &call->plan;
    if (one->plan != other->plan || one->row != other->row || one->n != other->n) return 0;
    if (entry->workspace != call->workspace || entry->workspace_bytes != call->workspace_bytes) return 0;
    for (uint32_t i = 0; i < call->about->operands; i++)
        if (entry->operands[i].address != call->given[i].address || (uint64_t)entry->operands[i].stride != call->given[i].stride) return 0;
    return 1;
}

/* An entry that the thread has to itself until it gives *tag another value than BUSY. */
typedef struct {
    Entry *entry; /* NULL: none. */
    uint64_t *tag;
    int known; /* Whether the entry holds the call's launches. */
} Held;

static Held hold(const s24_library *library, uint64_t at, uint64_t tag) {
    Held held = {(Entry *)(void *)(library->entries + at * library->entry_bytes), library->tags + at, 0};
    if (tag == BUSY || !__atomic_compare_exchange_n(held.tag, &tag, BUSY, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) held.entry = NULL;
    return held;
}

static void give_back(Held held, uint64_t tag) { __atomic_store_n(held.tag, tag, __ATOMIC_RELEASE); }

static uint64_t first_of_set(uint64_t hash) { return (hash >> 32) % SETS * WAYS; }

/* The entry that holds the call's launches. */
static Held find_entry(const Call *call, uint64_t hash) {
    const s24_library *library = call->plan.library;
    Held held = {NULL, NULL, 0};
    for (uint64_t at = first_of_set(hash), end = at + WAYS; at < end; at++) {
        if (__atomic_load_n(library->tags + at, __ATOMIC_RELAXED) != hash) continue;
        held = hold(library, at, hash);
        held.known = held.entry && is_of(held.entry, call);
        if (held.known) return held;
        if (held.entry) give_back(held, hash);
    }
    held.entry = NULL;
    return held;
}

/* An entry to put the call's launches in: a free one, or if there is none the next one in order. */
static Held take_entry(const Call *call, uint64_t hash) {
    s24_library *library = call->plan.library;
    uint64_t first = first_of_set(hash), at = first + __atomic_fetch_add(&library->turn, 1, __ATOMIC_RELAXED) % WAYS;
    Held held = {NULL, NULL, 0};
    if (entry_bytes(library, call->about) > library->entry_bytes) return held;
    for (uint64_t way = first; way < first + WAYS; way++)
        if (__atomic_load_n(library->tags + way, __ATOMIC_RELAXED) == EMPTY) at = way;
    held = hold(library, at, __atomic_load_n(library->tags + at, __ATOMIC_RELAXED));
    if (!held.entry) return held;
    held.entry->plan = call->plan;
    held.entry->workspace = call->workspace;
    held.entry->workspace_bytes = call->workspace_bytes;
    for (uint32_t i = 0; i < call->about->operands; i++) held.entry->operands[i] = (s24_operand){call->given[i].address, (int64_t)call->given[i].stride};
    return held;
}

int s24_run(const s24_plan *given, const s24_operand *operands, uint64_t workspace, uint64_t workspace_bytes, void *stream, s24_error *error) {
    Block block; /* The driver reads as many bytes of parameters as the cubin has, whatever the tables say. */
    const Launch *launch, *end;
    Call call;
    Held held;
    uint64_t hash, at;
    int code = resolve(&call, given, operands, workspace, workspace_bytes, error);
    if (code) return code;
    hash = hash_of(&call);
    held = find_entry(&call, hash);
    if (!held.known) {
        if ((code = check(&call, error))) return code;
        held = take_entry(&call, hash);
    }
    launch = (const Launch *)table(given->library, LAUNCHES) + call.about->first_launch;
    end = launch + call.about->launches;
    for (at = key_bytes(call.about); !code && launch < end; at += prepared_bytes(launch++)) {
        uint8_t *kept = held.entry ? (uint8_t *)held.entry + at : NULL;
        if (held.known) memcpy(&block, kept, prepared_bytes(launch));
        else code = prepare(&call, launch, &block.prepared, error);
        if (!code && kept && !held.known) memcpy(kept, &block, prepared_bytes(launch));
        if (!code) code = enqueue(given->library, launch, &block.prepared, stream, error);
    }
    if (held.entry) give_back(held, code ? EMPTY : hash);
    return code;
}
