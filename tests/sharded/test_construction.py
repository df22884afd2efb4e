"""A model on the meta device is given its values by a stepper, each rank what it keeps of them: with the bits of a model made whole."""

from __future__ import annotations

import gc
import itertools
import json
import re
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import everybit as eb
from everybit_torch import (
    FlatStepper,
    FromCheckpoint,
    FromInitializers,
    FromSafetensors,
    FromStateDict,
    TorchOptimizer,
    load_sharded,
    save_sharded,
)
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.plan import plan
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Strategy
from tests.support.allocations import counting
from tests.support.programs import on_a_mesh
from tests.support.ranks import run

LOW = torch.bfloat16


class Rotary(nn.Module):
    """Has a buffer that no state dict holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("frequencies", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("frequencies").copy_(1.0 / (1 + torch.arange(self.width)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("frequencies").to(x.dtype)


class Layer(nn.Module):
    """A unit with 16-bit matrices, a float32 norm, a frozen matrix and buffers of both kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width + 2, dtype=LOW)
        self.outer = nn.Linear(width + 2, width, dtype=LOW)
        self.fixed = nn.Linear(width, width, bias=False, dtype=LOW).requires_grad_(False)
        self.rotary = Rotary(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(self.rotary(x))
        out: Tensor = x + self.outer(torch.tanh(self.inner(self.norm(x.float()).to(LOW))))
        return out


class Model(nn.Module):
    """Layers between an embedding and an exit, perhaps tied; parameters of no size and of one element; a BatchNorm's buffers."""

    def __init__(self, width: int = 5, *, tied: bool = False) -> None:
        super().__init__()
        self.entry = nn.Embedding(7, width, dtype=LOW)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.exit = nn.Linear(width, 7, bias=False, dtype=LOW)
        if tied:
            self.exit.weight = self.entry.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.exit(self.norm(x.float()).to(LOW))
        return out


def whole(*, tied: bool = False) -> Model:
    torch.manual_seed(3)
    return Model(tied=tied)


def meta(*, tied: bool = False) -> Model:
    with torch.device("meta"):
        return Model(tied=tied)


def buffers(module: nn.Module) -> None:
    """What a user writes for buffers that no checkpoint holds."""
    if isinstance(module, Rotary):
        module.reset_parameters()


def trained(model: nn.Module, steps: int = 3, **arguments: Any) -> dict[str, Tensor]:
    """Weights and buffers after some steps on this rank's data."""
    policy = arguments.pop("policy", eb.policies.EXACT_BF16)
    transform = arguments.pop("transform", eb.adamw(1e-2))
    stepper = FlatStepper(model, transform, policy=policy, units=[Layer], **arguments)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        with stepper.microbatch(last=True):
            model(torch.arange(4) + (step + rank) % 3).float().square().mean().backward()
        stepper.step()
    with stepper.full_parameters():
        found = {name: x.detach().clone() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    stepper.close()
    return found


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what differs in a bit."""
    assert one.keys() == other.keys()
    return [
        name
        for name, x in one.items()
        if x.dtype is not other[name].dtype
        or not torch.equal(x.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8))
    ]


# -- one law ------------------------------------------------------------------------------------------------------------------------


def sources(folder: Path, tied: bool) -> dict[str, Callable[[], Any]]:
    """Every source that gives the values of ``whole(tied=...)``."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Callable[[], Any]] = {
        "one file": lambda: FromSafetensors(folder / "one" / "model.safetensors", buffers),
        "files": lambda: FromSafetensors(folder / "several", buffers),
        "checkpoint": lambda: FromCheckpoint(folder / "dcp", buffers=buffers),
        "nested checkpoint": lambda: FromCheckpoint(folder / "nested", buffers=buffers),
        "first rank": lambda: FromStateDict(whole(tied=tied).state_dict() if first else None, buffers),
    }
    if tied:
        found["function"] = lambda: FromInitializers(reset_but_the_exit, seed=3)
    else:
        found["initializers"] = lambda: FromInitializers(seed=3)
    return found


def reset_but_the_exit(module: nn.Module) -> None:
    """The values that ``exit`` draws when it is constructed are drawn, and given up for the embedding's."""
    if isinstance(module, nn.Linear) and module.out_features == 7 and module.bias is None:
        nn.Linear(5, 7, bias=False, dtype=LOW)
    else:
        getattr(module, "reset_parameters", lambda: None)()


def write_files(folder: Path, tied: bool) -> None:
    """The model in every kind of file."""
    state = dict(whole(tied=tied).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP's, that there is one process
        dcp_save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
        dcp_save({"model": dict(state), "step": torch.ones(())}, checkpoint_id=folder / "nested", no_dist=True)
    if tied:
        del state["exit.weight"]
    state = {name: x.contiguous() for name, x in state.items()}
    (folder / "one").mkdir()
    (folder / "several").mkdir()
    save_file(state, folder / "one" / "model.safetensors", {"format": "pt"})
    names = list(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: state[name] for name in members}, folder / "several" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "several" / "model.safetensors.index.json").write_text(json.dumps(index))


def law(
    folder: Path,
    strategies: tuple[Strategy, ...],
    outer: OuterStrategy = "no_shard",
    mesh: Any = None,
    *,
    sampled: bool = False,
) -> list[Any]:
    """The sources under which a model that is constructed from the meta device has other bits after three steps.

    ``sampled``: where parameters are not sharded, each source under one strategy of a tied or untied model.
    """
    wrong: list[Any] = []
    warnings.simplefilter("ignore")  # checkpoints of dcp.save have no checksums
    for tied in (False, True):
        here = folder / f"tied {tied}"
        for strategy in strategies:
            arguments = {"strategy": strategy, "outer": outer, "mesh": mesh, "nan": "step"}
            expected = trained(whole(tied=tied), **arguments)
            for number, (name, source) in enumerate(sources(here, tied).items()):
                if sampled and strategy != "optim_grads_params" and (number + tied) % 3 != STRATEGIES.index(strategy):
                    continue
                model, values = meta(tied=tied), source()
                before = dict(model.named_parameters())
                torch.manual_seed(17)
                found = trained(model, values=values, **arguments)
                drawn = torch.rand(2)
                torch.manual_seed(17)
                same = all(p is before[key] for key, p in model.named_parameters())
                if different(expected, found) or not same or (tied and model.exit.weight is not model.entry.weight):
                    wrong.append((strategy, tied, name, different(expected, found), same))
                if not torch.equal(drawn, torch.rand(2)):
                    wrong.append((strategy, tied, name, "the caller's generator moved"))
    return wrong


def law_sampled(folder: Path, strategies: tuple[Strategy, ...]) -> list[Any]:
    return law(folder, strategies, sampled=True)


def law_on(folder: Path, strategies: tuple[Strategy, ...], outer: OuterStrategy, mesh: Any) -> list[Any]:
    return law(folder, strategies, outer, mesh)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for tied in (False, True):
        (tmp_path / f"tied {tied}").mkdir()
        write_files(tmp_path / f"tied {tied}", tied)
    return tmp_path


@pytest.mark.parametrize("size", [2, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (1, 3, 4))])
def test_a_model_from_the_meta_device_has_the_bits_of_one_that_was_made_whole(size: int, files: Path) -> None:
    """All sources, tied and frozen parameters, several dtypes, buffers of both kinds; three steps; the caller's generators stay."""
    assert run(size, law_sampled if size == 2 else law, files, STRATEGIES) == [[]] * size


