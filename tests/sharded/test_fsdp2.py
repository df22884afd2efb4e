"""``TorchOptimizer`` on FSDP2's sharded parameters, and an exact wire for FSDP2's own reduce-scatter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into, save_sharded
from everybit_torch.fsdp2.exact_reduce_scatter import ExactReduceScatter
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.torch_internals.dtensors import local
from tests.support.exact_models import whole_of
from tests.support.programs import Block, Network, data, network
from tests.support.ranks import run
from tests.support.weights import Weights

POLICIES = ["FP32", "KAHAN_BF16", "LEAN_BF16", "FLOOR_BF16", "TIGHT_BF16"]


def sharded(
    dtype: torch.dtype, reduce: ExactReduceScatter | None = None, shape: tuple[int, ...] | None = None, seed: int = 0
) -> Network:
    model = network(dtype, seed)
    mesh = init_device_mesh(
        "cpu", shape or (dist.get_world_size(),), mesh_dim_names=("replicate", "shard") if shape else ("shard",)
    )
    low = None if dtype is torch.float32 and reduce is None else torch.float32
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=low)}
    options["ignored_params"] = {model.scale}  # FSDP2 takes no scalar; it stays whole, on every rank
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo's own mean is wrong for a reduce-scatter, and it has no premultiplied sum.
            module.set_force_sum_reduction_for_comms(True)
            if reduce is not None:
                module.set_custom_reduce_scatter(reduce)
    return model


def whole(model: Network) -> Weights:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(
    model: Network, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype, same: bool = True
) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = data(step, 0 if same else dist.get_rank(), 0, dtype)
        model(x).float().square().mean().backward()
        optimizer.step()


def fsdp2(name: str, shape: tuple[int, ...] | None, compile: bool) -> Weights:
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = sharded(dtype, shape=shape)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name], compile=compile)
    dispatched = mock.Mock(side_effect=AssertionError("an operation on a DTensor in a step"))
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 0, 0, dtype)).float().square().mean().backward()
        if step == 2:
            with mock.patch.object(DTensor, "__torch_dispatch__", dispatched):
                optimizer.step()
        else:
            optimizer.step()
    state = optimizer.state[model.entry.weight]
    assert isinstance(state["momentum"], DTensor)
    return whole(model)


def plain(name: str) -> Weights:
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    model = network(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name])
    train(model, optimizer, range(3), dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("size", "shape"), [(2, None), (4, (2, 2))])
def test_sharded_parameters_step_as_whole_ones_do_bit_for_bit(
    name: str, size: int, shape: tuple[int, ...] | None
) -> None:
    """Every rank has the same data; sums of two or four equal numbers are exact. Stochastic bits go by places in the whole."""
    expected = plain(name)
    for weights in run(size, fsdp2, name, shape, False):
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.exhaustive
def test_compiled_steps_are_the_same() -> None:
    expected = plain("LEAN_BF16")
    for weights in run(2, fsdp2, "LEAN_BF16", None, True):
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


RATES = {False: 1e-2, True: 1.0}


def clipped(shape: tuple[int, ...] | None, compile: bool) -> Weights:
    model = sharded(torch.float32, shape=shape)

    def factory(learning_rate: float) -> eb.Transform[Any]:
        # The norm is found by the same code whatever follows it, and plain descent is compiled in half the time.
        descent = eb.sgd(learning_rate) if compile else eb.adamw(learning_rate)
        return eb.chain(eb.clip_by_global_norm(0.1), descent)

    optimizer = TorchOptimizer(model.parameters(), factory, lr=RATES[compile], compile=compile)
    train(model, optimizer, range(3), torch.float32)
    return whole(model)


@pytest.mark.parametrize(
    ("size", "shape", "compile"),
    [
        (4, (2, 2), False),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
            (2, None, True), (2, None, False), (3, None, False), (3, None, True), (4, (2, 2), True),
        )),
    ],
)  # fmt: skip
def test_the_global_norm_is_that_of_the_whole_model(size: int, shape: tuple[int, ...] | None, compile: bool) -> None:
    model = network(torch.float64)
    oracle = torch.optim.SGD if compile else torch.optim.AdamW
    optimizer = oracle(model.parameters(), lr=RATES[compile])
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.float32).double()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for weights in run(size, clipped, shape, compile):
        for name, p in model.named_parameters():
            # As for the stepper: a norm counted twice would halve the gradient, which Adam's own scale hides only from the second step
            # on where clipping varies; relative errors of 2**-18 in the gradient move a weight by lr times that, or 2**-10 at near zeros.
            # Descent moves all weights by 0.1 in each of three steps: an absolute error of 0.3 * 2**-18.
            bound = 0.3 * 2**-18 if compile else 3e-2 * 2**-10
            torch.testing.assert_close(weights[name].double(), p.detach(), rtol=2**-22, atol=bound)


def sgd_clipped(shape: tuple[int, ...] | None) -> tuple[Weights, Weights]:
    model = sharded(torch.float32, shape=shape)

    def factory(learning_rate: float) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(0.1), eb.sgd(learning_rate))

    before = whole(model)
    optimizer = TorchOptimizer(model.parameters(), factory, lr=1.0)
    train(model, optimizer, range(1), torch.float32)
    return before, whole(model)


@pytest.mark.parametrize(("size", "shape"), [(2, None), (4, (2, 2)), (4, (4, 1))])
def test_a_clipped_step_is_as_long_as_the_limit(size: int, shape: tuple[int, ...] | None) -> None:
    """Counting an element twice, as replicas invite to, makes it shorter."""
    for before, after in run(size, sgd_clipped, shape):
        length = sum(float((after[name] - before[name]).double().square().sum()) for name in before) ** 0.5
        # Weights below 2 are rounded by 2**-24 each: 80 of them by at most 2**-20 together.
        assert length == pytest.approx(0.1, abs=2**-20)


def metered(is_sharded: bool) -> eb.Metrics:
    model = sharded(torch.float32) if is_sharded else network()
    optimizer = AdamW(model.parameters(), lr=1e-2, metrics=True)
    train(model, optimizer, range(1), torch.float32)
    return optimizer.metrics()


def test_metrics_count_every_element_once() -> None:
    """The scale, which FSDP2 leaves whole on every rank, was counted on every rank."""
    (expected,) = run(1, metered, False)
    for found in run(2, metered, True):
        assert found.moved == expected.moved
        # Sums of squares of float32 numbers, in float64, in another order.
        torch.testing.assert_close(found.intended, expected.intended, rtol=1e-6, atol=0.0)


def exact_wire(wire: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """This rank's parts of a gradient, and what its own gradient was."""
    exact = ExactReduceScatter("bfloat16") if wire else None
    model = sharded(torch.float32, exact)
    twin = network()
    rank = dist.get_rank()
    model(data(0, rank, 0, torch.float32)).square().mean().backward()
    twin(data(0, rank, 0, torch.float32)).square().mean().backward()
    parts = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    return (
        parts,
        [p.grad for p in twin.parameters() if p.grad is not None and p is not twin.scale],
        exact.sent if exact else 0,
    )


