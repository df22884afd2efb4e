"""Files of a sharded model, what they and state dicts take in memory, ignored parameters, and buffers."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import everybit as eb
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.plan import plan
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.sharded.test_model_access import layouts, same, stepper_of, tied, trained
from tests.support.allocations import counting, settled
from tests.support.programs import Block, data
from tests.support.ranks import run

LOW = torch.bfloat16


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model as transformers reads it: the index says which file has which tensor."""
    if not (directory / "model.safetensors.index.json").exists():
        return load_file(directory / "model.safetensors"), {}
    found = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in sorted(set(found["weight_map"].values()))}
    assert {name: file for file, tensors in files.items() for name in tensors} == found["weight_map"]
    return {name: files[file][name] for name, file in found["weight_map"].items()}, found


def exporting(path: Path) -> list[str]:
    wrong = []
    for name, arguments in layouts():
        model = tied(dtype=LOW)
        stepper = stepper_of(model, eb.policies.EXACT_BF16, **arguments)
        trained(model, stepper, 1)
        place = path / name
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        stepper.export_safetensors(place / "one.safetensors", metadata={"step": "1"})
        stepper.export_safetensors(place / "wide.safetensors", dtype=torch.float32)
        stepper.export_safetensors(place / "parts", max_shard_size=150)
        stepper.export_safetensors(place / "parts", max_shard_size=100)  # fewer bytes, more files, over the ones before
        stepper.export_safetensors(place / "whole", max_shard_size="1MB")
        state = stepper.model_state_dict("full")
        if dist.get_rank():
            continue
        once = {n: x for n, x in state.items() if n not in ("again.weight", "blocks.2.inner.weight")}
        wide = {n: x.float() if x.is_floating_point() else x for n, x in once.items()}
        parts, index = read(place / "parts")
        found = [load_file(place / "one.safetensors"), parts, read(place / "whole")[0]]
        for number, one in enumerate(found):
            if not same(dict(sorted(one.items())), dict(sorted(once.items()))):
                wrong.append(f"{name}: file {number}")
        if not same(dict(sorted(load_file(place / "wide.safetensors").items())), dict(sorted(wide.items()))):
            wrong.append(f"{name}: in another dtype")
        with safe_open(place / "one.safetensors", framework="pt") as file:
            metadata = file.metadata()
        ties = json.loads(metadata.pop("everybit.tied"))
        if metadata != {"format": "pt", "step": "1"} or ties != {
            "again.weight": "entry.weight",
            "blocks.2.inner.weight": "blocks.1.inner.weight",
        }:
            wrong.append(f"{name}: {metadata}, {ties}")
        sizes = [x.nbytes for x in once.values()]
        if index["metadata"]["total_size"] != sum(sizes):
            wrong.append(f"{name}: {index['metadata']}")
        files = sorted(one.name for one in (place / "parts").glob("*.safetensors"))
        if sorted(set(index["weight_map"].values())) != files:
            wrong.append(f"{name}: files of the export before are left: {files}")
        for file_name in files:
            tensors = load_file(place / "parts" / file_name)
            if len(tensors) > 1 and sum(x.nbytes for x in tensors.values()) > 100:
                wrong.append(f"{name}: {file_name} is too large")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_files_are_read_by_safetensors_and_by_their_index(size: int, tmp_path: Path) -> None:
    for wrong in run(size, exporting, tmp_path):
        assert wrong == []


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


def failing(path: Path) -> list[str]:
    """What is said, on each rank, if the first one cannot write, and training goes on."""
    model = tied()
    stepper = stepper_of(model, strategy=3)
    said = []
    for target, options in (
        (path / "no" / "such" / "model.safetensors", {}),
        (path, {}),
        (Path("/dev/full"), {}),
        (path / "x", {"max_shard_size": "much"}),
        (path / "x", {"dtype": torch.int8}),
    ):
        try:
            stepper.export_safetensors(target, **options)
            said.append("accepted")
        except (OSError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    trained(model, stepper, 1)
    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(2, 2), Extra(2, 2))
    other = FlatStepper(odd, eb.sgd(0.1), strategy=3, units=[nn.Linear])
    try:
        other.export_safetensors(path / "odd.safetensors")
    except TypeError as error:
        said.append(str(error))
    state = other.model_state_dict()
    other.load_model_state_dict(state, broadcast_from_rank0=True)
    said.append(str(odd[1].version))
    return said


