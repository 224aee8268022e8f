/* The calls of the CUDA driver that the C and C++ examples make, declared here so that they compile without CUDA's
 * headers; a program that has them includes <cuda.h>. Link with libcuda.so.1. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *address, size_t nbytes);
int cuMemFree_v2(uint64_t address);
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t nbytes);
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t nbytes);
int cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t nbytes);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);
int cuStreamDestroy_v2(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags);
int cuGraphLaunch(void *executable, void *stream);
int cuGraphExecDestroy(void *executable);
int cuGraphDestroy(void *graph);

#ifdef __cplusplus
}
#endif

#define CUDA(call) cuda_check(call, #call)

static inline void cuda_check(int status, const char *call) {
    if (status) {
        fprintf(stderr, "%s: CUDA error %d\n", call, status);
        exit(2);
    }
}
#endif
