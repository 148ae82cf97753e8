import sys

from rollmill.runtime.app import run
from rollmill_reward_merger.app import build
from rollmill_reward_merger.settings import RewardMergerSettings

raise SystemExit(run(build(RewardMergerSettings()), sys.argv[1:]))