@pytest.mark.exhaustive
def test_all_sources_under_all_strategies(files: Path) -> None:
    assert run(2, law, files, STRATEGIES) == [[], []]


@pytest.mark.parametrize("outer", ["optim", pytest.param("no_shard", marks=pytest.mark.exhaustive)])
def test_the_same_on_a_mesh_of_two_dimensions(outer: OuterStrategy, files: Path) -> None:
    strategies = ("optim_grads_params",) if outer == "optim" else STRATEGIES
    assert run(4, on_a_mesh, law_on, 2, 2, files, strategies, outer) == [[]] * 4


# -- values with more bits than the model's dtype ---------------------------------------------------------------------------------------


class Low(nn.Module):
    """All of its parameters are bfloat16."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first = nn.Linear(6, 9, dtype=LOW, device=device)
        self.second = nn.Linear(9, 3, dtype=LOW, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def wide_values() -> dict[str, Tensor]:
    """float32 numbers that no bfloat16 holds."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Low().named_parameters()}


WIDE: dict[str, tuple[eb.Policy, bool]] = {
    "float32 main weights": (eb.policies.MIXED_BF16, True),
    "remainders": (eb.policies.EXACT_BF16, True),
    "Kahan": (eb.policies.KAHAN_BF16, False),
}


def wide(folder: Path) -> list[Any]:
    """Where weights are not those of a torch optimizer that imported the same float32 values, before or after three steps."""
    wrong: list[Any] = []
    first = dist.get_rank() == 0
    for (name, (policy, exact)), strategy in zip(
        [*WIDE.items(), *WIDE.items()], [*STRATEGIES, *STRATEGIES], strict=False
    ):
        if name == "Kahan":  # momentum is rounded by bits that both number alike
            policy = eb.Policy(params=policy.params)
        whole_model = Low()
        optimizer = TorchOptimizer(whole_model.parameters(), lambda: eb.adamw(1e-2), policy=policy, compile=False)
        optimizer.import_fp32([list(wide_values().values())])
        sources: list[Any] = [
            FromSafetensors(folder / "wide.safetensors"),
            FromStateDict(wide_values() if first else None),
        ]
        steppers = []
        for source in sources:
            model = Low("meta")
            stepper = FlatStepper(
                model, eb.adamw(1e-2), policy=policy, strategy=strategy, units=[nn.Linear], values=source
            )
            steppers.append((model, stepper))
        kept = {n: w.clone() for n, w in zip(wide_values(), optimizer.export_fp32()[0], strict=True)}
        if exact and any(not torch.equal(kept[n], x) for n, x in wide_values().items()):
            wrong.append((name, strategy, "the torch optimizer rounds"))
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(LOW)
            optimizer.zero_grad()
            whole_model(x).float().square().mean().backward()
            for model, stepper in steppers:
                wrong += [
                    (name, strategy, step, unit.members[0].name)
                    for unit in stepper.as_optimizer().engine.units
                    if not matches(stepper, unit, optimizer, whole_model)
                ]
                with stepper.microbatch(last=True):
                    model(x).float().square().mean().backward()
                stepper.step()
            optimizer.step()
        for _, stepper in steppers:
            stepper.close()
    return wrong


