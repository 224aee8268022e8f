"""Maintainers' tools, run from a checkout: they take records, check them, and write figures from them."""
