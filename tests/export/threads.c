/* threads FOLDER: find and run all problems of a folder from several threads at once. */
#include "sparse24_export.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 8, ROUNDS = 20, MOST_N = 40 };
static s24_library *library;

static void *work(void *given) {
    uintptr_t *runs = given;
    unsigned seed = (unsigned)*runs;
    s24_operand operands[16];
    s24_error error;
    s24_plan plan;
    const char *name;
    *runs = 0;
    for (int i = 0; i < 16; i++) operands[i] = (s24_operand){(uint64_t)(i + 1) << 40, 4096};
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t at = 0; (name = s24_problem(library, at, NULL)); at++) {
            int64_t n = rand_r(&seed) % MOST_N;
            if (s24_find(library, name, n, &plan, &error) && s24_find(library, name, 0, &plan, &error)) continue;
            *runs += !s24_run(&plan, operands, (uint64_t)1 << 50, s24_workspace(&plan, NULL), NULL, &error);
        }
    }
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS];
    uintptr_t runs[THREADS];
    s24_error error;
    if (count != 2 || s24_open(arguments[1], &library, &error)) return 2;
    for (int i = 0; i < THREADS; i++) {
        runs[i] = (uintptr_t)i + 1;
        pthread_create(threads + i, NULL, work, runs + i);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        if (!runs[i]) return 3;
    }
    s24_close(library);
    return 0;
}
