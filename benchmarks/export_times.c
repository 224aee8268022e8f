/* export_times FOLDER N: print host times of the exported C code as JSON, for the folder's first product and N tokens. */
#include "sparse24_export.c" /* Not its header alone: the driver's part of a run is timed by itself. */

#include "cuda_driver.h"

enum { BATCHES = 41, RUNS = 100, OPENINGS = 11, STEP = 256, MAX_LAUNCHES = 4 };
enum { KNOWN, NEW, DRIVER, KINDS }; /* Runs of known operands, runs of new ones, the driver's launches of a known run. */

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

static void expect_ok(int code, const s24_error *error) {
    if (code) {
        fprintf(stderr, "%s\n", error->text);
        exit(2);
    }
}

typedef struct {
    s24_plan plan;
    s24_operand operands[MAX_OPERANDS];
    uint64_t workspace, nbytes;
    void *stream;
    Block prepared[MAX_LAUNCHES];
} Run;

static const Launch *launches_of(const Run *run) {
    return (const Launch *)table(run->plan.library, LAUNCHES) + ((const Plan *)run->plan.plan)->first_launch;
}
static uint32_t launch_count(const Run *run) { return ((const Plan *)run->plan.plan)->launches; }

static double time_once(int kind, Run *run) {
    s24_error error;
    double begin = now_us();
    if (kind != DRIVER) expect_ok(s24_run(&run->plan, run->operands, run->workspace, run->nbytes, run->stream, &error), &error);
    for (uint32_t i = 0; kind == DRIVER && i < launch_count(run); i++)
        expect_ok(enqueue(run->plan.library, launches_of(run) + i, &run->prepared[i].prepared, run->stream, &error), &error);
    return now_us() - begin;
}

/* The median of the microseconds of single runs of each kind. The kinds' batches take turns, so that all have the
 * machine's other work. The stream is waited for between batches alone, and no batch fills the driver's queue. */
static void time_runs(const Run *given, double found[KINDS]) {
    static double times[KINDS][BATCHES * RUNS];
    Run runs[KINDS] = {*given, *given, *given};
    for (int batch = -1; batch < BATCHES; batch++) /* The first one only warms up. */
        for (int kind = 0; kind < KINDS; kind++) {
            for (int i = 0; i < RUNS; i++) {
                double time;
                for (uint32_t at = 1; kind == NEW && at < MAX_OPERANDS; at++) runs[kind].operands[at].address += STEP; /* The first is a weight. */
                time = time_once(kind, runs + kind);
                if (batch >= 0) times[kind][batch * RUNS + i] = time;
            }
            CUDA(cuStreamSynchronize(given->stream));
        }
    for (int kind = 0; kind < KINDS; kind++) found[kind] = median(times[kind], BATCHES * RUNS);
}

static double time_open(const char *folder) {
    double times[OPENINGS];
    for (int i = 0; i < OPENINGS; i++) {
        s24_library *library;
        s24_error error;
        double begin = now_us();
        expect_ok(s24_open(folder, &library, &error), &error);
        times[i] = (now_us() - begin) / 1e3;
        s24_close(library);
    }
    return median(times, OPENINGS);
}

static double time_find(s24_library *library, int64_t n) {
    s24_error error;
    s24_plan plan;
    double begin = now_us();
    for (int i = 0; i < RUNS; i++) expect_ok(s24_find(library, s24_problem(library, 0, NULL), n, &plan, &error), &error);
    return (now_us() - begin) / RUNS;
}

int main(int count, char **arguments) {
    enum { NON_BLOCKING = 1, ROOM = 64 << 20 };
    static Run run;
    void *context;
    s24_library *library;
    s24_error error;
    Call call;
    double times[KINDS];
    if (count != 3) return fprintf(stderr, "usage: %s FOLDER N\n", arguments[0]), 2;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&run.stream, NON_BLOCKING));
    expect_ok(s24_open(arguments[1], &library, &error), &error);
    expect_ok(s24_find(library, s24_problem(library, 0, NULL), atol(arguments[2]), &run.plan, &error), &error);
    for (uint32_t i = 0; i < s24_operand_count(&run.plan); i++) {
        CUDA(cuMemAlloc_v2(&run.operands[i].address, ROOM));
        CUDA(library->driver.fill(run.operands[i].address, 0x44, ROOM, run.stream)); /* Metadata that the hardware takes. */
        run.operands[i].stride = 16384;
    }
    if ((run.nbytes = s24_workspace(&run.plan, NULL))) CUDA(cuMemAlloc_v2(&run.workspace, run.nbytes));
    expect_ok(resolve(&call, &run.plan, run.operands, run.workspace, run.nbytes, &error), &error);
    if (launch_count(&run) > MAX_LAUNCHES) return fprintf(stderr, "expected at most %d launches\n", MAX_LAUNCHES), 2;
    for (uint32_t i = 0; i < launch_count(&run); i++) expect_ok(prepare(&call, launches_of(&run) + i, &run.prepared[i].prepared, &error), &error);
    time_runs(&run, times);
    printf("{\"kernel\": \"%s\", \"open_ms\": %.2f, \"find_us\": %.2f, \"run_us\": %.2f, \"run_new_args_us\": %.2f, \"launch_us\": %.2f}\n",
           s24_guarantee(&run.plan).kernel, time_open(arguments[1]), time_find(library, run.plan.n), times[KNOWN], times[NEW], times[DRIVER]);
    for (uint32_t i = 0; i < s24_operand_count(&run.plan); i++) CUDA(cuMemFree_v2(run.operands[i].address));
    if (run.workspace) CUDA(cuMemFree_v2(run.workspace));
    s24_close(library);
    CUDA(cuStreamDestroy_v2(run.stream));
    CUDA(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
