"""``python -m sparse24_plans.cli``."""

from .app import main

main()
