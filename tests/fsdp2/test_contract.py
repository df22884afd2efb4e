"""What a stepper over FSDP2 promises and refuses: gradients that are not finite, clips, wires, labels, models that were sharded before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import everybit as eb
from everybit.policies import EXACT_BF16, LEAN_BF16
from everybit_torch import AdamW, FlatStepper, NonFinite, enable_gradient_release, evaluation_weights
from everybit_torch.torch_internals.dtensors import local
from tests.support.exact_models import Cell, Cells, mesh_of, train, train_alone, weights_of
from tests.support.ranks import RankFailedError, run
from tests.support.weights import Weights, equal

FSDP2: Any = {"strategy": "optim_grads_params", "units": [Cell]}
ADAMW = eb.adamw(0.03, weight_decay=0.1)


def sharded_by_user(model: Cells, **options: Any) -> None:
    for unit in (model.second.inner, model.second, model.first, model):
        fully_shard(unit, mesh=mesh_of((dist.get_world_size(),)), **options)  # type: ignore[arg-type]


# -- gradients that are not finite ----------------------------------------------------------------------------------------------------


class Spoiled(Cells):
    """The gradients of two elements are NaN, where it is told so."""

    spoils: float | None = None

    def forward(self, seed: int, uses_some: bool = True) -> Tensor:
        out = super().forward(seed, uses_some)
        return out if self.spoils is None else out + (self.own[0] * self.spoils).sum()


def spoiled(nan: Any, shape: tuple[int, ...], value: float, grads: eb.Grads) -> tuple[Any, bool, bool]:
    model = Spoiled(torch.float32)
    stepper = FlatStepper(model, ADAMW, policy=eb.Policy(grads=grads), mesh=mesh_of(shape), nan=nan, **FSDP2)
    train(stepper, model, range(1), 2)
    before = weights_of(model)
    model.spoils = value if dist.get_rank() == 1 else 0.0
    with stepper.microbatch(last=True):
        model(3).backward()
    report = stepper.step()
    kept = equal(before, weights_of(model))
    model.spoils = None
    train(stepper, model, range(1, 2), 2)
    return report, kept, not equal(before, weights_of(model))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("nan", ["step", "param"])
def test_a_step_is_skipped_on_all_ranks_and_says_whose_gradient_it_was(nan: str, shape: tuple[int, ...]) -> None:
    ranks = torch.Size(shape).numel()
    for report, kept, moved in run(ranks, spoiled, nan, shape, float("nan"), eb.Grads()):
        assert report.skipped
        assert kept
        assert moved
        assert report.nonfinite == ((NonFinite("own", 1, 2, "backward"),) if nan == "param" else ())


def test_an_overflow_on_the_wire_is_told_from_one_of_the_gradient() -> None:
    wire = eb.Grads(main="float32", comm="float16", reduce="float32")
    for report, kept, _ in run(2, spoiled, "param", (2,), 1e6, wire):
        assert report.skipped
        assert kept
        assert {(one.name, one.stage) for one in report.nonfinite} == {("own", "reduction")}


# -- what is done with final gradients --------------------------------------------------------------------------------------------------


def clipped(order: float, stepper: FlatStepper, model: Cells, seeds: list[tuple[int, bool]]) -> tuple[float, Weights]:
    for number, (seed, some) in enumerate(seeds):
        with stepper.microbatch(last=number == len(seeds) - 1):
            model(seed, some).backward()
    norm = float(stepper.clip_grad_norm_(1.0, order))
    stepper.step()
    return norm, weights_of(model)


def clipped_on_rows(order: float, shape: tuple[int, ...], outer: Any) -> tuple[float, Weights]:
    model = Cells(torch.float32)
    stepper = FlatStepper(model, eb.sgd(0.5), mesh=mesh_of(shape), outer=outer, divisor=1.0, **FSDP2)
    return clipped(order, stepper, model, [(4 + dist.get_rank(), True)])


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize(("shape", "outer"), [((4,), "no_shard"), ((2, 2), "no_shard"), ((2, 2), "optim")])
@pytest.mark.sampled(3)
def test_a_clip_measures_the_gradient_of_all_ranks_once(order: float, shape: tuple[int, ...], outer: str) -> None:
    model = Cells(torch.float32)
    stepper = FlatStepper(model, eb.sgd(0.5), strategy="no_shard", divisor=1.0)
    norm, weights = clipped(order, stepper, model, [(4 + rank, True) for rank in range(4)])
    for found, moved in run(4, clipped_on_rows, order, shape, outer):
        # Sums of 70 squares in other orders, in float32 where torch clips flat gradients.
        assert found == pytest.approx(norm, rel=2**-18)
        for name, value in weights.items():
            torch.testing.assert_close(moved[name], value, rtol=0, atol=2**-18)


def scaled(plain: bool) -> tuple[Weights, list[float]]:
    """torch's GradScaler, of which the third step overflows on one rank."""
    model = Spoiled(torch.float32)
    stepper = FlatStepper(model, ADAMW, **FSDP2)
    optimizer, scaler = stepper.as_optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    scales = []
    for step in range(4):
        if step == 2 and not plain:
            continue
        model.spoils = torch.inf if step == 2 and dist.get_rank() == 1 else None
        optimizer.zero_grad()
        with stepper.microbatch(last=True):
            loss = model(step + dist.get_rank())
            (scaler.scale(loss) if plain else loss).backward()
        if plain:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        else:
            stepper.step()
    return weights_of(model), scales


