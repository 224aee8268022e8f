// S24_CLUSTER is the attribute of a kernel whose clusters have S24_CLUSTER_SIZE CTAs; the including file defines the
// size. A size of 1 means no attribute, because a cluster of one CTA would still be launched as a cluster. Attributes
// can only be chosen by the preprocessor.
#pragma once

#if S24_CLUSTER_SIZE > 1
#define S24_CLUSTER __cluster_dims__(S24_CLUSTER_SIZE, 1, 1)
#else
#define S24_CLUSTER
#endif
