"""Rows from files and task generators; J3 and J4 name kinds of fault that users reported."""

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from algos.data import DataSpec, Row, load_rows
from algos.data.gsm8k import convert, main
from algos.errors import InputError
from algos.rewards import RewardManager, load_reward

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "algos" / "data" / "bundled" / "gsm8k.jsonl"


def verl_row(idx, ground_truth="7"):
    return {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"question {idx}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": "train", "index": idx, "notes": [{"a": 1, "b": None}]},
    }


def test_parquet_in_verls_format(tmp_path):
    pq.write_table(pa.Table.from_pylist([verl_row(idx) for idx in range(3)]), tmp_path / "a.parquet")
    first, *_, last = load_rows(str(tmp_path / "a.parquet"))
    assert first == Row(
        prompt=verl_row(0)["prompt"],
        data_source="sums",
        ground_truth="7",
        extra_info=verl_row(0)["extra_info"],
        index=0,
        ability="math",
    )
    assert last.index == 2


def test_j3_nested_columns_with_nulls_in_several_row_groups(tmp_path):
    rows = [verl_row(idx, None if idx % 2 else "7") for idx in range(7)]
    rows[3]["extra_info"] = None
    rows[4]["reward_model"] = None
    rows[5]["prompt"] = [{"role": "user", "content": "with a call", "tool_calls": [{"name": "f"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 4
    loaded = load_rows(str(tmp_path / "a.parquet"))
    assert [r.ground_truth for r in loaded] == ["7", None, "7", None, None, None, "7"]
    assert loaded[3].extra_info is None
    assert loaded[0].prompt == rows[0]["prompt"], "keys that only other rows have are absent, not null"
    assert loaded[5].prompt == rows[5]["prompt"]


def test_several_files_folders_and_patterns_count_on(tmp_path):
    for part in range(2):
        pq.write_table(pa.Table.from_pylist([verl_row(part)] * 2), tmp_path / f"part-{part}.parquet")
    (tmp_path / "more.jsonl").write_text(json.dumps(verl_row(2)) + "\n\n" + json.dumps(verl_row(3)) + "\n")
    expected = [0, 0, 1, 1]
    for spec in (str(tmp_path / "part-*.parquet"), [str(tmp_path / f"part-{part}.parquet") for part in range(2)]):
        rows = load_rows(spec)
        assert [r.extra_info["index"] for r in rows] == expected
        assert [r.index for r in rows] == [0, 1, 2, 3]
    assert [r.extra_info["index"] for r in load_rows(str(tmp_path))] == [2, 3, *expected]
    assert len(load_rows(DataSpec(files=(str(tmp_path),), max_rows=3))) == 3


def test_a_hugging_face_dataset_folder(tmp_path):
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list([verl_row(idx) for idx in range(2)])
    DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "both"))
    assert [r.prompt[1]["content"] for r in load_rows(str(tmp_path / "both" / "train"))] == ["question 0", "question 1"]
    with pytest.raises(
        InputError, match=r"holds several splits \(train, test\); name one of them, for example .*/train"
    ):
        load_rows(str(tmp_path / "both"))


def test_questions_and_answers_by_column_options():
    spec = DataSpec(
        files=(str(BUNDLED),),
        prompt_key="question",
        answer_key="answer",
        data_source="openai/gsm8k",
        system_prompt="You are good at sums.",
        prompt_suffix=" Write #### before the number.",
        max_rows=2,
    )
    first, second = load_rows(spec)
    assert [message["role"] for message in first.prompt] == ["system", "user"]
    assert first.prompt[0]["content"] == "You are good at sums."
    assert first.prompt[1]["content"].endswith("April and May? Write #### before the number.")
    assert (first.data_source, second.index) == ("openai/gsm8k", 1)
    manager = RewardManager(load_reward("gsm8k"))
    assert manager.score([first, second], ["#### 72", "#### 11"]).scores.tolist() == [1.0, 0.0]


def test_a_suffix_and_a_system_prompt_on_messages(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(verl_row(0)))
    spec = DataSpec(files=(str(tmp_path / "a.jsonl"),), system_prompt="New.", prompt_suffix="!")
    assert load_rows(spec)[0].prompt == [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "question 0!"},
    ]


def test_the_source_of_rows_without_one_is_the_files_name(tmp_path):
    (tmp_path / "mine.v2.jsonl").write_text('{"q": "1+1", "a": 2}')
    (loaded,) = load_rows(DataSpec(files=(str(tmp_path / "mine.v2.jsonl"),), prompt_key="q", answer_key="a"))
    assert (loaded.data_source, loaded.ground_truth, loaded.extra_info) == ("mine", 2, None)


def test_j4_missing_columns_are_named_at_once(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "p", "label": "l"}]), tmp_path / "a.parquet")
    with pytest.raises(InputError) as caught:
        load_rows(str(tmp_path / "a.parquet"))
    assert str(caught.value) == (
        f"{tmp_path / 'a.parquet'}: missing column 'reward_model.ground_truth'; needed are 'prompt' and "
        "'reward_model.ground_truth', the file has label, prompt. Rename it, or say which column to use: "
        "data.answer_key=NAME (now reward_model.ground_truth)"
    )
    assert load_rows(DataSpec(files=(str(tmp_path / "a.parquet"),), answer_key="label"))[0].ground_truth == "l"