def test_torchs_grad_scaler_skips_on_all_ranks_or_on_none() -> None:
    expected = run(2, scaled, False)[0][0]
    for weights, scales in run(2, scaled, True):
        assert scales == [8.0, 8.0, 4.0, 4.0]
        assert equal(weights, expected)


def in_pieces(pattern: str) -> list[float]:
    """The main gradients after 300 backward passes, each of which adds 1 to all of them."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    policy = eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32"))
    stepper = FlatStepper(model, eb.sgd(0.1), policy=policy, strategy="optim_grads_params", divisor=2.0)
    for number in range(300):
        with stepper.no_sync() if pattern == "no_sync" and number < 299 else stepper.microbatch(last=number == 299):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    (parameter,) = stepper.as_optimizer().param_groups[0]["params"]
    return sorted(set(local(parameter.grad).reshape(-1).tolist()))


@pytest.mark.parametrize("pattern", ["microbatch", "no_sync"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.sampled(2)
def test_gradients_of_a_bfloat16_model_add_up_in_float32(pattern: str, ranks: int) -> None:
    """In bfloat16 256 + 1 is 256."""
    for found in run(ranks, in_pieces, pattern):
        assert found == [150.0 * ranks]


# -- wires ------------------------------------------------------------------------------------------------------------------------------


def sent(dtype: Any, reduce: Any, by_context: bool) -> tuple[Weights, str, list[str]]:
    model = Cells(torch.float32)
    stepper = FlatStepper(
        model, ADAMW, policy=eb.Policy(grads=eb.Grads(main="float32")), mesh=mesh_of((2, 2)), divisor=1.0, **FSDP2
    )
    wires = []
    if by_context:
        with stepper.grad_comm(dtype, reduce):
            model(1 + dist.get_rank()).backward()
    else:
        stepper.set_grad_comm(dtype, reduce)
        model(1 + dist.get_rank()).backward()
    wires.append(str(next(iter(stepper.labelled.values())).policy.grads.comm))
    with pytest.raises(RuntimeError, match=r"^set_grad_comm: there are gradients of this cycle") as refused:
        stepper.set_grad_comm(None)
    stepper.step()
    wires.append(str(next(iter(stepper.labelled.values())).policy.grads.comm))
    return weights_of(model), str(refused.value), wires


@pytest.mark.parametrize("by_context", [False, True])
@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [("float16", "native"), ("bfloat16", "native"), ("bfloat16", "float32"), ("float16", "float32")],
)
@pytest.mark.sampled(3)
def test_every_wire_has_the_bits_of_one_process_where_it_holds_the_gradients(
    dtype: str, reduce: str, by_context: bool
) -> None:
    model = Cells(torch.float32)
    stepper = FlatStepper(
        model, ADAMW, policy=eb.Policy(grads=eb.Grads(main="float32")), strategy="no_shard", divisor=1.0
    )
    for rank in range(4):
        model(1 + rank).backward()
    stepper.step()
    for weights, _, wires in run(4, sent, dtype, reduce, by_context):
        assert equal(weights, weights_of(model))
        assert wires == [dtype, "None" if by_context else dtype]


# -- labels, schedulers, evaluation -----------------------------------------------------------------------------------------------------


def labelled(strategy: str) -> tuple[Weights, list[Any], dict[str, Any]]:
    model = Cells(torch.bfloat16)
    transforms = {"matrix": eb.adamw(1e-2, weight_decay=0.5), "other": eb.sgd(1e-3, momentum=0.9)}
    exact, lean = (dataclasses.replace(one, grads=eb.Grads(main="float32")) for one in (EXACT_BF16, LEAN_BF16))
    policy = eb.by_label(lambda path, p: "wide" if p.ndim > 1 else "lean", {"wide": exact, "lean": lean})
    stepper = FlatStepper(
        model, transforms, labels=lambda name, p: "matrix" if p.ndim > 1 else "other", policy=policy, strategy=strategy,  # type: ignore[arg-type]
        units=[Cell], divisor=1.0,
    )  # fmt: skip
    optimizer = stepper.as_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):

        def closure(step: int = step) -> float:
            model(step).backward()
            return 1.5

        assert optimizer.step(closure) == 1.5
        scheduler.step()
    groups = [{name: one[name] for name in one if not name.startswith("param")} for one in optimizer.param_groups]
    return weights_of(model), groups, dict(stepper.routed)


def test_labels_policies_and_schedulers_are_those_of_the_other_strategies() -> None:
    (expected, groups, routed), _ = run(2, labelled, "optim")
    for weights, found, parameters in run(2, labelled, "optim_grads_params"):
        assert equal(weights, expected)
        assert found == groups
        assert parameters == routed


def evaluated() -> tuple[Weights, Weights, Weights]:
    model = Cells(torch.bfloat16)
    transform = eb.chain(eb.adamw(0.05), eb.average_weights(0.5))
    stepper = FlatStepper(model, transform, policy="LEAN_BF16", mesh=mesh_of((2, 2)), outer="optim", **FSDP2)
    train(stepper, model, range(2), 1)
    before = weights_of(model)
    with torch.no_grad(), evaluation_weights(stepper):
        model(1)
        inside = weights_of(model)
        with pytest.raises(RuntimeError, match="inside evaluation_weights"):
            stepper.step()
    model(1).backward()
    return before, inside, weights_of(model)


def test_weights_for_evaluation_are_seen_by_all_outer_ranks_and_forgotten_after_it() -> None:
    found = run(4, evaluated)
    for before, inside, after in found:
        assert equal(before, after)
        assert not equal(before, inside)
        assert equal(inside, found[0][1])


def imported() -> tuple[Weights, Weights, Weights]:
    """The weights at a full state dict, after loading it, and after weights of twice their size were imported."""
    model = Cells(torch.bfloat16)
    stepper = FlatStepper(
        model, eb.chain(eb.adamw(0.05), eb.average_weights(0.5)), policy="LEAN_BF16", mesh=mesh_of((2, 2)), outer="optim", **FSDP2
    )  # fmt: skip
    optimizer = stepper.as_optimizer()
    train(stepper, model, range(2), 1)
    before, kept = weights_of(model), optimizer.full_state_dict()
    train(stepper, model, range(1), 1)
    optimizer.load_full_state_dict(kept)
    loaded = weights_of(model)
    optimizer.import_fp32([[2 * one for one in group] for group in optimizer.export_fp32()])
    with (
        pytest.raises(RuntimeError, match=r"accepted is `with evaluation_weights\(stepper\):`"),
        evaluation_weights(optimizer),
    ):
        pass
    with pytest.raises(TypeError, match=r"optimizer: got a FlatStepper's"):
        enable_gradient_release(model, optimizer)
    return before, loaded, weights_of(model)


def test_weights_that_its_optimizer_takes_over_are_on_all_outer_ranks() -> None:
    trained = {name for name, p in Cells(torch.bfloat16).named_parameters() if p.requires_grad}
    for before, loaded, doubled in run(4, imported):
        assert equal(before, loaded)
        assert equal(doubled, {name: 2 * x if name in trained else x for name, x in before.items()})


# -- models that were sharded before ----------------------------------------------------------------------------------------------------


def by_user(options: dict[str, Any]) -> tuple[Weights, str]:
    torch.manual_seed(dist.get_rank())
    model = Cells(torch.float32)
    sharded_by_user(model, **options)
    stepper = FlatStepper(model, ADAMW, strategy=3, divisor=1.0, compile=bool(options))
    train(stepper, model, range(3), 2)
    return weights_of(model), repr(stepper)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.sampled(2)
def test_a_model_that_the_user_has_sharded_trains_alike_also_offloaded_and_compiled(offloads: bool) -> None:
    model = Cells(torch.float32)
    train_alone(FlatStepper(model, ADAMW, strategy="no_shard", divisor=1.0), model, range(3), 2, 2)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}
    for weights, text in run(2, by_user, options):
        assert equal(weights, weights_of(model))
        assert text.startswith("FlatStepper(strategy='optim_grads_params' over 2, 4 units of FSDP2)")


def computing_in_bfloat16() -> Weights:
    model = Cells(torch.float32)
    sharded_by_user(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    stepper = FlatStepper(model, ADAMW, strategy=3, divisor=1.0)
    train(stepper, model, range(1), 3)
    return weights_of(model)


def test_main_weights_in_float32_may_compute_in_bfloat16() -> None:
    """Gradients are whole numbers that bfloat16 holds; their sums over microbatches and ranks are float32's."""
    model = Cells(torch.float32)
    train_alone(FlatStepper(model, ADAMW, strategy="no_shard", divisor=1.0), model, range(1), 3, 2)
    for weights in run(2, computing_in_bfloat16):
        assert equal(weights, weights_of(model))


