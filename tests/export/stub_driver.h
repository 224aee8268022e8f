/* Records of the stub of the CUDA driver. */
#ifndef STUB_DRIVER_H
#define STUB_DRIVER_H

#include <stdint.h>

/* With PROGRAMS each thread has its own records. */
#ifdef PROGRAMS
#define BY_THREAD __thread
#else
#define BY_THREAD
#endif

typedef struct {
    unsigned kind, grid, threads, shared_bytes, early, byte;
    uint64_t stream, address, nbytes;
    char code[1024], symbol[64];
    unsigned char parameters[4096];
} StubCall;

enum { MAX_CALLS = 16 };
extern BY_THREAD StubCall stub_calls[MAX_CALLS]; /* Launches and fills. */
extern BY_THREAD unsigned stub_count;
extern BY_THREAD unsigned stub_driver_calls; /* Calls of any function that a library makes. */
extern int stub_idle; /* Whether launches, fills and tiled maps do nothing but count as driver calls. */

#endif
