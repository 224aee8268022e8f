/* run FOLDER: run an exported product for 1, 16 and 300 tokens, launched and from a CUDA graph.
 *
 * `python examples/13_export_to_c.py FOLDER` writes FOLDER: plans/, the packed weight, and for each number of tokens
 * x and the y that is expected, as plain files. Exits 1 if a bit of a result differs, 2 if something fails. */
#include "cuda_driver.h"
#include "sparse24_export.h"

#include <string.h>

typedef struct {
    uint8_t *bytes;
    size_t size;
} Content;

static Content read_file(const char *folder, const char *name) {
    char path[4096];
    Content found = {NULL, 0};
    FILE *file;
    long end;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (!(file = fopen(path, "rb")) || fseek(file, 0, SEEK_END) || (end = ftell(file)) <= 0 || fseek(file, 0, SEEK_SET) ||
        !(found.bytes = malloc((size_t)end)) || fread(found.bytes, 1, (size_t)end, file) != (size_t)end) {
        fprintf(stderr, "%s: can't be read\n", path);
        exit(2);
    }
    fclose(file);
    found.size = (size_t)end;
    return found;
}

static uint64_t allocated(size_t size) {
    uint64_t address = 0;
    if (size) CUDA(cuMemAlloc_v2(&address, size));
    return address;
}

static uint64_t uploaded(Content content) {
    uint64_t address = allocated(content.size);
    CUDA(cuMemcpyHtoD_v2(address, content.bytes, content.size));
    return address;
}

static void check(int code, const s24_error *error) {
    if (code) {
        fprintf(stderr, "%s\n", error->text);
        exit(2);
    }
}

/* Whether y has the expected bits. Spoils y, so that the next launch must write all of it. */
static int is_expected(const char *how, int n, uint64_t y, Content expected, void *stream) {
    uint8_t *found = malloc(expected.size);
    int same;
    if (!found) exit(2);
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuMemcpyDtoH_v2(found, y, expected.size));
    CUDA(cuMemsetD8_v2(y, 0xff, expected.size));
    same = !memcmp(found, expected.bytes, expected.size);
    printf("%d tokens, %s: %s\n", n, how, same ? "as expected" : "DIFFERENT");
    free(found);
    return same;
}

static int run(s24_library *library, const char *folder, uint64_t weight, int n, void *stream) {
    char names[2][32];
    snprintf(names[0], sizeof names[0], "x.%d", n);
    snprintf(names[1], sizeof names[1], "y.%d", n);
    Content x = read_file(folder, names[0]), expected = read_file(folder, names[1]);
    s24_error error;
    s24_plan plan;
    /* Loads kernels the first time, so it is no work for a capture. */
    check(s24_find(library, s24_problem(library, 0, NULL), n, &plan, &error), &error);

    uint64_t bytes = s24_workspace(&plan, NULL), workspace = allocated(bytes);
    /* Elements have two bytes, and rows touch. The operands are weight, x and y: see s24_operand_name. */
    s24_operand operands[] = {{weight, 0},
                              {uploaded(x), (int64_t)x.size / n / 2},
                              {allocated(expected.size), (int64_t)expected.size / n / 2}};
    CUDA(cuMemsetD8_v2(operands[2].address, 0xff, expected.size));
    check(s24_run(&plan, operands, workspace, bytes, stream, &error), &error);
    int same = is_expected("launched", n, operands[2].address, expected, stream);

    enum { THREAD_LOCAL = 1 };
    void *graph, *executable;
    CUDA(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    check(s24_run(&plan, operands, workspace, bytes, stream, &error), &error);
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphInstantiateWithFlags(&executable, graph, 0));
    CUDA(cuGraphLaunch(executable, stream));
    same &= is_expected("from a graph", n, operands[2].address, expected, stream);
    CUDA(cuGraphExecDestroy(executable));
    CUDA(cuGraphDestroy(graph));

    for (int i = 1; i < 3; i++) CUDA(cuMemFree_v2(operands[i].address));
    if (workspace) CUDA(cuMemFree_v2(workspace));
    free(x.bytes);
    free(expected.bytes);
    return same;
}

int main(int count, char **arguments) {
    enum { ORDERED = 0 }; /* The stream waits for the copies, which run on the default stream, and they for it. */
    static const int TOKENS[] = {1, 16, 300};
    char plans[4096];
    void *context, *stream;
    s24_library *library;
    s24_error error;
    int same = 1;
    if (count != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
        return 2;
    }
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&stream, ORDERED));

    snprintf(plans, sizeof plans, "%s/plans", arguments[1]);
    check(s24_open(plans, &library, &error), &error);
    Content packed = read_file(arguments[1], "weight.packed");
    uint64_t weight = uploaded(packed);
    for (int i = 0; i < 3; i++) same &= run(library, arguments[1], weight, TOKENS[i], stream);

    CUDA(cuMemFree_v2(weight));
    free(packed.bytes);
    s24_close(library);
    CUDA(cuStreamDestroy_v2(stream));
    CUDA(cuDevicePrimaryCtxRelease_v2(0));
    return same ? 0 : 1;
}
