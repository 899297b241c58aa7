"""Settings of all tests."""

import os
import signal

from hypothesis import settings

# The same examples in every run, so that a failure is the change's own; to look for new ones:
# HYPOTHESIS_PROFILE=explore make test
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell starts background jobs with SIGINT ignored, and what these start would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
