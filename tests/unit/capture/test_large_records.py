"""Records beyond the log's limit: kept outside, or made to fit while the storage is away."""

from pathlib import Path

import orjson
import pytest

from rollmill.codec import decode
from rollmill.models import CompletionRecord
from rollmill.runtime.claim_check import BlobReference, ClaimCheck, is_reference
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.proxy.recorder import Recorder
from rollmill_capture.settings import CaptureSettings

MIB = 2**20


@pytest.fixture
def settings(tmp_path: Path) -> CaptureSettings:
    return CaptureSettings(upstream="http://engine/v1", claim_check_url=f"file://{tmp_path}/store")


def recorder(settings: CaptureSettings) -> Recorder:
    return Recorder(
        MemoryEventWriter(), AnnouncedVersions(), ManualClock(), Metrics("capture"), claims=ClaimCheck.of(settings)
    )


def record(text: int) -> CompletionRecord:
    request = orjson.dumps({"messages": [{"role": "user", "content": "x" * text}]})
    choice = {"token_ids": [7, 9], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    return CompletionRecord.model_validate(
        {
            "session_id": "s",
            "completion_id": "c",
            "prompt_ids": [1],
            "choices": [choice],
            "request": request,
            "original_request": request,
        }
    )


async def test_a_large_record_is_kept_whole_outside_the_log(settings: CaptureSettings) -> None:
    large, made = record(6 * MIB), recorder(settings)
    value = await made._encode(large)
    assert value is not None
    assert is_reference(value)
    assert BlobReference.decode(value).size > COMPLETIONS.max_bytes
    assert made.claims is not None
    found = await made.claims.read(COMPLETIONS, value, ())
    assert (found.original_request, found.metadata) == (large.original_request, {})


@pytest.mark.parametrize(("text", "dropped"), [(2 * MIB, None), (6 * MIB, ["original_request"])])
async def test_while_the_storage_is_away_a_record_fits_by_itself(
    settings: CaptureSettings, tmp_path: Path, text: int, dropped: list[str] | None
) -> None:
    (tmp_path / "store").write_text("a file in the directory's place")
    value = await recorder(settings)._encode(record(text))
    assert value is not None
    found = decode(COMPLETIONS.model, value)
    assert found.metadata.get("dropped_for_size") == dropped
    assert found.choices[0].token_ids.tolist() == [7, 9]


async def test_without_a_storage_records_are_as_they_were(settings: CaptureSettings) -> None:
    bare = settings.model_copy(update={"claim_check_url": ""})
    value = await recorder(bare)._encode(record(2 * MIB))
    assert value is not None
    assert decode(COMPLETIONS.model, value).metadata == {}
