"""What the parts of a model tell each other: the plan has every byte of it, and no two of them draw the same random bits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import everybit as eb
from everybit_torch import plan
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.construction.sources import FromInitializers, FromSafetensors, FromStateDict
from everybit_torch.sharded.joint import JointStepper
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.sharded.test_composition import TRANSFORMS, Model, dtype_of, one_process, policy, weights_of
from tests.sharded.test_composition import Part as CompositionPart
from tests.sharded.test_plan import counting_live, settled_bytes
from tests.support.allocations import counting, settled
from tests.support.parts import BY_COLUMNS, BY_ROWS, SHAPES, Layer, Layers, Mesh, cut, trained
from tests.support.ranks import run

LOW = torch.bfloat16


# -- random bits ------------------------------------------------------------------------------------------------------------------------


def drawing() -> dict[str, Any]:
    """Two stages under a policy that draws bits, of which the second has a copy of the first's second part; and two alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    stage, data = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    model = Model([["first", "tied"], ["tied", "second"]][stage], LOW)
    copies = {name: name for name, _ in model.named_parameters() if "tied" in name} if stage else {}
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {
        "policy": policy("LEAN_BF16"), "mesh": mesh["data"], "model_parallel": mesh["stage"], "units": [CompositionPart], "seed": 5,
        "strategy": "optim_grads_params",
    }  # fmt: skip
    stepper = FlatStepper(model, TRANSFORMS["clipped"](1e-2), copies=copies, **arguments)
    for step in range(3):
        with stepper.microbatch(last=True):
            model(step, data).backward()
        stepper.step()
    found["weights"] = weights_of(stepper)
    stepper.close()
    told = {}
    for name, wrong in (
        ("list", ["parts.tied.weight"]),
        ("unknown", {"parts.tied.weight": "parts.third.weight"}),
        ("shape", {"parts.tied.weight": "parts.first.bias"}),
    ):
        other = Model([["first", "tied"], ["tied", "second"]][stage], LOW)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            FlatStepper(other, TRANSFORMS["clipped"](1e-2), copies=wrong if stage else (), **arguments)
        told[name] = str(caught.value)
    found["told"] = told
    # The same weights and gradients in both stages: bits are what may differ.
    alike = nn.Linear(64, 64, bias=False, dtype=LOW)
    nn.init.ones_(alike.weight)
    two = FlatStepper(alike, eb.adamw(1e-3), **(arguments | {"units": None}))
    with two.microbatch(last=True):
        alike(torch.ones(1, 64, dtype=LOW)).sum().backward()
    two.step()
    (unit,) = two.as_optimizer().engine.units
    found["variance"] = unit.named_state(unit.members[0])["variance"].clone()
    # A JointStepper changes nobody's bits, and refuses two that draw the same.
    one, same, third = (
        FlatStepper(nn.Linear(2, 2, dtype=LOW), eb.adamw(1e-3), policy=policy("LEAN_BF16"), seed=seed)
        for seed in (5, 5, 6)
    )
    with pytest.raises(
        ValueError, match=r"steppers\['b'\]: draws random bits with the seed 5, and so does steppers\['a'\]"
    ):
        JointStepper({"a": one, "b": same})
    JointStepper({"a": one, "b": third})
    return found


def test_stages_draw_the_bits_of_one_process_and_copies_those_of_what_they_copy() -> None:
    expected = one_process("clipped", "LEAN_BF16", ["first", "tied", "second"], 2)
    found = run(4, drawing)
    for rank, one in enumerate(found):
        for name, value in one["weights"].items():
            assert torch.equal(value, expected[name]), (rank, name)
        told = one["told"]
        assert "copies: got 'parts.tied.weight', of which a step draws random bits" in told["list"]
        assert "'parts.third.weight' is not there" in told["unknown"]
        assert (
            "copies: parts.tied.weight is torch.bfloat16 (6, 5), and 'parts.first.bias' is torch.bfloat16 (3,) there"
            in told["shape"]
        )
    assert not torch.equal(found[0]["variance"], found[1]["variance"])


