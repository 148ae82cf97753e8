"""Failpoints: named, counted, refused where unknown."""

import subprocess
import sys
import time

import pytest
from pydantic import ValidationError

from rollmill.errors import InvalidInputError
from rollmill.runtime.failpoints import Action, Armed, Failpoint, FailpointError, Failpoints
from rollmill.settings import KafkaSettings

PLACE = Failpoint.TRANSACTION_BEFORE_COMMIT


def test_an_entry_says_place_action_and_pass() -> None:
    assert Armed.parse("transaction.before_commit=kill@3") == Armed(PLACE, Action.KILL, 3)
    assert Armed.parse("transaction.before_commit=pause:1.5") == Armed(PLACE, Action.PAUSE, 1, 1.5)


@pytest.mark.parametrize(
    "text",
    ["commit=kill", "transaction.before_commit", "restore.read=die", "restore.read=kill@0", "restore.read=kill@x"],
)
def test_what_is_unknown_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"restore\.read|transaction\.before_commit"):
        Failpoints.parse(text)
    with pytest.raises(ValidationError):
        KafkaSettings(failpoints=text)


def test_nothing_happens_where_nothing_is_armed() -> None:
    assert KafkaSettings(failpoints="").failpoints == ""
    for place in Failpoint:
        Failpoints.parse("").reach(place)


def test_it_happens_at_its_own_pass_alone() -> None:
    failpoints = Failpoints.parse("restore.read=raise@2, transaction.before_commit=raise@1")
    failpoints.reach(Failpoint.RESTORE_READ)
    with pytest.raises(FailpointError, match="pass 2"):
        failpoints.reach(Failpoint.RESTORE_READ)
    failpoints.reach(Failpoint.RESTORE_READ)
    with pytest.raises(FailpointError, match="before_commit, pass 1"):
        failpoints.reach(PLACE)


def test_a_pause_holds_the_whole_process() -> None:
    began = time.monotonic()
    Failpoints([Armed(PLACE, Action.PAUSE, seconds=0.05)]).reach(PLACE)
    assert time.monotonic() - began >= 0.05


def test_a_kill_leaves_no_time_to_clean_up() -> None:
    program = (
        "from rollmill.runtime.failpoints import Failpoint, Failpoints\n"
        "try:\n    Failpoints.parse('restore.read=kill').reach(Failpoint.RESTORE_READ)\n"
        "finally:\n    print('cleaned up', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")
