"""A model with DTensor parameters: state dicts, files, copies, checkpoints for other numbers of ranks, and its construction."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everybit as eb
from everybit_torch import TorchOptimizer, export_weights
from everybit_torch.sharded.checkpoint import load_sharded, load_sharded_into, save_sharded
from everybit_torch.sharded.construction.reading import Request
from everybit_torch.sharded.construction.sources import FromCheckpoint, FromInitializers, FromSafetensors, FromStateDict
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from everybit_torch.sharded.tensor_parallel import parts_of
from everybit_torch.sharded.whole_tensors import elements_of, view_of
from tests.support.block_formats import Int8Blocks
from tests.support.parts import BY_COLUMNS, BY_ROWS, SHAPES, Layer, Layers, Mesh, cut, trained
from tests.support.ranks import run

MAIN = eb.Grads(main="float32", comm="float32")
LOW = torch.bfloat16
BLOCKS = eb.Policy(params=eb.Split(16), momentum=Int8Blocks(4), variance=eb.Nearest("float32"), grads=MAIN)
POLICIES: dict[str, eb.Policy | None] = {
    "FP32": None,
    "EXACT_BF16": dataclasses.replace(eb.policies.EXACT_BF16, grads=MAIN),
    "LEAN_BF16": dataclasses.replace(eb.policies.LEAN_BF16, grads=MAIN),
    "blocks": BLOCKS,
}
ALIGNED = {"rows": (4, 3, 4), "columns": (3, 8), "few": (2, 8), "copy": (3,), "plain": (5,)}
"""Of which parts along the first dimension are whole blocks of four."""


def transform(lr: float = 1e-2) -> Any:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(lr))


def model_of(policy: str) -> Layers:
    dtype = torch.float32 if policy == "FP32" else LOW
    return Layers(dtype, shapes=ALIGNED if policy == "blocks" else SHAPES)


def expected(policy: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process: the model's state dict, and the weights with all of their bits."""
    model = model_of(policy)
    given = POLICIES[policy] and dataclasses.replace(POLICIES[policy], grads=eb.Grads(main="float32"))  # type: ignore[type-var]
    optimizer = TorchOptimizer(model.named_parameters(), lambda lr: transform(lr), lr=1e-2, policy=given, seed=5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            model(step, rank).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2)
        optimizer.step()
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    wide = export_weights(model, optimizer)
    return state, {name: x if "frozen" in name else wide[name] for name, x in state.items()}


def stepper_of(
    model: nn.Module, policy: str, mesh: Mesh | None, strategy: Any = "optim_grads_params", lr: float = 1e-2, **more: Any
) -> FlatStepper:  # fmt: skip
    arguments: dict[str, Any] = {"policy": POLICIES[policy], "units": [Layer], "seed": 5} | more
    return FlatStepper(
        model, transform(lr), mesh=None if mesh is None else mesh["data"], strategy=strategy, **arguments
    )


