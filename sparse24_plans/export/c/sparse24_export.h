/* Runs exported plans of sparse24_plans in programs without Python. docs/export.md shows how.
 *
 * C99. It needs the CUDA driver alone, which s24_open loads, and no header of CUDA. Every function but s24_close
 * returns S24_OK or another code, and then a text that names the argument, what was expected and what came.
 * Threads may share a library and its plans. */
#ifndef SPARSE24_EXPORT_H
#define SPARSE24_EXPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    S24_OK = 0,
    S24_INVALID = 1,             /* An argument is wrong. */
    S24_UNSUPPORTED = 2,         /* The folder has no plan for the problem, or is for another GPU. */
    S24_MISALIGNED = 3,          /* An address or a stride is not a multiple of what the kernel needs. */
    S24_WORKSPACE_TOO_SMALL = 4,
    S24_DAMAGED = 5,             /* A file isn't what its hash is of, or its tables are unsound. */
    S24_STORAGE = 6,             /* A file can't be read, or memory is full. */
    S24_DRIVER = 7               /* The CUDA driver is missing or refuses a call. */
};

enum { S24_DETERMINISTIC = 1, S24_STABLE_ON_SAME_HARDWARE = 2, S24_BATCH_INVARIANT = 4, S24_STABLE_ACROSS_HARDWARE = 8 };

typedef struct s24_library s24_library;

typedef struct s24_error {
    int code;
    char text[248];
} s24_error;

/* The plan of one problem and one number of tokens. Copy it freely; it is valid until s24_close. */
typedef struct s24_plan {
    s24_library *library;
    const void *plan;
    const int64_t *row;
    int64_t n;
} s24_plan;

/* An operand in the GPU's memory: its address, 0 for an optional one that is absent, and the elements from the
 * start of one line to the next. A line is a row, or a column of a column-major matrix. The stride of a vector, a
 * weight or a single line isn't read. */
typedef struct s24_operand {
    uint64_t address;
    int64_t stride;
} s24_operand;

typedef struct s24_promises {
    uint32_t flags;        /* S24_DETERMINISTIC and others, or'ed. */
    const char *kernel;    /* The kernel's name, which plan.kernel has in Python. */
    const char *guarantee; /* All of the guarantee, as JSON. */
} s24_promises;

/* Read the folder for the device of the current CUDA context. Reads and checks plans.bin; cubins are read by
 * s24_find. */
int s24_open(const char *folder, s24_library **library, s24_error *error);
/* Free all; unload the kernels. No launch may be in flight. NULL is allowed. */
void s24_close(s24_library *library);

/* The plan of the problem of this name for n tokens (0 for problems without tokens). Loads its kernels the first
 * time, so call it outside of a graph capture, in the context of s24_open. With groups of tokens n counts the rows of
 * X. The operand offsets or counts says which rows each group has; kernels read it, so that it may change between
 * launches of a graph. With counts n is a multiple of the number of groups. Batches of a row-major X, Y or C begin as
 * many rows apart as the descriptor's n, for every n; column-major ones follow each other. An error leaves *plan as it
 * is. */
int s24_find(s24_library *library, const char *problem, int64_t n, s24_plan *plan, s24_error *error);
/* Name and descriptor (JSON) of the problem at an index, NULL behind the last one. */
const char *s24_problem(const s24_library *library, uint32_t index, const char **descriptor);

/* The number of operands, and the name of the one at an index, NULL behind the last one: weight, x, y, bias ... */
uint32_t s24_operand_count(const s24_plan *plan);
const char *s24_operand_name(const s24_plan *plan, uint32_t index);

/* Bytes of workspace, and in *alignment what must divide its address. */
uint64_t s24_workspace(const s24_plan *plan, uint32_t *alignment);
s24_promises s24_guarantee(const s24_plan *plan);

/* Whether s24_run would take these operands, which are in the order of their indices. */
int s24_check(const s24_plan *plan, const s24_operand *operands, uint64_t workspace, uint64_t workspace_bytes,
              s24_error *error);
/* Check, then enqueue on a stream (a CUstream or cudaStream_t). Takes no memory, doesn't wait, and may be captured. The
 * library keeps the launches of up to 1024 recent calls, in at most 4.3 MB that s24_open takes. A call that differs from
 * a kept one in its stream alone makes its launches and no other call of the driver. */
int s24_run(const s24_plan *plan, const s24_operand *operands, uint64_t workspace, uint64_t workspace_bytes,
            void *stream, s24_error *error);

#ifdef __cplusplus
}
#endif
#endif
