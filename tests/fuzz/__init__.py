"""Random problems of every family, against float64 and slow models: ``python -m tests.fuzz --help``."""
