"""Matrices of unsigned integers of 4 or 8 bits in int32 words: compressed-tensors, GPTQ and AWQ.

A word holds 32 / bits values u, the first in the lowest bits. W [M, K] is scale * (u - z), with a scale and a
zero point z for each row and group of columns.

- compressed-tensors' ``pack-quantized``: ``weight_packed`` [M, K*bits/32] along the row, the last word filled
  up; ``weight_scale`` [M, groups]; ``weight_zero_point`` [M*bits/32, groups] along M, or of older versions
  int8 [M, groups] of z - 2^(bits-1). Without it z is 2^(bits-1). ``weight_g_idx`` [K] gives the group of each
  column; any -1 means that columns are in order.
- GPTQ: ``qweight`` [K*bits/32, M] along K; ``scales`` [groups, M]; ``qzeros`` [groups, M*bits/32] along M, of
  z - 1 (``checkpoint_format`` "gptq") or of z ("gptq_v2"); ``g_idx`` [K]. In the first of these a zero point
  of 0 overflows: some writers spoil its word, others borrow from its neighbours.
- AWQ: ``qweight`` [K, M/8] and ``qzeros`` [groups, M/8] along M, 4 bits; ``scales`` [groups, M]. The values
  of eight rows are in the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in AWQ's word of each of its eight rows."""
ANY_ORDER = -1
"""The group in compressed-tensors' ``weight_g_idx`` that says nothing."""