def failing() -> str:
    """Values of one stage cannot be made."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))

    def broken(module: nn.Module) -> None:
        if mesh.get_local_rank("stage"):
            raise OSError("no values here")
        getattr(module, "reset_parameters", lambda: None)()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((OSError, RuntimeError)) as caught:
        FlatStepper(
            model, eb.adamw(1e-3), mesh=mesh["data"], model_parallel=mesh["stage"], values=FromInitializers(broken)
        )
    assert model[0].weight.device.type == "meta"
    return str(caught.value)


def test_a_stage_that_cannot_be_constructed_is_told_to_the_others() -> None:
    for told in run(4, failing, timeout=20.0):
        assert "no values here" in told


# -- the plan -----------------------------------------------------------------------------------------------------------------------------

SENT: list[tuple[str, str, str, dict[str, Any]]] = [
    ("stages", "clipped", "optim", {}),
    ("stages", "clipped later", "optim_grads_params", {"nan": "param"}),
    ("stages", "lamb", "optim_grads", {}),
    ("stages", "clipped later", "no_shard", {"nan": "step"}),
    ("tensors", "clipped later", "optim_grads_params", {"nan": "param"}),
    ("tensors", "lamb", "optim", {}),
]


def sending(cases: list[int]) -> list[Any]:
    """Where what was sent in a step, or what persists, is not what is planned; the plan of a stepper and that of its arguments."""
    mesh, wrong = Mesh(2, 2), list[Any]()
    rank, other = mesh.place("data"), mesh.place("tensor")
    with counting_live() as start_counting:
        for kind, transform, strategy, options in [SENT[case] for case in cases]:
            start_counting()
            names = ["a"] if kind == "stages" and other else ["a", "b"]
            # What torch's DTensor keeps of a frozen parameter of another size on each rank is longer than the part.
            shapes = {name: shape for name, shape in SHAPES.items() if name != "frozen"}
            model = Layers(LOW, tuple(names), shapes, tied=False)
            if kind == "tensors":
                cut(model, mesh["tensor"], BY_ROWS)
            arguments: dict[str, Any] = {"policy": policy("EXACT_BF16"), "strategy": strategy, "units": [Layer]}
            beside: dict[str, Any] = {"model_parallel": mesh["tensor"]} if kind == "stages" else {}
            stepper = FlatStepper(
                model, TRANSFORMS[transform](1e-2), mesh=mesh["data"], **arguments, **beside, **options
            )
            communicators = [stepper.inner, stepper.outer, *stepper.beside.communicators]
            if stepper._gathering is not None and stepper._gathering.communicator is not stepper.inner:
                communicators.append(stepper._gathering.communicator)
            for _ in range(2):
                for one in communicators:
                    one.sent.clear()
                trained(model, stepper, rank, 2, range(1))
            sent: dict[str, int] = {}
            for one in communicators:
                for name, size in one.sent.items():
                    sent[name] = sent.get(name, 0) + size
            predicted = stepper.plan()
            if dict(predicted.wire) != {name: size for name, size in sent.items() if size}:
                wrong.append((kind, transform, strategy, dict(predicted.wire), sent))
            buffers = sum(buffer.nbytes for buffer in model.buffers())
            there = settled_bytes(predicted.persistent_bytes + buffers) - buffers
            if there != predicted.persistent_bytes:
                wrong.append((kind, transform, strategy, there, predicted.persistent_bytes))
            of_arguments = plan(
                model, TRANSFORMS[transform](1e-2), ranks=2, rank=rank, model_parallel=2 if kind == "stages" else (),
                nan=options.get("nan", "off"), **arguments,
            )  # fmt: skip
            if transform != "lamb" and (
                of_arguments.wire != predicted.wire or of_arguments.persistent != predicted.persistent
            ):
                wrong.append((kind, transform, strategy, of_arguments.wire, predicted.wire))
            stepper.close()
            del stepper, model
    return wrong


@pytest.mark.parametrize("cases", [[1, 2, 4], pytest.param([0, 3, 5], marks=pytest.mark.exhaustive)])
def test_what_is_sent_to_ranks_with_other_parts_is_planned_to_the_byte(cases: list[int]) -> None:
    for wrong in run(4, sending, cases):
        assert wrong == []


WIDE = {"rows": (130, 33), "columns": (16, 66), "copy": (160,), "plain": (128,), "frozen": (32, 40)}


def wide(dtype: torch.dtype, mesh: Mesh) -> Layers:
    """A model on torch's default device, in parts each of which is larger than what the counter leaves out."""
    model = Layers(dtype, shapes=WIDE, tied=False)
    cut(model, mesh["tensor"], {**BY_ROWS, "columns": BY_COLUMNS["columns"]})
    return model


