"""The model while it is sharded: state dicts of it, loading into it, copies, weights of some modules, and other methods than forward."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.programs import Block, data
from tests.support.ranks import run

State = dict[str, Any]


class Tied(nn.Module):
    """Units; tied names in and out of a unit; a frozen parameter; buffers, one of them not in state dicts; an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.exit = nn.Linear(5, 2)
        self.again = nn.Linear(3, 5)
        self.again.weight = self.entry.weight
        self.blocks[2].inner.weight = self.blocks[1].inner.weight  # type: ignore[union-attr]
        self.blocks[0].outer.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.entry(x)) + self.again(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(x) * self.scale * self.hidden
        return out

    def encode(self, x: Tensor) -> Tensor:
        """Computes with the model's own layers and with one unit, and is not forward."""
        out: Tensor = self.exit(self.blocks[1](self.norm(self.entry(x)))) * self.scale
        return out

    @torch.no_grad()
    def generate(self, x: Tensor, count: int) -> Tensor:
        """One forward pass after another, and its own layer after each."""
        for _ in range(count):
            x = self.entry.weight.T @ self.entry(torch.cat([self(x), x[:, :1]], 1)).T
            x = x.T
        return x


def tied(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(seed)
    model = Tied().to(dtype)
    with torch.no_grad():
        for number, buffer in enumerate(model.buffers()):
            if buffer.is_floating_point():
                buffer.add_(number + seed)
    return model


Made = Callable[..., FlatStepper]


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of steppers: all strategies; on four ranks the one that shards everything, and two dimensions of ranks."""
    four = dist.get_world_size() == 4
    for strategy in STRATEGIES[-1:] if four else STRATEGIES:
        yield strategy, {"strategy": strategy}
    if four:
        mesh = init_device_mesh("cpu", (2, 2))
        for name, one, outer in (("hsdp", 3, "no_shard"), ("hfsdp", 3, "optim"), ("hybrid zero-1", 1, "no_shard")):
            yield name, {"strategy": one, "outer": outer, "mesh": mesh}


def stepper_of(model: nn.Module, policy: eb.Policy | None = None, **arguments: Any) -> FlatStepper:
    return FlatStepper(model, eb.adamw(1e-2), policy=policy, units=[Block], **arguments)


def trained(model: Any, stepper: FlatStepper, steps: int = 2) -> None:
    for step in range(steps):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, model.entry.weight.dtype)).float().square().mean().backward()
        stepper.step()


def bits(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


def same(a: State, b: State) -> bool:
    """The same names in the same order, dtypes, shapes and bits."""
    return list(a) == list(b) and all(
        a[name].dtype is b[name].dtype and a[name].shape == b[name].shape and torch.equal(bits(a[name]), bits(b[name]))
        for name in a
    )


def whole(state: State) -> State:
    """All ranks' shards, put together by hand."""
    found = {}
    for name, value in state.items():
        if not hasattr(value, "local"):
            found[name] = value
            continue
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (value.low, value.local))
        flat = torch.full(value.shape, torch.nan, dtype=value.dtype).view(-1)
        for low, part in parts:
            flat[low : low + part.numel()] = part
        found[name] = flat.view(value.shape)
    return found


def state_dicts() -> list[str]:
    wrong = []
    cases = [(None, torch.float32), (eb.policies.EXACT_BF16, torch.bfloat16)]
    for number, (name, arguments) in enumerate(layouts()):
        for policy, dtype in cases[number % 2 :][:1] if dist.get_world_size() > 2 else cases:
            model = tied(dtype=dtype)
            before = copy.deepcopy(model.state_dict())
            stepper = stepper_of(model, policy, **arguments)
            found = [stepper.model_state_dict("full")]
            if not same(found[0], before):
                wrong.append(f"{name}: before training")
            trained(model, stepper)
            first = stepper.model_state_dict()
            found = [stepper.model_state_dict("full"), whole(stepper.model_state_dict("sharded"))]
            with stepper.full_parameters():
                found += [stepper.model_state_dict("full"), whole(stepper.model_state_dict("sharded"))]
            if dist.get_rank() == 0:
                found.append(first)
            elif first:
                wrong.append(f"{name}: not empty on another rank")
            if found[0]["entry.weight"] is not found[0]["again.weight"]:
                wrong.append(f"{name}: tied names are two tensors")
            metadata = vars(found[0])["_metadata"] == vars(before)["_metadata"]
            trained(model, stepper, 1)  # what was copied is not written to
            stepper.load_model_state_dict(found[0])
            stepper.close()
            wrong += [
                f"{name}: state dict {n}" for n, one in enumerate(found) if not same(one, dict(model.state_dict()))
            ]
            wrong += [] if metadata else [f"{name}: versions of modules"]
    return wrong


SIZES = [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(3, marks=pytest.mark.exhaustive), 4]

TWO = [2, pytest.param(4, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("size", SIZES)
def test_state_dicts_are_those_of_the_whole_model(size: int) -> None:
    for wrong in run(size, state_dicts):
        assert wrong == []


# -- loading ------------------------------------------------------------------------------------------------------------------------------


def entries_of(stepper: FlatStepper) -> dict[str, list[Tensor]]:
    """Copies of this rank's state by entry, in order."""
    found: dict[str, list[Tensor]] = {}
    for unit in stepper.as_optimizer().engine.units:
        for member in unit.members:
            for entry, value in unit.entries(member):
                found.setdefault(entry.name, []).append(value.clone())
    return found


LOADS: dict[str, Callable[[FlatStepper, State], Any]] = {
    "full on every rank": lambda stepper, state: stepper.load_model_state_dict(state),
    "full on the first rank": lambda stepper, state: stepper.load_model_state_dict(
        state if dist.get_rank() == 0 else {}, broadcast_from_rank0=True
    ),
    "without tied names": lambda stepper, state: stepper.load_model_state_dict(
        {name: value for name, value in state.items() if name != "entry.weight"}
    ),
}


def loading(path: Path) -> list[str]:
    """Each way of loading, into a stepper that was trained; two more steps are those of a stepper that was made with these weights."""
    wrong = []
    dtype = torch.bfloat16
    for number, (name, arguments) in enumerate(layouts()):
        for policy in (eb.policies.MIXED_BF16, eb.policies.EXACT_BF16)[number % 2 :][:1]:
            state = tied(1, dtype).state_dict()
            model = tied(1, dtype)
            other = stepper_of(model, policy, **arguments)
            mains = {entry: one for entry, one in entries_of(other).items() if entry.startswith("param.")}
            cut = other.model_state_dict("sharded")
            trained(model, other, 1)
            expected = other.model_state_dict("full")
            for way in [*LOADS, "sharded", "through dcp"]:
                model = tied(0, dtype)
                stepper = stepper_of(model, policy, **arguments)
                trained(model, stepper, 1)
                moments = entries_of(stepper)
                if way == "sharded":
                    keys = stepper.load_model_state_dict(cut)
                elif way == "through dcp":
                    save(cut, checkpoint_id=path / str(number))
                    into = stepper.model_state_dict("sharded")
                    load(into, checkpoint_id=path / str(number))
                    keys = stepper.load_model_state_dict(into)
                else:
                    keys = LOADS[way](stepper, state)
                loaded = stepper.model_state_dict("full")
                after = entries_of(stepper)
                if not same(loaded, dict(state)) or keys != ([], []):
                    wrong.append(f"{name}, {way}: {keys}")
                for entry, values in after.items():
                    wanted = mains.get(entry, moments[entry])
                    if not all(torch.equal(bits(a), bits(b)) for a, b in zip(values, wanted, strict=True)):
                        wrong.append(f"{name}, {way}: {entry}")
                # With moments as before a first step, it is that step.
                for unit in stepper.as_optimizer().engine.units:
                    for value in eb.tree.leaves((unit.state.step, unit.state.inner)):
                        value.zero_()
                trained(model, stepper, 1)
                if not same(stepper.model_state_dict("full"), expected):
                    wrong.append(f"{name}, {way}: a step after it")
    return wrong


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3, 4))])
def test_loaded_weights_are_trained_on_and_main_weights_follow(size: int, tmp_path: Path) -> None:
    for wrong in run(size, loading, tmp_path):
        assert wrong == []


