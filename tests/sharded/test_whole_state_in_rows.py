"""Optimizers that keep state for whole matrices, on parameters that FSDP2 has cut by rows: bits and state of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import TorchOptimizer, nonfinite_state
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into, save_sharded
from everybit_torch.optim import visits
from everybit_torch.sharded.stepper import FlatStepper
from tests.support.matrix_model import Small, small
from tests.support.ranks import run
from tests.support.rows import Layers, cut, mesh_of, new_model, train, whole
from tests.support.weights import Weights, equal

STEPS = 5
VIEWS = {
    "qkv.weight": eb.row_blocks(8, 8, 5, inside=(eb.heads(2), eb.heads(2, rows=(1, 3)), eb.matrix())),
    "experts": eb.batched(eb.interleaved(2, inside=eb.heads(3))),
}

P = TypeVar("P")
Factory = Callable[[eb.Hyperparameter], eb.Transform[Any]]


def normuon(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.normuon(learning_rate, matrices=eb.Matrices(views=VIEWS))


def muon(learning_rate: eb.Hyperparameter, **arguments: Any) -> eb.Transform[Any]:
    return eb.muon(learning_rate, matrices=eb.Matrices(views=VIEWS, others_clip=0.5), **arguments)


def centralized(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.named_chain({"centralize": eb.centralize(), "descent": eb.sgd(learning_rate, momentum=0.9)})


def twice(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """Slots of one name: those of the first are numbers of elements, those of the others the work's; and a neighbour between two."""
    parts: dict[str, eb.Transform[Any]] = {
        "mean": eb.running_mean(0.9),
        "soap": eb.scale_by_soap(period=2),
        "trace": eb.trace(0.9),
        "came": eb.scale_by_came(),
        "rate": eb.scale_by_learning_rate(learning_rate),
    }
    return eb.named_chain(parts)


