import sys

from rollmill.runtime.app import run
from rollmill_batcher.app import build
from rollmill_batcher.settings import BatcherSettings

raise SystemExit(run(build(BatcherSettings()), sys.argv[1:]))