def test_a_file_that_cannot_be_written_is_told_of_on_every_rank_and_training_goes_on(tmp_path: Path) -> None:
    patterns = [
        "FileNotFoundError.*does not exist", "OSError|IsADirectoryError.*is a directory", "OSError.*is a character device",
        "max_shard_size: got 'much'", "dtype: got torch.int8", r"1\._extra_state: the model's state has a dict", "3",
    ]  # fmt: skip
    for said in run(2, failing, tmp_path):
        assert len(said) == len(patterns)
        for message, pattern in zip(said, patterns, strict=True):
            assert re.search(pattern, message), message
    assert not list(tmp_path.glob("*.partial"))


# -- what it takes ------------------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Units that differ in size; every tensor is larger than what the counter leaves out, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(16, 40)
        self.blocks = nn.ModuleList([Block(40), nn.Sequential(Block(40), Block(40)), Block(40)])
        self.exit = nn.Linear(40, 32)
        self.exit.weight.requires_grad_(False)


def measured(path: Path, strategy: Strategy, low: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What the plan says, and what was allocated."""
    torch.manual_seed(0)
    model = Wide().to(LOW if low else torch.float32)
    with counting() as counter:
        stepper = FlatStepper(
            model,
            eb.adamw(1e-3),
            policy=eb.policies.EXACT_BF16 if low else None,
            strategy=strategy,
            units=[Block, nn.Sequential],
        )
        found: dict[str, int] = {}

        def during(name: str, call: Any) -> None:
            before = counter.peak = settled(counter)
            kept: Any = call()
            kept = kept if isinstance(kept, dict) else {}
            parts = [x.local.nbytes for x in kept.values() if hasattr(x, "local")] if kept else []
            # The counter leaves out the smallest tensors, such as the few elements of a parameter that a shard ends in.
            found[name] = counter.peak - before + sum(size for size in parts if size < SMALLEST)
            del kept
            if settled(counter) != before:
                found[name] = -1

        during("model_state_dict", stepper.model_state_dict)
        during("model_state_dict, full", lambda: stepper.model_state_dict("full"))
        during("model_state_dict, sharded", lambda: stepper.model_state_dict("sharded"))
        during("export_safetensors", lambda: stepper.export_safetensors(path / "model.safetensors"))
        during("export_safetensors, main", lambda: stepper.export_safetensors(path / "main.safetensors", main=True))
        state = {name: x.clone() for name, x in Wide().to(LOW if low else torch.float32).state_dict().items()}
        during("load_model_state_dict", lambda: stepper.load_model_state_dict(state))
        first = state if dist.get_rank() == 0 else None
        during(
            "load_model_state_dict, broadcast", lambda: stepper.load_model_state_dict(first, broadcast_from_rank0=True)
        )
        with contextlib.ExitStack() as stack:
            before = counter.peak = counter.live
            stack.enter_context(stepper.full_parameters())
            found["full_parameters"] = counter.peak - before
    # Of saves, test_staging.py.
    predicted = {name: size for name, size in stepper.plan().access.items() if not name.startswith("save_sharded")}
    return predicted, found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_state_dicts_and_files_take_what_is_planned_to_the_byte(size: int, tmp_path: Path) -> None:
    model = Wide()
    units = [sum(p.numel() for p in block.parameters()) * 4 for block in model.blocks]
    whole = sum(p.numel() for p in model.parameters()) * 4
    for strategy, low in (("optim_grads_params", False), ("optim_grads_params", True), ("optim", False)):
        for rank, (predicted, found) in enumerate(run(size, measured, tmp_path, strategy, low)):
            # Where nothing is taken there are left the texts in which two ranks compare what they call, below 256 bytes each.
            assert all(found[name] < 2 * 256 for name, nbytes in predicted.items() if nbytes == 0)
            predicted, found = ({n: one[n] for n in predicted if predicted[n]} for one in (predicted, found))
            assert predicted == found
            if strategy == "optim_grads_params" and not low:
                # Not more than the largest unit, its padding, and no more than the whole of it on the first rank beside.
                assert predicted["export_safetensors"] <= max(units) + 64
                assert predicted["model_state_dict"] <= max(units) + 64 + (whole if rank == 0 else 0)
                assert predicted["full_parameters"] >= whole
            if strategy == "optim":
                assert "full_parameters" not in predicted
                assert "export_safetensors" not in predicted


# -- ignored parameters, and buffers ------------------------------------------------------------------------------------------------------


def ignoring(path: Path) -> list[str]:
    wrong = []
    for number, (name, arguments) in enumerate(layouts()):
        model, plain = tied(), tied()
        rank = dist.get_rank()
        with torch.no_grad():
            for one in (model, plain):
                one.exit.bias.fill_(float(rank))  # is not made the same on all ranks
        ways: list[Any] = [[model.exit], [model.exit.weight, "exit.bias"], ["exit"], ["exit.weight", model.exit.bias]]
        given = ways[number % 4]
        stepper = FlatStepper(model, eb.sgd(2**-4), units=[Block], ignored=iter(given), **arguments)
        own = torch.optim.SGD(model.exit.parameters(), lr=0.5)
        # Products with a power of two are exact, and so is the mean of two equal gradients: one rounding for each element, here as there.
        rest = torch.optim.SGD([p for n, p in plain.named_parameters() if not n.startswith("exit")], lr=2**-4)
        theirs = torch.optim.SGD(plain.exit.parameters(), lr=0.5)
        with torch.no_grad():
            model.exit.bias.zero_(), plain.exit.bias.zero_()
        for step in range(2):
            x = data(step, 0, 0, torch.float32)
            with stepper.microbatch(last=True):
                model(x).square().mean().backward()
            plain(x).square().mean().backward()
            for mine, other in zip(model.exit.parameters(), plain.exit.parameters(), strict=True):
                if mine.grad is None or not torch.equal(mine.grad, other.grad):  # type: ignore[arg-type]
                    wrong.append(f"{name}: a gradient that is left alone")
            stepper.step(), own.step(), own.zero_grad()
            rest.step(), theirs.step(), rest.zero_grad(), theirs.zero_grad()
        state = stepper.model_state_dict("full")
        if not same(state, dict(plain.state_dict())):
            wrong.append(f"{name}: weights")
        if any(place.spec.name.startswith("exit") for group in stepper.layout.groups for place in group.placements):
            wrong.append(f"{name}: is laid out")
        save_sharded(stepper, path / str(number))
        with torch.no_grad():
            model.exit.weight.zero_()
        load_sharded(stepper, path / str(number))
        if not same(stepper.model_state_dict("full"), state):
            wrong.append(f"{name}: after a checkpoint")
        with torch.no_grad():
            model.exit.weight.zero_()
        stepper.load_model_state_dict(state if rank == 0 else None, broadcast_from_rank0=True)
        if not same(stepper.model_state_dict("full"), state):
            wrong.append(f"{name}: after a state dict")
        planned = plan(
            tied(), eb.adamw(1e-2), ignored=["exit"], units=[Block], strategy=arguments["strategy"]
        ).parameters
        if planned != stepper.layout.numel or planned != sum(p.numel() for p in rest.param_groups[0]["params"]):
            wrong.append(f"{name}: planned {planned}")
        refused: list[tuple[Any, type[Exception]]] = [
            (["strange"], ValueError), ([nn.Linear(1, 1)], ValueError), ([3], TypeError), ("exit", TypeError),
        ]  # fmt: skip
        for bad, kind in refused:
            with pytest.raises(kind, match="ignored: got"):
                stepper_of(tied(), ignored=bad, **arguments)
        stepper.close()
    return wrong


@pytest.mark.parametrize("size", [1, 2])
def test_ignored_parameters_are_left_alone_and_are_in_state_dicts(size: int, tmp_path: Path) -> None:
    for wrong in run(size, ignoring, tmp_path):
        assert wrong == []


def buffers(values: Any) -> list[Tensor]:
    model = tied()
    stepper = stepper_of(model, strategy=3)
    rank = dist.get_rank()
    with torch.no_grad():
        model.norm.running_mean.copy_(data(7, rank, 0, torch.float32).sum(0)[0] + torch.arange(5))  # type: ignore[union-attr]
        model.norm.num_batches_tracked.fill_(10 + rank)  # type: ignore[union-attr]
    own = copy.deepcopy(model.norm.running_mean)
    stepper.synchronize_buffers(values)
    with pytest.raises(ValueError, match="values: got 'most'; accepted are 'first', 'mean'"):
        stepper.synchronize_buffers("most")  # type: ignore[arg-type]
    return [own, model.norm.running_mean, model.norm.num_batches_tracked]  # type: ignore[list-item]


def test_buffers_become_the_first_ranks_or_the_mean_over_the_ranks() -> None:
    for values in ("first", "mean"):
        found = run(3, buffers, values)
        total = sum(own.double() for own, _, _ in found)
        expected = found[0][0] if values == "first" else (total / 3).float()
        for _, mean, count in found:
            assert torch.equal(mean, expected)
            assert int(count) == 10
