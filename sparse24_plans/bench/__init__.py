"""Measures what users compare. ``sparse24 bench`` runs it; ``python -m benchmarks.plot`` draws it."""
