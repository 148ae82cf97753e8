"""``python -m rollmill_capture``: run capture until SIGTERM."""

import sys

from rollmill.runtime.app import run
from rollmill_capture.app import build
from rollmill_capture.settings import CaptureSettings

raise SystemExit(run(build(CaptureSettings()), sys.argv[1:]))
