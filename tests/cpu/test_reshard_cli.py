"""The simulator against sums done by hand, and the command line from its arguments to its output."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.predict_transition import SETUPS, predict
from reshard import DType, Layout, Mesh, ModelSpec, Rules, TensorSpec, Topology, make_plan
from reshard.cli import main
from reshard.errors import PlanError
from reshard.simulator import HARDWARE, Hardware, gather_seconds, simulate, traffic
from reshard.spec import ModelTensor
from reshard.spec_transformers import spec_from_transformers

ROUND = Hardware(
    "round",
    "made up",
    10**12,
    memory_bandwidth=1000.0,
    nvlink_bandwidth=100.0,
    network_bandwidth=10.0,
    latency_s=1.0,
    efficiency=1.0,
)


def toy(num_bytes: int) -> ModelSpec:
    spec = TensorSpec("layers.0.w", (num_bytes,), DType.UINT8)
    return ModelSpec("toy", "made up", 1, 1, 1, 1, (ModelTensor(spec, "rows", layer=0),), {})


def test_seconds_are_those_of_the_busiest_link_hop_by_hop():
    """800 bytes in two shards on one node, whole on the other node's two ranks: 800 enter at 10 B/s, then fan out."""
    model = toy(800)
    source = Layout.from_parallel(model, Mesh({"tp": 2}))
    destination = Layout.from_parallel(model, Mesh({"dp": 2}, ranks=[2, 3]))
    plan = make_plan(source, destination, topology=Topology.regular(range(4), ranks_per_node=2))
    result = simulate(plan, ROUND)
    assert result.bound_by == ("network", "nvlink")
    assert result.hop_seconds[0] == 800 / 10 + 1.0, "one peer each"
    assert result.hop_seconds[1] == 400 / 100 + 1.0
    assert (result.train_bytes, result.generate_bytes, result.transition_bytes) == (400, 800, 800)
    found = traffic(plan)
    assert found.network.tolist() == [0, 0, 400, 400]
    assert found.nvlink.tolist() == [0, 0, 400, 400]


def test_shared_bytes_count_once_and_local_copies_use_memory():
    model = toy(800)
    plan = make_plan(Layout.from_parallel(model, Mesh({"tp": 2})), Layout.from_parallel(model, Mesh({"dp": 2})))
    result = simulate(plan, ROUND)
    assert result.bound_by == ("nvlink",)
    assert result.seconds == 400 / 100 + 1.0
    assert result.transition_bytes == 400 + 800 - 400
    slow = simulate(plan, Hardware("slow", "made up", 1, 1.0, 100.0, 10.0, 0.0, 1.0))
    assert slow.bound_by == ("memory",) and slow.seconds == 2 * 400
    rounds = simulate(plan, ROUND, staging_bytes=100)
    assert (rounds.rounds, rounds.seconds) == (4, result.seconds + 3.0)


def test_partial_plans_are_not_simulated():
    model = toy(8)
    layouts = Layout.from_parallel(model, Mesh({"tp": 2})), Layout.from_parallel(model, Mesh({"dp": 2}))
    with pytest.raises(PlanError, match="simulate the plan of all ranks"):
        simulate(make_plan(*layouts, ranks=[0]), ROUND)


def test_full_gather_is_bound_by_the_network_between_nodes():
    inside = gather_seconds(800, num_ranks=4, ranks_per_node=8, hardware=ROUND)
    assert inside == 600 / 100 + 3.0
    assert gather_seconds(800, num_ranks=16, ranks_per_node=8, hardware=ROUND) == 400 / 10 + 15.0


