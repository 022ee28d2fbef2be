"""`python -m interception`."""

from interception.cli import main

main()
