"""Measures what users compare: ``sparse24 bench``. What only maintainers run lies in benchmarks/."""