def write(folder, name, content):
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "absent.parquet",
            None,
            r"'.*absent.parquet' does not exist \(seen from .*\); expected a .parquet file, a .jsonl",
        ),
        ("a.csv", b"x", r"has the ending '.csv'; expected a .parquet file"),
        ("a.parquet", b"not parquet", "a.parquet' is not a readable parquet file"),
        ("a.jsonl", b'{"prompt": "x"', r"line 1: expected one JSON object a line, got '\{\"prompt\": \"x\"'"),
        ("a.jsonl", b"\n[1]\n", "line 2: expected one JSON object a line, got a list"),
        ("a.jsonl", b"\xff\xfe", "can't be read as UTF-8 text"),
        ("a.jsonl", b"", "no rows in .*a.jsonl; expected at least one"),
        (
            "a.jsonl",
            b'{"prompt": 3, "reward_model": null}',
            "row 0: column 'prompt' must hold text or a list of messages",
        ),
        ("a.jsonl", b'{"prompt": [{"text": "x"}], "reward_model": null}', "with 'role' and 'content', got list"),
        (
            "a.jsonl",
            b'{"prompt": "x", "reward_model": null, "extra_info": 3}',
            "'extra_info' must hold an object or null",
        ),
    ],
)
def test_bad_files_are_named_with_what_was_expected(tmp_path, name, content, message):
    if content is not None:
        write(tmp_path, name, content)
    with pytest.raises(InputError, match=message) as caught:
        load_rows(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_an_empty_folder_and_no_file_at_all(tmp_path):
    with pytest.raises(InputError, match=r"has no data in it; expected a \.parquet file"):
        load_rows(str(tmp_path))
    with pytest.raises(InputError, match=r"no data file given; set data\.train_files"):
        load_rows([])


def test_null_keys_of_other_rows_are_absent_from_tools(tmp_path):
    tools = [[{"name": "f", "args": {"x": "int"}}], [{"name": "g", "args": {"y": "str"}}], None]
    rows = [{**verl_row(idx), "tools": tools[idx]} for idx in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [r.tools for r in load_rows(str(tmp_path / "a.parquet"))] == tools


def test_a_column_that_only_later_rows_have_is_there(tmp_path):
    lines = [{"prompt": "a", "reward_model": {}}, {"prompt": "b", "reward_model": {"ground_truth": "7"}}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert [r.ground_truth for r in load_rows(str(tmp_path / "a.jsonl"))] == [None, "7"]


ADDITION = (
    "reasoning_gym:basic_arithmetic:min_terms=2:max_terms=2:min_digits=1:max_digits=2:operators=+"
    ":allow_parentheses=false:size=6:seed=3"
)


def test_a_task_spec_makes_rows_and_survives_shell_and_yaml():
    assert shlex.quote(ADDITION) == ADDITION
    assert OmegaConf.from_dotlist([f"data.train_files={ADDITION}"]).data.train_files == ADDITION
    assert OmegaConf.from_dotlist([f"data.train_files=[{ADDITION},{ADDITION}]"]).data.train_files == [ADDITION] * 2
    rows = load_rows(DataSpec(files=(ADDITION,), prompt_template="What is {expression}? Answer with the number only."))
    assert len(rows) == 6
    for made in rows:
        left, right = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with the number only\.", made.prompt).groups()
        assert int(made.ground_truth) == int(left) + int(right)
        assert made.data_source == "reasoning_gym:basic_arithmetic"
    assert load_rows(ADDITION)[0].prompt.startswith("Calculate ")
    assert [r.prompt for r in load_rows(ADDITION)] == [r.prompt for r in load_rows(ADDITION)]
    assert len(load_rows(DataSpec(files=(ADDITION, ADDITION), max_rows=8))) == 8
    without_seed = ADDITION.removesuffix(":seed=3")
    assert [r.prompt for r in load_rows(without_seed)] == [r.prompt for r in load_rows(without_seed + ":seed=0")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:chain_sums", r"no task 'chain_sums' \(did you mean 'chain_sum'\?\); a spec looks like"),
        ("reasoning_gym:chain_sum:min_term=2", r"no such key 'min_term' \(did you mean 'min_terms'\?\)"),
        ("reasoning_gym:chain_sum:size", "expected key=value, got 'size'"),
        ("reasoning_gym:chain_sum:size=1:size=2", "'size' is given twice; keep one"),
        ("reasoning_gym:chain_sum:min_terms=0", "does not accept .*: min_terms must be positive"),
    ],
)
def test_bad_task_specs(spec, message):
    with pytest.raises(InputError, match=message):
        load_rows(spec)


def test_a_template_that_does_not_fit_names_the_columns():
    with pytest.raises(
        InputError, match=r"'What is \{expresion\}\?' does not fit \('expresion'\); the columns are .*expr"
    ):
        load_rows(DataSpec(files=(ADDITION,), prompt_template="What is {expresion}?"))


def test_bundled_rows_are_gsm8k_with_their_notice():
    rows = [json.loads(line) for line in BUNDLED.read_text().splitlines()]
    assert len(rows) == 24
    assert all(set(r) == {"question", "answer"} for r in rows)
    notice = (BUNDLED.parent / "NOTICE").read_text()
    assert "MIT License" in notice
    assert "Copyright (c) 2021 OpenAI" in notice


def test_the_converter_of_gsm8k(tmp_path, capsys):
    assert main([str(BUNDLED), str(tmp_path / "sub" / "train.parquet")]) == 0
    assert capsys.readouterr().out == f"wrote 24 rows to {tmp_path / 'sub' / 'train.parquet'}\n"
    rows = load_rows(str(tmp_path / "sub"))
    assert rows[0].prompt[0]["content"].startswith("Natalia sold clips")
    assert rows[0].prompt[0]["content"].endswith('write the final number after "####".')
    assert (rows[0].ground_truth, rows[0].ability, rows[0].data_source) == ("72", "math", "openai/gsm8k")
    answers = [r.extra_info["answer"] for r in rows]
    assert load_reward("gsm8k:method=strict") is not None
    assert RewardManager(load_reward("gsm8k:method=strict")).score(rows, answers).scores.tolist() == [1.0] * 24
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["train.parquet"]


def test_the_converter_names_a_row_that_is_none(tmp_path, capsys):
    write(tmp_path, "x.jsonl", b'{"question": "q", "answer": "none"}')
    with pytest.raises(InputError, match=r"row 0: expected 'question' and an 'answer' that ends with '#### NUMBER'"):
        convert(tmp_path / "x.jsonl", tmp_path / "x.parquet")
    assert main([str(tmp_path / "x.jsonl"), str(tmp_path / "x.parquet")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "x.parquet").exists()
