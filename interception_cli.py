"""Where the program `interception` begins: outside the package, whose import alone takes a second.

Ctrl-C in that second ends the program at once and silently, as it does with any program that has nothing to tidy up;
Python would show the stack of whatever was being imported. The commands handle it themselves as soon as they do.
"""

import signal


def main() -> None:
    _end_at_once()
    from interception.cli import main

    try:
        main()
    finally:
        _end_at_once()  # all is tidied up: what is left is Python's own end


def _end_at_once() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored (nohup), and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
