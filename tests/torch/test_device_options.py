"""Options by which compiled code rounds as eager code does: for steps on an accelerator, and for what users compile themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.testing import assert_same_bits
from everybit_torch import EXACT_OPTIONS
from everybit_torch.torch_internals import compiler


@pytest.fixture
def asked_anew() -> Iterator[None]:
    compiler.device_options.cache_clear()
    yield
    compiler.device_options.cache_clear()


def test_a_compensated_sum_that_is_written_with_casts_survives_the_exact_options() -> None:
    """Under default options the compiler leaves out the two casts, and the residual is zero."""

    def kahan(value: Tensor, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        whole = value.float() + residual.float() + update
        rounded = whole.to(torch.bfloat16)
        return rounded, (whole - rounded.float()).to(torch.bfloat16)

    generator = torch.Generator().manual_seed(1)
    value, residual = torch.randn(333, generator=generator).bfloat16(), torch.zeros(333, dtype=torch.bfloat16)
    update = 1e-3 * torch.randn(333, generator=generator)
    torch._dynamo.reset()
    compiled = torch.compile(kahan, fullgraph=True, options=EXACT_OPTIONS)
    assert_same_bits(compiled(value, residual, update), kahan(value, residual, update), "with the exact options")
    assert kahan(value, residual, update)[1].count_nonzero() > 300
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_step_in_a_users_function_has_eager_codes_bits_under_the_exact_options() -> None:
    optimizer = eb.with_policy(eb.adamw(1e-3), eb.policies.EXACT_BF16)
    params = {"w": torch.linspace(-1, 1, 300).bfloat16()}
    state = optimizer.init(params)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, fullgraph=True, options=EXACT_OPTIONS)
    assert_same_bits(compiled(params, params, state), optimizer.step(params, params, state), "with the exact options")
    torch._dynamo.reset()


def test_steps_on_an_accelerator_have_all_exact_options_of_that_kind(asked_anew: None) -> None:
    given = compiler.device_options()
    assert {name: given[name] for name in EXACT_OPTIONS if not name.startswith("cpp.")} == {
        "emulate_precision_casts": True,
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
    }


@pytest.mark.parametrize("name", [name for name in EXACT_OPTIONS if not name.startswith("cpp.")])
def test_without_one_of_the_options_no_code_is_made_for_an_accelerator(
    name: str, monkeypatch: pytest.MonkeyPatch, asked_anew: None
) -> None:
    import torch._inductor.config as config

    known: dict[str, Any] = config.get_config_copy()
    monkeypatch.setattr(type(config), "get_config_copy", lambda _: {key: known[key] for key in known if key != name})
    with pytest.raises(compiler.MissingOptionError, match=f"no option {name}, without which"):
        compiler.device_options()
