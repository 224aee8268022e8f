"""The package's logger, ``sparse24_plans``: silent until the application gives it a handler.

Children: ``sparse24_plans.compile`` (kernels and their cache), ``sparse24_plans.select`` (what was chosen and
refused), ``sparse24_plans.tuning``, ``sparse24_plans.load`` (checkpoints). Nothing is logged by ``run``,
``launch`` and a cached ``select``. docs/operations.md lists the messages.
"""

from __future__ import annotations

import logging

_ROOT = logging.getLogger("sparse24_plans")
_ROOT.addHandler(logging.NullHandler())

COMPILE = _ROOT.getChild("compile")
SELECT = _ROOT.getChild("select")
TUNING = _ROOT.getChild("tuning")
LOAD = _ROOT.getChild("load")
