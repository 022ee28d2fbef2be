"""`python -m envserver`."""

from envserver.cli import main

main()
