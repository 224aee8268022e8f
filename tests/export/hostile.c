/* hostile FOLDER ROUNDS SEED: spoil plans.bin again and again, with a true hash, and use all that opens. */
#include "sparse24_export.c"

static uint64_t state;
static uint64_t random_number(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void spoil(uint8_t *content, uint64_t length) {
    static const uint64_t values[] = {0, 1, 2, 7, 255, 4096, 65536, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX, (uint64_t)1 << 63};
    uint64_t begin = random_number() % 4 ? sizeof(Header) : HASHED_FROM;
    for (uint64_t changes = 1 + random_number() % 3; changes; changes--) {
        size_t size = random_number() % 2 ? 4 : 8;
        uint64_t at = (begin + random_number() % (length - begin - 8)) / size * size, value = values[random_number() % 12];
        if (random_number() % 3 == 0) memcpy(&value, content + at, size), value += random_number() % 5 - 2;
        if (at < HASHED_FROM) at = HASHED_FROM;
        memcpy(content + at, &value, size);
    }
    sha256(content + HASHED_FROM, length - HASHED_FROM, ((Header *)content)->sha256);
}

static int use(s24_library *library) {
    s24_operand operands[16];
    s24_error error;
    s24_plan plan;
    const char *name, *descriptor;
    int runs = 0;
    for (uint32_t problem = 0; (name = s24_problem(library, problem, &descriptor)); problem++) {
        for (int64_t n = 0; n < 40; n += 1 + (int64_t)(random_number() % 7)) {
            uint32_t alignment;
            if (strlen(name) + strlen(descriptor) > 1 << 20 || s24_find(library, name, n, &plan, &error)) continue;
            if (s24_operand_count(&plan) > 16 || strlen(s24_guarantee(&plan).guarantee) > 1 << 20) continue;
            for (uint32_t i = 0; i < s24_operand_count(&plan); i++) {
                operands[i].address = random_number() % 8 ? ((uint64_t)i + 1) << 40 : random_number();
                operands[i].stride = random_number() % 8 ? 4096 : (int64_t)random_number();
            }
            for (int twice = 0; twice < 2; twice++) /* The second run finds the launches of the first. */
                runs += !s24_run(&plan, operands, (uint64_t)1 << 50, s24_workspace(&plan, &alignment), NULL, &error);
        }
    }
    return runs;
}

int main(int count_of_arguments, char **arguments) {
    uint8_t *sound, *spoiled;
    uint64_t length;
    s24_error error;
    int opened = 0, runs = 0;
    if (count_of_arguments != 4 || read_file(arguments[1], "plans.bin", &sound, &length, &error)) return 2;
    state = strtoull(arguments[3], NULL, 10) * 2 + 1;
    spoiled = malloc((size_t)length);
    for (long round = atol(arguments[2]); round; round--) {
        char path[4096];
        s24_library *library;
        FILE *file;
        memcpy(spoiled, sound, (size_t)length);
        if (round > 1) spoil(spoiled, length); /* The last round is sound. */
        snprintf(path, sizeof path, "%s/plans.bin", arguments[1]);
        file = fopen(path, "wb");
        fwrite(spoiled, 1, (size_t)(random_number() % 16 || round == 1 ? length : random_number() % length), file);
        fclose(file);
        if (s24_open(arguments[1], &library, &error)) continue;
        opened++;
        runs += use(library);
        s24_close(library);
    }
    free(sound);
    free(spoiled);
    printf("%d opened, %d runs\n", opened, runs);
    return opened && runs ? 0 : 3;
}