REFUSED: dict[str, tuple[Callable[[State], Any], dict[str, Any], list[str]]] = {
    "all at once": (
        lambda s: {
            **{name: x for name, x in s.items() if name not in ("exit.bias", "blocks.0.inner.bias")},
            "norm.running_mean": s["norm.running_mean"].double(),
            "again.bias": s["again.bias"][:3],
            "stranger": torch.ones(1),
            "scale": [1.0, 2.0],
        },
        {},
        [
            "exit.bias: is missing", "blocks.0.inner.bias: is missing", "stranger: is not in the model",
            r"norm.running_mean: got torch.float64; accepted is torch.float32", r"again.bias: got shape \(3,\); accepted is \(5,\)",
            "scale: got a list; accepted is a tensor",
        ],
    ),
    "not strict, another shape": (lambda s: {"exit.bias": torch.ones(7)}, {"strict": False}, [r"exit.bias: got shape \(7,\)"]),
    "ties": (
        lambda s: {**s, "again.weight": s["again.weight"] + 1},
        {},
        ["again.weight: is tied to entry.weight in the model, and their values differ"],
    ),
    "ranks that differ": (
        lambda s: {**s, "exit.bias": s["exit.bias"] + dist.get_rank()},
        {},
        ["exit.bias: differs between rank 0 and rank 1"],
    ),
    "one rank's names": (
        lambda s: {name: x for name, x in s.items() if name != "exit.bias" or dist.get_rank() == 0},
        {},
        [r"exit.bias: is missing \(on rank 1\)"],
    ),
    "values elsewhere": (lambda s: s, {"broadcast_from_rank0": True}, [r"\d+ entries on another rank than the first"]),
    "the first rank's": (
        lambda s: {"exit.bias": s["exit.bias"]} if dist.get_rank() == 0 else None,
        {"broadcast_from_rank0": True},
        ["entry.weight: is missing"],
    ),
    "nothing": (lambda s: None, {}, ["state_dict: got NoneType"]),
    "without values": (lambda s: {**s, "exit.bias": s["exit.bias"].to("meta")}, {}, ["exit.bias: got a tensor on the meta device"]),
}  # fmt: skip


