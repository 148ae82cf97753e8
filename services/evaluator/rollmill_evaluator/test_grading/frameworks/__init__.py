"""Parsers of test output and report files, one file per framework; `registry` lists them, `results` is what they share.

Names are complete, with file, package or binary, so that tests of one name in two files are two tests. Where a test is
reported more than once, the worst status counts. The process under test writes these results itself, so code that is
made to forge them can do so: protect the tests' files and configuration, and inspect what is rewarded.
"""

from rollmill_evaluator.test_grading.frameworks.registry import FRAMEWORKS, Framework, FrameworkName
from rollmill_evaluator.test_grading.frameworks.results import Results, Status

__all__ = ["FRAMEWORKS", "Framework", "FrameworkName", "Results", "Status"]
