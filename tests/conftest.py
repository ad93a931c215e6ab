"""What every test run needs: signals as in a terminal."""

import signal

# a run started in the background by a shell has SIGINT ignored, and so would every program that a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