def refusals() -> list[str]:
    wrong = []
    state = tied(1).state_dict()
    for name, arguments in layouts():
        model = tied()
        stepper = stepper_of(model, **arguments)
        before = stepper.model_state_dict("full")
        for case, (change, options, patterns) in REFUSED.items():
            try:
                stepper.load_model_state_dict(change(dict(state)), **options)
                wrong.append(f"{name}, {case}: accepted")
            except ValueError as error:
                messages: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(messages, str(error))
                wrong += [f"{name}, {case}: {error}" for p in patterns if not re.search(p, str(error))]
                wrong += [f"{name}, {case}: {message}" for message in messages if message != messages[0]]
                if "nothing was changed" not in str(error) or not same(stepper.model_state_dict("full"), before):
                    wrong.append(f"{name}, {case}: changed")
        given = {"exit.bias": state["exit.bias"], "stranger": torch.ones(1)}
        keys = stepper.load_model_state_dict(given, strict=False)
        missing = [key for key in state if key != "exit.bias"]
        after = stepper.model_state_dict("full")
        if (keys.missing_keys, keys.unexpected_keys) != (missing, ["stranger"]):
            wrong.append(f"{name}: {keys}")
        if not same(after, before | {"exit.bias": state["exit.bias"]}):
            wrong.append(f"{name}: not strict")
    return wrong


def test_what_does_not_fit_is_refused_by_name_on_all_ranks_and_nothing_is_changed() -> None:
    for wrong in run(2, refusals):
        assert wrong == []


def residuals() -> list[str]:
    """Weights that are not in the dict keep their residuals."""
    wrong = []
    for name, arguments in layouts():
        model = tied(0, torch.bfloat16)
        stepper = stepper_of(model, eb.policies.KAHAN_BF16, **arguments)
        trained(model, stepper, 3)
        before, state = entries_of(stepper), stepper.model_state_dict("full")
        stepper.load_model_state_dict({"blocks.1.inner.bias": state["blocks.1.inner.bias"]}, strict=False)
        members = [member.name for unit in stepper.as_optimizer().engine.units for member in unit.members]
        for entry, values in entries_of(stepper).items():
            for member, old, new in zip(members, before[entry], values, strict=True):
                cleared = member == "blocks.1.inner.bias" and entry.startswith("param.")
                if not torch.equal(bits(new), bits(torch.zeros_like(old) if cleared else old)):
                    wrong.append(f"{name}: {member}, {entry}")
        if not any(
            bool(x.any())
            for entry, x in ((e, torch.cat([v.view(-1) for v in vs])) for e, vs in before.items())
            if entry.startswith("param.")
        ):
            wrong.append(f"{name}: no residual to be kept")
    return wrong


@pytest.mark.parametrize("size", TWO)
def test_weights_that_are_not_loaded_keep_their_residuals(size: int) -> None:
    for wrong in run(size, residuals):
        assert wrong == []


