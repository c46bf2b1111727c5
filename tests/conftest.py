"""What holds for every test."""

import signal

# A shell starts background jobs with SIGINT ignored, and every child inherits that. Tests of Ctrl-C
# would then say something about the shell; with a handler here, children start with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
