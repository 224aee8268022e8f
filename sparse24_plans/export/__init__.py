"""Plans for programs that have no Python: their launches in files, and C code that makes them."""

from .folder import Exported, export_plans

__all__ = ["Exported", "export_plans"]
