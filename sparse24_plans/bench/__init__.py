"""Measures what users compare: ``sparse24 bench``. plot.py draws the records, figures.py writes them down."""