def misplaced() -> list[str]:
    model = tied()
    stepper = stepper_of(model, strategy=3)
    state = stepper.model_state_dict("full")
    said = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
            said.append("accepted")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))

    with stepper.full_parameters():
        attempt(lambda: stepper.load_model_state_dict(state))
    with stepper.microbatch(last=False):
        attempt(lambda: stepper.load_model_state_dict(state))
        model(data(0, 0, 0, torch.float32)).sum().backward()
    attempt(lambda: stepper.load_model_state_dict(state))
    stepper.zero_grad()
    hook = model.exit.register_forward_hook(lambda *_: attempt(stepper.model_state_dict))
    with torch.no_grad():
        model(data(0, 0, 0, torch.float32))
    hook.remove()
    attempt(lambda: stepper.model_state_dict("full" if dist.get_rank() else "rank0"))
    attempt(lambda: stepper.model_state_dict() if dist.get_rank() else stepper.copy_model())
    attempt(lambda: stepper.model_state_dict("all"))  # type: ignore[arg-type]
    stepper.completeness.mark_incomplete("something ended in an error")
    attempt(lambda: stepper.load_model_state_dict(state))
    return said


def test_calls_at_the_wrong_place_or_on_some_ranks_only_are_refused() -> None:
    patterns = [
        r"inside full_parameters\(\)", r"in the middle of a cycle", r"in the middle of a cycle", r"inside a forward or backward pass",
        r"rank 0 calls model_state_dict\(rank0\), and rank 1 calls model_state_dict\(full\)",
        r"rank 0 calls copy_model\(rank0\), and rank 1 calls model_state_dict\(rank0\)",
        r"form: got 'all'; accepted are 'rank0', 'full', 'sharded'", r"load_model_state_dict: something ended in an error",
    ]  # fmt: skip
    for said in run(2, misplaced):
        assert len(said) == len(patterns)
        for message, pattern in zip(said, patterns, strict=True):
            assert re.search(pattern, message), message


# -- copies -------------------------------------------------------------------------------------------------------------------------------


def averaged(update: Callable[[Tensor, Tensor], Any], models: list[State]) -> State:
    """What torch's own formula makes of the weights after each step, in one process."""
    average = copy.deepcopy(models[0])
    for state in models[1:]:
        for name, value in state.items():
            if value.is_floating_point():
                update(average[name], value)
    return average


def copies() -> list[str]:
    wrong = []
    for name, arguments in layouts():
        model = tied()
        stepper = stepper_of(model, **arguments)
        stepper.register_method(model, "encode")
        trained(model, stepper, 1)
        made = [stepper.copy_model("full"), stepper.copy_model()]
        if (made[1] is None) != (dist.get_rank() > 0):
            wrong.append(f"{name}: a copy on the wrong rank")
        shards = stepper.model_state_dict("sharded")
        history = [stepper.model_state_dict("full")]
        once = dict.fromkeys(n for n, _ in model.named_parameters())
        with stepper.full_parameters():
            average = AveragedModel(model, multi_avg_fn=None, avg_fn=lambda a, b, n: a.lerp(b, 0.25))
            average.update_parameters(model)  # the first one is a copy
            made.append(copy.deepcopy(model))
        x = data(0, 0, 0, torch.float32)
        with stepper.full_parameters(), torch.no_grad():
            expected_outputs = [model.eval()(x), model.encode(x)]
        model.train()
        for one in made:
            if one is None:
                continue
            assert isinstance(one, Tied)
            pickle.loads(pickle.dumps(one))
            with torch.no_grad():
                outputs = [one.eval()(x), one.encode(x)]
            if not same(dict(one.state_dict()), history[0]) or not all(map(torch.equal, outputs, expected_outputs)):
                wrong.append(f"{name}: a copy")
            if one.again.weight is not one.entry.weight or one.blocks[0].outer.weight.requires_grad:  # type: ignore[union-attr]
                wrong.append(f"{name}: a copy's ties, or what it trains")
            one(x).sum().backward()  # a plain model, whose gradients are its own
            if one.exit.weight.grad is None:
                wrong.append(f"{name}: a copy has hooks")
            stepper.zero_grad()
        for _ in range(3):
            trained(model, stepper, 1)
            history.append(stepper.model_state_dict("full"))
            with stepper.full_parameters():
                average.update_parameters(model)
            # The average of this rank's shards, which is nobody's but this rank's.
            now = stepper.model_state_dict("sharded")
            for key, value in shards.items():
                if hasattr(value, "local") and key in once:
                    value.local.lerp_(now[key].local, 0.25)
        expected = averaged(lambda a, b: a.lerp_(b, 0.25), [{n: one[n] for n in once} for one in history])
        mine = whole(shards)
        if not all(torch.equal(mine[n], expected[n]) for n in once):
            wrong.append(f"{name}: an average of shards")
        if not all(torch.equal(average.module.get_parameter(n), expected[n]) for n in once):
            wrong.append(f"{name}: AveragedModel made inside full_parameters()")
        stepper.load_model_state_dict({n: v for n, v in shards.items() if n in once}, strict=False)
        if not all(torch.equal(stepper.model_state_dict("full")[n], expected[n]) for n in once):
            wrong.append(f"{name}: the average loaded")
    return wrong