def accessing(path: Path, strategy: Strategy, stored: str) -> list[Any]:
    """Where what state dicts, files, loading and construction take is not what is planned."""
    mesh, wrong = Mesh(2, 2), list[Any]()
    first = dist.get_rank() == 0
    dtype = dtype_of(stored)
    arguments: dict[str, Any] = {
        "policy": policy(stored),
        "strategy": strategy,
        "units": [Layer],
        "mesh": mesh["data"],
    }
    model = wide(dtype, mesh)
    with counting() as counter:
        found, predicted, state = access(model, arguments, path, counter)
    wrong += [
        (strategy, name, predicted[name], size)
        for name, size in found.items()
        if predicted[name] != size and max(predicted[name], size) >= 2 * SMALLEST
    ]
    del model
    gc.collect()
    sources: dict[str, Any] = {
        "initializers": FromInitializers(),
        "files": FromSafetensors(path / "model.safetensors"),
        "more bits": FromSafetensors(path / "main.safetensors"),
        "first rank": FromStateDict(state if first else None),
    }
    for name, values in sources.items():
        with torch.device("meta"):
            model = wide(dtype, mesh)
        with counting(everything=True) as counter:
            stepper = FlatStepper(model, eb.adamw(1e-3), values=values, device="cpu", **arguments)
            measured = counter.peak - counter.live
        if stepper.plan().transient["construction"] != measured:
            wrong.append((strategy, name, stepper.plan().transient["construction"], measured))
        stepper.close()
        del stepper, model
    return wrong


def access(
    model: nn.Module, arguments: dict[str, Any], path: Path, counter: Any
) -> tuple[dict[str, int], dict[str, int], dict[str, Tensor]]:
    """The bytes of each call, measured and planned; and the model's state dict."""
    stepper = FlatStepper(model, eb.adamw(1e-3), **arguments)
    state = stepper.model_state_dict("full")
    found: dict[str, int] = {}

    def during(name: str, call: Any) -> None:
        before = counter.peak = settled(counter)
        kept = call()
        parts = [x.local.nbytes for x in kept.values() if hasattr(x, "local")] if isinstance(kept, dict) else []
        found[name] = counter.peak - before + sum(size for size in parts if size < SMALLEST)
        del kept
        if settled(counter) != before:
            found[name] = -1

    given = state if dist.get_rank() == 0 else None
    during("model_state_dict", stepper.model_state_dict)
    during("model_state_dict, full", lambda: stepper.model_state_dict("full"))
    during("model_state_dict, sharded", lambda: stepper.model_state_dict("sharded"))
    during("export_safetensors", lambda: stepper.export_safetensors(path / "model.safetensors"))
    during("export_safetensors, main", lambda: stepper.export_safetensors(path / "main.safetensors", main=True))
    during("load_model_state_dict", lambda: stepper.load_model_state_dict(state))
    during("load_model_state_dict, broadcast", lambda: stepper.load_model_state_dict(given, broadcast_from_rank0=True))
    predicted = dict(stepper.plan().access)
    stepper.close()
    return found, predicted, state


@pytest.mark.parametrize(
    ("strategy", "stored"),
    [("optim_grads_params", "EXACT_BF16"), pytest.param("optim", "FP32", marks=pytest.mark.exhaustive)],
)
def test_what_whole_tensors_take_in_memory_is_planned_to_the_byte(
    strategy: Strategy, stored: str, tmp_path: Path
) -> None:
    for wrong in run(4, accessing, tmp_path, strategy, stored):
        assert wrong == []


# -- checkpoints with a part for each tensor-parallel rank ------------------------------------------------------------------------------


def formerly(path: Path) -> list[str]:
    """What each tensor-parallel rank saved for itself, as if its parts of tensors were the model, goes on as tensor parallelism."""
    mesh = Mesh(2, 2)

    def stepper_of(model: nn.Module) -> FlatStepper:
        return FlatStepper(model, eb.adamw(1e-2), policy=policy("EXACT_BF16"), mesh=mesh["data"], units=[Layer])

    model = Layers(LOW)
    cut(model, mesh["tensor"], BY_ROWS)
    parts = Layers(LOW)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, attribute = name.rpartition(".")
        held = nn.Parameter(own_part(parameter).clone(), requires_grad=parameter.requires_grad)
        setattr(parts.get_submodule(module), attribute, held)
    parts.get_submodule("layers.two").rows = parts.get_parameter("layers.one.rows")
    former = stepper_of(parts)
    trained(parts, former, mesh.place("data"), 2, range(2))
    save_sharded(former, path / f"part-{mesh.place('tensor') + 1}-of-2")
    now = stepper_of(model)
    load_sharded(now, path)
    with now.full_parameters(), former.full_parameters():
        pairs = zip(model.named_parameters(), parts.parameters(), strict=True)
        wrong = [name for (name, parameter), other in pairs if not torch.equal(own_part(parameter), other)]
    save_sharded(now, path)  # whole, from now on
    again = Layers(LOW)
    cut(again, mesh["tensor"], BY_ROWS)
    later = stepper_of(again)
    load_sharded(later, path)
    one, two = now.model_state_dict("full"), later.model_state_dict("full")
    return wrong + [name for name, x in one.items() if not torch.equal(x, two[name])]


def own_part(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def test_checkpoints_with_a_part_for_each_tensor_parallel_rank_still_load(tmp_path: Path) -> None:
    for wrong in run(4, formerly, tmp_path):
        assert wrong == []
