import pytest
import torch

from relay.learning import PackedTokens, grpo_step, packed_log_probs
from relay.model import RelayModel, from_bytes, to_bytes
from relay.task import encode

RIGHT, WRONG = "u?4.a4.", "u?4.a51."


@pytest.fixture
def model() -> RelayModel:
    torch.manual_seed(2)
    return RelayModel()


def packed(model: RelayModel, sequences: list[tuple[str, float]]) -> PackedTokens:
    rows = [encode(text) for text, _ in sequences]
    ids = torch.tensor([token for row in rows for token in row])
    bounds = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(0)
    mask = torch.tensor([position >= 5 for row in rows for position in range(len(row))], dtype=torch.uint8)
    advantages = torch.tensor([value for row, (_, value) in zip(rows, sequences, strict=True) for _ in row])
    with torch.no_grad():
        log_probs = packed_log_probs(model, ids, bounds)
    return PackedTokens(ids.int(), bounds, mask, log_probs, advantages)


def gradient(model: RelayModel) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_packed_log_probs_are_those_of_each_sequence_alone(model: RelayModel) -> None:
    batch = packed(model, [(RIGHT, 1.0), (WRONG, -1.0)])
    alone = [model.log_probs(torch.tensor([encode(text)]))[0] for text in (RIGHT, WRONG)]
    torch.testing.assert_close(packed_log_probs(model, batch.input_ids, batch.cu_seqlens), torch.cat(alone))


def test_a_step_makes_the_rewarded_reply_likelier(model: RelayModel) -> None:
    batch = packed(model, [(RIGHT, 1.0), (WRONG, -1.0)])
    metrics = grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch])
    change = packed_log_probs(model, batch.input_ids, batch.cu_seqlens) - batch.behavior_log_probs
    bounds = batch.cu_seqlens.tolist()
    assert change[5 : bounds[1]].sum() > 0
    assert change[bounds[1] + 5 :].sum() < 0
    assert metrics.tokens == 5
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-5)
    assert metrics.log_prob_gap_max < 1e-5


def test_a_split_into_micro_batches_leaves_the_gradient_unchanged(model: RelayModel) -> None:
    twin = from_bytes(to_bytes(model.state_dict()))
    sequences = [(RIGHT, 0.7), (WRONG, -0.2), (WRONG, -0.5)]
    still, twin_still = (torch.optim.SGD(each.parameters(), lr=0.0) for each in (model, twin))
    grpo_step(model, still, [packed(model, sequences)])
    grpo_step(twin, twin_still, [packed(twin, sequences[:1]), packed(twin, sequences[1:])])
    for whole, split in zip(gradient(model), gradient(twin), strict=True):
        torch.testing.assert_close(whole, split, atol=1e-6, rtol=1e-4)


def test_a_token_beyond_the_clip_teaches_nothing(model: RelayModel) -> None:
    batch = packed(model, [(RIGHT, 1.0)])
    far = PackedTokens(
        batch.input_ids, batch.cu_seqlens, batch.loss_mask, batch.behavior_log_probs - 1.0, batch.advantages
    )
    metrics = grpo_step(model, torch.optim.SGD(model.parameters(), lr=0.0), [far])
    assert metrics.clip_fraction == 1.0
    assert metrics.gradient_norm == 0.0
    assert metrics.loss == pytest.approx(-1.28)


def test_a_step_without_a_trained_token_changes_nothing(model: RelayModel) -> None:
    batch = packed(model, [(RIGHT, 1.0)])
    empty = PackedTokens(
        batch.input_ids,
        batch.cu_seqlens,
        torch.zeros_like(batch.loss_mask),
        batch.behavior_log_probs,
        batch.advantages,
    )
    metrics = grpo_step(model, torch.optim.SGD(model.parameters(), lr=1.0), [empty])
    assert (metrics.tokens, metrics.loss, metrics.gradient_norm) == (0, 0.0, 0.0)
