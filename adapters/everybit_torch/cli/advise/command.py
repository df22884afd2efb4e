"""``everybit advise``, from a model and a memory budget to a policy and a strategy, with the reasons."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

import everybit as eb
from everybit_torch.cli.errors import FAILED, OptionError
from everybit_torch.cli.files import check_out, keep_results
from everybit_torch.cli.machine import versions
from everybit_torch.cli.optimizers import Chosen, require_policies
from everybit_torch.cli.output import Results, Sheet, counted, show
from everybit_torch.cli.policies import named_policy
from everybit_torch.cli.setup import Planned, Setup, Subject, plan_all, planned, subject, unit_of
from everybit_torch.planning.plan import Plan
from everybit_torch.sharded.strategies import STRATEGIES, Strategy

FORMAT = 1
MOST_RANKS = 1 << 14
"""How far ranks are doubled when nothing fits."""

_FEWEST_BYTES = 1 << 20
"""The least number without a unit that is taken as a number of bytes: smaller ones lack their unit."""

_SIZES = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
KEEPS = {
    "FP32": "everything in float32",
    "EXACT_BF16": "the weights and moments of float32 training, bit for bit",
    "MIXED_BF16": "float32 main weights and moments",
    "LEAN_BF16": "exact float32 weights; bfloat16 moments, rounded stochastically",
    "KAHAN_BF16": "bfloat16 weights with a bfloat16 residual; bfloat16 moments, rounded stochastically",
    "TIGHT_BF16": "weights of 24 bits and bfloat16 moments, rounded stochastically",
    "FLOOR_BF16": "bfloat16 throughout, rounded stochastically: right on average, with more noise",
}
"""A description of each policy, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions(Setup):
    """Find the most precise policy that fits into a memory budget, and of its strategies the one that sends the fewest bytes.

    Activations, buffers and the memory of the device's libraries are not counted: keep memory free for them with --reserve. Nothing is
    allocated. Writes advise.json and advise.png to --out, if it is given. The exit code is 1 if nothing fits.
    """

    memory: str = "80GB"
    """Memory of one rank's device: a number with GB (1000**3 bytes) or GiB (1024**3)."""

    reserve: str = "0GB"
    """Memory to keep free, for activations and everything else that is not counted."""

    policies: tuple[str, ...] = ()
    """Presets of everybit.policies and .toml, .json or .yaml files, in order of preference. Default: from EXACT_BF16 to FLOOR_BF16, or
    FP32 for a float32 model."""

    out: Path | None = None
    """Folder for advise.json and advise.png; created if it does not exist."""


def advise(options: AdviseOptions, console: Console, command: str) -> Results:
    """Plan every policy under every strategy, choose, and say why.

    Raises:
        OptionError: An option that cannot be used; nothing was done.
    """
    memory, reserve = parsed_size("--memory", options.memory), parsed_size("--reserve", options.reserve)
    budget = memory - reserve
    if budget <= 0:
        raise OptionError("--reserve", options.reserve, f"less than --memory, which is {options.memory}")
    chosen = subject(options)
    policies = dict(map(named_policy, options.policies or _defaults(chosen)))
    require_policies(chosen.optimizer, policies)
    if options.out is not None:
        check_out(options.out)
    choices = plan_all(policies, STRATEGIES, partial(planned, options, chosen, ranks=options.ranks), console)
    best = best_of(choices, budget)
    enough = {} if best else _enough_ranks(options, chosen, policies, budget)
    title = (
        f"{options.model}: {choices[0].plan.parameters:,} parameters ({options.dtype}), {chosen.optimizer.shown},"
        f" {counted(options.ranks, 'rank')} of {_sized(memory)}, {_sized(reserve)} of it reserved; units: {chosen.unit_names}."
    )
    console.print(title, highlight=False)
    show(_sheet(choices, best, budget), console)
    said = (
        _reasons(choices, best, budget, policies, options, chosen.optimizer)
        if best
        else _too_small(choices, enough, budget)
    )
    for line in said:
        console.print(line, highlight=False)
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "options": asdict(options),
        "optimizer": chosen.optimizer.described(), "budget": budget,
        "advice": {"policy": best.policy, "strategy": best.strategy} if best else None, "reasons": said, "enough_ranks": enough,
        "choices": [
            {
                "policy": one.policy, "strategy": one.strategy, "peak_bytes": one.plan.peak_bytes,
                "persistent_bytes": one.plan.persistent_bytes, "wire_bytes": one.plan.wire_bytes,
                "bytes_per_param": one.plan.bytes_per_param, "fits": one.plan.peak_bytes <= budget,
            }
            for one in choices
        ],
    }  # fmt: skip
    if options.out is not None:
        from everybit_torch.cli.plan.pictures import draw

        drawn: list[tuple[str, Strategy, Plan]] = [(one.policy, one.strategy, one.plan) for one in choices]
        keep_results(
            options.out, "advise", results, lambda picture: draw(picture, drawn, title=title, budget=budget), console
        )
    return Results(results, 0 if best else FAILED)


