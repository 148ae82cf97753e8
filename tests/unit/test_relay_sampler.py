import pytest
import torch

from relay.model import RelayModel, WeightsError, from_bytes, to_bytes
from relay.sampler import Draw, generator, sample
from relay.task import END_OF_TURN_ID, VOCABULARY_SIZE, encode


@pytest.fixture
def model() -> RelayModel:
    torch.manual_seed(1)
    return RelayModel()


def draw(prompt: str, *, seed: int = 0, max_tokens: int = 6, temperature: float = 1.0) -> Draw:
    return Draw(tuple(encode(prompt)), max_tokens, temperature, generator(seed))


PROMPTS = ["u?1.a", "u?2.a2.t=5.a", "u?2.a222.t=5.a5.t=0.a"]


def test_the_model_has_about_105_thousand_parameters(model: RelayModel) -> None:
    assert sum(weight.numel() for weight in model.parameters()) == 104_726


def test_log_probs_are_those_of_a_plain_pass_over_the_whole_sequence(model: RelayModel) -> None:
    draws = [draw(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS * 20)]
    for asked, reply in zip(draws, sample(model, draws), strict=True):
        whole = torch.tensor([[*asked.prompt_ids, *reply.token_ids]])
        expected = model.log_probs(whole)[0, len(asked.prompt_ids) :].tolist()
        assert reply.log_probs == pytest.approx(expected, abs=1e-4)


def test_log_probs_stand_at_their_own_token(model: RelayModel) -> None:
    ids = torch.tensor([encode("u?1.a")])
    distribution = torch.log_softmax(model.logits(model.hidden(ids[:, :3])), dim=-1)
    assert model.log_probs(ids)[0, 0] == 0
    assert model.log_probs(ids)[0, 3].item() == pytest.approx(distribution[0, 2, ids[0, 3]].item(), abs=1e-6)


def test_padding_changes_no_log_prob(model: RelayModel) -> None:
    short, padded = torch.tensor([encode("u?1.a")]), torch.tensor([encode("u?1.a094")])
    torch.testing.assert_close(model.log_probs(padded)[:, :5], model.log_probs(short))


def test_a_reply_ends_with_the_end_of_turn_token_or_by_its_length(model: RelayModel) -> None:
    replies = sample(model, [draw("u?1.a", seed=seed, max_tokens=20) for seed in range(60)])
    assert {reply.finish_reason for reply in replies} == {"stop", "length"}
    for reply in replies:
        assert len(reply.token_ids) == len(reply.log_probs)
        assert reply.token_ids.count(END_OF_TURN_ID) == (reply.finish_reason == "stop")
        assert (reply.token_ids[-1] == END_OF_TURN_ID) == (reply.finish_reason == "stop")
        assert reply.finish_reason == "stop" or len(reply.token_ids) == 20


def test_every_row_keeps_its_own_limit(model: RelayModel) -> None:
    replies = sample(model, [draw("u?1.a", seed=seed, max_tokens=1 + seed % 4) for seed in range(40)])
    assert all(len(reply.token_ids) <= 1 + seed % 4 for seed, reply in enumerate(replies))


def test_a_seeded_reply_does_not_depend_on_its_neighbours(model: RelayModel) -> None:
    alone = sample(model, [draw("u?1.a", seed=7)])[0]
    among = sample(model, [draw(PROMPTS[2], seed=3), draw("u?1.a", seed=7)])[1]
    assert among.token_ids == alone.token_ids
    assert among.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token(model: RelayModel) -> None:
    reply = sample(model, [draw("u?1.a", max_tokens=1, temperature=0)])[0]
    logits = model.logits(model.hidden(torch.tensor([encode("u?1.a")])))[0, -1]
    assert reply.token_ids == (int(logits.argmax()),)


def test_tokens_are_drawn_as_often_as_their_probability_says(model: RelayModel) -> None:
    rng = generator(0)
    asked = [Draw(tuple(encode("u?1.a")), 1, 1.0, rng)] * 4000
    drawn = torch.tensor([reply.token_ids[0] for reply in sample(model, asked)])
    expected = model.logits(model.hidden(torch.tensor([encode("u?1.a")])))[0, -1].softmax(dim=-1)
    shares = torch.bincount(drawn, minlength=VOCABULARY_SIZE) / 4000
    torch.testing.assert_close(shares, expected, atol=0.02, rtol=0)


def test_weights_survive_the_way_through_bytes(model: RelayModel) -> None:
    ids = torch.tensor([encode("u?1.a")])
    torch.testing.assert_close(from_bytes(to_bytes(model.state_dict())).log_probs(ids), model.log_probs(ids))


def test_other_bytes_are_no_weights(model: RelayModel) -> None:
    with pytest.raises(WeightsError):
        from_bytes(b"junk")
    with pytest.raises(WeightsError):
        from_bytes(to_bytes({"head.bias": model.head.bias}))
