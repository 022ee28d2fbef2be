"""`python -m interception`."""

from interception_cli import main

main()
