"""A gate says what an audit of the same step finds, with closures and on shards too, and that steps are skipped."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from everybit_torch import AdamW, Audit, Gate, LayerAudit, LostUpdatesError
from everybit_torch.audit.gate import Gates
from tests.support import ranks


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 30), nn.LayerNorm(30), nn.Linear(30, 5)).to(dtype)


def backward(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).float().square().mean()
    torch.autograd.backward(loss)
    return loss


def watched(model: nn.Module, optimizer: Any, steps: int, **settings: Any) -> list[str]:
    said: list[str] = []
    gate = Gate(model, optimizer, say=said.append, **settings)
    for number in range(steps):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        gate.step_ended()
    return said


def test_it_says_what_an_audit_of_that_step_finds() -> None:
    model, twin = model_of(), model_of()
    (said,) = watched(model, torch.optim.AdamW(model.parameters(), lr=1e-5), 6, after=4)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-5)
    audit = Audit(twin, optimizer, first=4, every=3)
    watched(twin, optimizer, 6)
    assert {layer.step for layer in audit.layers} == {4}
    total = sum(layer.elements for layer in audit.layers)
    share = sum(layer.lost_share * layer.elements for layer in audit.layers) / total
    assert said.startswith(f"Step 4: Updates are lost: {100 * share:.1f} % of them")
    assert "LEAN_BF16 would mend it" in said
    most = max(audit.layers, key=lambda layer: (1 - layer.edq) * layer.elements)
    assert said.splitlines()[1] == f"  {most.name}: {most.lost_share:.0%} lost, {most.edq:.0%} of the movement arrives"


def test_it_audits_again_and_finds_nothing_where_nothing_is_lost() -> None:
    for model, optimizer in (
        (one := model_of(torch.float32), torch.optim.AdamW(one.parameters(), lr=1e-4)),
        (one := model_of(), AdamW(one.named_parameters(), lr=1e-4, policy="LEAN_BF16", compile=False)),
    ):
        said = watched(model, optimizer, 9, after=2, every=3, stop=True)
        assert said == [f"Step {step}: Nothing is lost: the updates reach the weights." for step in (2, 5, 8)]


def test_it_stops_a_run_that_loses_updates() -> None:
    model = model_of()
    with pytest.raises(LostUpdatesError, match=r"Step 2: Updates are lost: .*\n(.*\n)+LEAN_BF16 would mend it"):
        watched(model, torch.optim.AdamW(model.parameters(), lr=1e-6), 9, after=2, stop=True)


def test_training_that_begins_again_after_an_error_is_watched_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A callback is told when training begins and ends, and not that an error ended it."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    gates = Gates(after=1, stop=True)
    for _ in range(2):
        gates.begin(model, [optimizer], speaks=True)
        backward(model, 0)
        optimizer.step()
        with pytest.raises(LostUpdatesError):
            gates.step_ended()
    assert len(optimizer._optimizer_step_post_hooks) == 1
    gates.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_steps_that_are_skipped_are_named() -> None:
    """A loss scale that never fits: no weight changes, and the program goes on."""
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    said: list[str] = []
    gate = Gate(model, optimizer, say=said.append)
    for _ in range(9):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 16), 1e30)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        gate.step_ended()
    assert [re.findall(r"the last (\d+) steps were skipped", one) for one in said] == [["3"], ["4"], ["8"]]
    assert all(one.endswith("Gradients are not finite in weight.") for one in said)
    gate.remove()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_audited_by_the_gradients_of_the_closure(by_name: bool) -> None:
    found: list[list[LayerAudit]] = []
    for with_closure in (False, True):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        audit = Audit(model, optimizer, every=2)
        for number in range(3):
            optimizer.zero_grad()
            if with_closure:

                def closure(model: nn.Module = model, number: int = number) -> Any:
                    return backward(model, number)

                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
                assert isinstance(loss, Tensor)
            else:
                backward(model, number)
                optimizer.step()
        found.append(audit.layers)
    assert found[0] == found[1]
    assert {layer.step for layer in found[0]} == {1, 3}


def sharded(kind: str, size: int) -> list[LayerAudit]:
    model = model_of()
    if size:
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model, mesh=mesh)
    optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=1e-5)
    audit = Audit(model, optimizer, every=2)
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
    return audit.layers


@pytest.mark.parametrize(("kind", "size"), [("AdamW", 2), ("SGD", 4)])
def test_on_shards_every_rank_has_the_numbers_of_one_process(kind: str, size: int) -> None:
    """Two and four equal gradients have themselves for a mean; the rest is exact, but for the order of a float64 sum."""
    whole = sharded(kind, 0)
    by_rank = ranks.run(size, sharded, kind, size)
    for found in by_rank:
        assert found == by_rank[0]
        for one, other in zip(found, whole, strict=True):
            assert (one.name, one.step, one.elements) == (other.name, other.step, other.elements)
            assert (one.lost_share, one.frozen) == (other.lost_share, other.frozen)
            assert one.edq == pytest.approx(other.edq, rel=1e-12)
