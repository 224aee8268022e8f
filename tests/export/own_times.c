/* own_times FOLDER PROBLEM N: print the nanoseconds that our code takes of a run, on a driver whose calls do nothing. */
#include "sparse24_export.h"
#include "stub_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BATCHES = 1000, RUNS = 100, MAX_OPERANDS = 16, OTHER_NS = 16 };
typedef struct { s24_library *library; const char *problem; int64_t n; s24_plan plan; } Problem;

static void check(int code, const s24_error *error) {
    if (!code) return;
    fprintf(stderr, "%s\n", error->text);
    exit(2);
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* The least of the batches' times, since other programs on the machine only add to them. Each run has `step` further addresses than the one before, and is of one of `ns` numbers of tokens,
 * for which its plan is found first if there are several. */
static double time_of(Problem given, uint64_t step, int64_t ns) {
    double least = 1e9;
    s24_operand operands[MAX_OPERANDS];
    s24_error error;
    for (uint32_t i = 0; i < MAX_OPERANDS; i++) operands[i] = (s24_operand){(uint64_t)(i + 1) << 40, 16384};
    for (int batch = 0; batch < BATCHES; batch++) {
        double begin = now_ns();
        for (int run = 0; run < RUNS; run++) {
            if (ns > 1) check(s24_find(given.library, given.problem, given.n - run % ns, &given.plan, &error), &error);
            for (uint32_t i = 1; i < MAX_OPERANDS; i++) operands[i].address += step; /* The first is a weight. */
            check(s24_run(&given.plan, operands, (uint64_t)1 << 50, (uint64_t)1 << 40, NULL, &error), &error);
        }
        begin = (now_ns() - begin) / RUNS;
        if (begin < least) least = begin;
    }
    return least;
}

int main(int count, char **arguments) {
    Problem given = {NULL, arguments[2], 0, {0}};
    s24_error error;
    if (count != 4) return fprintf(stderr, "usage: %s FOLDER PROBLEM N\n", arguments[0]), 2;
    given.n = atol(arguments[3]);
    stub_idle = 1;
    check(s24_open(arguments[1], &given.library, &error), &error);
    check(s24_find(given.library, given.problem, given.n, &given.plan, &error), &error);
    printf("{\"known\": %.1f, \"new\": %.1f, \"other_n\": ", time_of(given, 0, 1), time_of(given, 256, 1));
    if (given.n > OTHER_NS) printf("%.1f}\n", time_of(given, 0, OTHER_NS));
    else printf("null}\n");
    s24_close(given.library);
    return 0;
}
