"""`python -m graphopt` is the `graphopt` command."""

from graphopt.cli import main

main()
