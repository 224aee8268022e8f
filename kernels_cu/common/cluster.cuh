// S24_CLUSTER: the attribute of a kernel whose clusters have S24_CLUSTER_SIZE blocks, which its file defines before
// this include. One block: no attribute, since a cluster of one is still launched as a cluster.
#pragma once

#if S24_CLUSTER_SIZE > 1
#define S24_CLUSTER __cluster_dims__(S24_CLUSTER_SIZE, 1, 1)
#else
#define S24_CLUSTER
#endif