def test_every_hardware_says_where_its_numbers_are_from():
    assert set(HARDWARE) == {"a100", "h100", "h200", "gb200"}
    assert all("data sheet" in hardware.origin for hardware in HARDWARE.values())


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_the_papers_transition_is_predicted_from_a_plan_that_meets_its_formula(num_ranks):
    """7B, 1-8 to 1-2 on A100: three eighths of 13.5 GB arrive at every rank, but for the padding of the vocabulary."""
    row = predict(SETUPS[0], num_ranks)
    assert row["micro_dp_size"] == 4
    assert row["received_gb_formula"]["zero_redundancy"] == 5.05
    assert row["received_gb_plan"] == pytest.approx(5.05, rel=3e-3)
    assert row["received_gb_formula"]["vanilla"] == 11.79
    assert row["seconds"]["zero_redundancy"] < row["seconds"]["vanilla"] <= row["seconds"]["full_gather"]
    sizes = [predict(SETUPS[0], num_ranks, t_g=t_g)["seconds"]["zero_redundancy"] for t_g in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 20, "t_g = t copies locally"


def test_the_page_on_planning_shows_what_its_commands_print(capsys):
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    blocks = re.findall(r"```console\n\$ python -m reshard (.*)\n((?:.*\n)*?)```", text)
    assert len(blocks) == 3
    for command, output in blocks:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.rstrip() == output.rstrip()


@pytest.fixture
def config(tmp_path):
    fields = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 256,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_diff_answers_what_a_smaller_tp_would_cost(capsys, config):
    code, out, _ = run(
        capsys, "diff", "--model", config, "--train", "fsdp=16", "--gen", "tp=4", "--gen", "tp=2", "--format", "json"
    )
    before, after, change = json.loads(out)["rows"]
    assert code == 0
    assert (before["gen"], after["gen"], change["gen"]) == ("tp=4", "tp=2", "tp=4 -> tp=2")
    assert change["received_per_rank"] == after["received_per_rank"] - before["received_per_rank"] > 0


def test_sweep_shows_every_size_that_fits_and_says_why_others_do_not(capsys, config):
    code, out, _ = run(capsys, "sweep", "--model", config, "--train", "pp=2,tp=2,dp=4")
    rows = [line.split()[0] for line in out.splitlines()[2:] if line.strip().startswith("tp=")]
    assert code == 0
    assert rows == ["tp=1", "tp=2", "tp=4", "tp=8"]
    assert "left out: tp=16: " in out


@pytest.mark.parametrize("grouping", ["zero_redundancy", "vanilla"])
def test_plan_and_explain_and_simulate_agree(capsys, config, grouping):
    common = (
        "--model",
        config,
        "--train",
        "tp=4,dp=2,ep=4",
        "--gen",
        "tp=2,ep=2",
        "--style",
        "megatron",
        "--grouping",
        grouping,
    )
    _, text, _ = run(capsys, "plan", *common)
    _, account, _ = run(capsys, "explain", *common)
    _, out, _ = run(capsys, "plan", *common, "--format", "json")
    fields = json.loads(out)
    assert f"Plan {fields['digest'][:12]}" in text and "model.layers.1.mlp.experts.7.up_proj.weight" in account
    for rank in fields["ranks"]:
        floor = rank["needed_bytes"] - rank["held_bytes"]
        assert rank["received_bytes"] == floor == rank["nvlink_bytes"] + rank["network_bytes"]
        assert sum(row[rank["rank"]] for row in fields["sent_bytes"]) == floor
    _, out, _ = run(capsys, "simulate", *common, "--format", "json")
    assert json.loads(out)["seconds"] == fields["seconds"]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(config, tmp_path):
    page = tmp_path / "plan.html"
    arguments = ["--model", config, "--train", "tp=4", "--gen", "tp=2", "--format", "html", "--out", str(page)]
    assert main(["plan", *arguments]) == 0
    tags = Tags()
    tags.feed(page.read_text())
    assert tags.open == [] and tags.links == []
    assert tags.seen["svg"] == 3
    assert tags.seen["rect"] == 4 * 4 + 4 * 4 + 3


def test_the_picture_is_a_png(config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--model", config, "--train", "tp=4", "--gen", "tp=2", "--format", "png"]
    assert main(["plan", *arguments, "--out", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, "plan", *arguments)
    assert (code, "add --out plan.png" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--model", "gpt-5", "--train", "tp=2", "--gen", "tp=1"), "reshard plan: no model 'gpt-5'"),
        (("plan", "--model", "llama3-8b", "--train", "tp", "--gen", "tp=1"), "expected distinct 'axis=size' parts"),
        (
            ("plan", "--model", "llama3-8b", "--train", "cp=2", "--gen", "tp=1"),
            "training has no axis cp: use pp, dp, fsdp",
        ),
        (("plan", "--model", "llama3-8b", "--train", "tp=2", "--gen", "dp=2,sp=1"), "generation has no axis sp"),
        (("plan", "--model", "llama3-8b", "--train", "tp=2"), "expected --gen once, got it 0 times"),
        (("plan", "--model", "llama3-8b", "--train", "tp=3", "--gen", "tp=1"), "does not divide among axis tp=3"),
        (("sweep", "--model", "llama3-8b", "--train", "tp=2", "--format", "html"), "sweep prints text or json"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_families_equal_the_modules_of_transformers(kind, tied):
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    ours, theirs = ModelSpec.from_config(config.to_dict()), spec_from_transformers(config)
    assert {t.spec.name: (t.spec.shape, t.cut, t.layer, t.head_dim, t.is_output) for t in ours.tensors} == {
        t.spec.name: (t.spec.shape, t.cut, t.layer, t.head_dim, t.is_output) for t in theirs.tensors
    }
    assert dict(ours.ties) == dict(theirs.ties)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite", "deepseek-v2"])
def test_sparse_families_list_the_tensors_that_transformers_saves(name):
    import transformers

    from reshard.spec import _bundle

    fields = json.loads(_bundle()[name])
    small = fields | {"num_hidden_layers": 4}
    theirs = spec_from_transformers(transformers.AutoConfig.for_model(**small))
    ours = ModelSpec.from_config(small)
    ours, theirs = ({t.spec.name: t for t in spec.tensors} for spec in (ours, theirs))
    differ = {
        tensor: (ours[tensor].spec.dtype.value, t.spec.dtype.value) for tensor, t in theirs.items() if t != ours[tensor]
    }
    sparse = range(fields.get("first_k_dense_replace", 4), 4)
    router = {f"model.layers.{layer}.mlp.gate.weight": ("bfloat16", "float32") for layer in sparse}
    assert ours.keys() == theirs.keys()
    # Published in bfloat16; newer Transformers keep it in float32 when training.
    assert differ in ({}, router)
    bias = [t.spec.dtype.value for tensor, t in theirs.items() if tensor.endswith("e_score_correction_bias")]
    assert bias == (["float32"] if name == "deepseek-v3" else [])


def test_a_spec_from_transformers_can_be_laid_out():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gemma2",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    model = spec_from_transformers(config)
    train = Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="megatron"))
    plan = make_plan(train, Layout.from_parallel(model, Mesh({"tp": 2}), rules=Rules(style="vllm")))
    assert plan.certificate.floor_bytes(0) == plan.received_bytes(0)
