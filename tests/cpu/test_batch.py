import pytest
import torch

from hybrid.batch import (
    FIELDS,
    concatenate,
    length_mask,
    loss_mask,
    make_batch,
    pad_rows,
    prompt_mask,
    response_mask,
    select,
    trim,
    validate,
)


def batch(prompts=((1, 2, 3), (4,)), responses=((5, 0), (0, 0, 7)), **changes):
    fields = {
        "prompts": prompts,
        "responses": responses,
        "log_probs": [[-0.5] * len(response) for response in responses],
        "group_ids": list(range(len(prompts))),
        "truncated": [False] * len(prompts),
        "version": 3,
        "pad_token_id": 0,
    }
    return make_batch(**{**fields, **changes})


def test_fields_have_the_documented_shapes():
    made = batch()
    assert made.batch_size == torch.Size([2])
    assert made["prompt_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert made["response_ids"].tolist() == [[5, 0, 0], [0, 0, 7]]
    assert made["prompt_len"].tolist() == [3, 1] and made["response_len"].tolist() == [2, 3]
    assert made["version"].tolist() == [3, 3]
    assert made["rollout_log_probs"].tolist() == [[-0.5, -0.5, 0.0], [-0.5] * 3]
    assert {made[name].dtype for name in ("prompt_len", "group_id", "version")} == {torch.int64}


def test_masks_come_from_lengths_even_where_ids_equal_the_padding():
    made = batch()
    assert response_mask(made).tolist() == [[True, True, False], [True, True, True]]
    assert prompt_mask(made).tolist() == [[True, True, True], [True, False, False]]
    assert loss_mask(made).equal(response_mask(made))
    made["loss_mask"] = torch.tensor([[True, True, True], [False, False, False]])
    assert loss_mask(made).tolist() == [[True, True, False], [False] * 3]
    assert length_mask(torch.tensor([0, 2]), 2).tolist() == [[False, False], [True, True]]


def test_pad_rows_of_nothing():
    assert pad_rows([], dtype=torch.int64, value=0).shape == (0, 0)
    assert pad_rows([[], [1.5]], dtype=torch.float32, value=-1).tolist() == [[-1.0], [1.5]]


def test_concatenate_pads_to_the_widest():
    first, second = batch(), batch(prompts=[(9, 9, 9, 9, 9)], responses=[(8,)])
    for one in (first, second):
        one["advantages"] = torch.ones_like(one["rollout_log_probs"])
        one["score_parts"] = torch.ones(len(one), 7)
        one["prompt_weights"] = torch.ones(one["prompt_ids"].shape)
    joined = concatenate([first, second])
    assert joined["prompt_ids"].shape == (3, 5) and joined["response_ids"].shape == (3, 3)
    assert joined["advantages"].tolist()[2] == [1.0, 0.0, 0.0]
    assert joined["prompt_weights"].tolist()[1] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert joined["score_parts"].shape == (3, 7)
    assert validate(joined)["response_len"].tolist() == [2, 3, 1]


def test_concatenate_refuses_what_does_not_belong_together():
    odd = batch()
    odd["scores"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"batch 1 .* they differ in \['scores'\]"):
        concatenate([batch(), odd])
    with pytest.raises(ValueError, match="at least one batch"):
        concatenate([])


def test_select_takes_rows_in_order_and_trims():
    made = batch()
    one = select(made, [0])
    assert one["response_ids"].tolist() == [[5, 0]]
    assert select(made, [1, 0, 1])["group_id"].tolist() == [1, 0, 1]
    assert select(made, [1, 0, 1])["prompt_ids"].shape == (3, 3)
    assert select(made, torch.tensor([False, True]))["prompt_ids"].tolist() == [[4]]
    assert select(made, [])["response_ids"].shape == (0, 0)


def test_trim_cuts_padding_only():
    wide = concatenate([batch(), batch(prompts=[(9,) * 6], responses=[(8,) * 9])])[:2]
    assert wide["response_ids"].shape == (2, 9)
    assert trim(wide)["response_ids"].tolist() == batch()["response_ids"].tolist()


@pytest.mark.parametrize("name", [name for name in FIELDS if name in batch()])
def test_a_missing_field_is_named(name):
    with pytest.raises(ValueError, match=rf"lacks {name}; docs/batch\.md"):
        validate(batch().exclude(name))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantages", torch.zeros(2, 4), r"advantages to be torch\.float32 of shape \[2, 3\], but got .*\[2, 4\]"),
        ("scores", torch.zeros(2, dtype=torch.float64), r"scores to be torch\.float32.*torch\.float64"),
        ("prompt_len", torch.tensor([0, 1]), "prompt_len between 1 and 3, but row 0 has 0"),
        ("response_len", torch.tensor([9, 9]), r"between 0 and 3, but row 0 has 9 \(2 rows are wrong\)"),
    ],
)
def test_a_wrong_field_is_named(name, value, message):
    wrong = batch()
    wrong[name] = value
    with pytest.raises(ValueError, match=message):
        validate(wrong)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="Expected 2 group_ids, one for each prompt, but got 1"):
        batch(group_ids=[0])
    with pytest.raises(ValueError, match="prompt_len between 1 and 1, but row 0 has 0"):
        batch(prompts=[(), (4,)])


def test_log_probs_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"row 1 has 3 response tokens and 2 log-probs"):
        batch(log_probs=[[0.0, 0.0], [0.0, 0.0]])
