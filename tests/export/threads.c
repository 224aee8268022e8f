/* threads FOLDER: find and run all problems of a folder from several threads at once, with operands that they share. */
#include "sparse24_export.c"
#include "stub_driver.h"

enum { THREADS = 8, TRANSPOSITIONS = 100, MAX_N = 40, OFFSETS = 3 };
static s24_library *library;

/* Whether the thread's last run launched what is prepared for it anew. */
static int is_launched(const s24_plan *plan, const s24_operand *operands, uint64_t workspace) {
    const Launch *launch = (const Launch *)table(library, LAUNCHES) + ((const Plan *)plan->plan)->first_launch;
    Block block;
    Call call;
    if (stub_count != ((const Plan *)plan->plan)->launches || resolve(&call, plan, operands, workspace, 0, NULL)) return 0;
    for (uint32_t i = 0; i < stub_count; i++, launch++) {
        const StubCall *found = stub_calls + i;
        const Prepared *expected = &block.prepared;
        if (prepare(&call, launch, &block.prepared, NULL)) return 0;
        if (launch->fill && (found->address != expected->address || found->nbytes != expected->nbytes)) return 0;
        if (launch->fill) continue;
        if (found->grid != expected->config.grid[0] || memcmp(found->parameters, expected->parameters, launch->parameter_bytes)) return 0;
    }
    return 1;
}

typedef struct { unsigned seed, runs, wrong; } Work;

static void *work(void *given) {
    Work *mine = given;
    s24_operand operands[MAX_OPERANDS];
    s24_error error;
    s24_plan plan;
    const char *name;
    for (int turn = 0; turn < TRANSPOSITIONS; turn++) {
        for (uint32_t at = 0; (name = s24_problem(library, at, NULL)); at++) {
            int64_t n = rand_r(&mine->seed) % MAX_N;
            uint64_t offset = 256 * (uint64_t)(rand_r(&mine->seed) % OFFSETS), workspace = ((uint64_t)1 << 50) + offset;
            for (uint32_t i = 0; i < MAX_OPERANDS; i++) operands[i] = (s24_operand){((uint64_t)(i + 1) << 40) + offset, 4096};
            if (s24_find(library, name, n, &plan, &error) && s24_find(library, name, 0, &plan, &error)) continue;
            stub_count = 0;
            if (s24_run(&plan, operands, workspace, s24_workspace(&plan, NULL), NULL, &error)) continue;
            mine->runs++;
            mine->wrong += !is_launched(&plan, operands, workspace);
        }
    }
    return NULL;
}

int main(int count_of_arguments, char **arguments) {
    pthread_t threads[THREADS];
    Work works[THREADS];
    s24_error error;
    if (count_of_arguments != 2 || s24_open(arguments[1], &library, &error)) return 2;
    for (unsigned i = 0; i < THREADS; i++) {
        works[i] = (Work){i + 1, 0, 0};
        pthread_create(threads + i, NULL, work, works + i);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        if (!works[i].runs || works[i].wrong) return 3;
    }
    s24_close(library);
    return 0;
}
