"""`python -m subquad`: the command line."""

from subquad.cli import main

main()