def with_trust_ratios(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """Numbers of each parameter, of what is computed of whole ones, behind a reduction over all."""
    behind = (eb.add_decayed_weights(0.1), eb.scale_by_trust_ratio(), eb.scale_by_learning_rate(learning_rate))
    return eb.chain(eb.clip_by_global_norm(0.3), eb.scale_by_shampoo(), *behind)


@dataclass(frozen=True, slots=True)
class TowardsTheBeginning:
    """Goes back to the first weights of a row, as far as the present ones are from them; a made-up transform that keeps weights."""

    cut: ClassVar[eb.Cut] = "tensor"
    reduces: ClassVar[bool] = False

    def init(self, params: Any) -> BeginningState[Any]:
        return BeginningState(
            eb.tree.map(lambda p: {"rows": p.reshape(p.shape[0], -1)[:, :1].clone() if p.numel() else p}, params)
        )

    def update(
        self,
        updates: Any,
        state: BeginningState[Any],
        params: Any,
        ctx: eb.Context = eb.Context(),  # noqa: B008
    ) -> tuple[Any, BeginningState[Any]]:
        def moved(u: Tensor, p: Tensor, first: dict[str, Tensor]) -> Tensor:
            if not u.numel():
                return u
            return u + (p.reshape(p.shape[0], -1)[:, :1] - first["rows"]).reshape(-1, *[1] * (u.ndim - 1))

        return eb.tree.map(moved, updates, params, state.slow), state


@eb.state
class BeginningState(Generic[P]):
    slow: eb.Slot[P]


def clipped_by_weights(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """What looks at whole weights, and keeps nothing."""
    return eb.chain(eb.clip_by_unit_norm(0.1), eb.sgd(learning_rate, momentum=0.9))


FACTORIES: dict[str, Factory] = {
    "muon": muon,
    "clipped muon": lambda lr: eb.chain(
        eb.clip_by_global_norm(0.5), muon(lr, before="rows", after="columns_then_rows", decay_kind="coupled")
    ),
    "muon beside lamb": lambda lr: eb.chain(
        eb.clip_by_global_norm(0.5),
        muon(lr, iteration=eb.NewtonSchulz(arithmetic="float32", form="gram"), others=eb.lamb),
    ),
    "centralized": centralized,
    "normuon": normuon,
    "soap": lambda lr: eb.chain(eb.clip_by_global_norm(0.5), eb.soap(lr, period=2)),
    "shampoo": eb.shampoo,
    "kron": eb.kron,
    "dion": lambda lr: eb.dion(lr, matrices=eb.Matrices(views=VIEWS), others=eb.adamw),
    "torch adafactor": eb.torch_adafactor,
    "adafactor": lambda lr: eb.adafactor(lr, b1=0.9, weight_decay=0.1),
    "cautious": lambda lr: eb.cautious(normuon(lr)),
    "trust ratios": with_trust_ratios,
    "beginning": lambda lr: eb.chain(TowardsTheBeginning(), eb.scale_by_learning_rate(lr)),
    "twice": twice,
    "weights": clipped_by_weights,
    "accumulated": lambda lr: eb.accumulate(eb.apply_if_finite(normuon(lr)), 2),
}
CASES: dict[str, tuple[str, PolicyName]] = {
    **{name: (name, "FP32") for name in FACTORIES},
    **{
        f"{name} in 16 bits": (name, "LEAN_BF16")
        for name in (
            "muon",
            "centralized",
            "normuon",
            "soap",
            "kron",
            "dion",
            "adafactor",
            "twice",
        )
    },
    "compensated normuon": ("normuon", "KAHAN_BF16"),
}


def make(model: Layers, name: str, **arguments: Any) -> TorchOptimizer:
    factory, policy = CASES[name]
    named: Any = model.named_parameters()
    if factory == "dion":
        named = [(key, p) for key, p in model.named_parameters() if key != "layers.0.short.weight"]
    if "muon" in factory:  # in two param groups
        named = [*named]
        slow = [(key, p) for key, p in named if "experts" in key or "short" in key]
        fast = [(key, p) for key, p in named if "experts" not in key and "short" not in key]
        named = [{"params": fast}, {"params": slow, "lr": 3e-3}]
    return TorchOptimizer(
        named, FACTORIES[factory], lr=1e-2, policy=policy, seed=5, metrics=True, **({"compile": False} | arguments)
    )


def full(x: Any) -> Any:
    if isinstance(x, DTensor) and x.dtype is torch.int16:  # which gloo does not take
        wide, mesh = x.to_local().int(), x.device_mesh
        wide = DTensor.from_local(wide, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
        return wide.full_tensor().short()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def state_of(model: nn.Module, optimizer: TorchOptimizer) -> Weights:
    """All entries of all parameters, whole, by names of both. Every rank has to call it."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    return {
        f"{names[number]} {entry}": full(x).short() if x.dtype is torch.int32 else full(x)
        for number, entries in sorted(optimizer.state_dict()["state"].items())
        for entry, x in entries.items()
    }


@cache
def one_process(name: str) -> tuple[Weights, Weights, Tensor]:
    model = new_model(CASES[name][1])
    optimizer = make(model, name)
    train(model, optimizer, range(STEPS))
    return whole(model), state_of(model, optimizer), optimizer.metrics().moved


def in_rows(
    names: tuple[str, ...], shape: tuple[int, ...] | None, at_least: int
) -> dict[str, tuple[Weights, Weights, Tensor]]:
    found, mesh = {}, mesh_of(shape)
    with patch.object(visits, "ROUND", at_least):
        for name in names:
            model = new_model(CASES[name][1])
            cut(model, list(model.layers), mesh)
            optimizer = make(model, name)
            train(model, optimizer, range(STEPS))
            found[name] = whole(model), state_of(model, optimizer), optimizer.metrics().moved
    return found


SOME = (
    "clipped muon",
    "muon in 16 bits",
    "soap in 16 bits",
    "dion in 16 bits",
    "adafactor in 16 bits",
    "beginning",
    "twice in 16 bits",
    "accumulated",
)


@pytest.mark.parametrize(
    ("names", "size", "shape", "at_least"),
    [
        (SOME, 3, None, 1),  # several buckets
        (("soap", "normuon in 16 bits", "cautious", "torch adafactor"), 4, (2, 2), 1),  # replicas
        pytest.param(tuple(CASES), 3, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 1, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 2, None, 1 << 22, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 4, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 4, (2, 2), 1, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 4, (4, 1), 1 << 22, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_rows_have_the_bits_and_the_state_of_the_whole_model(
    names: tuple[str, ...], size: int, shape: tuple[int, ...] | None, at_least: int
) -> None:
    expected = {name: one_process(name) for name in names}
    for found in run(size, in_rows, names, shape, at_least):
        for name, (weights, state, moved) in found.items():
            assert moved == expected[name][2], name
            assert equal(weights, expected[name][0]), name
            assert state.keys() == expected[name][1].keys(), name
            assert equal(state, expected[name][1]), name


def on_all_ranks() -> tuple[Weights, Weights]:
    """A parameter that every rank has whole."""
    weight: Any = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    gradient: Any = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    if torch.distributed.is_initialized():
        weight, gradient = (
            distribute_tensor(x, mesh, [Replicate()]) for mesh in (mesh_of(),) for x in (weight, gradient)
        )
    model = nn.ParameterDict({"w": nn.Parameter(weight)})
    optimizer = TorchOptimizer(model.named_parameters(), small_soap, lr=1e-2, compile=False)
    for _ in range(2):
        model["w"].grad = gradient
        optimizer.step()
    again = TorchOptimizer(model.named_parameters(), small_soap, lr=1e-2, compile=False)
    again.load_state_dict(optimizer.state_dict())
    again.step()
    return whole(model), state_of(model, again)


def test_a_parameter_that_all_ranks_have_whole_is_stepped_by_each() -> None:
    weights, state = on_all_ranks()
    for found in run(2, on_all_ranks):
        assert equal(found[0], weights)
        assert equal(found[1], state)


def shares() -> dict[str, tuple[int, int]]:
    """Bytes of state here, and of all ranks."""
    model = new_model("FP32")
    cut(model, list(model.layers))
    optimizer = make(model, "soap")
    train(model, optimizer, range(1))
    found: dict[str, tuple[int, int]] = {}
    table = optimizer.bytes_table()
    for entries in optimizer.state_dict()["state"].values():
        for name, x in entries.items():
            if isinstance(x, DTensor):
                field = name.split(".")[0]
                found[field] = table[field], found.get(field, (0, 0))[1] + x.nbytes
    return found


def test_every_rank_has_its_share_of_all_state_and_no_more() -> None:
    ranks = run(2, shares)
    for name in ("momentum", "variance", "factors", "basis"):
        assert sum(rank[name][0] for rank in ranks) == ranks[0][name][1]
        # Owners are balanced by cost; of six matrices one has at most four.
        assert max(rank[name][0] for rank in ranks) < 0.75 * ranks[0][name][1]


def compiled(names: list[str]) -> dict[str, tuple[Weights, Weights]]:
    found, mesh = {}, mesh_of()
    for name in names:
        model = new_model(CASES[name][1])
        cut(model, list(model.layers), mesh)
        optimizer = make(model, name, compile=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a step that is not compiled after all says so
            train(model, optimizer, range(STEPS))
        found[name] = whole(model), state_of(model, optimizer)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["normuon in 16 bits", "soap"])
def test_compiled_steps_have_the_same_bits(name: str) -> None:
    for found in run(2, compiled, [name], limit=500.0):
        assert equal(found[name][0], one_process(name)[0])
        assert equal(found[name][1], one_process(name)[1])


def saved(name: str, place: Path, shape: tuple[int, ...] | None) -> None:
    mesh = mesh_of(shape)
    model = new_model(CASES[name][1])
    cut(model, list(model.layers), mesh)
    optimizer = make(model, name)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=place)


def resumed(name: str, place: Path) -> tuple[Weights, Weights]:
    model = new_model(CASES[name][1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    cut(model, list(model.layers))
    optimizer = make(model, name)
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    copied = make(model, name)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, copied, range(2, STEPS))
    return whole(model), state_of(model, copied)


@pytest.mark.parametrize(
    ("name", "before", "shape", "after"),
    [
        ("soap", 3, None, 2),
        ("normuon in 16 bits", 2, None, 3),
        *(
            pytest.param(name, before, shape, after, marks=pytest.mark.exhaustive)
            for name in ("kron in 16 bits", "accumulated")
            for before, shape, after in ((1, None, 4), (4, (2, 2), 3))
        ),
    ],
)
@pytest.mark.sampled(2)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    name: str, before: int, shape: tuple[int, ...] | None, after: int, tmp_path: Path
) -> None:
    run(before, saved, name, tmp_path, shape)
    for weights, state in run(after, resumed, name, tmp_path):
        assert equal(weights, one_process(name)[0])
        assert equal(state, one_process(name)[1])


def by_whole_state_dicts(name: str) -> tuple[Weights, Weights]:
    """To another optimizer by a whole state dict, and to a third in full precision."""
    model = new_model(CASES[name][1])
    cut(model, list(model.layers))
    optimizer = make(model, name)
    train(model, optimizer, range(2))
    before = state_of(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    again = make(model, name)
    for parameter in model.parameters():
        parameter.grad = None  # else torch takes its state for settled
    set_optimizer_state_dict(model, again, get_optimizer_state_dict(model, optimizer, options=options), options=options)
    assert equal(state_of(model, again), before)
    third = make(model, name)
    losses = third.load_full_state_dict(again.full_state_dict())
    assert all(loss.error == 0.0 for loss in losses.values()), losses
    assert equal(state_of(model, third), before)
    train(model, third, range(2, STEPS))
    return whole(model), state_of(model, third)


@pytest.mark.parametrize(
    "name",
    ["soap", "compensated normuon", pytest.param("dion", marks=pytest.mark.exhaustive)],
)
@pytest.mark.sampled(2)
def test_whole_state_dicts_and_full_precision_lose_nothing(name: str) -> None:
    for weights, state in run(2, by_whole_state_dicts, name):
        assert equal(weights, one_process(name)[0])
        assert equal(state, one_process(name)[1])


def stepped(model: nn.Module, number: int) -> None:
    model(torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(number))).square().mean().backward()


def new_pair(factory: Factory) -> tuple[Small, TorchOptimizer]:
    other = small()
    cut(other, [other.qkv, other.ensemble])
    return other, TorchOptimizer(other.named_parameters(), factory, lr=0.02, compile=False)


def small_soap(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.soap(learning_rate, period=2)


def from_a_stepper(place: Path, name: str) -> tuple[Weights, Weights]:
    factory = {"soap": small_soap, "kron": eb.kron}[name]
    model = small()
    stepper = FlatStepper(model, factory(0.02), strategy="optim_grads")
    for number in range(4):
        if number == 2:
            save_sharded(stepper, place).result()
        with stepper.microbatch(last=True):
            stepped(model, number)
        stepper.step()
    other, optimizer = new_pair(factory)
    load_sharded_into(other, optimizer, place)
    for number in range(2, 4):
        optimizer.zero_grad()
        stepped(other, number)
        optimizer.step()
    return whole(model), whole(other)


def to_a_stepper(place: Path, name: str) -> tuple[Weights, Weights]:
    factory = {"soap": small_soap, "kron": eb.kron}[name]
    model, optimizer = new_pair(factory)
    other = small()
    for number in range(4):
        if number == 2:
            optimizer.zero_grad()
            weights, state = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": state}, checkpoint_id=place)
        optimizer.zero_grad()
        stepped(model, number)
        optimizer.step()
    stepper = FlatStepper(other, factory(0.02), strategy="optim_grads")
    load_sharded(stepper, place)
    for number in range(2, 4):
        with stepper.microbatch(last=True):
            stepped(other, number)
        stepper.step()
    return whole(model), whole(other)


@pytest.mark.parametrize("name", ["soap", "kron"])
@pytest.mark.parametrize("program", [from_a_stepper, to_a_stepper])
def test_checkpoints_go_on_in_the_other_front_end(program: Any, name: str, tmp_path: Path) -> None:
    for one, other in run(2, program, tmp_path, name):
        assert equal(one, other)


class Wide(nn.Module):
    """Rows of whole blocks, on any of two and four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ParameterList([torch.randn(32, 64), torch.randn(16, 128), torch.randn(256)])


EIGHT = eb.Policy(
    params=eb.Split(16),
    momentum=eb.Blockwise("linear", block=64),
    variance=eb.Blockwise("linear", block=64),
    slots={name: eb.Blockwise("linear", block=64) for name in ("factors", "basis")},
)


def in_blocks(name: str) -> tuple[Weights, Weights, Weights]:
    factory = {"soap": small_soap, "normuon": eb.normuon}[name]
    model = Wide().bfloat16()
    if torch.distributed.is_initialized():
        cut(model, [])
    optimizer = TorchOptimizer(
        model.named_parameters(), factory, lr=1e-2, policy=EIGHT, seed=5, unsafe="allow", compile=False
    )
    train(model, optimizer, range(4))
    third = TorchOptimizer(
        model.named_parameters(), factory, lr=1e-2, policy=EIGHT, seed=5, unsafe="allow", compile=False
    )
    third.load_full_state_dict(optimizer.full_state_dict())
    return whole(model), state_of(model, optimizer), state_of(model, third)


@pytest.mark.parametrize("name", ["soap", pytest.param("normuon", marks=pytest.mark.exhaustive)])
def test_blocks_of_the_whole_are_those_of_one_process(name: str) -> None:
    weights, state, again = in_blocks(name)
    for found in run(2, in_blocks, name):
        assert equal(found[0], weights)
        assert equal(found[1], state)
        assert equal(found[2], again)


def with_an_infinity() -> tuple[Weights, list[str]]:
    def factory(lr: eb.Hyperparameter, momentum: float = 0.0) -> eb.Transform[Any]:
        around = [eb.trace(momentum)] if momentum else []
        return eb.chain(*around, eb.scale_by_soap(period=2), eb.scale_by_learning_rate(lr))

    model = new_model("FP32")
    if torch.distributed.is_initialized():
        cut(model, list(model.layers))
    optimizer = TorchOptimizer(model.named_parameters(), factory, lr=1e-2, momentum=0.0, compile=False)
    train(model, optimizer, range(2))
    if torch.distributed.is_initialized():
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ValueError, match=r"param group 0: its transform would keep other state"):
            train(model, optimizer, range(2, 3))
        optimizer.param_groups[0]["momentum"] = 0.0
    state = optimizer.state_dict()
    number = optimizer.param_groups[0]["param_names"].index("layers.0.qkv.weight")
    factor = state["state"][number]["factors.along0"]
    here: Tensor = factor.to_local() if isinstance(factor, DTensor) else factor
    here[-1, 0] = torch.inf
    optimizer.load_state_dict(state)
    return whole(model), [f"{one.name} {one.entry}" for one in nonfinite_state(optimizer)]


def test_infinities_of_state_at_owners_are_named_and_other_state_is_refused() -> None:
    weights, named = with_an_infinity()
    assert named == ["layers.0.qkv.weight factors.along0"]
    for found in run(2, with_an_infinity):
        assert equal(found[0], weights)
        assert found[1] == named
