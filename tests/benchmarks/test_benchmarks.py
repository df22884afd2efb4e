"""What decides whether a measurement counts, and what it is divided by."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import battery
import contestants
import everybit as eb
import memory
import pages
import speed
from contestants import HYPERPARAMETERS, Contestant
from everybit_torch import AdamW
from shapes import MODELS

FUSED = contestants.named("torch fused")
NARROW = contestants.named("torch fused, bfloat16")


def errors_of(make: Any, dtype: torch.dtype) -> speed.Errors:
    weights, gradients = speed.weights_and_gradients([(200, 300), (7,), ()])
    return speed.first_updates(make, weights, gradients, dtype)[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weight_decay": 0.0}, "decay lost"),
    ({"lr": 1.01e-3}, "wrong length"),
    ({"betas": (0.95, 0.999)}, "wrong length"),
]


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [("EXACT_BF16", contestants.FLOAT32), ("LEAN_BF16", contestants.BFLOAT16_STATE), ("KAHAN_BF16", contestants.BFLOAT16_STATE),
     ("TIGHT_BF16", contestants.BFLOAT16_STATE), ("FLOOR_BF16", contestants.BFLOAT16_WEIGHTS)],
)  # fmt: skip
def test_a_right_step_is_accepted_and_wrong_ones_are_named(policy: str, allowed: float) -> None:
    def make(**changed: Any) -> Any:
        return lambda params: AdamW(params, **HYPERPARAMETERS | changed, policy=eb.policies.PRESETS[policy])

    assert errors_of(make(), torch.bfloat16).verdict(allowed) == "right"
    for changed, verdict in WRONG:
        got = errors_of(make(**changed), torch.bfloat16).verdict(allowed)
        # Where formats are exact, the error alone tells.
        assert got == ("wrong" if policy == "EXACT_BF16" else verdict), changed


def test_and_of_torchs() -> None:
    def make(**changed: Any) -> Any:
        return lambda params: torch.optim.AdamW(params, **HYPERPARAMETERS | changed)

    assert errors_of(make(), torch.float32).verdict(contestants.FLOAT32) == "right"
    for changed, _ in [*WRONG, ({"betas": (0.9, 0.99)}, "")]:
        assert errors_of(make(**changed), torch.float32).verdict(contestants.FLOAT32) == "wrong", changed
    # bfloat16 weights, each tensor operation rounded: the factor of the decay rounds to one.
    assert errors_of(make(foreach=True), torch.bfloat16).decay_lost > 1


@pytest.mark.exhaustive
def test_an_error_is_what_float64_says() -> None:
    """Recomputed without sampling and in one go."""
    weights, gradients = speed.weights_and_gradients([(50,)])
    errors, _, _, params = speed.first_updates(
        contestants.named("everybit KAHAN_BF16").make, weights, gradients, torch.bfloat16
    )
    w = weights[0].double()
    m = v = torch.zeros_like(w)
    for step in range(1, speed.UPDATES + 1):
        g = gradients[0].double() * (1.0 if step % 2 == 0 else 2.0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - 1e-3 * 0.1) - 1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    moved = (w - weights[0].double()).square().sum()
    plain = float((params[0].detach().double() - w).square().sum() / moved) ** 0.5
    assert 0 < errors.error < plain  # the residual counts
    assert errors.error < contestants.BFLOAT16_STATE


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("torch fused", 28.0),
        ("torch fused, bfloat16", 14.0),
        ("everybit FP32, not compiled", 28.0),
        ("AnyPrecisionAdamW as published", 22.0),
    ],
)
def test_bytes_moved_are_counted(name: str, moved: float) -> None:
    """By hand: gradient read, weight and moments read and written; as published, all are bfloat16 but the float32 momentum."""
    contestant = contestants.named(name)
    weights, gradients = speed.weights_and_gradients([(100, 10)])
    _, _, optimizer, params = speed.first_updates(contestant.make, weights, gradients, contestant.dtype)
    assert speed.bytes_moved(optimizer, params) == moved


def test_bytes_moved_under_a_policy() -> None:
    weights, gradients = speed.weights_and_gradients([(100, 10), (10,)])
    make = lambda params: AdamW(params, policy=eb.policies.LEAN_BF16)  # noqa: E731
    _, _, optimizer, params = speed.first_updates(make, weights, gradients, torch.bfloat16)
    # bfloat16 weight, int16 rest, two bfloat16 moments, read and written; gradient read.
    assert speed.bytes_moved(optimizer, params) == 2 * (2 + 2 + 2 + 2) + 2


def test_models_have_the_sizes_they_are_named_for() -> None:
    sizes = {name: sum(math.prod(shape) for shape in shapes) for name, shapes in MODELS.items()}
    assert sizes["one-20M"] == 20_000_000
    assert (sizes["gpt-0.6M"], len(MODELS["gpt-0.6M"])) == (599_808, 144)
    assert len(MODELS["small-10000"]) == 10_000
    assert sizes["opt-125m"] == 125_239_296  # facebook/opt-125m's own count
    assert sizes["llama-3-8b-layer"] == 218_112_000  # (8,030,261,248 - 2 * 128256 * 4096 - 4096) / 32
    assert sizes["llama-3-8b-layer"] == (8_030_261_248 - 2 * 128_256 * 4096 - 4096) / 32


def test_a_steps_allocations_are_seen() -> None:
    def allocate() -> None:
        first, second = torch.ones(1000), torch.ones(500)
        del first
        torch.ones(100).copy_(second[:100])

    assert memory.allocated_by(allocate) == (6000, 6400)
    assert memory.allocated_by(lambda: None) == (0, 0)


def test_measured_bytes_are_the_policys() -> None:
    result = memory.measure("KAHAN_BF16", 5000, compile=False)
    assert result.predicted == result.measured == 10
    assert result.step_peak > 5000  # without a compiler there are temporaries


@pytest.mark.exhaustive
def test_the_battery_tells_what_is_kept_from_what_is_lost() -> None:
    # A step of 1e-5 on float32 weights between 1 and 2 is rounded by up to 2**-24.
    step = 2**-24 / 1e-5
    assert battery.decay(FUSED) == pytest.approx(1.0, abs=step)
    assert battery.decay(NARROW) == 0.0
    assert battery.updates(FUSED) == pytest.approx(1.0, abs=step)
    assert battery.updates(NARROW) == 0.0
    assert battery.variance(FUSED) == pytest.approx(1.0, abs=1e-3)
    assert battery.variance(NARROW) > 10

    def make(params: list[nn.Parameter], **others: Any) -> Any:
        return AdamW(params, **HYPERPARAMETERS | others, policy=eb.policies.KAHAN_BF16)

    eager = Contestant("everybit", torch.bfloat16, make, 1.0)
    assert battery.decay(eager) == pytest.approx(1.0, abs=1e-2)
    assert battery.resumed(eager) == "same bits"
    assert battery.dtypes(eager) == "kept"
    assert battery.bytes_per_parameter(eager) == 8


def test_the_battery_notices_state_that_does_not_come_back() -> None:
    class Forgetful(torch.optim.AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for entry in self.state.values():
                entry["exp_avg"] = entry["exp_avg"].to(torch.bfloat16)

        def step(self, closure: Any = None) -> Any:
            for entry in self.state.values():
                entry["exp_avg"] = entry["exp_avg"].float()
            return super().step(closure)

    def make(params: list[nn.Parameter], **others: Any) -> Any:
        return Forgetful(params, **HYPERPARAMETERS | others)

    forgetful = Contestant("forgetful", torch.float32, make, 1.0)
    assert battery.dtypes(forgetful) == "float32, float32 became bfloat16, float32"
    assert battery.resumed(forgetful) == "differs"
    assert battery.dtypes(FUSED) == "kept"
    assert battery.resumed(FUSED) == "same bits"


@pytest.mark.exhaustive
def test_steps_that_nothing_was_compiled_of_are_not_the_same_bits_compiled() -> None:
    class Uncompilable(torch.optim.AdamW):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def make(params: list[nn.Parameter], **others: Any) -> Any:
        return Uncompilable(params, **HYPERPARAMETERS | others)

    # Ours first: what it compiled is not counted as another's.
    assert battery.compiled(contestants.named("everybit FP32")) == "same bits"
    assert battery.compiled(Contestant("uncompilable", torch.float32, make, 1.0)) == "not compiled"
    assert battery.compiled(FUSED) == "not compiled"


def test_weights_and_moments_are_read_with_the_corrections_that_heavyball_keeps() -> None:
    pytest.importorskip("heavyball")
    contestant = contestants.named("HeavyBall, bfloat16 and 8 bits")
    params, exact = battery.weights(torch.bfloat16), battery.weights(torch.float64)
    start = exact[0].detach().clone()
    optimizer = contestant.make(params)
    reference = torch.optim.AdamW(exact, **HYPERPARAMETERS)
    with torch.compiler.set_stance("force_eager"):
        battery.stream(optimizer, params, range(5))
    for step in range(5):
        noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(step))
        exact[0].grad = noise.bfloat16().double()
        reference.step()

    def error(weights: torch.Tensor) -> float:
        return float((weights - exact[0].detach()).norm() / (exact[0].detach() - start).norm())

    (read,) = contestants.full_precision(optimizer, params)
    assert error(read) < contestants.BFLOAT16_STATE < contestants.BFLOAT16_WEIGHTS < error(params[0].detach().double())
    # HeavyBall keeps the second moment after bias correction.
    right = reference.state[exact[0]]["exp_avg_sq"] / (1 - 0.999**5)
    held = battery.second_moment(optimizer, params[0]).double()
    plain = optimizer.state[params[0]][0]["update_by_adam_exp_avg_sq_0"].double()
    assert (held - right).norm() < (plain - right).norm() / 10


def test_a_failure_is_a_cell() -> None:
    def fail(params: list[nn.Parameter], **others: Any) -> Any:
        raise RuntimeError("no\nway")

    assert battery.cell("decay", Contestant("failing", torch.float32, fail, 1.0)) == "RuntimeError: no"


def test_the_page_keeps_what_is_written_around_the_table(tmp_path: Path) -> None:
    row = battery.Row("one", decay=0.5, compiled="same bits", resumed="Error: long. And so on", bytes=8.0)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n")
    pages.insert(page, "x", pages.table(battery.HEADINGS, [battery.shown(row)]))
    lines = page.read_text().splitlines()
    assert lines[:2] + lines[-2:] == ["before", "<!-- begin x -->", "<!-- end x -->", "after"]
    assert "| one | 50.0 % | not run | not run | same bits | Error: long | not run | 8.00 |" in lines
    assert "old" not in lines
    with pytest.raises(SystemExit, match=r"has no <!-- begin y -->"):
        pages.insert(page, "y", "")
    battery.picture([row], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_raw_results_are_small() -> None:
    """A clone carries them: numbers with five digits, without spaces."""
    assert (
        sum(
            path.stat().st_size
            for path in (Path(__file__).parents[2] / "benchmarks/results").rglob("*")
            if path.is_file()
        )
        <= 1_000_000
    )
