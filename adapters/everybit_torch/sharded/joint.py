"""Several steppers that step as one: parts of a model with ranks, divisors or strategies of their own, such as experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from everybit.base import barriers
from everybit_torch.sharded.gradient_norm import reduces_otherwise
from everybit_torch.sharded.reports import StepReport
from everybit_torch.sharded.stepper import FlatStepper


class JointStepper:
    """Step several steppers of one model together, with one norm of all gradients and one decision whether to step.

    Each stepper draws the random bits that it would draw alone, so that each needs a seed of its own under stochastic formats.

    Each part has a stepper of its own, with its own ranks, divisor, transform, policy and strategy. Experts are such a part: they are
    reduced over the ranks that hold the same experts, and everything else is reduced over all ranks. Where a rank holds several stages of a
    pipeline, each of them is such a part. Every rank has to have parts of the same names, in the same order.

    Args:
        steppers: A stepper by the name of its part. Their models must not share parameters.

    Attributes:
        steppers: The same.

    Raises:
        TypeError: A value that is not a stepper.
        ValueError: No stepper, one that is closed, a parameter in two of them, two that draw random bits with one seed, or a transform that
            reduces over all parameters in another way than by clipping to the global norm first, whose result would be about one part.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import FlatStepper, JointStepper
        >>> dense, experts = torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        >>> optimizer = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3))
        >>> stepper = JointStepper({"dense": FlatStepper(dense, optimizer), "experts": FlatStepper(experts, optimizer)})
        >>> with stepper.microbatch(last=True):
        ...     experts[0](dense(torch.ones(3, 4))).sum().backward()
        >>> {name: report.skipped for name, report in stepper.step().items()}
        {'dense': False, 'experts': False}
    """

    def __init__(self, steppers: Mapping[str, FlatStepper]) -> None:
        if not isinstance(steppers, Mapping) or not steppers:
            raise ValueError(f"steppers: got {steppers!r}; accepted is a dict of at least one FlatStepper, by name.")
        owners: dict[int, str] = {}
        seeds: dict[int, str] = {}
        for name, one in steppers.items():
            if not isinstance(one, FlatStepper):
                raise TypeError(f"steppers[{name!r}]: got {one!r}; accepted is a FlatStepper.")
            if one.closed:
                raise ValueError(f"steppers[{name!r}]: is closed; accepted is one whose close() was not called.")
            for parameter_name, parameter in one.model.named_parameters():
                if (other := owners.setdefault(id(parameter), name)) != name:
                    raise ValueError(
                        f"steppers[{name!r}]: {parameter_name} is stepped by steppers[{other!r}] too; accepted are models without a"
                        " common parameter."
                    )
            draws = any(label.draws_bits for label in one.labelled.values())
            if draws and (other := seeds.setdefault(one.seed, name)) != name:
                raise ValueError(
                    f"steppers[{name!r}]: draws random bits with the seed {one.seed}, and so does steppers[{other!r}], which would draw the"
                    " same ones; accepted is a seed of its own for each stepper: FlatStepper(..., seed=...)."
                )
            if reduces_otherwise(one.labelled):
                raise ValueError(
                    f"steppers[{name!r}]: its transform reduces over all of its parameters, and would not see those of the other steppers."
                    " Accepted are transforms that clip to the global norm before anything else, whose norm is of all steppers, and those"
                    " that reduce over each parameter by itself."
                )
        self.steppers = dict(steppers)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """One microbatch of all parts; see :meth:`FlatStepper.microbatch`."""
        return self._inside(lambda stepper: stepper.microbatch(last=last))

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of backward passes that are not the last before a step; see :meth:`FlatStepper.no_sync`."""
        return self._inside(FlatStepper.no_sync)

    def sync(self) -> AbstractContextManager[None]:
        """Context of the last backward pass before a step; see :meth:`FlatStepper.sync`."""
        return self._inside(FlatStepper.sync)

    @contextmanager
    def _inside(self, enter: Callable[[FlatStepper], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for stepper in self.steppers.values():
                stack.enter_context(enter(stepper))
            yield

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> dict[str, StepReport]:
        """Finish the sums over the ranks, find the norm of all gradients, and step every part, or none.

        Args:
            loss_scale: The factor by which the loss was multiplied; gradients are divided by it.

        Returns:
            The report of each part, with the norm of all of them.

        Raises:
            RuntimeError: As :meth:`FlatStepper.step`.
        """
        agreed = {name: stepper.agree_on_step(loss_scale=loss_scale) for name, stepper in self.steppers.items()}
        first, *others = agreed.values()
        squares = first.squares.clone()
        for one in others:
            squares += one.squares.to(squares.device)
        skipped = any(one.skipped for one in agreed.values())
        return {
            name: stepper.carry_out(
                replace(
                    agreed[name],
                    squares=(own := squares.to(agreed[name].squares.device)),
                    norm=barriers.sqrt(own),
                    skipped=skipped,
                )
            )
            for name, stepper in self.steppers.items()
        }

    def zero_grad(self) -> None:
        """Discard the gradients of this cycle, in every stepper."""
        for stepper in self.steppers.values():
            stepper.zero_grad()

    def close(self) -> None:
        """Close every stepper; see :meth:`FlatStepper.close`. Every rank has to call it."""
        for stepper in self.steppers.values():
            stepper.close()

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {stepper!r}" for name, stepper in self.steppers.items())
