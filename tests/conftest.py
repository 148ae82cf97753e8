"""Fixtures for all tests, and how many examples hypothesis tries.

``ROLLMILL_HYPOTHESIS_PROFILE``: ``ci`` (the default) tries the same examples in every run, ``fuzz`` tries
``ROLLMILL_FUZZ_EXAMPLES`` new ones and remembers what failed.
"""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["rollmill.testing.kafka"]

SLOW = [HealthCheck.too_slow]

settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("ROLLMILL_FUZZ_EXAMPLES", "50000")),
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW,
)
settings.load_profile(os.environ.get("ROLLMILL_HYPOTHESIS_PROFILE", "ci"))