def matches(stepper: FlatStepper, unit: Any, optimizer: Any, model: nn.Module) -> bool:
    """Whether a unit's weights, decoded, are the torch optimizer's."""
    (decoded,) = stepper.as_optimizer().engine.optimizer_of(unit).export_fp32([unit.tensor], unit.state)
    expected = dict(zip((n for n, _ in model.named_parameters()), optimizer.export_fp32()[0], strict=True))
    slices = {
        id(p): s for shard in stepper.as_optimizer().shards for s, p in zip(shard.slices, shard.parameters, strict=True)
    }
    return all(
        torch.equal(
            decoded[m.start : m.stop], expected[m.name].reshape(-1)[slices[id(m.parameter)].low :][: m.stop - m.start]
        )
        for m in unit.members
    )


def test_main_weights_take_all_bits_of_values_with_more_than_the_model(tmp_path: Path) -> None:
    """float32 values under a bfloat16 model: what ``TorchOptimizer.import_fp32`` keeps, bit for bit, on any rank and in any strategy."""
    save_file(wide_values(), tmp_path / "wide.safetensors")
    assert run(2, wide, tmp_path) == [[], []]


# -- bytes --------------------------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Units of several sizes between two layers of the model's own, one of which has nothing in common with the other; no buffers."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        with torch.device(device):
            self.entry = nn.Linear(9, 259, dtype=dtype)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(259, n, dtype=dtype), nn.Linear(n, 259, dtype=dtype)) for n in (64, 131, 97)
            )
            self.fixed = nn.Linear(259, 33, bias=False, dtype=dtype).requires_grad_(False)
            self.exit = nn.Linear(33, 101, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(self.fixed(x))
        return out


BYTES: list[tuple[str, eb.Policy | None, torch.dtype, Any]] = [
    ("initializers", None, torch.float32, eb.adamw(1e-3)),
    ("given", None, torch.float32, eb.sgd(1e-3)),
    ("given", eb.policies.LEAN_BF16, LOW, eb.adamw(1e-3)),
    ("files", eb.policies.EXACT_BF16, LOW, eb.sgd(1e-3)),
    ("wide files", eb.policies.MIXED_BF16, LOW, eb.adamw(1e-3)),
    ("initializers", eb.policies.FLOOR_BF16, LOW, eb.sgd(1e-3)),
    ("first rank", eb.policies.LEAN_BF16, LOW, eb.sgd(1e-3)),
]


_broadcast = Communicator.broadcast


def patient_broadcast(communicator: Communicator, x: Tensor, what: str, source: int = 0) -> None:
    """As the method, and some time for gloo's thread, which may hold what was sent for a moment after all ranks have it."""
    _broadcast(communicator, x, what, source)
    time.sleep(0.005)


def constructed(
    folder: Path,
    strategies: tuple[Strategy, ...],
    sampled: bool,
    outer: OuterStrategy = "no_shard",
    mesh: Any = None,
) -> list[Any]:
    """Where the most bytes while a stepper was made are not those that are planned."""
    wrong: list[Any] = []
    first = dist.get_rank() == 0
    shape = (1, dist.get_world_size()) if mesh is None else tuple(mesh.mesh.shape)
    for strategy, (number, (source, policy, dtype, transform)), keep in itertools.product(
        strategies, enumerate(BYTES), (True, False)
    ):
        if keep is (number % 2 == 0) or (sampled and (number + STRATEGIES.index(strategy)) % 2):
            continue
        arguments: dict[str, Any] = {
            "policy": policy, "strategy": strategy, "outer": outer, "units": [nn.Sequential], "keep_gradients": keep,
        }  # fmt: skip
        state = (
            Stack(torch.float32 if "wide" in source else dtype, "cpu").state_dict()
            if first and source == "first rank"
            else None
        )
        values = {
            "initializers": FromInitializers(),
            "given": None,
            "files": FromSafetensors(folder / "bfloat16.safetensors"),
            "wide files": FromSafetensors(folder / "float32.safetensors"),
            "first rank": FromStateDict(state),
        }[source]
        model = Stack(dtype, "meta")  # whose tensors have no memory, and are not to be counted
        with counting(everything=True) as counter, mock.patch.object(Communicator, "broadcast", patient_broadcast):
            if values is None:
                model = Stack(dtype, "cpu")
            counter.peak = counter.live
            stepper = FlatStepper(model, transform, mesh=mesh, values=values, **arguments)
            measured = counter.peak - counter.live
        predicted = stepper.plan()
        if predicted.transient["construction"] != measured:
            wrong.append((number, source, strategy, keep, measured, predicted.transient["construction"]))
        unit = max(sum(p.numel() * dtype.itemsize for p in block.parameters()) for block in model.blocks)
        step = predicted.transient["step"]  # what a piece of a step takes, the first state takes as well
        if source in ("initializers", "files", "first rank") and measured > max(unit, step):
            wrong.append((number, source, strategy, keep, measured, unit, step, "more than a unit"))
        if "wide" not in source:  # of which the arguments alone know nothing
            asked = type(values) if values is not None else None
            planned = plan(
                Stack(dtype, "meta"), transform, ranks=shape, rank=dist.get_rank(), values=asked, **arguments
            )
            if planned.transient["construction"] != measured:
                wrong.append((number, source, strategy, keep, measured, planned.transient["construction"], "arguments"))
        stepper.close()
        del stepper, model
    return wrong


def constructed_on(folder: Path, strategies: tuple[Strategy, ...], outer: OuterStrategy, mesh: Any) -> list[Any]:
    return constructed(folder, strategies, False, outer, mesh)


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    for name, dtype in (("bfloat16", LOW), ("float32", torch.float32)):
        state = Stack(dtype, "cpu").state_dict()
        state["fixed.weight"] = state["fixed.weight"].to(LOW)  # frozen: no main weights keep more
        save_file(state, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("size", [2, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (1, 3))])
def test_the_bytes_of_making_a_stepper_are_planned(size: int, stacks: Path) -> None:
    """Of models with values and from the meta device, under every strategy, to the byte."""
    assert run(size, constructed, stacks, STRATEGIES, size == 2) == [[]] * size


@pytest.mark.parametrize("policy", [eb.policies.LEAN_BF16, eb.policies.MIXED_BF16])
def test_the_bytes_of_a_long_buffer_are_planned_whose_state_is_made_in_pieces(
    policy: eb.Policy, tmp_path: Path
) -> None:
    """And of one that is read in float32, whose main weights are made in pieces."""
    for dtype in (LOW, torch.float32):
        save_file(nn.Linear(701, 1201, dtype=dtype).state_dict(), tmp_path / "model.safetensors")
        model = on_meta(lambda: nn.Linear(701, 1201, dtype=LOW))
        with counting(everything=True) as counter:
            stepper = FlatStepper(model, eb.adamw(1e-3), policy=policy, values=FromSafetensors(tmp_path))
            measured = counter.peak - counter.live
        predicted = stepper.plan().transient
        assert predicted["construction"] == measured
        assert measured <= predicted["step"] + (701 * 1201 + 1201) * 4 * (dtype is torch.float32)
        stepper.close()


@pytest.mark.exhaustive
def test_the_bytes_of_making_a_stepper_are_planned_in_two_dimensions(stacks: Path) -> None:
    assert run(4, on_a_mesh, constructed_on, 2, 2, stacks, ("optim_grads_params",), "optim") == [[]] * 4


# -- what is refused ----------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Has a parameter of its own and no initializer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)


class Reaching(nn.Module):
    """Its initializer uses a tensor of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.gain = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        self.gain.copy_(self.inner.get_parameter("0.bias"))


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def half(module: nn.Module) -> None:
    """Forgets the biases."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()


def linear(*, file: Path | None = None, **changed: Any) -> dict[str, Tensor]:
    """The state of a layer, with some tensors replaced, or left out if they are None."""
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2)} | changed
    state = {name: x for name, x in state.items() if x is not None}
    if file is not None:
        save_file(state, file)
    return state


