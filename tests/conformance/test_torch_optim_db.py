"""torch's own table of what its optimizers are tried with (``optim_db``, in its wheel), tried on ours."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import everybit_torch
from everybit_torch import TorchOptimizer

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

NAMES = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adafactor")
OURS: dict[str, type[TorchOptimizer]] = {name: getattr(everybit_torch, name) for name in NAMES}


TABLE = [info for info in cast(list[Any], optim_db) if info.optim_cls.__name__ in OURS]
CASES = [(info.optim_cls, case) for info in TABLE for case in info.optim_inputs_func(device="cpu")]
# Accepted here: one of the betas may be a tensor and the other a number.
ACCEPTED = ("betas must be either both",)

ERRORS = [
    (info.optim_cls, case)
    for info in TABLE
    for case in info.optim_error_inputs_func("cpu", torch.float32)
    if not any(word in case.optimizer_error_input.desc for word in ACCEPTED)
]


def run(kind: Any, arguments: dict[str, Any], steps: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 4).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    optimizer = kind(model.parameters(), **arguments)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("theirs", "case"), CASES, ids=lambda x: getattr(x, "desc", getattr(x, "__name__", None)))
def test_what_torch_tries_gives_torchs_weights(theirs: Any, case: Any) -> None:
    for a, b in zip(run(OURS[theirs.__name__], case.kwargs), run(theirs, case.kwargs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("theirs", "case"), ERRORS, ids=lambda x: getattr(x, "optimizer_error_input", x).__class__.__name__
)
def test_what_torch_refuses_is_refused(theirs: Any, case: Any) -> None:
    given = case.optimizer_error_input
    # What torch's Adafactor refuses at its first step, complex parameters, is refused here before.
    assert case.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR or theirs is torch.optim.Adafactor
    params = [nn.Parameter(torch.randn(2, 3))] if given.params is None else given.params
    if given.kwargs.get("foreach"):  # chooses nothing here, so that tensors go with it
        with warnings.catch_warnings(action="ignore"):
            OURS[theirs.__name__](params, **given.kwargs)
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        OURS[theirs.__name__](params, **given.kwargs)
    assert str(caught.value)
