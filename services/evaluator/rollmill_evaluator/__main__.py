import sys

from rollmill.runtime.app import run
from rollmill_evaluator.app import build
from rollmill_evaluator.settings import EvaluatorSettings

raise SystemExit(run(build(EvaluatorSettings()), sys.argv[1:]))