def by_name(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the order of the names."""
    return dict(sorted(found.items()))


def differing(found: dict[str, Any], wanted: dict[str, Tensor]) -> list[str]:
    """Names of what has other bits, other dtypes, or is no plain tensor."""
    if list(found) != list(wanted):
        return [f"names {list(found)}"]
    return [
        name
        for name, x in wanted.items()
        if type(found[name]) is not Tensor or found[name].dtype is not x.dtype or not torch.equal(found[name], x)
    ]


# -- everyday access --------------------------------------------------------------------------------------------------------------------


def everyday(
    data: int, tensor: int, strategies: tuple[Strategy, ...], wanted: tuple[dict[str, Tensor], dict[str, Tensor]], path: Path
) -> list[str]:  # fmt: skip
    wrong: list[str] = []
    mesh, (state, wide) = Mesh(data, tensor), wanted
    rank = dist.get_rank()
    for strategy in strategies:
        here = path / f"{data} {tensor} {strategy}"
        model = model_of("EXACT_BF16")
        cut(model, mesh["tensor"], BY_COLUMNS)
        stepper = stepper_of(model, "EXACT_BF16", mesh, strategy)
        trained(model, stepper, mesh.place("data"), data, range(2))

        def check(what: str, found: dict[str, Any], expect: dict[str, Tensor] = state, at: str = strategy) -> None:
            wrong.extend(f"{at}, {what}: {name}" for name in differing(found, expect))

        check("full", stepper.model_state_dict("full"))
        check("rank0", stepper.model_state_dict(), state if rank == 0 else {})
        copied = stepper.copy_model("full")
        assert copied is not None
        check("copy", dict(copied.state_dict()))
        if copied.get_submodule("layers.one").rows is not copied.get_submodule("layers.two").rows:
            wrong.append(f"{strategy}: a copy's ties")
        if rank == 0:
            here.mkdir()
        dist.barrier()
        stepper.export_safetensors(here / "one.safetensors")
        stepper.export_safetensors(here / "main.safetensors", main=True)
        stepper.export_safetensors(here / "parts", max_shard_size=60)
        dist.barrier()
        once = {name: x for name, x in state.items() if name != "layers.two.rows"}
        for file, expect in (("one.safetensors", once), ("main.safetensors", {name: wide[name] for name in once})):
            check(file, by_name(load_file(here / file)), by_name(expect))
        parts = {n: x for file in (here / "parts").glob("*.safetensors") for n, x in load_file(file).items()}
        check("several files", by_name(parts), by_name(once))
        # torch's own functions write and read the shards, in other cuts too: here all of it on every rank.
        dcp_save(stepper.model_state_dict("sharded"), checkpoint_id=here / "dcp")
        again = {name: torch.zeros_like(x) for name, x in state.items()}
        dcp_load(again, checkpoint_id=here / "dcp")
        check("dcp", again)
        # Loading: everything of every form, into a model of other values.
        for form in ("full", "first", "sharded", "dcp"):
            other = model_of("EXACT_BF16")
            with torch.no_grad():
                for x in (*other.parameters(), *other.buffers()):
                    x.add_(1)
            cut(other, mesh["tensor"], BY_ROWS if form == "dcp" else BY_COLUMNS)
            into = stepper_of(other, "EXACT_BF16", mesh, strategy)
            shards = into.model_state_dict("sharded") if form == "dcp" else stepper.model_state_dict("sharded")
            if form == "dcp":
                dcp_load(shards, checkpoint_id=here / "dcp")
            given: Any = shards if form in ("sharded", "dcp") else state if form == "full" or rank == 0 else None
            into.load_model_state_dict(given, broadcast_from_rank0=form == "first")
            check(f"loaded from {form}", into.model_state_dict("full"))
            into.export_safetensors(here / "loaded.safetensors", main=True)
            dist.barrier()
            trains = {n for n, p in model.named_parameters() if p.requires_grad}
            rounded = {name: x.float() if name in trains else x for name, x in once.items()}
            check(f"main weights from {form}", by_name(load_file(here / "loaded.safetensors")), by_name(rounded))
            dist.barrier()
            into.close()
        with stepper.full_parameters(["layers.one"], writeback=False) as shown:
            rows: Any = shown.layers["one"].rows  # type: ignore[index, union-attr]
            check("shown", {"rows": rows.full_tensor().detach()}, {"rows": state["layers.one.rows"]})
        with pytest.raises(RuntimeError, match="was written to"), stepper.full_parameters(writeback=False), torch.no_grad():  # fmt: skip
            rows.to_local().add_(1)
        stepper.close()
    # A copy computes as the whole model does, on one rank alone: nothing makes DTensors of its inputs.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    parallel = parallelize_module(
        copy.deepcopy(plain), mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    alone = FlatStepper(parallel, eb.sgd(0.1), mesh=mesh["data"]).copy_model()
    if alone is not None and not torch.equal(alone(torch.ones(2, 4)), plain(torch.ones(2, 4))):
        wrong.append("a copy of a parallelized model")
    return wrong


EVERYDAY: list[Any] = [
    (2, 2, ("optim_grads_params",)),
    pytest.param(2, 2, ("optim", "no_shard"), marks=pytest.mark.exhaustive),
    pytest.param(1, 3, ("optim_grads_params", "optim_grads"), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("data", "tensor", "strategies"), EVERYDAY)
def test_what_one_sees_of_a_tensor_parallel_model_are_whole_tensors(
    data: int, tensor: int, strategies: tuple[Strategy, ...], tmp_path: Path
) -> None:
    for wrong in run(data * tensor, everyday, data, tensor, strategies, expected("EXACT_BF16", 2), tmp_path):
        assert wrong == []


# -- checkpoints ------------------------------------------------------------------------------------------------------------------------


def saved(path: Path, policy: str, tensor: int, placements: Any) -> None:
    """Two steps, and a save, of two data-parallel ranks."""
    mesh = Mesh(2, tensor)
    model = model_of(policy)
    if tensor > 1:
        cut(model, mesh["tensor"], placements)
    stepper = stepper_of(model, policy, mesh, lr=0.5)
    for group in stepper.as_optimizer().param_groups:
        group["lr"] = 1e-2  # is loaded, whatever the labels of what is replicated
    trained(model, stepper, mesh.place("data"), 2, range(2))
    save_sharded(stepper, path)


def resumed(path: Path, policy: str, data: int, tensor: int, placements: Any, wanted: dict[str, Tensor]) -> list[str]:
    """Two more steps on other ranks; and the same from what these save again."""
    mesh, found = Mesh(data, tensor), dict[str, Any]()
    for strategy, steps in (("optim", range(2, 3)), ("optim_grads_params", range(3, 4))):
        model = model_of(policy)
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.add_(1)
        if tensor > 1:
            cut(model, mesh["tensor"], placements)
        stepper = stepper_of(model, policy, mesh, strategy, lr=0.25)
        load_sharded(stepper, path)
        trained(model, stepper, mesh.place("data"), data, steps)
        path = path.with_name(f"{path.name} {data} {tensor}")
        save_sharded(stepper, path, asynchronous=strategy == "optim").result()
        found = stepper.model_state_dict("full")
        stepper.close()
    return [f"{policy} on {data} x {tensor}: {name}" for name in differing(found, wanted)]


def alone(path: Path, policy: str, wanted: dict[str, Tensor]) -> list[str]:
    """What a plain optimizer of one process reads."""
    model = model_of(policy)
    given = POLICIES[policy] and dataclasses.replace(POLICIES[policy], grads=eb.Grads(main="float32"))  # type: ignore[type-var]
    optimizer = TorchOptimizer(model.named_parameters(), lambda lr: transform(lr), lr=1e-2, policy=given, seed=5)
    load_sharded_into(model, optimizer, path)
    return differing(dict(model.state_dict()), wanted)


CASES = [("EXACT_BF16", BY_COLUMNS, BY_ROWS), ("LEAN_BF16", BY_ROWS, BY_ROWS), ("blocks", BY_ROWS, BY_ROWS)]
SHAPES_OF_RANKS: list[Any] = [
    (0, (1, 3)),
    (1, (2, 1)),
    (2, (1, 1)),
    *(
        pytest.param(case, ranks, marks=pytest.mark.exhaustive)
        for case, ranks in ((0, (2, 1)), (1, (1, 2)), (2, (2, 2)))
    ),
]


@pytest.mark.parametrize(("case", "ranks"), SHAPES_OF_RANKS)
def test_a_checkpoint_goes_on_with_another_number_of_tensor_parallel_ranks(
    case: int, ranks: tuple[int, int], tmp_path: Path
) -> None:
    policy, before, after = CASES[case]
    wanted = expected(policy, 4)[0]
    run(4, saved, tmp_path / "saved", policy, 2, before)
    for wrong in run(ranks[0] * ranks[1], resumed, tmp_path / "saved", policy, *ranks, after, wanted):
        assert wrong == []


@pytest.mark.parametrize("case", [1, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in (0, 2))])
def test_a_checkpoint_of_whole_tensors_goes_on_in_parts_and_is_read_by_a_plain_optimizer(
    case: int, tmp_path: Path
) -> None:
    policy, _, after = CASES[case]
    wanted = expected(policy, 4)[0]
    run(2, saved, tmp_path / "saved", policy, 1, after)
    for wrong in run(4, resumed, tmp_path / "saved", policy, 2, 2, after, wanted):
        assert wrong == []
    assert run(1, alone, tmp_path / "saved 2 2 2 2", policy, wanted) == [[]]


def unlike(path: Path) -> list[str]:
    """Refusals, each the same on all ranks."""
    mesh = Mesh(2, 2)
    told: list[str] = []

    def attempt(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        told.append(str(caught.value))

    model = model_of("EXACT_BF16")
    cut(model, mesh["tensor"], BY_COLUMNS)
    stepper = stepper_of(model, "EXACT_BF16", mesh)
    shards = stepper.model_state_dict("sharded")
    state = stepper.model_state_dict("full")
    placed = {**state, "layers.one.few": distribute_tensor(state["layers.one.few"], mesh["tensor"], [Replicate()])}
    attempt(ValueError, lambda: stepper.load_model_state_dict(placed))
    alike = {**state, "layers.one.few": distribute_tensor(state["layers.one.few"], mesh["tensor"], [Shard(0)])}
    stepper.load_model_state_dict(alike)
    told.append(str(differing(stepper.model_state_dict("full"), state)))
    other = model_of("EXACT_BF16")
    cut(other, mesh["tensor"], BY_ROWS)
    into = stepper_of(other, "EXACT_BF16", mesh)
    attempt(ValueError, lambda: into.load_model_state_dict(shards))
    state["layers.one.few"] = state["layers.one.few"].clone() + (dist.get_rank() == 3)
    attempt(ValueError, lambda: stepper.load_model_state_dict(state))
    # Two labels here, of one there: parameters of one param group that had different hyperparameters.
    for group in stepper.as_optimizer().param_groups:
        group["lr"] = 0.5 if "replicated" in group["label"] else 0.25
    save_sharded(stepper, path)
    whole_model = stepper_of(model_of("EXACT_BF16"), "EXACT_BF16", mesh, synchronize=False)
    attempt(ValueError, lambda: load_sharded(whole_model, path))
    unequal = torch.ones(3, 1 + 2 * mesh.place("tensor"))
    for placement, held in ((Partial(), torch.ones(3, 4)), (Shard(1), unequal)):
        made = DTensor.from_local(
            held, mesh["tensor"], [placement], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1)
        )
        odd = nn.Linear(4, 3)
        odd.weight = nn.Parameter(made)
        attempt(ValueError, partial(FlatStepper, odd, eb.sgd(0.1), mesh=mesh["data"]))
    # FSDP2 over tensor parallelism cuts the other way round: in strides.
    both = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(both, mesh=mesh["data"])
    attempt(ValueError, partial(FlatStepper, both, eb.sgd(0.1), mesh=mesh["data"]))
    return told


def test_what_does_not_fit_a_part_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    told = run(4, unlike, tmp_path)
    words = [
        "layers.one.few: got a DTensor placed as [Replicate()]", "[]",
        "layers.one.columns: got elements", "layers.one.few: differs between rank 0 and rank 3",
        "replicated", "weight: got a DTensor placed as Partial", "weight: this rank's part of it has the shape (3, ",
        "0.weight: got a DTensor placed as _StridedShard",
    ]  # fmt: skip
    for messages in told:
        for message, word in zip(messages, words, strict=True):
            assert word in message, message
    for number in (0, 2, 3, 4):
        assert len({messages[number] for messages in told}) == 1


def in_two_dimensions(path: Path, wanted: dict[str, Tensor], strategies: tuple[Strategy, ...]) -> list[str]:
    """A mesh of tensor parallelism of two dimensions; a DTensor that is left alone, of which a part is not contiguous."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "rows of ranks", "columns of ranks"))
    tensor = mesh["rows of ranks", "columns of ranks"]
    placements = {
        "rows": [Shard(0), Shard(1)], "columns": [Shard(1), Shard(1)], "few": [Replicate(), Shard(0)], "cube": [Shard(2), Shard(0)],
        "copy": [Replicate(), Replicate()], "frozen": [Shard(0), Replicate()],
    }  # fmt: skip
    wrong: list[str] = []
    for strategy in strategies:
        model = model_of("EXACT_BF16")
        cut(model, tensor, placements)
        across = distribute_tensor(torch.arange(15.0).view(3, 5), tensor, [Replicate(), Shard(1)])
        strided = across.to_local().mT.contiguous().mT
        alone = DTensor.from_local(
            strided, tensor, [Replicate(), Shard(1)], run_check=False, shape=across.shape, stride=across.stride()
        )
        model.alone = nn.Parameter(alone)
        arguments: dict[str, Any] = {
            "policy": POLICIES["EXACT_BF16"],
            "units": [Layer],
            "seed": 5,
            "ignored": ["alone"],
        }
        stepper = FlatStepper(model, transform(), mesh=mesh["data"], strategy=strategy, **arguments)
        trained(model, stepper, 0, 1, range(2))
        expect = {"alone": torch.arange(15.0).view(3, 5), **wanted}
        stepper.export_safetensors(path / "one.safetensors")
        save_sharded(stepper, path / strategy)
        state, shards = stepper.model_state_dict("full"), stepper.model_state_dict("sharded")
        wrong += [f"{strategy}: {name}" for name in differing(state, expect)]
        wrong += [
            f"{strategy}, rank0: {n}"
            for n in differing(stepper.model_state_dict(), expect if dist.get_rank() == 0 else {})
        ]
        once = by_name({name: x for name, x in expect.items() if name != "layers.two.rows"})
        dist.barrier()
        wrong += [f"{strategy}, file: {name}" for name in differing(by_name(load_file(path / "one.safetensors")), once)]
        for form in ("sharded", "first rank", "checkpoint"):
            with torch.no_grad(), stepper.full_parameters():
                for parameter in model.parameters():
                    (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
            if form == "checkpoint":
                load_sharded(stepper, path / strategy)
            elif form == "sharded":
                stepper.load_model_state_dict(shards)
            else:
                stepper.load_model_state_dict(state if dist.get_rank() == 0 else None, broadcast_from_rank0=True)
            wrong += [f"{strategy}, from {form}: {n}" for n in differing(stepper.model_state_dict("full"), expect)]
        dist.barrier()
        stepper.close()
    return wrong


@pytest.mark.parametrize("strategy", ["optim_grads_params", pytest.param("optim", marks=pytest.mark.exhaustive)])
def test_parts_of_two_dimensions_and_dtensors_that_are_left_alone_are_whole_too(
    strategy: Strategy, tmp_path: Path
) -> None:
    wanted = expected("EXACT_BF16", 2)[0]
    for wrong in run(4, in_two_dimensions, tmp_path, wanted, (strategy,)):
        assert wrong == []


# -- construction -----------------------------------------------------------------------------------------------------------------------


def files(path: Path) -> None:
    """The model of seed 3, made whole, in all kinds of files: with more bits than the model has, too."""
    made = made_whole()
    save_file(
        {n: x.contiguous() for n, x in made.state_dict().items() if n != "layers.two.rows"}, path / "low.safetensors"
    )
    wide = {n: x.float() * (1 + 2**-10) if "frozen" not in n else x for n, x in made.state_dict().items()}
    wide = {n: made.state_dict()[n] if "table" in n else x for n, x in wide.items()}
    save_file({n: x.contiguous() for n, x in wide.items() if n != "layers.two.rows"}, path / "wide.safetensors")


def made_whole() -> Layers:
    torch.manual_seed(3)
    model = Layers(LOW)
    torch.manual_seed(3)
    for layer in model.layers.values():
        layer.reset_parameters()  # type: ignore[operator]
    return model


def initialize(module: nn.Module) -> None:
    """In the order of the model, and a tied weight with its last layer."""
    if isinstance(module, Layer):
        module.reset_parameters()


def constructing(path: Path, data: int, tensor: int, sampled: bool) -> list[str]:
    """``sampled``: each source under one of two strategies."""
    wrong: list[str] = []
    mesh, first = Mesh(data, tensor), dist.get_rank() == 0
    made = made_whole()
    state = {name: x.clone() for name, x in made.state_dict().items()}
    wide = load_file(path / "wide.safetensors")
    sources: dict[str, Any] = {
        "initializers": FromInitializers(initialize, seed=3),
        "files": FromSafetensors(path / "low.safetensors"),
        "more bits": FromSafetensors(path / "wide.safetensors"),
        "first rank": FromStateDict(state if first else None),
        "checkpoint": FromCheckpoint(path / "saved"),
    }
    for number, (name, values) in enumerate(sources.items()):
        for strategy in STRATEGIES[1 + 2 * (number % 2 == 0) :][:1] if sampled else STRATEGIES[1::2]:
            if name == "checkpoint" and not (path / "saved").exists():
                dist.barrier()
                given = made_whole()
                cut(given, mesh["tensor"], BY_ROWS)
                save_sharded(stepper_of(given, "EXACT_BF16", mesh, strategy), path / "saved")
            with torch.device("meta"):
                model = Layers(LOW)
            cut(model, mesh["tensor"], BY_COLUMNS)
            before = {name: id(p) for name, p in model.named_parameters()}
            stepper = stepper_of(model, "EXACT_BF16", mesh, strategy, values=values, device="cpu")
            kept = before == {name: id(p) for name, p in model.named_parameters()}
            tied = model.get_submodule("layers.one").rows is model.get_submodule("layers.two").rows
            if not (kept and tied):
                wrong.append(f"{name}, {strategy}: other parameters")
            expect = state
            if name == "more bits":
                expect = {n: wide.get(n, wide["layers.one.rows"]).to(x.dtype) for n, x in state.items()}
            wrong += [f"{name}, {strategy}: {one}" for one in differing(stepper.model_state_dict("full"), expect)]
            if name == "more bits":
                stepper.export_safetensors(path / f"{data}.safetensors", main=True)
                dist.barrier()
                found = load_file(path / f"{data}.safetensors")
                wrong += [f"bits, {strategy}: {one}" for one in differing(by_name(found), by_name(wide))]  # fmt: skip
                dist.barrier()
            if number == 0:
                trained(model, stepper, mesh.place("data"), data, range(1))
            stepper.close()
    return wrong


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), pytest.param(1, 3, marks=pytest.mark.exhaustive)])
def test_a_tensor_parallel_model_is_constructed_of_parts_of_what_is_made_whole(
    data: int, tensor: int, tmp_path: Path
) -> None:
    files(tmp_path)
    for wrong in run(data * tensor, constructing, tmp_path, data, tensor, data == 2):
        assert wrong == []