def one_after_another() -> list[str]:
    model, said = Cells(torch.float32), []
    first = FlatStepper(model, ADAMW, **FSDP2)
    train(first, model, range(1), 1)
    try:
        FlatStepper(model, ADAMW, strategy=3)
    except ValueError as error:
        said.append(str(error))
    first.close()
    try:
        train(first, model, range(1), 1)
    except RuntimeError as error:
        said.append(str(error))
    second = FlatStepper(model, ADAMW, strategy=3)
    before = weights_of(model)
    train(second, model, range(1), 2)
    assert not equal(before, weights_of(model))
    return said


def test_a_closed_stepper_leaves_the_model_to_the_next() -> None:
    for taken, closed in run(2, one_after_another):
        assert taken == "model: belongs to a stepper already; call that stepper's close() first."
        assert "This one was closed" in closed


# -- what is refused --------------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Two units and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.own = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x)) * self.own
        return out


def small(change: Callable[[Small], Any] = lambda model: None, **arguments: Any) -> None:
    model = Small()
    change(model)
    options: dict[str, Any] = {"strategy": 3, "units": [nn.Linear]}
    transform = arguments.pop("transform", eb.sgd(0.1))
    FlatStepper(model, transform, **options | arguments)


def set_to(name: str, value: Tensor) -> Callable[[Small], None]:
    return lambda model: model.register_parameter(name, nn.Parameter(value))


