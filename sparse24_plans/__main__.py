"""``python -m sparse24_plans``: the command line."""

from .cli.app import main

main()