def parsed_size(option: str, text: str) -> int:
    """Bytes of a size such as ``80GiB``.

    Raises:
        OptionError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise OptionError(option, text, "a number with a unit, such as 80GB, 79.6GiB or 512MiB")
    if text.strip().replace(".", "").isdigit() and 0 < float(match[1]) < _FEWEST_BYTES:
        raise OptionError(option, text, f"a number with a unit, {match[1]}GB; without one it is a number of bytes")
    return int(float(match[1]) * _SIZES[match[2] or ""])


def best_of(choices: list[Planned], budget: int) -> Planned | None:
    """The first policy of which some strategy fits; of its strategies that fit, the one that sends least; of equals, the first."""
    for policy in dict.fromkeys(choice.policy for choice in choices):
        fitting = [one for one in choices if one.policy == policy and one.plan.peak_bytes <= budget]
        if fitting:
            return min(fitting, key=lambda one: one.plan.wire_bytes)
    return None


def _defaults(chosen: Subject) -> tuple[str, ...]:
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in chosen.model.parameters()}
    if dtypes == {"bfloat16"}:
        return ("EXACT_BF16", "LEAN_BF16", "TIGHT_BF16", "FLOOR_BF16")
    if dtypes == {"float32"}:
        return ("FP32",)
    if dtypes == {"float64"}:
        return ("FP64",)
    got = f"nothing, for parameters in {', '.join(sorted(dtypes))}"
    raise OptionError(
        "--policies", got, "policies for these dtypes: presets are for one of bfloat16, float32 and float64"
    )


def _enough_ranks(
    options: AdviseOptions, chosen: Subject, policies: dict[str, eb.Policy], budget: int
) -> dict[str, int | None]:
    """For each policy, of how many ranks, doubled, the memory is enough if everything is sharded; None: of no number."""
    found: dict[str, int | None] = {}
    for name, policy in policies.items():
        found[name], ranks = None, options.ranks
        while found[name] is None and ranks < MOST_RANKS:
            ranks *= 2
            if planned(options, chosen, name, policy, "optim_grads_params", ranks=ranks).peak_bytes <= budget:
                found[name] = ranks
    return found


def _sheet(choices: list[Planned], best: Planned | None, budget: int) -> Sheet:
    unit, size = unit_of(max(one.plan.peak_bytes for one in choices))
    caption = (
        f"{unit} of one rank at the step's peak. The budget is {_sized(budget)}; what is in brackets exceeds it."
        + (" The arrow points to what is advised." if best else "")
    )
    sheet = Sheet(("", *(name.replace("_params", "_\nparams") for name in STRATEGIES)), caption=caption)
    for policy in dict.fromkeys(choice.policy for choice in choices):
        cells = []
        for one in (one for one in choices if one.policy == policy):
            peak = f"{one.plan.peak_bytes / size:.1f}"
            cells.append(("> " if one is best else "") + (peak if one.plan.peak_bytes <= budget else f"({peak})"))
        sheet.rows.append((policy, *cells))
    return sheet


def _sized(nbytes: int) -> str:
    """Bytes in the largest unit of which there is one at least: ``46.6 GiB``."""
    unit, size = unit_of(nbytes)
    return f"{nbytes} {unit}" if size == 1 else f"{nbytes / size:.1f} {unit}"


def _reasons(
    choices: list[Planned], best: Planned, budget: int, policies: dict[str, eb.Policy], options: AdviseOptions, optimizer: Chosen
) -> list[str]:  # fmt: skip
    plan = best.plan
    said = [
        f"{best.policy} under {best.strategy}: {_sized(plan.peak_bytes)} at the peak, {_sized(budget - plan.peak_bytes)} of"
        f" the budget are left; {_sized(plan.wire_bytes)} are sent in a step."
    ]
    if best.policy in KEEPS:
        said.append(f"{best.policy} keeps {KEEPS[best.policy]}.")
    for policy in list(policies)[: list(policies).index(best.policy)]:
        least = min((one for one in choices if one.policy == policy), key=lambda one: one.plan.peak_bytes)
        said.append(f"{policy} does not fit: {_sized(least.plan.peak_bytes)} at least, under {least.strategy}.")
    said += [
        f"{one.strategy} would send less, and takes {_sized(one.plan.peak_bytes)}."
        for one in choices
        if one.policy == best.policy and one.plan.wire_bytes < plan.wire_bytes
    ]
    written = f"eb.policies.{best.policy}" if best.policy in eb.policies.PRESETS else f'load_policy("{best.policy}...")'
    if options.ranks == 1 and optimizer.shown == "adamw":
        said.append(f"As code: AdamW(model.parameters(), policy={written})")
    elif options.ranks == 1:
        given = "".join(f", {name}={value!r}" for name, value in optimizer.given_to_torch().items())
        said.append(f"As code: create({optimizer.name!r}, model, policy={written}{given})")
    else:
        said.append(
            f"As code: FlatStepper(model, {optimizer.code}, policy={written}, strategy={best.strategy!r}, units=[...])"
        )
    return said


def _too_small(choices: list[Planned], enough: dict[str, int | None], budget: int) -> list[str]:
    least = min(choices, key=lambda one: one.plan.peak_bytes)
    said = [
        f"Nothing fits into {_sized(budget)}: the least is {_sized(least.plan.peak_bytes)}, {least.policy} under"
        f" {least.strategy}."
    ]
    for policy, ranks in enough.items():
        if ranks is None:
            said.append(
                f"{policy} fits on no number of ranks: one unit alone is too large, or there are no units (--units)."
            )
        else:
            said.append(f"{policy} fits from {counted(ranks, 'rank')} on, under optim_grads_params.")
    return said