def test_fsdp2_with_an_exact_low_precision_wire() -> None:
    ranks = run(4, exact_wire, True)
    locals_ = [grads for _, grads, _ in ranks]
    for index, got in enumerate(ranks[0][0]):
        true = sum(grads[index].bfloat16().double() for grads in locals_) / 4
        assert isinstance(true, Tensor)
        # Rounded once to float32; dividing by four is exact.
        assert ((got.double() - true).abs() <= 2**-24 * true.abs()).all()
    numel = sum(g.numel() for g in locals_[0])
    assert 0.75 * 2 * numel <= ranks[0][2] < 0.75 * 2 * (numel + 200)  # FSDP2 pads rows


def averaged() -> list[float]:
    out, given, group = torch.zeros(2), torch.arange(4.0) * (1 + dist.get_rank()), dist.group.WORLD
    assert group is not None
    ExactReduceScatter("bfloat16")(out, given, group, dist.ReduceOp.AVG)
    return out.tolist()


def test_an_exact_wire_divides_where_fsdp2_asks_for_the_mean() -> None:
    assert run(2, averaged) == [[0.0, 1.5], [3.0, 4.5]]


def refused() -> list[str]:
    messages = []
    exact = ExactReduceScatter("bfloat16")
    out, given, group = torch.zeros(2), torch.zeros(4), dist.group.WORLD
    assert group is not None
    for tensors, op in (((out.bfloat16(), given.bfloat16()), dist.ReduceOp.SUM), ((out, given), dist.ReduceOp.MAX)):
        try:
            exact(*tensors, group, op)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_what_an_exact_wire_cannot_do_it_says() -> None:
    with pytest.raises(
        ValueError, match=r"ExactReduceScatter\.wire: got 'float32'; accepted are 'bfloat16', 'float16'"
    ):
        ExactReduceScatter("float32")  # type: ignore[arg-type]
    for messages in run(2, refused):
        assert "accepted is float32" in messages[0]
        assert "accepted are SUM and AVG" in messages[1]


