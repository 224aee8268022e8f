"""Until ``checkpoints/convert.py`` imports from ``table.py`` and ``base.py``: then delete this."""

from .base import ForeignFormat as ForeignFormat
from .table import FORMATS as FORMATS
