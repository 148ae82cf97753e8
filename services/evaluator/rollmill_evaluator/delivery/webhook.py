"""The webhook: each session's result is POSTed to one address, at least once.

A consumer group of its own over ``trajectories``: a target that is slow or dead holds up nothing but itself, and a
restart goes on where the deliveries were. It lives in the evaluator's process because that is where requests to the
outside are made and at-least-once groups are run; the reward-merger's transactions never wait for a socket.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
import structlog

from rollmill.codec import decode
from rollmill.errors import ConfigurationError, InfrastructureError, NotGradedError, PoisonRecordError
from rollmill.models import Trajectory
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import ExternalService
from rollmill.topics import TRAJECTORIES
from rollmill_evaluator.consumer.concurrent_consumer import ConcurrentConsumer, Received
from rollmill_evaluator.delivery.record_content import content_of
from rollmill_evaluator.delivery.webhook_payload import name_of, webhook_payload
from rollmill_evaluator.remote.http_request import HttpRequest
from rollmill_evaluator.retrying import Retries
from rollmill_evaluator.settings import EvaluatorSettings
from rollmill_evaluator.worker import membership

log = structlog.get_logger(__name__)

NAME = "webhook"
IDEMPOTENCY = "idempotency-key"


@dataclass(frozen=True)
class Delivery:
    """Tells ``service`` of each record; a record is finished when it was taken, refused, or given up."""

    service: ExternalService
    metrics: Metrics
    retries: Retries
    seconds: float
    """For one try."""
    patience: float
    """For all tries of one notice, in seconds."""
    claims: ClaimCheck | None = None

    async def deliver(self, received: Received) -> None:
        trajectory = await self._read(received)
        if trajectory is None:
            return
        name = name_of(trajectory)
        question = HttpRequest(
            service=self.service, body=orjson.dumps(webhook_payload(trajectory)), headers={IDEMPOTENCY: name}
        )
        try:
            await self.retries.run(lambda left: self._once(question, left), self.patience)
        except NotGradedError as error:
            self._end("refused", name, error)
        except InfrastructureError as error:
            self._end("given_up", name, error)
        else:
            self.metrics.count("webhook_notices", ended="taken")

    async def _once(self, question: HttpRequest, left: float) -> bytes:
        try:
            return await question.ask(min(self.seconds, left))
        except InfrastructureError:
            self.metrics.count("webhook_failures")
            raise

    def _end(self, ended: str, name: str, error: Exception) -> None:
        log.error("a webhook webhook_payload is not delivered", ended=ended, webhook_payload=name, error=str(error))
        self.metrics.count("webhook_notices", ended=ended)

    async def _read(self, received: Received) -> Trajectory | None:
        """None: no other reader of the topic can read it either; the batcher sets it aside."""
        try:
            content = await content_of(received.value, self.claims)
            trajectory: Trajectory = decode(Trajectory, content, received.headers)
        except PoisonRecordError as error:
            log.warning("unreadable trajectory passed over", reason=error.reason, offset=received.offset)
            return None
        return trajectory


async def run_webhook(context: ServiceContext) -> None:
    """Deliver until ``context.stop``; what is not delivered by then is delivered by the next process."""
    settings = context.settings
    if not isinstance(settings, EvaluatorSettings) or settings.webhook is None:
        raise ConfigurationError("the webhook needs EvaluatorSettings with webhook_url")
    delivery = Delivery(
        service=settings.webhook,
        metrics=context.metrics,
        retries=Retries(None, settings.webhook_retry_seconds, longest=settings.webhook_longest_wait_seconds),
        seconds=settings.webhook_seconds,
        patience=settings.webhook_patience_seconds,
        claims=ClaimCheck.of(settings),
    )
    group = ConcurrentConsumer(
        delivery.deliver,
        topic=TRAJECTORIES,
        prefix=settings.prefix,
        group_id=f"{settings.prefix}{NAME}",
        clients=context.clients,
        limits=settings.webhook_limits,
        metrics=context.metrics,
        labels={"reads": NAME},
    )
    await membership(group, context, NAME)