def tie(model: Small) -> None:
    model.two.weight = model.one.weight


def shard_one(model: Small) -> None:
    fully_shard(model.one, mesh=mesh_of((1,)))


def shard_all(model: Small) -> None:
    shard_one(model)
    fully_shard(model, mesh=mesh_of((1,)))


def policies(path: Any, p: Tensor) -> str:
    return "one" if p.ndim > 1 else "other"


TWO_GRADS = eb.by_label(
    policies, {"one": eb.Policy(grads=eb.Grads(main="float32")), "other": eb.Policy(grads=eb.Grads(comm="bfloat16"))}
)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no dimension": (lambda: small(set_to("own", torch.ones(()))), r"^own: got a parameter without dimensions.*shape \(1,\)"),
    "no element": (lambda: small(set_to("own", torch.ones(0, 3))), r"^own: got a parameter without elements"),
    "strides": (lambda: small(set_to("own", torch.ones(3, 4).t())), r"^own: got a parameter that is not contiguous"),
    "tied": (lambda: small(tie), r"^units: one\.weight and two\.weight are one parameter, and lie in the units 'one' and 'two'"),
    "dtypes": (
        lambda: small(lambda m: m.one.bfloat16(), units=None, policy="FP32"),
        r"^units: own is torch\.float32 and one\.weight is torch\.bfloat16, both in the unit the model's own.*nn\.LayerNorm\]",
    ),
    "meta": (lambda: small(lambda m: m.to("meta")), r"^model: own is on the meta device.*to_empty"),
    "part of it": (lambda: small(shard_one, units=None), r"^model: fully_shard was applied to modules in it, and not to the model"),
    "units of two": (lambda: small(shard_all), r"^units: got some for a model to which fully_shard was applied"),
    "grads": (lambda: small(policy=TWO_GRADS), r"^policy: one\.weight and one\.bias are in one unit.*different Grads"),
    "a gradient": (lambda: small(lambda m: m(torch.ones(1, 3)).sum().backward()), r"^own: holds a gradient already"),
    "no such unit": (lambda: small(units=[Cell]), r"^units: the model has no Cell"),
}  # fmt: skip