@pytest.mark.parametrize("size", TWO)
def test_copies_are_plain_models_and_averages_of_shards_are_averages(size: int) -> None:
    for wrong in run(size, copies):
        assert wrong == []


# -- some modules -------------------------------------------------------------------------------------------------------------------------


def shown(stepper: FlatStepper) -> set[str]:
    """The names of parameters that have their values; all of them do where nothing is sharded."""
    return {name for name, p in stepper.model.named_parameters() if p.numel() and not bool(p.isnan().any())}


def chosen_modules() -> list[str]:
    wrong = []
    for name, arguments in layouts():
        model, plain = tied(), tied()
        stepper = stepper_of(model, **arguments)
        sharded = stepper.sharding.params
        first = {n for n, _ in model.named_parameters() if n.startswith("blocks.0")}
        # One weight of block 1 and 2 is one tensor, and lies in the model's own unit.
        second = {f"blocks.1.{n}" for n in ("inner.bias", "outer.weight", "outer.bias")}
        own = {n for n, p in model.named_parameters() if not n.startswith("blocks") and p.numel()} | {
            "blocks.1.inner.weight"
        }
        cases: list[tuple[Any, set[str]]] = [
            ([model.blocks[0]], first), (["blocks.0.inner"], first), ([model.blocks[1]], second | own), (["exit"], own), ([], set()),
        ]  # fmt: skip
        for modules, expected in cases:
            with stepper.full_parameters(modules) as given:
                if sharded and shown(stepper) != expected:
                    wrong.append(f"{name}: {modules} shows {shown(stepper)}")
                with stepper.full_parameters([model.blocks[0]]):
                    if sharded and shown(stepper) != expected | first:
                        wrong.append(f"{name}: one in another shows {shown(stepper)}")
                if given is not model or (sharded and shown(stepper) != expected):
                    wrong.append(f"{name}: after one in another {shown(stepper)}")
                # Passes inside, which need other units too.
                x = data(0, 0, 0, torch.float32)
                with torch.no_grad():
                    if not torch.equal(model.eval()(x), plain.eval()(x)):
                        wrong.append(f"{name}: a pass inside")
                if sharded and shown(stepper) != expected:
                    wrong.append(f"{name}: after a pass inside {shown(stepper)}")
            if sharded and shown(stepper):
                wrong.append(f"{name}: afterwards {shown(stepper)}")
        # Writing, and a step inside, are as if all were shown.
        other = stepper_of(plain, **arguments)
        for one, modules in ((stepper, ["blocks.0", "exit"]), (other, None)):
            with one.full_parameters(modules) as there, torch.no_grad():
                there.train()
                there.get_parameter("blocks.0.inner.bias").fill_(3.0)
                with torch.enable_grad():
                    trained(there, one, 1)
                there.get_parameter("exit.weight").mul_(2.0)
            trained(one.model, one, 1)
        states = [one.model_state_dict("full") for one in (stepper, other)]
        if not same(*states):
            wrong.append(f"{name}: written")
        with stepper.full_parameters(["exit"], writeback=False):
            model.exit.weight.sum()
        try:
            with stepper.full_parameters(["exit"], writeback=False), torch.no_grad():
                model.exit.weight.zero_()
            wrong.append(f"{name}: written to what is for reading")
        except RuntimeError as error:
            if not re.search(
                r"exit\.weight: was written to, or stepped, inside full_parameters\(writeback=False\)", str(error)
            ):
                wrong.append(f"{name}: {error}")
        if sharded and not same(stepper.model_state_dict("full"), states[0]):
            wrong.append(f"{name}: kept what was written to what is for reading")
        for modules in (["strange"], [nn.Linear(1, 1)]):
            with pytest.raises(ValueError, match=r"modules: got .* which is not in the model"):
                stepper.full_parameters(modules).__enter__()
        with pytest.raises(TypeError, match=r"modules: got .*; accepted is a list"):
            stepper.full_parameters("exit").__enter__()
    return wrong


@pytest.mark.parametrize("size", TWO)
def test_the_weights_of_some_modules_are_shown_and_no_others(size: int) -> None:
    for wrong in run(size, chosen_modules):
        assert wrong == []