def refused(model: Any, transform: Any = None, **arguments: Any) -> str:
    """What an error of making a stepper says; the model is as it was."""
    before = [(name, p, p.device, p.shape) for name, p in model.named_parameters()]
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as caught:
        FlatStepper(model, transform or eb.sgd(0.1), **arguments)
    assert before == [(name, p, p.device, p.shape) for name, p in model.named_parameters()]
    return str(caught.value)


def one_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2))


def test_a_model_without_values_says_where_they_may_come_from() -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    said = refused(model)
    assert "values=FromInitializers(), FromSafetensors(path), FromCheckpoint(path) or FromStateDict(state_dict)" in said
    said = refused(model, values=FromInitializers(), device="meta")
    assert said == "device: got meta; accepted is the device where the model is to be trained."
    said = refused(model, values="model.safetensors")
    assert said.startswith("values: got 'model.safetensors'; accepted are FromInitializers(...), FromSafetensors(...)")
    said = refused(nn.Linear(2, 2), values=FromInitializers())
    assert said.startswith(
        "values: got FromInitializers for a model on cpu, which has values; accepted is a model on the meta device"
    )
    held = weakref.ref(model.weight)
    said = refused(model, values=FromInitializers())
    assert said.startswith("weight: somebody holds a weak reference to it")
    assert held() is model.weight


