import pytest

from relay.task import (
    CHARACTERS,
    END_OF_TURN_ID,
    TURNS,
    VOCABULARY_SIZE,
    Message,
    UnknownTextError,
    decode,
    encode,
    group_digits,
    question,
    render,
    reply_ids,
    reply_text,
    reward,
)


def test_the_vocabulary_is_22_distinct_characters() -> None:
    assert VOCABULARY_SIZE == 22
    assert len(set(CHARACTERS)) == 22


def test_decode_undoes_encode_for_every_token() -> None:
    ids = list(range(VOCABULARY_SIZE))
    assert encode(decode(ids)) == ids


def test_encode_names_the_character_it_does_not_know() -> None:
    with pytest.raises(UnknownTextError, match="'x'"):
        encode("12x")


def test_a_prompt_shows_roles_contents_ends_and_the_assistant_at_last() -> None:
    messages = [Message("user", "?3"), Message("assistant", "3"), Message("tool", "=8")]
    assert decode(render(messages)) == "u?3.a3.t=8.a"


@pytest.mark.parametrize("sampled", ["7.", ".", "77.", "777", "ut?"])
def test_the_next_prompt_begins_with_the_last_prompt_and_the_reply(sampled: str) -> None:
    asked = [question(0, "7")]
    first, ids = render(asked), encode(sampled)
    following = render([*asked, Message("assistant", reply_text(ids)), question(1, "2")])
    end = [] if ids[-1] == END_OF_TURN_ID else [END_OF_TURN_ID]
    assert following == first + ids + end + encode("t=2.a")


@pytest.mark.parametrize("sampled", ["7.", ".", "777"])
def test_what_was_sampled_follows_from_text_and_finish_reason(sampled: str) -> None:
    ids = encode(sampled)
    reason = "stop" if ids[-1] == END_OF_TURN_ID else "length"
    assert reply_ids(reply_text(ids), reason) == ids


def test_a_message_cannot_hold_the_end_of_a_turn() -> None:
    with pytest.raises(UnknownTextError, match="ends a turn"):
        render([Message("user", "?1.")])


def test_a_role_without_a_marker_is_refused() -> None:
    with pytest.raises(UnknownTextError, match="'system'"):
        render([Message("system", "1")])


def test_digits_belong_to_the_group_and_the_seed() -> None:
    digits = [group_digits(5, group) for group in range(50)]
    assert digits == [group_digits(5, group) for group in range(50)]
    assert len(set(digits)) > 40
    assert digits != [group_digits(6, group) for group in range(50)]
    assert all(len(text) == TURNS and text.isdecimal() for text in digits)


@pytest.mark.parametrize(
    ("replies", "expected"), [(["1", "2", "3"], 1.0), (["1", "9", "33"], 1 / 3), (["1"], 1 / 3), ([], 0.0)]
)
def test_the_reward_is_the_share_of_right_turns(replies: list[str], expected: float) -> None:
    assert reward(replies, "123") == pytest.approx(expected)
