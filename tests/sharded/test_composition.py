"""Steppers beside tensor parallelism, pipelines and experts: the bits of one process, and every element counted once in what is global."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.construction.sources import FromInitializers
from everybit_torch.sharded.joint import JointStepper
from everybit_torch.sharded.save_folders import point_to
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.parts import weighted
from tests.support.ranks import run
from tests.support.transforms import EXAMPLES
from tests.support.weights import Weights, equal

STEPS = 3
MAIN = eb.Grads(main="float32", comm="float32")
TRANSFORMS: dict[str, Any] = {
    "clipped": lambda lr: eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(lr)),
    # Of which the norm of all gradients is not the first reduction.
    "clipped later": lambda lr: eb.chain(eb.scale(2.0), eb.clip_by_global_norm(0.5), eb.adamw(lr)),
    "lamb": EXAMPLES["lamb"],
}


class Part(nn.Module):
    """A layer whose gradients are what :func:`~tests.support.parts.gradient` says."""

    def __init__(self, name: str, dtype: torch.dtype, rows: int = 6) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * 5).view(rows, 5).to(dtype))
        self.bias = nn.Parameter(torch.linspace(0, 1, 3).to(dtype))
        self.scale = nn.Parameter(torch.ones(2).to(dtype))

    def forward(self, step: int, rank: int) -> Tensor:
        return weighted(self, self.name, step, rank)


class Model(nn.Module):
    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part(name, dtype) for name in names})

    def forward(self, step: int, rank: int) -> Tensor:
        return torch.stack([part(step, rank) for part in self.parts.values()]).sum()


def policy(name: str) -> eb.Policy:
    chosen: eb.Policy = getattr(eb.policies, name)
    return dataclasses.replace(chosen, grads=MAIN)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "FP32" else torch.bfloat16


def one_process(
    transform: str, stored: str, names: list[str], size: int, ranks: Callable[[str], list[int]] | None = None
) -> Weights:
    """The torch optimizer on the whole model, with the sum of ranks' gradients over a number of ranks.

    Args:
        transform: Of the examples.
        stored: A policy.
        names: Of the model's parts.
        size: What the sum is divided by.
        ranks: By the name of a part, of which ranks it is the sum; all ranks up to ``size``.
    """
    model = Model(names, dtype_of(stored))
    given = dataclasses.replace(policy(stored), grads=eb.Grads(main="float32"))
    optimizer = TorchOptimizer(model.named_parameters(), TRANSFORMS[transform], lr=1e-2, policy=given, seed=5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for name, part in model.parts.items():
            for rank in range(size) if ranks is None else ranks(name):
                part(step, rank).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(size)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def weights_of(stepper: FlatStepper) -> Weights:
    with stepper.full_parameters() as model:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


# -- tensor parallelism -----------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, mesh: DeviceMesh, dimension: int) -> None:
    """Weights in parts, biases as copies, scales as they were."""
    for module in model.modules():
        for name, placement in (("weight", Shard(dimension)), ("bias", Replicate()), ("frozen", Shard(0))):
            if isinstance(parameter := getattr(module, name, None), nn.Parameter):
                placements: list[Placement] = [placement]
                part = distribute_tensor(parameter.detach(), mesh, placements)
                module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def with_tensor_parallelism(stored: str, names: list[str]) -> dict[tuple[str, str], Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: dict[tuple[str, str], Any] = {}
    for transform in names:
        # Clipping first goes through every strategy; what is asked for in another way, through one that cuts weights and one that does not.
        for strategy in STRATEGIES if transform == names[0] else ("optim", "optim_grads_params"):
            model = Model(["first", "second"], dtype_of(stored))
            cut(model, mesh["tensor"], 0)
            stepper = FlatStepper(
                model, TRANSFORMS[transform](1e-2), policy=policy(stored), mesh=mesh["data"], strategy=strategy,
                units=[Part], seed=5,
            )  # fmt: skip
            norms = []
            for step in range(STEPS):
                with stepper.microbatch(last=True):
                    model(step, mesh.get_local_rank("data")).backward()
                norms.append(float(stepper.step().grad_norm))
            found[transform, strategy] = weights_of(stepper), norms
            stepper.close()
    return found


@pytest.mark.parametrize("stored", ["LEAN_BF16", pytest.param("FP32", marks=pytest.mark.exhaustive)])
def test_a_tensor_parallel_model_has_the_bits_of_one_process(stored: str) -> None:
    names = list(TRANSFORMS)
    expected = {name: one_process(name, stored, ["first", "second"], 2) for name in names}
    for found in run(4, with_tensor_parallelism, stored, names):
        for (transform, strategy), (weights, _) in found.items():
            assert equal(weights, expected[transform]), (transform, strategy)


def test_a_layer_that_torch_parallelizes_trains_as_one_process_does() -> None:
    """With torch's own plan for a model: gradients of replicated parameters that are still to be summed, too."""
    expected = in_one_process()
    for found in run(4, with_torchs_plan):
        for strategy, weights in found.items():
            for name, value in weights.items():
                # float64: partial sums of products are added in another order.
                torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=f"{strategy}: {name}")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.up = nn.Linear(8, 12, dtype=torch.float64)
        self.down = nn.Linear(12, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return found


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def clipped() -> Any:
    return eb.chain(eb.clip_by_global_norm(0.05), eb.adamw(1e-2))


def in_one_process() -> Weights:
    model = Perceptron()
    optimizer = TorchOptimizer(model.named_parameters(), lambda lr: clipped(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.cat([model(batch(step, rank)) for rank in range(2)]).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_torchs_plan() -> dict[str, Weights]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = {}
    for strategy in ("optim", "optim_grads_params"):
        model = Perceptron()
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
        stepper = FlatStepper(model, clipped(), mesh=mesh["data"], strategy=strategy)
        for step in range(STEPS):
            x = batch(step, mesh.get_local_rank("data"))
            with stepper.microbatch(last=True):
                model(x).square().mean().backward()
            stepper.step()
        found[strategy] = weights_of(stepper)
        stepper.close()
    return found


# -- a pipeline -------------------------------------------------------------------------------------------------------------------


def stage_stepper(model: Model, transform: str, mesh: DeviceMesh, options: dict[str, Any]) -> FlatStepper:
    return FlatStepper(
        model, TRANSFORMS[transform](1e-2), policy=policy("EXACT_BF16"), mesh=mesh["data"], units=[Part],
        model_parallel=mesh["stage"], seed=5, **options,
    )  # fmt: skip


def with_stages(directory: str) -> dict[str, Any]:
    """Two stages, each on two ranks; the second has a copy of the first's second part, which gets the same gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    if mesh.get_local_rank("stage"):  # one stage makes a group that the other does not know of
        torch.distributed.new_group(
            torch.distributed.get_process_group_ranks(mesh.get_group("data")), use_local_synchronization=True
        )
    stage, data = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    found: dict[str, Any] = {}
    for transform, strategy in (("clipped", "optim"), ("clipped later", "optim_grads_params"), ("lamb", "optim_grads")):
        names = [["first"], ["second", "third"]] if transform == "lamb" else [["first", "tied"], ["tied", "second"]]
        model = Model(names[stage], torch.bfloat16)
        copies = [name for name, _ in model.named_parameters() if "tied" in name] if stage else []
        options: dict[str, Any] = {"copies": copies, "strategy": strategy}
        stepper = stage_stepper(model, transform, mesh, options)
        for step in range(STEPS):
            if step == 2:  # goes on from a checkpoint
                save_sharded(stepper, f"{directory}/{transform}")
                stepper.close()
                model = Model(names[stage], torch.bfloat16)
                stepper = stage_stepper(model, transform, mesh, options)
                load_sharded(stepper, f"{directory}/{transform}")
            with stepper.microbatch(last=True):
                model(step, data).backward()
            stepper.step()
        found[transform] = weights_of(stepper)
        stepper.close()
    return found


def test_stages_of_a_pipeline_have_the_bits_of_one_process(tmp_path: Path) -> None:
    parts = {name: ["first", "tied", "second"] for name in TRANSFORMS} | {"lamb": ["first", "second", "third"]}
    expected = {name: one_process(name, "EXACT_BF16", parts[name], 2) for name in TRANSFORMS}
    for rank, found in enumerate(run(4, with_stages, str(tmp_path))):
        for transform, weights in found.items():
            assert len(weights) == (3 if transform == "lamb" and rank % 2 == 0 else 6)
            for name, value in weights.items():
                assert torch.equal(value, expected[transform][name]), (rank, transform, name)


# -- experts ----------------------------------------------------------------------------------------------------------------------


def with_experts() -> tuple[Weights, list[float], bool]:
    """Each expert is on two of four ranks, and everything else on all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    rank, expert = torch.distributed.get_rank(), mesh.get_local_rank("expert")
    dense, experts = Model(["router"], torch.bfloat16), Model([f"expert{expert}"], torch.bfloat16)
    options: dict[str, Any] = {"policy": policy("EXACT_BF16"), "nan": "step", "seed": 5}
    stepper = JointStepper(
        {
            "dense": FlatStepper(dense, TRANSFORMS["clipped"](1e-2), strategy="optim", **options),
            "experts": FlatStepper(
                experts, TRANSFORMS["clipped"](1e-2), mesh=mesh["data"], model_parallel=mesh["expert"], divisor=4,
                strategy="optim_grads_params", **options,
            ),
        }
    )  # fmt: skip
    norms = []
    for step in range(STEPS):
        with stepper.microbatch(last=True):
            (dense(step, rank) + experts(step, rank)).backward()
        reports = stepper.step()
        norms.append(float(reports["dense"].grad_norm))
        assert float(reports["experts"].grad_norm) == norms[-1]
    # One rank's gradient of an expert is not finite: nobody steps.
    with stepper.microbatch(last=True):
        loss = dense(STEPS, rank) + experts(STEPS, rank)
        (loss * (torch.inf if rank == 3 else 1.0)).backward() if expert else loss.backward()
    skipped = all(report.skipped for report in stepper.step().values())
    weights = weights_of(stepper.steppers["dense"]) | weights_of(stepper.steppers["experts"])
    stepper.close()
    return weights, norms, skipped


def test_experts_are_reduced_over_their_own_ranks_and_counted_with_the_rest() -> None:
    names = ["router", "expert0", "expert1"]
    ranks = {"router": [0, 1, 2, 3], "expert0": [0, 2], "expert1": [1, 3]}
    expected = one_process("clipped", "EXACT_BF16", names, 4, ranks.__getitem__)
    found = run(4, with_experts)
    for rank, (weights, norms, skipped) in enumerate(found):
        assert len(weights) == 6
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), (rank, name)
        assert norms == found[0][1]
        assert skipped
    assert {name for weights, _, _ in found for name in weights} == expected.keys()


# -- what cannot be composed, and what is read and measured -----------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    second = mesh.get_local_rank("other")
    told: dict[str, str] = {}

    def refused(name: str, dimension: int = 0, on: str = "cpu", **arguments: Any) -> None:
        with torch.device(on):
            model = Model(["first"], torch.bfloat16)
        if dimension >= 0:
            cut(model, mesh["other"], dimension)
        given: dict[str, Any] = {"mesh": mesh["data"], "policy": policy("EXACT_BF16")} | arguments
        transform = given.pop("transform", TRANSFORMS["clipped"](1e-2))
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            FlatStepper(model, transform, **given)
        told[name] = f"{type(caught.value).__name__}: {caught.value}"

    refused("no mesh", mesh=None)
    refused("drawn bits", dimension=1, policy=policy("LEAN_BF16"))
    refused("overlap", dimension=-1, model_parallel=mesh["data"])
    refused("overlap with DTensors", model_parallel=mesh["other"])
    refused("no group", dimension=-1, model_parallel=2)
    refused("values of DTensors", device="cuda", values=FromInitializers(), on="meta")
    refused("unknown copy", dimension=-1, model_parallel=mesh["other"], copies=["parts.second.weight"])
    refused("copies in a norm of each", dimension=-1, copies=["parts.first.bias"], transform=TRANSFORMS["lamb"](1e-2))
    limit = 0.25 * (1 + second)
    differing = eb.chain(eb.clip_by_global_norm(limit), eb.sgd(0.1))
    refused("stages that differ", dimension=-1, model_parallel=mesh["other"], transform=differing)
    refused("one stage refuses", dimension=-1, model_parallel=mesh["other"], divisor=-1.0 if second else 1.0)
    return told


def test_what_does_not_compose_is_refused_by_name_on_every_rank() -> None:
    first, *others = run(4, refusals)
    for word, name in {
        "parts.first.weight: got a DTensor over the ranks 0, 1, which the stepper is to shard over": "no mesh",
        "parts.first.weight: a parameter of shape (6, 5) is sharded along dimension 1": "drawn bits",
        "model_parallel: has the ranks 0, 2 in common with mesh": "overlap",
        "model_parallel: has the ranks 0, 1 in common with dimension 0 of the DTensors' mesh": "overlap with DTensors",
        "model_parallel: got 2; accepted are a DeviceMesh, a process group, or None": "no group",
        "device: got cuda for parts.first.weight, a DTensor over a mesh of cpu; accepted is": "values of DTensors",
        "copies: got 'parts.second.weight'; accepted is a list of names of the model's parameters": "unknown copy",
        "copies: got 'parts.first.bias' with a transform that reduces over each": "copies in a norm of each",
        "rank 0 has": "stages that differ",
        "rank 1 could not make its stepper: ValueError: divisor: got -1.0": "one stage refuses",
    }.items():
        assert word in first[name], first[name]
    assert "limit=0.25" in first["stages that differ"]
    assert "limit=0.5" in first["stages that differ"]
    for told in others:
        assert told.keys() == first.keys()
        assert told["stages that differ"] == first["stages that differ"]


def norms_and_saves(directory: str) -> dict[str, Any]:
    """What is asked of gradients outside of a step, and a save that was interrupted between the parts of a model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Model(["first"], torch.float32)
    model.frozen = nn.Parameter(torch.arange(6.0), requires_grad=False)
    cut(model, mesh["tensor"], 0)
    stepper = FlatStepper(model, eb.adamw(1e-2), mesh=mesh["data"], nan="param")
    found: dict[str, Any] = {"weights": []}
    for step in range(2):
        with stepper.microbatch(last=True):
            model(step, mesh.get_local_rank("data")).backward()
        own = [p for group in stepper.as_optimizer().param_groups for p in group["params"]]
        for order in (2.0, torch.inf):
            found[f"norm {order}"] = float(torch.nn.utils.clip_grad_norm_(own, 1e9, norm_type=order))
        found["reported"] = float(stepper.step().grad_norm)
        save_sharded(stepper, directory, keep=1)
        found["weights"].append(weights_of(stepper))
    if (
        torch.distributed.get_rank() == 3
    ):  # tensor-parallel ranks save together: the second save does not count as whole
        point_to(Path(directory), "000001")
    torch.distributed.barrier()
    fixed: Any = model.frozen
    fixed.to_local().zero_()
    load_sharded(stepper, directory)
    found["loaded"] = weights_of(stepper)
    with stepper.microbatch(last=True):  # of one rank's own part of a weight, a gradient is not finite
        loss = model(2, mesh.get_local_rank("data"))
        weight: Any = model.parts["first"].get_parameter("weight")
        (loss + (weight.to_local().sum() * torch.inf if torch.distributed.get_rank() == 3 else 0.0)).backward()
    report = stepper.step()
    found["skipped"], found["named"] = report.skipped, [one.name for one in report.nonfinite]
    stepper.close()
    model = Model(["first"], torch.float32)
    model.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
    alone = FlatStepper(model, eb.adamw(1e-2), mesh=mesh["data"])
    load_sharded(alone, directory)
    found["alone"] = weights_of(alone)
    stages = f"{directory}/stages"
    staged = FlatStepper(
        Model(["first"], torch.float32), eb.adamw(1e-2), mesh=mesh["data"], model_parallel=mesh["tensor"]
    )
    with pytest.raises(FileNotFoundError) as caught:
        load_sharded(staged, directory)
    found["parts"] = str(caught.value)
    saved = []
    for step in range(2):
        with staged.microbatch(last=True):
            staged.model(step, mesh.get_local_rank("data")).backward()
        staged.step()
        save_sharded(staged, stages, keep=1)
        saved.append(weights_of(staged))
    if torch.distributed.get_rank() == 3:  # its part of the second save does not count as whole
        point_to(Path(stages) / "part-2-of-2", "000001")
    torch.distributed.barrier()
    load_sharded(staged, stages)
    found["stages"] = equal(weights_of(staged), saved[0]) and not equal(*saved)
    with pytest.raises(FileNotFoundError) as caught:
        load_sharded(alone, stages)
    found["whole"] = str(caught.value)
    return found


def test_norms_count_copies_once_and_a_save_of_all_parts_counts_or_the_one_before(tmp_path: Path) -> None:
    model = Model(["first"], torch.float32)
    (sum(model(1, rank) for rank in range(2)) / 2).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
    for rank, found in enumerate(run(4, norms_and_saves, str(tmp_path))):
        assert found["norm 2.0"] == pytest.approx(float(gradients.norm()), rel=1e-7)
        assert found["norm inf"] == float(gradients.abs().max())
        assert found["reported"] == float(gradients.norm())
        assert equal(found["loaded"], found["weights"][0])
        assert torch.equal(found["loaded"]["frozen"], torch.arange(6.0))
        assert not equal(*found["weights"])
        assert found["skipped"]
        assert found["named"] == (["parts.first.weight"] if rank % 2 else [])
        assert equal(found["alone"], found["weights"][0])
        assert found["stages"]
        assert "holds a model in parts (part-1-of-2, part-2-of-2)" in found["whole"]
        assert "holds a model in one part" in found["parts"]


def linear(transform: Any = None) -> FlatStepper:
    return FlatStepper(nn.Linear(2, 2), transform or TRANSFORMS["clipped"](1e-2))


def test_steppers_that_do_not_make_one_are_refused() -> None:
    closed, shared = linear(), nn.Linear(2, 2)
    closed.close()
    inner = nn.Sequential(shared)
    one, other = FlatStepper(shared, eb.adamw(1e-2)), FlatStepper(inner, eb.adamw(1e-2))
    cases: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, "steppers: got {}; accepted is a dict"),
        ([closed], ValueError, "steppers: got [FlatStepper"),
        ({"a": shared}, TypeError, "steppers['a']: got Linear"),
        ({"a": closed}, ValueError, "steppers['a']: is closed"),
        ({"a": one, "b": other}, ValueError, "steppers['b']: 0.weight is stepped by steppers['a'] too"),
        ({"a": linear(TRANSFORMS["clipped later"](1e-2))}, ValueError, "steppers['a']: its transform reduces over all"),
        (
            {"a": linear(eb.chain(eb.clip_by_global_norm(1.0), eb.accumulate(TRANSFORMS["clipped"](1e-2), every=2)))},
            ValueError,
            "steppers['a']: its transform reduces over all",
        ),
    ]
    for steppers, kind, words in cases:
        with pytest.raises(kind) as caught:
            JointStepper(steppers)
        assert words in str(caught.value)
    JointStepper({"lamb": linear(TRANSFORMS["lamb"](1e-2)), "clipped": linear(), "plain": linear(eb.adamw(1e-2))})