def refused() -> dict[str, str]:
    said = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
            said[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


def test_what_cannot_work_is_refused_by_name() -> None:
    (said,) = run(1, refused)
    for name, (_, pattern) in REFUSED.items():
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(said[name])


def test_without_a_process_group_it_says_what_to_write() -> None:
    with pytest.raises(
        ValueError, match=r"^strategy: got 'optim_grads_params' without a process group.*init_process_group"
    ):
        small()


def main_gradients_alone() -> str:
    model = Cells(torch.bfloat16)
    sharded_by_user(model)
    wide = dataclasses.replace(LEAN_BF16, grads=eb.Grads(main="float32"))
    AdamW(model.parameters(), policy=dataclasses.replace(wide, grads=eb.Grads(main=None)))
    with pytest.raises(ValueError, match=r"Grads\.main") as error:
        AdamW(model.parameters(), policy=wide)
    return str(error.value)


def test_the_torch_optimizer_alone_refuses_main_gradients_of_dtensors() -> None:
    (said,) = run(1, main_gradients_alone)
    assert said.startswith("param group 0: Grads.main: got torch.float32 for a DTensor of torch.bfloat16")
    assert "FlatStepper(model, ..., strategy='optim_grads_params')" in said


def other_units() -> tuple[str, bool, bool]:
    """The second rank runs one unit twice, and leaves out another of the same size: it has computed with the other's weights."""
    model = Small()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=3, units=[nn.Linear])
    before = weights_of(model)
    forward = Small.forward
    if dist.get_rank() == 1:
        model.forward = lambda x: model.one(model.one(x)) * model.own  # type: ignore[method-assign]
    with torch.no_grad():
        model(torch.ones(1, 3))
    model.forward = partial(forward, model)  # type: ignore[method-assign]
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="another rank another number") as error:
        stepper.step()
    stepper.zero_grad()
    kept = equal(before, weights_of(model))
    with stepper.microbatch(last=True):
        model(torch.ones(1, 3)).sum().backward()
    stepper.step()
    return str(error.value), kept, not equal(before, weights_of(model))


def test_ranks_that_run_other_units_are_told_before_a_weight_changes() -> None:
    for message, kept, moved in run(2, other_units):
        assert message.startswith("unit '")
        assert kept
        assert moved


def misused(case: str) -> str:
    model = Cells(torch.float32)
    stepper = FlatStepper(model, ADAMW, **FSDP2)

    def passed() -> None:
        model(1).backward()

    try:
        if case == "nested":
            with stepper.microbatch(last=False), stepper.no_sync():
                passed()
        elif case == "after the last":
            with stepper.sync():
                passed()
            with stepper.microbatch(last=True):
                passed()
        elif case == "inside":
            with stepper.microbatch(last=True):
                stepper.step()
        elif case == "not sent":
            with stepper.no_sync():
                passed()
            stepper.step()
        else:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            passed()
            stepper.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nested", "no_sync: inside microbatch(); accepted is after it"),
        ("after the last", "accepted next is step() or zero_grad()"),
        ("inside", "step: inside microbatch(); accepted is after it"),
        (
            "not sent",
            "were not summed over the ranks in the last backward pass; accepted before it is a pass inside sync()",
        ),
        ("torch's", "model.set_requires_gradient_sync is the stepper's to call"),
    ],
)
def test_cycles_that_would_lose_gradients_are_errors(case: str, words: str) -> None:
    for said in run(2, misused, case):
        assert words in said


def test_ranks_that_differ_are_told_so() -> None:
    with pytest.raises(RankFailedError, match=r"seed: rank 0 has 0, and rank 1 has 1"):
        run(2, with_seed_of_rank)


def with_seed_of_rank() -> None:
    FlatStepper(Cells(torch.float32), ADAMW, seed=dist.get_rank(), **FSDP2)


# -- process groups that are made anew ------------------------------------------------------------------------------------------------


def trained_before_and_after(store: str) -> list[Weights]:
    rank, found = dist.get_rank(), []
    for _ in range(3):
        dist.new_group()  # so that the groups of the second time have other names
    for again in (False, True):
        if again:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model = Cells(torch.float32)
        stepper = FlatStepper(model, eb.soap(0.03), mesh=mesh_of((2, 1)), outer="optim", **FSDP2)
        train(stepper, model, range(2), 2)
        found.append(weights_of(model))
        stepper.close()
    return found


def test_a_process_may_destroy_its_groups_and_train_again(tmp_path: Path) -> None:
    """Torch keeps meshes in caches, and gives them back for equal ones, with the groups of then."""
    for before, after in run(2, trained_before_and_after, str(tmp_path / "store")):
        assert equal(before, after)
