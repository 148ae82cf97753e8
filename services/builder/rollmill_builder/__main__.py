import sys

from rollmill.runtime.app import run
from rollmill_builder.app import build
from rollmill_builder.settings import BuilderSettings

if __name__ == "__main__":
    raise SystemExit(run(build(BuilderSettings()), sys.argv[1:]))