# -- parts ------------------------------------------------------------------------------------------------------------------------------


class Cut(SimpleNamespace):
    """What is looked at of a DTensor: its shape, and how a mesh of these sizes cuts it."""


@st.composite
def cuts(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    kinds = [Replicate(), *(Shard(dimension) for dimension in range(len(shape)))]
    placements = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2))
    sizes = tuple(draw(st.integers(1, 4)) for _ in placements)
    return Cut(shape=shape, placements=placements, device_mesh=SimpleNamespace(shape=sizes)), draw(st.randoms())


@given(cuts())
def test_a_part_is_what_torch_chunk_makes_and_its_ranges_are_rectangles_of_the_whole(given: Any) -> None:
    cut, random = given
    whole = torch.arange(math.prod(cut.shape)).view(cut.shape)
    pieces = [whole]
    for placement, size in zip(cut.placements, cut.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            chunked = [list(piece.chunk(size, placement.dim)) for piece in pieces]
            # torch makes fewer chunks than it is asked for where there are too few rows, and DTensor gives the last ranks nothing.
            nothing = [piece.narrow(placement.dim, 0, 0) for piece in pieces]
            pieces = [
                x for found, none in zip(chunked, nothing, strict=True) for x in [*found, *[none] * (size - len(found))]
            ]
    parts = list(parts_of(cut))
    assert len(parts) == len(pieces)
    assert sum(part.numel for part in parts) == whole.numel()
    for part, piece in zip(parts, pieces, strict=True):
        assert part.sizes == tuple(piece.shape)
        assert part.largest == max(one.numel for one in parts)
        low, high = sorted(random.randint(0, part.numel) for _ in range(2))
        boxes = part.boxes(low, high)
        assert len(boxes) <= max(2 * whole.ndim - 1, 1)
        found = torch.full((high - low,), -1)
        for box in boxes:
            elements_of(found, box).copy_(view_of(whole, box))
        assert torch.equal(found, piece.reshape(-1)[low:high])
        into = torch.full((high - low,), -1)
        request = Request(("x",), low, high, into, part)
        for start, stop, place in request.runs(cut.shape):
            into[place : place + stop - start] = whole.reshape(-1)[start:stop]
        assert torch.equal(into, found)
        flat = piece.reshape(-1).tolist()
        consecutive = flat == list(range(flat[0], flat[0] + len(flat))) if flat else True
        assert (part.first is not None) == consecutive
        if flat and consecutive:
            assert part.first == flat[0]
            if flat[0] % 4 == 0:
                blocks = part.blocks(4)
                assert (blocks.offsets, blocks.sizes) == ((flat[0] // 4,), (-(-len(flat) // 4),))
