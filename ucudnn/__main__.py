"""The command `ucudnn`, which is `python -m ucudnn`, too: it takes Ctrl-C before anything else is imported."""

import os
import signal
import sys

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count


def main() -> None:
    """Run the command line; Ctrl-C ends it with exit status 130, without a word, from here on.

    Modules may take a KeyboardInterrupt in the middle of their import for an error of their own, so the process ends
    at once while they are imported; nothing is open yet that would have to be closed.
    """
    before = signal.getsignal(signal.SIGINT)
    taken = before is signal.default_int_handler  # who ignores it, as in the background, goes on so
    if taken:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    # No file or pipe shall take the number of a standard stream that is closed: it would get what libraries print.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    from ucudnn.cli import app
    from ucudnn.errors import began_with_interrupt

    try:
        if taken:
            signal.signal(signal.SIGINT, before)
        app.main()
    except KeyboardInterrupt:  # while typer makes the commands; it takes Ctrl-C in them
        sys.exit(_INTERRUPTED)
    except Exception as error:
        if not began_with_interrupt(error):
            raise
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
