"""Settings of all tests."""

import os

from hypothesis import settings

# The same examples in every run, so that a failure is the change's own; to look for new ones:
# HYPOTHESIS_PROFILE=explore make test
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
