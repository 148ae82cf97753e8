"""The webhook: each session's result is POSTed to one address, at least once.

A consumer group of its own over ``trajectories``: a target that is slow or down delays its own notices only, and a
restart continues with the first notice that was not delivered. It runs in the evaluator's process because that
process already makes requests to outside services and runs at-least-once consumers; the reward-merger's transactions
must not wait for a socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from rollmill.errors import ConfigurationError, InfrastructureError, NotGradedError, PoisonRecordError
from rollmill.models import Trajectory
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import ExternalService
from rollmill.topics import TRAJECTORIES
from rollmill_evaluator.consumer.concurrent_consumer import ConcurrentConsumer, run_member
from rollmill_evaluator.consumer.in_flight import ReceivedRecord
from rollmill_evaluator.delivery.trajectory_record import read_trajectory
from rollmill_evaluator.remote.http_request import HttpRequest
from rollmill_evaluator.retrying import Retries
from rollmill_evaluator.settings import EvaluatorSettings

log = structlog.get_logger(__name__)

NAME = "webhook"
IDEMPOTENCY = "idempotency-key"
EVENT = "session_result"


@dataclass(frozen=True)
class WebhookDelivery:
    """Sends ``service`` a notice of each record, which is finished when the notice was taken, refused or given up."""

    service: ExternalService
    metrics: Metrics
    retries: Retries
    seconds: float
    """For one try."""
    patience: float
    """For all tries of one notice, in seconds."""
    claim_check: ClaimCheck | None = None

    async def deliver(self, received: ReceivedRecord) -> None:
        try:
            trajectory, _ = await read_trajectory(received, self.claim_check)
        except PoisonRecordError as error:
            log.warning(
                "unreadable trajectory skipped; the batcher quarantines it",
                reason=error.reason,
                offset=received.offset,
            )
            return
        notice_id = result_id(trajectory)
        request = HttpRequest(
            service=self.service, body=orjson.dumps(webhook_payload(trajectory)), headers={IDEMPOTENCY: notice_id}
        )
        try:
            await self.retries.run(lambda seconds_left: self._try_once(request, seconds_left), self.patience)
        except NotGradedError as error:
            self._give_up("refused", notice_id, error)
        except InfrastructureError as error:
            self._give_up("given_up", notice_id, error)
        else:
            self.metrics.count("webhook_notices", ended="taken")

    async def _try_once(self, request: HttpRequest, seconds_left: float) -> bytes:
        try:
            return await request.send(min(self.seconds, seconds_left))
        except InfrastructureError:
            self.metrics.count("webhook_failures")
            raise

    def _give_up(self, ended: str, notice_id: str, error: Exception) -> None:
        log.error("webhook notice not delivered and not tried again", ended=ended, notice=notice_id, error=str(error))
        self.metrics.count("webhook_notices", ended=ended)


def result_id(trajectory: Trajectory) -> str:
    """The same for the same result, however often it is delivered."""
    return f"{trajectory.session_id}:{trajectory.attempt}:{trajectory.revision or 0}"


def webhook_payload(trajectory: Trajectory) -> dict[str, Any]:
    """A session's result without the tokens, as plain values. A revised reward is a notice of its own, with the next
    ``revision``.
    """
    spec = trajectory.spec
    return {
        "event": EVENT,
        "id": result_id(trajectory),
        "session_id": trajectory.session_id,
        "attempt": trajectory.attempt,
        "revision": trajectory.revision or 0,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "task_id": spec.task_id,
        "group_id": trajectory.group_id,
        "dataset": spec.dataset,
        "epoch": spec.epoch,
        "purpose": spec.purpose.value,
        "policy": spec.policy,
        "opened_at": trajectory.opened_at,
        "closed_at": trajectory.closed_at,
        "reward": trajectory.outcome_reward,
        "trace_rewards": [trace.reward for trace in trajectory.traces],
        "ungraded_reason": trajectory.ungraded_reason,
        "evaluation": trajectory.evaluation,
        "trained_tokens": trajectory.trained_tokens,
    }


async def run_webhook(context: ServiceContext) -> None:
    """Deliver until ``context.stop``; the next process delivers the rest."""
    settings = context.settings
    if not isinstance(settings, EvaluatorSettings) or settings.webhook is None:
        raise ConfigurationError("the webhook needs EvaluatorSettings with webhook_url")
    delivery = WebhookDelivery(
        service=settings.webhook,
        metrics=context.metrics,
        retries=Retries(None, settings.webhook_retry_seconds, longest=settings.webhook_longest_wait_seconds),
        seconds=settings.webhook_seconds,
        patience=settings.webhook_patience_seconds,
        claim_check=ClaimCheck.of(settings),
    )
    consumer = ConcurrentConsumer(
        delivery.deliver,
        topic=TRAJECTORIES,
        prefix=settings.prefix,
        group_id=f"{settings.prefix}{NAME}",
        clients=context.clients,
        limits=settings.webhook_limits,
        metrics=context.metrics,
        labels={"reads": NAME},
    )
    await run_member(consumer, context, NAME)
