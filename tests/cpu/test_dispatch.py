"""Dispatch: who gets which rows, and how the answers are joined."""

import pytest
import torch
from tensordict import TensorDict

from hybrid.dispatch import Dispatch, RegisteredMethod, concatenate, gather, part_of, register, scatter
from hybrid.errors import DispatchError
from reshard.mesh import Mesh


def rows(*values: float) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, batch_size=[len(values)])


def method(dispatch: Dispatch, **options: object) -> RegisteredMethod:
    def step(self: object, batch: object = None, other: object = None) -> None:
        return None

    return register(dispatch=dispatch, **options)(step)


def spread(registered: RegisteredMethod, mesh: Mesh, generation_mesh: Mesh | None = None, **arguments: object) -> list:
    scattered = scatter(registered, arguments, mesh=mesh, generation_mesh=generation_mesh or mesh)
    return [[float(x) for x in part["batch"]["x"]] for part in scattered.arguments]


def test_dp_cuts_over_every_rank() -> None:
    assert spread(method(Dispatch.DP), Mesh({"dp": 2}), batch=rows(0, 1, 2, 3)) == [[0, 1], [2, 3]]
    assert spread(method(Dispatch.DP), Mesh({"dp": 1, "tp": 2}), batch=rows(0, 1)) == [[0], [1]]


def test_three_d_gives_peers_the_same_rows_and_collects_from_the_last_stage() -> None:
    mesh = Mesh({"pp": 2, "dp": 2, "tp": 2})
    registered = method(Dispatch.THREE_D)
    first, second = [0.0, 1.0], [2.0, 3.0]
    assert spread(registered, mesh, batch=rows(0, 1, 2, 3)) == [first, first, second, second] * 2
    scattered = scatter(registered, {"batch": rows(0, 1, 2, 3)}, mesh=mesh, generation_mesh=mesh)
    assert scattered.collect == (mesh.rank(pp=1, dp=0, tp=0), mesh.rank(pp=1, dp=1, tp=0)) == (4, 6)


def test_three_d_follows_a_permuted_mesh() -> None:
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=(0, 2, 1, 3))
    registered = method(Dispatch.THREE_D)
    assert spread(registered, mesh, batch=rows(5, 6)) == [[5], [6], [5], [6]]
    assert scatter(registered, {"batch": rows(5, 6)}, mesh=mesh, generation_mesh=mesh).collect == (0, 1)


def test_micro_dp_cuts_each_dp_part_further() -> None:
    """Training 1-4-2 to generation 1-2-2-2: generation TP groups [0,2][1,3][4,6][5,7], micro-DP [0,1][2,3]..."""
    training = Mesh({"pp": 1, "dp": 2, "tp": 4})
    generation = Mesh({"pp": 1, "dp": 2, "micro_dp": 2, "tp": 2}, ranks=(0, 2, 1, 3, 4, 6, 5, 7))
    batch = rows(*range(8))
    coarse = spread(method(Dispatch.THREE_D), training, generation, batch=batch)
    fine = spread(method(Dispatch.MICRO_DP), training, generation, batch=batch)
    assert fine == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]
    for rank in range(8):
        assert set(fine[rank]) < set(coarse[rank])
    collect = scatter(method(Dispatch.MICRO_DP), {"batch": batch}, mesh=training, generation_mesh=generation).collect
    assert collect == (0, 1, 4, 5)
    parts = [part_of(Dispatch.MICRO_DP, rank, mesh=training, generation_mesh=generation) for rank in range(8)]
    assert parts == [0, 1, 0, 1, 2, 3, 2, 3]
    with pytest.raises(DispatchError, match="ALL cuts nothing"):
        part_of(Dispatch.ALL, 0, mesh=training, generation_mesh=generation)


def test_one_to_all_and_all() -> None:
    mesh = Mesh({"dp": 3})
    same = scatter(method(Dispatch.ONE_TO_ALL), {"batch": 5}, mesh=mesh, generation_mesh=mesh)
    assert [dict(part) for part in same.arguments] == [{"batch": 5}] * 3
    each = scatter(method(Dispatch.ALL), {"batch": ["a", "b", "c"]}, mesh=mesh, generation_mesh=mesh)
    assert [part["batch"] for part in each.arguments] == ["a", "b", "c"]
    with pytest.raises(DispatchError, match="ALL needs a list of 3 entries for 'batch', got 2 entries"):
        scatter(method(Dispatch.ALL), {"batch": ["a", "b"]}, mesh=mesh, generation_mesh=mesh)
    with pytest.raises(DispatchError, match="for 'batch', got int"):
        scatter(method(Dispatch.ALL), {"batch": 7}, mesh=mesh, generation_mesh=mesh)


