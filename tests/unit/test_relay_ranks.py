"""The demo's ranks and layouts: the same gradient, however the step is cut and laid out."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from grpo_minimal import accumulate
from relay.learning import packed_log_probs
from relay.model import RelayModel, use_one_thread
from relay.options import Layout
from relay.ranks import LAYOUTS, together
from rollmill.models import PolicyVersion
from rollmill.testing.samples.batches import SampleTrace, Steps, step_values
from rollmill.trainer import Step
from rollmill.trainer.batches.staleness_filter import filter_step
from rollmill.trainer.batches.step_assembly import StepRecords
from rollmill.trainer.layouts.safetensors_reader import read_batch

TRACES = [
    SampleTrace(f"r{n}", prompt=(1, 2, 3)[: 1 + n % 3], reply=(4 + n, 5), log_probs=(-2.0, -3.0), advantage=1.0 - n)
    for n in range(5)
]
ONE_RANK: Steps = [[TRACES]]
TWO_RANKS: Steps = [[TRACES[:2], TRACES[2:3]], [TRACES[3:], []]]


def step(ranks: Steps, acknowledged: list[int] | None = None) -> Step:
    noted = [] if acknowledged is None else acknowledged

    def rank(number: int, values: list[bytes]) -> Step:
        records = StepRecords(tuple(map(read_batch, values)), {number: 1})
        verdict = filter_step(records.header, PolicyVersion(), {})
        return Step(records, verdict, lambda _: noted.append(number))

    return together([rank(number, values) for number, values in enumerate(step_values(0, ranks))])


def a_model() -> RelayModel:
    use_one_thread()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return RelayModel()


def gradients(model: RelayModel, whole: Step, layout: Layout) -> list[torch.Tensor]:
    model.zero_grad()
    log_probs = partial(packed_log_probs, model)
    for micro_batch in whole:
        accumulate(whole, *LAYOUTS[layout](micro_batch, log_probs))
    return [weights.grad.clone() for weights in model.parameters() if weights.grad is not None]


@pytest.mark.parametrize("ranks", [ONE_RANK, TWO_RANKS], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("layout", list(Layout))
def test_ranks_and_layouts_leave_the_gradient_as_it_is(ranks: Steps, layout: Layout) -> None:
    model = a_model()
    wanted = gradients(model, step(ONE_RANK), Layout.PACKED)
    found = gradients(model, step(ranks), layout)
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_parts_of_a_step_add_up_to_its_gradient() -> None:
    model = a_model()
    whole = step(TWO_RANKS)
    wanted = gradients(model, whole, Layout.PACKED)
    sums = [torch.zeros_like(each) for each in wanted]
    for part in whole.minibatches(3):
        model.zero_grad()
        for micro_batch in part:
            current = packed_log_probs(model, micro_batch.input_ids, micro_batch.cu_seqlens)
            accumulate(part, micro_batch, current)
        share = part.denominator / whole.denominator
        grads = [weights.grad * share for weights in model.parameters() if weights.grad is not None]
        sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
    for one, other in zip(sums, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_all_ranks_are_acknowledged_together() -> None:
    acknowledged: list[int] = []
    step(TWO_RANKS, acknowledged).ack()
    assert acknowledged == [0, 1]