def test_a_seed_in_the_place_of_a_function_is_told_what_to_write() -> None:
    sources: list[Any] = [FromInitializers, FromStateDict]
    with pytest.raises(TypeError, match=r"^FromInitializers: write seed=11\. Got 11 as function"):
        sources[0](11)
    with pytest.raises(
        TypeError, match=r"^FromInitializers: function: got 'zeros'; accepted is a function of a module\."
    ):
        sources[0]("zeros")
    with pytest.raises(TypeError, match=r"^FromStateDict: buffers: got 3; accepted is a function of a module\."):
        sources[1]({}, buffers=3)


def test_modules_that_cannot_be_initialized_are_refused_by_name_before_anything_is_allocated() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Plain()))
    said = refused(model, values=FromInitializers())
    assert said.startswith("values: 1 (Plain: 1.gain): has tensors of its own and no initializer (reset_parameters,")
    said = refused(meta(tied=True), values=FromInitializers(), policy=eb.policies.EXACT_BF16)
    assert said.startswith(
        "values: entry.weight and exit.weight are one tensor, and Embedding.reset_parameters() of entry and Linear.reset_parameters() of"
        " exit would both initialize it"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_initializers_that_fail_leave_the_model_on_the_meta_device(strategy: Strategy) -> None:
    arguments: dict[str, Any] = {"strategy": strategy, "units": [nn.Sequential]}
    said = refused(on_meta(one_linear), values=FromInitializers(half), **arguments)
    assert said.startswith("values: 0.bias: 2 of its 2 elements were not written, or are NaN, after half(module) of 0")
    if strategy == "optim_grads_params":  # in the others its values are still there
        said = refused(on_meta(Reaching), values=FromInitializers(), **arguments)
        assert said.startswith(
            "values: Reaching.reset_parameters() of the model uses inner.0.bias, which has no memory at that moment"
        )
    order = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    early = FromInitializers(lambda module: order[1].weight.data.zero_() if module is order[0] else None)
    said = refused(order, values=early, **arguments)
    assert re.match(r"values: .*<lambda>\(module\) of 0 uses a tensor of shape \(2, 2\) on the meta device", said)
    # And once it is right, the same model is constructed.
    model = on_meta(one_linear)
    refused(model, values=FromInitializers(half), **arguments)
    FlatStepper(model, eb.sgd(0.1), values=FromInitializers(), **arguments).close()
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in model.parameters())


