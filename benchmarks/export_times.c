/* export_times FOLDER N: print host times of the exported C code as JSON, for the folder's first product and N tokens. */
#define _POSIX_C_SOURCE 200809L
#include "cuda_driver.h"
#include "sparse24_export.h"

#include <string.h>
#include <time.h>

enum { BATCHES = 41, RUNS = 100, MOST_OPERANDS = 8, OPENINGS = 11, STEP = 256 };

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int ascending(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median(double *times, size_t count) {
    qsort(times, count, sizeof *times, ascending);
    return times[count / 2];
}

static void check(int code, const s24_error *error) {
    if (code) {
        fprintf(stderr, "%s\n", error->text);
        exit(2);
    }
}

/* The median of the microseconds of single runs. Before each one all operands but the first, a weight, move by `step`
 * bytes: runs with the operands of the run before for 0, and else with operands at addresses that no run had. The stream
 * is waited for between batches alone, and no batch fills the driver's queue. */
static double time_run(const s24_plan *plan, s24_operand *operands, uint64_t step, uint64_t workspace, void *stream) {
    double times[BATCHES * RUNS];
    s24_error error;
    uint64_t nbytes = s24_workspace(plan, NULL);
    for (int run = 0; run < BATCHES * RUNS; run++) {
        double begin;
        for (int i = 1; i < MOST_OPERANDS; i++) operands[i].address += step;
        begin = now_us();
        check(s24_run(plan, operands, workspace, nbytes, stream, &error), &error);
        times[run] = now_us() - begin;
        if (run % RUNS == RUNS - 1) CUDA(cuStreamSynchronize(stream));
    }
    return median(times, BATCHES * RUNS);
}

static double time_open(const char *folder) {
    double times[OPENINGS];
    for (int i = 0; i < OPENINGS; i++) {
        s24_library *library;
        s24_error error;
        double begin = now_us();
        check(s24_open(folder, &library, &error), &error);
        times[i] = (now_us() - begin) / 1e3;
        s24_close(library);
    }
    return median(times, OPENINGS);
}

int main(int count, char **arguments) {
    enum { NON_BLOCKING = 1, ROOM = 64 << 20 };
    s24_operand operands[MOST_OPERANDS] = {{0, 0}};
    void *context, *stream;
    uint64_t memory[MOST_OPERANDS], workspace = 0;
    s24_library *library;
    s24_error error;
    s24_plan plan;
    double find, known, moving;
    if (count != 3) return fprintf(stderr, "usage: %s FOLDER N\n", arguments[0]), 2;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&stream, NON_BLOCKING));
    check(s24_open(arguments[1], &library, &error), &error);
    check(s24_find(library, s24_problem(library, 0, NULL), atol(arguments[2]), &plan, &error), &error);
    find = now_us();
    for (int i = 0; i < RUNS; i++) check(s24_find(library, s24_problem(library, 0, NULL), atol(arguments[2]), &plan, &error), &error);
    find = (now_us() - find) / RUNS;
    for (uint32_t i = 0; i < s24_operand_count(&plan) && i < MOST_OPERANDS; i++) {
        CUDA(cuMemAlloc_v2(memory + i, ROOM));
        CUDA(cuMemsetD8_v2(memory[i], 0x44, ROOM)); /* Metadata that the hardware takes. */
        operands[i].address = memory[i];
        operands[i].stride = 16384;
    }
    if (s24_workspace(&plan, NULL)) CUDA(cuMemAlloc_v2(&workspace, s24_workspace(&plan, NULL)));
    time_run(&plan, operands, 0, workspace, stream);
    known = time_run(&plan, operands, 0, workspace, stream);
    moving = time_run(&plan, operands, STEP, workspace, stream);
    printf("{\"kernel\": \"%s\", \"open_ms\": %.2f, \"find_us\": %.2f, \"run_us\": %.2f, \"run_new_args_us\": %.2f}\n", s24_guarantee(&plan).kernel,
           time_open(arguments[1]), find, known, moving);
    for (uint32_t i = 0; i < s24_operand_count(&plan) && i < MOST_OPERANDS; i++) CUDA(cuMemFree_v2(memory[i]));
    if (workspace) CUDA(cuMemFree_v2(workspace));
    s24_close(library);
    CUDA(cuStreamDestroy_v2(stream));
    CUDA(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
