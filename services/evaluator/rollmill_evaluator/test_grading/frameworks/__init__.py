"""What a test command printed or wrote, read as results: one reader per framework.

Names are whole, with file, package or binary, so that same-named tests in two files are two tests. Where a test is
reported more than once, the worst counts. Results are what the process under test says of itself: code that sets out
to forge them can; protect the tests' files and configuration, and look at what is rewarded.
"""

from rollmill_evaluator.test_grading.frameworks.registry import FRAMEWORKS, Framework, FrameworkName
from rollmill_evaluator.test_grading.frameworks.results import Results, Status

__all__ = ["FRAMEWORKS", "Framework", "FrameworkName", "Results", "Status"]