def test_a_function_may_ask_for_all_of_a_unit() -> None:
    """It sees what modules below were given, and its draws are those of ``model.apply``."""

    def scaled(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, nn.Sequential):
            for below in module:
                below.get_parameter("weight").data.mul_(2.0 / len(module))

    torch.manual_seed(4)
    expected = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        torch.manual_seed(4)
        expected.apply(scaled)
    for strategy in STRATEGIES:
        model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)))
        stepper = FlatStepper(
            model, eb.sgd(0.1), strategy=strategy, values=FromInitializers(scaled, seed=4, whole_units=True)
        )
        stepper.close()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


FITS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"weight": torch.ones(2, 3), "bias": None, "extra": torch.ones(1)},
        ["weight has the shape (2, 3); accepted is (2, 2)", "bias is missing", "extra is not in the model"],
    ),
    ({"bias": torch.ones(2, dtype=torch.float64)}, ["bias is torch.float64; accepted is torch.float32"]),
    ({"bias": torch.ones(2, dtype=torch.int64)}, ["bias is torch.int64; accepted is torch.float32"]),
]


@pytest.mark.parametrize("case", range(len(FITS)))
def test_a_source_that_does_not_fit_is_refused_with_all_that_differs(case: int, tmp_path: Path) -> None:
    changed, problems = FITS[case]
    file = tmp_path / "model.safetensors"
    state = linear(file=file, **changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        for values in (
            FromSafetensors(file),
            FromSafetensors(tmp_path),
            FromStateDict(state),
            FromCheckpoint(tmp_path / "dcp", "model."),
        ):
            said = refused(on_meta(lambda: nn.Linear(2, 2)), values=values)
            assert "does not fit the model, and nothing was changed" in said
            assert said.splitlines()[1:] == [f"  {problem}" for problem in problems]


def test_low_weights_without_main_weights_take_no_more_bits_than_they_have(tmp_path: Path) -> None:
    linear(file=tmp_path / "model.safetensors")
    for policy, accepted in (
        (eb.policies.FLOOR_BF16, "torch.bfloat16"),
        (eb.policies.KAHAN_BF16, "torch.bfloat16, or up to torch.float32, which main weights keep"),
    ):
        model = on_meta(lambda: nn.Linear(2, 2, dtype=LOW))
        if policy is eb.policies.KAHAN_BF16:
            linear(file=tmp_path / "model.safetensors", weight=torch.ones(2, 2, dtype=torch.float64))
        said = refused(model, eb.adamw(0.1), policy=policy, values=FromSafetensors(tmp_path))
        assert f"accepted is {accepted}\n" in said + "\n"


def test_buffers_that_no_checkpoint_holds_need_a_function(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    said = refused(meta(), policy=eb.policies.EXACT_BF16, values=FromSafetensors(tmp_path))
    assert said.startswith("values: layers.0.rotary.frequencies, layers.1.rotary.frequencies: on the meta device")
    assert "FromSafetensors(..., buffers=function)" in said


def test_buffers_that_have_values_are_read_where_a_source_has_them_and_else_stay(tmp_path: Path) -> None:
    def mixed() -> nn.BatchNorm1d:
        model = on_meta(lambda: nn.BatchNorm1d(3))
        model.running_mean = torch.full((3,), 7.0)
        model.running_var = torch.full((3,), 8.0)
        assert isinstance(model, nn.BatchNorm1d)
        return model

    state = {
        "weight": torch.ones(3),
        "bias": torch.ones(3),
        "running_mean": torch.arange(3.0),
        "num_batches_tracked": torch.tensor(4),
    }
    save_file(state, tmp_path / "model.safetensors")
    model = mixed()
    own = model.running_mean
    FlatStepper(model, eb.sgd(0.1), values=FromSafetensors(tmp_path)).close()
    assert model.running_mean is own
    assert own is not None
    assert own.tolist() == [0.0, 1.0, 2.0]
    assert model.running_var is not None
    assert model.running_var.tolist() == [8.0, 8.0, 8.0]
    # If it fails later, they are as they were.
    save_file(state | {"bias": torch.ones(2)}, tmp_path / "model.safetensors")
    model = mixed()
    refused(model, values=FromSafetensors(tmp_path))
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [7.0, 7.0, 7.0]


def damaged(folder: Path) -> list[tuple[Path, str]]:
    """Files that are no safetensors files, and what is said of them."""
    good = folder / "good"
    linear(file=good)
    data = good.read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    cases = {
        "short": (data[:5], "is no safetensors file, or was cut off"),
        "cut": (data[:-3], r"was cut off: '(weight|bias)' ends at byte"),
        "long": ((1 << 60).to_bytes(8, "little") + data[8:], "is no safetensors file, or was cut off"),
        "garbage": (data[:8] + b"!" * (len(data) - 8), "is no safetensors file or index, or bits have changed"),
        "list": (written([]), "is no safetensors file or index: its table is a list"),
    }
    for number, record in enumerate(
        [
            {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
            {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
            {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
            [],
        ]
    ):
        cases[f"record {number}"] = written(table | {"bias": record}), r"'bias' is described by .*, which is no tensor"
    found = []
    for name, (content, message) in cases.items():
        (folder / name).write_bytes(content)
        found.append((folder / name, message))
    return found


def written(table: Any) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def test_files_that_are_damaged_are_refused_by_name(tmp_path: Path) -> None:
    for file, message in damaged(tmp_path):
        said = refused(on_meta(lambda: nn.Linear(2, 2)), values=FromSafetensors(file))
        assert said.startswith(f"{file}: ")
        assert re.search(message, said), said
    for path, message in ((tmp_path / "none", "does not exist"), (tmp_path, "has no .safetensors file and no index")):
        said = refused(on_meta(lambda: nn.Linear(2, 2)), values=FromSafetensors(path))
        assert said.startswith(f"{path}: {message}")
    index = tmp_path / "model.safetensors.index.json"
    for files, message in (
        ({"weight": "../good"}, "has to name files beside it"),
        ({"gone": "good"}, "says that 'gone' is in good"),
    ):
        index.write_text(json.dumps({"weight_map": files}))
        said = refused(on_meta(lambda: nn.Linear(2, 2)), values=FromSafetensors(index))
        assert message in said


def by_rank(module: nn.Module) -> None:
    """Initializes other values on each rank."""
    for parameter in module.parameters(recurse=False):
        parameter.fill_(dist.get_rank())


def failing(folder: Path) -> list[str]:
    """What each rank says where one alone has a reason; the model is on the meta device after each."""
    rank, said = dist.get_rank(), []
    cases: list[Callable[[], Any]] = [
        lambda: FromSafetensors(folder / ("model.safetensors" if rank else "none.safetensors")),
        lambda: FromInitializers(by_rank),
        lambda: FromInitializers(half if rank else by_rank),
        lambda: FromInitializers(seed=rank),
        lambda: FromStateDict(linear() if rank else None),
        lambda: FromStateDict(linear()),
        lambda: FromStateDict(linear(bias=None) if not rank else None),
        lambda: FromSafetensors(folder / f"{rank}.safetensors"),
    ]
    for case in cases:
        model = on_meta(lambda: nn.Linear(2, 2))
        said.append(refused(model, strategy=3, values=case()))
    return said


def test_what_is_wrong_on_one_rank_is_said_on_all_of_them(tmp_path: Path) -> None:
    linear(file=tmp_path / "model.safetensors")
    linear(file=tmp_path / "0.safetensors")
    linear(file=tmp_path / "1.safetensors", bias=torch.ones(2, dtype=LOW))
    here, there = run(2, failing, tmp_path)
    patterns = [
        r"none.safetensors: does not exist",
        r"the initial values of weight: rank 0 has .*, and rank 1 has",
        r"values: bias: 2 of its 2 elements were not written",
        r"values.seed: rank 0 has 0, and rank 1 has 1",
        r"FromStateDict: got (None on the first rank|a dict on rank 1)",
        r"FromStateDict: got a dict on rank 1; accepted is a state dict on the first rank",
        r"the first rank's state dict does not fit the model, and nothing was changed:\n  bias is missing",
        r"values: rank 0 has .*float32.*, and rank 1 has .*bfloat16",
    ]
    for pattern, one, other in zip(patterns, here, there, strict=True):
        assert re.search(pattern, one), one
        assert re.search(pattern, other), other


# -- more ---------------------------------------------------------------------------------------------------------------------------


def test_memory_of_a_model_with_values_is_given_back_tensor_by_tensor() -> None:
    """What others hold of it stays theirs."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    held = model.get_parameter("0.weight").detach()
    gone = weakref.ref(model.get_parameter("1.weight").untyped_storage())
    before = held.clone()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy="optim_grads_params", units=[nn.Linear])
    assert gone() is None
    assert torch.equal(held, before)
    with stepper.full_parameters():
        model.get_parameter("0.weight").detach().zero_()
    assert torch.equal(held, before)


def test_a_stepper_does_not_keep_the_state_dict_that_it_was_given() -> None:
    state = linear()
    values = FromStateDict(state)
    gone = [weakref.ref(x) for x in state.values()]
    stepper = FlatStepper(on_meta(lambda: nn.Linear(2, 2)), eb.sgd(0.1), values=values)
    del state, values
    gc.collect()
    assert [one() for one in gone] == [None, None]
    stepper.close()


def test_attributes_of_parameters_and_their_classes_stay() -> None:
    class Special(nn.Parameter):
        keeps_decay = False

    model = on_meta(lambda: nn.Linear(2, 2))
    model.weight = Special(model.weight.detach())
    model.weight.keeps_decay = True
    with torch.no_grad():
        stepper = FlatStepper(model, eb.sgd(0.1), values=FromInitializers())
    assert type(model.weight) is Special
    assert model.weight.keeps_decay is True
    stepper.close()


def resumed(folder: Path) -> dict[str, Tensor]:
    """A run that goes on from a checkpoint on a model from the meta device."""
    model = meta()
    stepper = FlatStepper(
        model, eb.adamw(1e-2), policy=eb.policies.EXACT_BF16, strategy=3, units=[Layer], values=FromInitializers(seed=9)
    )
    load_sharded(stepper, folder)
    return continued(stepper, model)


def continued(stepper: FlatStepper, model: nn.Module) -> dict[str, Tensor]:
    for _ in range(2):
        with stepper.microbatch(last=True):
            model(torch.arange(4)).float().square().mean().backward()
        stepper.step()
    with stepper.full_parameters():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def saved(folder: Path) -> dict[str, Tensor]:
    model = meta()
    stepper = FlatStepper(
        model, eb.adamw(1e-2), policy=eb.policies.EXACT_BF16, strategy=3, units=[Layer], values=FromInitializers(seed=3)
    )
    continued(stepper, model)
    save_sharded(stepper, folder)
    return continued(stepper, model)


def test_a_run_goes_on_from_a_checkpoint_on_another_number_of_ranks_without_the_whole_model(tmp_path: Path) -> None:
    (first, *_), again = run(4, saved, tmp_path), run(2, resumed, tmp_path)
    for found in again:
        assert different(first, found) == []
    model = meta()
    values = FromCheckpoint(tmp_path, buffers=buffers)
    FlatStepper(model, eb.adamw(1e-2), policy=eb.policies.EXACT_BF16, units=[Layer], values=values).close()
    assert all(p.isfinite().all() for p in model.parameters())