def carried_over(path: Path, name: str, strategy: Any) -> tuple[Weights, Weights]:
    """A stepper's checkpoint goes on in FSDP2 with everybit's optimizer."""
    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    policy = eb.policies.PRESETS[name]
    model = network(dtype)
    stepper = FlatStepper(
        model,
        eb.adamw(1e-2),
        policy=dataclasses.replace(policy, grads=eb.Grads(comm="float32")),
        strategy=strategy,
        units=[Block],
    )
    for step in range(2):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, dtype)).float().square().mean().backward()
        stepper.step()
    save_sharded(stepper, path).result()
    for step in range(2, 4):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, dtype)).float().square().mean().backward()
        stepper.step()
    other = sharded(dtype, seed=5)
    optimizer = AdamW(other.parameters(), lr=1e-2, policy=policy)
    load_sharded_into(other, optimizer, path)
    train(other, optimizer, range(2, 4), dtype)
    kept = {key: whole_of(p).clone() for key, p in model.named_parameters()}
    return kept, whole(other)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *(("optim_grads_params", name) for name in POLICIES),
        ("optim", "LEAN_BF16"),
        *(pytest.param("optim", name, marks=pytest.mark.exhaustive) for name in POLICIES if name != "LEAN_BF16"),
    ],
)
@pytest.mark.sampled(3)
def test_a_steppers_checkpoint_goes_on_in_fsdp2(tmp_path: Path, name: str, strategy: str) -> None:
    for kept, other in run(2, carried_over, tmp_path, name, strategy):
        assert all(torch.equal(kept[key], other[key]) for key in kept)


def saved_by_fsdp2(path: Path, name: str) -> tuple[Weights, Weights]:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    dtype = torch.float32 if name == "FP32" else torch.bfloat16
    policy = eb.policies.PRESETS[name]
    model = sharded(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=policy)
    train(model, optimizer, range(2), dtype)
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=path)
    train(model, optimizer, range(2, 4), dtype)
    other = network(dtype, 7)
    stepper = FlatStepper(other, eb.adamw(1e-2), policy=policy, strategy="optim_grads", units=[Block])
    load_sharded(stepper, path)
    for step in range(2, 4):
        with stepper.microbatch(last=True):
            other(data(step, 0, 0, dtype)).float().square().mean().backward()
        stepper.step()
    got = {key: whole_of(p).clone() for key, p in other.named_parameters()}
    return whole(model), got


@pytest.mark.parametrize("name", ["FP32", "LEAN_BF16"])
def test_fsdp2s_checkpoint_goes_on_in_a_stepper(tmp_path: Path, name: str) -> None:
    for expected, got in run(2, saved_by_fsdp2, tmp_path, name):
        assert all(torch.equal(expected[key], got[key]) for key in expected)


def gathered(name: eb.PolicyName, offload: bool, broadcast: bool) -> list[Weights]:
    """Continue from torch's full state dict, and from one in which a remainder is int16 as checkpoints of before have it."""
    dtype, options = torch.bfloat16, StateDictOptions(full_state_dict=True, cpu_offload=offload)
    model = sharded(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=name, compile=False)
    train(model, optimizer, range(2), dtype)
    full: Any = get_optimizer_state_dict(model, optimizer, options=options)
    assert all(x.dtype is not torch.int16 for entry in full.get("state", {}).values() for x in entry.values())
    former: Any = optimizer.state_dict()
    for entry in former["state"].values():
        entry["param.remainder"] = entry["param.remainder"].to(torch.int16)
    others = []
    for number in range(2):
        other = sharded(dtype)
        other.load_state_dict(model.state_dict())
        resumed = AdamW(other.parameters(), lr=1.0, policy=name, compile=False)
        if number:
            resumed.load_state_dict(former)
        else:
            given = full if dist.get_rank() == 0 or not broadcast else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            set_optimizer_state_dict(other, resumed, given, options=options)
        others.append((other, resumed))
    for one, its in ((model, optimizer), *others):
        train(one, its, range(2, 4), dtype)
    # With the low halves of the weights, which the model does not show.
    parts = [[local(p) for p in its.export_fp32()[0]] for _, its in ((model, optimizer), *others)]
    return [{str(number): x.clone() for number, x in enumerate(each)} for each in parts]


@pytest.mark.parametrize(("offload", "broadcast"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("name", ["LEAN_BF16", pytest.param("EXACT_BF16", marks=pytest.mark.exhaustive)])
def test_torchs_full_state_dict_goes_there_and_back(name: eb.PolicyName, offload: bool, broadcast: bool) -> None:
    """accelerate's FULL_STATE_DICT: neither gloo nor NCCL sends int16, in which a remainder is stored."""
    for before, *resumed in run(2, gathered, name, offload, broadcast):
        for after in resumed:
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_remainder_beyond_16_bits_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([p], policy="LEAN_BF16", compile=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    wide = saved["state"][0]["param.remainder"].int()
    optimizer.load_state_dict(saved | {"state": {0: saved["state"][0] | {"param.remainder": wide}}})
    with pytest.raises(
        ValueError, match=r"'param.remainder': holds numbers beyond int16; accepted are .* in \[-32768, 32767\]"
    ):
        optimizer.load_state_dict(saved | {"state": {0: saved["state"][0] | {"param.remainder": wide + 70000}}})
