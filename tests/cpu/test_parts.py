"""A transition by parts: how tensors are cut, states, and pushes from within a real backward pass."""

import pytest
import torch

import reshard
from reshard.errors import LayoutError, PlanError, StateError
from reshard.overlap import BackwardPush
from reshard.parts import Parts
from reshard.resharder import Resharder, State

NAMES = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.7.w1.weight",
    "model.layers.0.norm.weight",
    "model.layers.10.norm.weight",
    "model.layers.2.norm.weight",
    "model.norm.weight",
]


def test_layers_come_in_the_order_of_generation():
    parts = Parts.by_layer(NAMES)
    assert parts.names == (
        ("model.embed_tokens.weight",),
        ("model.layers.0.mlp.experts.7.w1.weight", "model.layers.0.norm.weight"),
        ("model.layers.2.norm.weight",),
        ("model.layers.10.norm.weight",),
        ("lm_head.weight", "model.norm.weight"),
    )
    assert parts.numbers()["model.layers.10.norm.weight"] == 3
    assert parts.digest != Parts.whole(NAMES).digest


def test_patterns_that_leave_out_share_or_miss_tensors_are_refused_by_name():
    assert Parts.of(NAMES, [["*embed*", "*head*"], ["*layers*", "model.norm*"]]).num == 2
    with pytest.raises(PlanError, match=r"parts: 'model.norm.weight' are in no part"):
        Parts.of(NAMES, [["*embed*", "*head*"], ["*layers*"]])
    with pytest.raises(PlanError, match=r"one part, but there are 'model.norm.weight in \[0, 1\]'"):
        Parts.of(NAMES, [["*"], ["model.norm.*"]])
    with pytest.raises(PlanError, match=r"parts: '\*.layers.3.\*' fit no tensor of the Plan \(it has 'lm_head.weight'"):
        Parts.of(NAMES, [["*"], ["*.layers.3.*"]])


class Tower(torch.nn.Module):
    """Embedding, three layers, a frozen scale and a head tied to nothing; layer 1 is left out of some passes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(16), requires_grad=False)
        self.head = torch.nn.Linear(16, 11, bias=False)

    def forward(self, tokens: torch.Tensor, skip: int = -1) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        for index, layer in enumerate(self.layers):
            hidden = hidden if index == skip else hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def bind(model: torch.nn.Module, **options) -> tuple[Resharder, dict[str, torch.Tensor]]:
    source = dict(model.named_parameters())
    destination = {name: torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for name, p in source.items()}
    plan = reshard.make_plan(reshard.Layout.from_tensors(source), reshard.Layout.from_tensors(destination))
    return Resharder(plan, source, destination, **options), destination


def test_states_of_parts():
    resharder, destination = bind(Tower(), parts=[["head.*", "scale"], ["embed.*", "layers.*"]])
    with resharder:
        with pytest.raises(StateError, match="no transition is in flight"):
            resharder.wait_part(0)
        resharder.begin(version=3)
        with pytest.raises(StateError, match="a transition is in flight"):
            resharder.begin()
        resharder.push(1)
        resharder.wait_part(1)
        assert destination["embed.weight"].any() and not destination["head.weight"].any()
        with pytest.raises(StateError, match="never been filled"):
            resharder.require_complete()
        with pytest.raises(ValueError, match="part 2 of 2: expected 0 to 1"):
            resharder.push(2)
        stats = resharder.wait()
        assert destination["head.weight"].any() and resharder.state is State.GENERATING
        assert (stats.num_parts, stats.num_launches, resharder.version) == (2, 2, 3)
    with pytest.raises(PlanError, match="expected 'layers' or a list of lists of names, got 'layer'"):
        bind(Tower(), parts="layer")
    with pytest.raises(PlanError, match="graph=True needs tensors on a GPU"):
        bind(Tower(), graph=True)


@pytest.mark.parametrize("skip", [-1, 1])
def test_an_optimizer_in_backward_pushes_each_part_as_it_becomes_final(skip):
    """Two steps, each of two accumulated passes; equal to plain AdamW and a whole transition, to the bit."""
    torch.manual_seed(0)
    model, reference = Tower(), Tower()
    reference.load_state_dict(model.state_dict())
    resharder, destination = bind(model, parts="layers")
    expected_resharder, expected = bind(reference)
    steps = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters() if p.requires_grad}
    whole = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    pushed: list[int] = []
    push = resharder.push
    resharder.push = lambda part, **options: (pushed.append(part), push(part, **options))
    with resharder, BackwardPush(resharder, dict(model.named_parameters()), update=lambda p: steps[p].step()) as hooks:
        for step in (1, 2):
            tokens = torch.arange(8) * step % 11
            before = model.embed.weight.detach().clone()
            model(tokens).sum().backward()
            assert torch.equal(before, model.embed.weight), "an update outside a transition"
            hooks.begin()
            model((tokens + 3) % 11, skip).square().sum().backward()
            assert resharder.state is State.TRANSITION
            resharder.wait_part(0)
            assert torch.equal(destination["embed.weight"], model.embed.weight.bfloat16())
            resharder.wait()
            reference(tokens).sum().backward()
            reference((tokens + 3) % 11, skip).square().sum().backward()
            for parameter in reference.layers[skip].parameters() if skip >= 0 else ():
                parameter.grad = None
            whole.step()
            expected_resharder.run()
            for name, tensor in expected.items():
                assert torch.equal(destination[name], tensor), name
                assert torch.equal(destination[name], model.get_parameter(name).bfloat16()), name
            resharder.verify()
            model.zero_grad()
            reference.zero_grad()
    order = [4, 3, 2, 1, 0] if skip < 0 else [4, 3, 1, 0, 2]
    assert pushed == order * 2


def test_hooks_need_every_tensor_that_travels():
    model = Tower()
    resharder, _ = bind(model, parts="layers")
    parameters = dict(model.named_parameters())
    del parameters["layers.1.bias"]
    with pytest.raises(LayoutError, match=r"1 storages of the source are no parameters, first 'layers.1.bias'"):
        BackwardPush(resharder, parameters, update=lambda p: None)
