"""The measurements of ``sparse24 bench``, which users run. Maintainers' own are in benchmarks/."""