def test_named_lists_are_cut_beside_batches_and_the_rest_is_repeated() -> None:
    registered = method(Dispatch.DP, split=("other",))
    mesh = Mesh({"dp": 2})
    scattered = scatter(
        registered, {"batch": rows(0, 1, 2, 3), "other": ["a", "b", "c", "d"]}, mesh=mesh, generation_mesh=mesh
    )
    assert [part["other"] for part in scattered.arguments] == [["a", "b"], ["c", "d"]]
    repeated = scatter(method(Dispatch.DP), {"batch": rows(0, 1), "other": ["a"]}, mesh=mesh, generation_mesh=mesh)
    assert [part["other"] for part in repeated.arguments] == [["a"], ["a"]]


def test_uneven_rows_are_refused_by_default() -> None:
    mesh = Mesh({"dp": 2})
    with pytest.raises(DispatchError, match=r"3 rows don't divide into 2 parts \(DP\); send a multiple of 2"):
        spread(method(Dispatch.DP), mesh, batch=rows(0, 1, 2))
    with pytest.raises(DispatchError, match=r"differ in their rows: \{'batch': 2, 'other': 4\}"):
        spread(method(Dispatch.DP), mesh, batch=rows(0, 1), other=rows(0, 1, 2, 3))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("copies", [1, 3])
def test_padding_repeats_the_last_row_and_is_dropped_from_the_result(num_rows: int, copies: int) -> None:
    mesh = Mesh({"dp": 4})
    registered = method(Dispatch.DP, uneven="pad", split=("other",))
    batch, other = rows(*range(num_rows)), [str(i) for i in range(num_rows)]
    scattered = scatter(registered, {"batch": batch, "other": other}, mesh=mesh, generation_mesh=mesh)
    sizes = [len(part["other"]) for part in scattered.arguments]
    assert len(set(sizes)) == 1
    assert sum(sizes) - scattered.num_padding == num_rows
    sent = torch.cat([part["batch"]["x"] for part in scattered.arguments])
    assert sent.tolist() == [float(min(i, num_rows - 1)) for i in range(num_rows + scattered.num_padding)]
    values = {
        rank: TensorDict({"y": part["batch"]["x"].repeat_interleave(copies)}, batch_size=[len(part["other"]) * copies])
        for rank, part in enumerate(scattered.arguments)
    }
    joined = gather(registered, scattered, values)
    assert joined["y"].tolist() == [float(i) for i in range(num_rows) for _ in range(copies)]


def test_padding_that_cannot_be_dropped_is_an_error() -> None:
    mesh = Mesh({"dp": 2})
    registered = method(Dispatch.DP, uneven="pad")
    scattered = scatter(registered, {"batch": rows(0, 1, 2)}, mesh=mesh, generation_mesh=mesh)
    with pytest.raises(DispatchError, match="4 rows were sent, 1 of them padding, and 3 came back"):
        gather(registered, scattered, {0: rows(0, 1), 1: rows(2)})


def test_results_that_are_no_batches_come_as_a_list_per_part() -> None:
    mesh = Mesh({"pp": 2, "dp": 2})
    registered = method(Dispatch.THREE_D)
    scattered = scatter(registered, {"batch": rows(0, 1)}, mesh=mesh, generation_mesh=mesh)
    assert gather(registered, scattered, {2: {"loss": 1.0}, 3: {"loss": 2.0}}) == [{"loss": 1.0}, {"loss": 2.0}]


def test_samples_of_different_widths_are_joined_and_other_batches_must_agree() -> None:
    from hybrid.batch import make_batch

    parts = [
        make_batch(
            prompts=[[1] * width], responses=[[2] * width], log_probs=[[-1.0] * width], group_ids=[0],
            truncated=[False], version=0,
        )
        for width in (2, 4)
    ]  # fmt: skip
    joined = concatenate(parts)
    assert joined["response_ids"].tolist() == [[2, 2, 0, 0], [2, 2, 2, 2]]
    with pytest.raises(DispatchError, match=r"parts don't join: one has \{'x'"):
        concatenate([rows(1), TensorDict({"x": torch.zeros(1, 2)}, batch_size=[1])])


def test_registration_refuses_what_it_cannot_dispatch() -> None:
    def loose(self: object, *batches: object) -> None:
        return None

    def plain(self: object, batch: object) -> None:
        return None

    with pytest.raises(TypeError, match=r"named parameters only, not \['batches'\]"):
        register(dispatch=Dispatch.DP)(loose)
    with pytest.raises(TypeError, match=r"split names \['prompts'\], but its parameters are \['self', 'batch'\]"):
        register(dispatch=Dispatch.DP, split=("prompts",))(plain)
    with pytest.raises(TypeError, match="ONE_TO_ALL cuts nothing, so drop split and uneven"):
        register(dispatch=Dispatch.ONE_TO_ALL, uneven="pad")(plain)
    with pytest.raises(DispatchError, match="expected a TensorDict, list, tuple or tensor to cut, got int"):
        mesh = Mesh({"dp": 1})
        scatter(method(Dispatch.DP, split=("batch",)), {"batch": 3}, mesh=mesh, generation_mesh=mesh)
