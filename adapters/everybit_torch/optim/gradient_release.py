"""Stepping during the backward pass: a parameter as soon as its gradient is there, which is then freed; short parameters together.

Never all gradients exist at once, which saves their bytes (LOMO, Lv et al. 2023; ``torch``'s tutorial on the step in the backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from threading import RLock
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everybit.base import require
from everybit.stepping import Metrics
from everybit_torch import clip_notice, streams
from everybit_torch.ambient import in_plain_mode
from everybit_torch.optim.parameters import Stepped
from everybit_torch.optim.planned import parameters_of
from everybit_torch.optim.stepping import Task, added, gradients, is_counted, measured_mesh, step_one
from everybit_torch.optim.torch_optimizer import TorchOptimizer
from everybit_torch.torch_internals import autograd
from everybit_torch.torch_internals.dtensors import is_dtensor, local
from everybit_torch.torch_internals.light_optimizer import leave_scaling_to_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _Waiting:
    """Parameters that are stepped at once, and which of their gradients have come in this step."""

    def __init__(self, one: Stepped) -> None:
        self.one = one
        self.begin()

    def begin(self) -> None:
        """Begin a new step: parameters may have been frozen or unfrozen since the last."""
        self.expected = sum(parameter.requires_grad for parameter in self.one.of.parameters)
        self.arrived: set[int] = set()
        self.stepped = False


class GradientRelease:
    """The handle of a gradient release, which :func:`enable_gradient_release` returns.

    ``optimizer.step()`` is still called once after each backward pass: it ends the step, for parameters that received no gradient in it
    and for the norm. Learning-rate schedulers work as before.
    """

    def __init__(self, model: nn.Module, optimizer: TorchOptimizer, max_norm: float | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._accumulating = False
        self._norm: Tensor | None = None
        # Parameters, and the square of the norm of each one's gradient on this rank.
        self._squares: list[tuple[Tensor, Tensor]] = []
        self._metrics: list[Metrics] = []
        self._all: list[_Waiting] = []
        self._of: dict[int, _Waiting] = {}
        self._mesh: DeviceMesh | None = None
        self._begun = False
        self._home = streams.Home()
        self._lock = RLock()  # autograd has a thread for each device, and parameters may lie on several
        self._open: set[int] = set()  # backward passes that stepped and did not come to their end
        # A GradScaler then comes to `finish`, which refuses it, rather than fail for want of gradients.
        self._undo = leave_scaling_to_step(optimizer)
        self._hooks: dict[int, RemovableHandle] = {}
        self._watch()

    def _watch(self) -> None:
        """Be told of the gradients of every parameter that is trained.

        Raises:
            ValueError: One that is not the model's.
        """
        new = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in self._hooks
        ]
        if new:
            require_parameters_of(self._model, self._optimizer)
        clip_notice.advise(new, self, lambda one: "release.clip_grad_norm_(max_norm)" if one.is_on else None)
        for parameter in new:
            self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(autograd.weakly(self._arrive))

    @property
    def is_on(self) -> bool:
        """Whether gradients are released; not after :meth:`remove`."""
        return self._optimizer.release is self

    @property
    def norm(self) -> Tensor | None:
        """Norm of all gradients of the last finished step, 0-d, at least float32; None before, and without ``max_norm``."""
        return self._norm

    @in_plain_mode
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Return the norm of this backward pass's gradients, and clip those of the next passes to ``max_norm``.

        Call it after the backward pass and before ``optimizer.step()``, in the place of ``torch.nn.utils.clip_grad_norm_``. The gradients
        were used already, scaled by the norm of the step before: see :func:`enable_gradient_release`.

        Args:
            max_norm: The limit, at least zero; unit of the gradient.

        Returns:
            The norm before clipping, over all parameters: 0-d, at least float32.

        Raises:
            RuntimeError: :func:`enable_gradient_release` had no ``max_norm``, so that no norm was measured.
            TypeError: ``max_norm`` is no number.
            ValueError: ``max_norm`` is below zero, or not finite.
        """
        if self._max_norm is None:
            raise RuntimeError(
                "clip_grad_norm_: pass max_norm=... to enable_gradient_release(). Gradients are measured while they are there, and this"
                " release was made without it."
            )
        require("max_norm", max_norm, 0.0, schedule=False)
        self._max_norm = max_norm
        parameters = parameters_of(self._optimizer.own_groups)
        waiting = [(p, _square(local(p.grad))) for p in parameters if p.grad is not None]
        squares = self._squares + waiting
        return self._joint_norm(squares) if squares else torch.zeros(())

    def _joint_norm(self, squares: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The norm of gradients, over the ranks that have the other rows of their parameters."""
        own, sums = self._optimizer.own, dict[int, Tensor]()
        for parameter, square in squares:
            axis, counts = own.axis_and_counts(parameter)
            term = square if counts else torch.zeros_like(square)
            sums[id(axis)] = sums[id(axis)] + term.to(sums[id(axis)].device) if id(axis) in sums else term
        # In the order of the parameters, which ranks share; that in which gradients come may differ.
        axes = {
            id(axis): axis for p in parameters_of(self._optimizer.own_groups) for axis, _ in [own.axis_and_counts(p)]
        }
        totals = [axis.sum(sums[key]) for key, axis in axes.items() if key in sums]
        return torch.stack([total.to(totals[0].device) for total in totals]).sum().sqrt()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients in the backward passes inside this context; the first pass after it steps."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def remove(self) -> None:
        """End gradient release, so that ``optimizer.step()`` steps as before. A second call is a no-op."""
        if self._optimizer.release is not self:
            return
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._optimizer.release = None
        self._undo()

    def abandon(self) -> None:
        """Drop a backward pass that ended in an exception; the next one begins a new step. Parameters that were stepped stay stepped."""
        if self._open:
            self._home.begin_everywhere()  # after an error autograd does not see to that
            self._end()

    # -- during the backward pass ---------------------------------------------------------------------------------------------

    @in_plain_mode
    @torch.no_grad()
    def _arrive(self, parameter: Tensor) -> None:
        self._optimizer.require_trained("a backward pass under gradient release")
        if self._accumulating:
            return
        assert parameter.grad is not None
        with self._lock:
            if not self._begun:
                self._home.begin(parameter.device)
            with self._home.entered(parameter.device, parameter.grad):
                self._take(parameter)

    def _take(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete."""
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided:
            raise TypeError(f"gradient release: got a {parameter.grad.layout} gradient; accepted are dense gradients.")
        this = autograd.present_pass()
        if this not in self._open:
            # Called only if the pass raises no error. A pass within a pass, as reentrant checkpointing makes, has its own.
            self._open.add(this)
            autograd.at_the_end_of_the_pass(lambda: self._open.discard(this))
        self._begin()
        waiting = self._of[id(parameter)]
        if waiting.stepped:
            if self._open - {this}:
                raise RuntimeError(
                    "gradient release: the backward pass before this one ended in an exception, after parameters had been stepped. They"
                    " stay stepped; call optimizer.zero_grad(), which drops the gradients that are left, and go on."
                )
            raise RuntimeError(
                "gradient release: a second backward pass reached parameters that were stepped already. Call optimizer.step() after each"
                " backward pass; for accumulation run all but the last within `with release.accumulate():`."
            )
        waiting.arrived.add(id(parameter))
        if len(waiting.arrived) == waiting.expected:
            self._step_all(waiting)

    def _begin(self) -> None:
        """Prepare a step at its first gradient: create state, and read hyperparameters."""
        if self._begun:
            return
        self._watch()
        self._optimizer.prepare()
        _require_steps_apart(self._model, self._optimizer)  # hyperparameters may have changed it since
        known = {id(waiting.one): waiting for waiting in self._all}
        self._all = [known.get(id(one)) or _Waiting(one) for one in self._optimizer.own.stepped]
        self._of = {id(parameter): waiting for waiting in self._all for parameter in waiting.one.of.parameters}
        for waiting in self._all:
            waiting.begin()
        self._mesh = measured_mesh(self._optimizer.own) if self._optimizer.metrics_enabled else None
        self._begun = True

    def _step_all(self, waiting: _Waiting) -> None:
        """Step those parameters that have a gradient; others are skipped, and their count of steps stays behind."""
        waiting.stepped = True
        grads = gradients(waiting.one)
        if all(grad is not None for grad in grads):
            self._step(waiting.one, cast(list[Tensor], grads))
            return
        if all(grad is None for grad in grads):
            return
        own, there = self._optimizer.own, {id(parameter) for parameter in waiting.one.of.parameters}
        own.come_apart([waiting.one])
        for one in own.stepped:
            if id(one.of.parameters[0]) in there:
                (grad,) = gradients(one)
                if grad is not None:
                    self._step(one, [grad])

    def _step(self, one: Stepped, grads: list[Tensor]) -> None:
        if self._max_norm is not None:
            self._squares += [(p, _square(grad)) for p, grad in zip(one.of.parameters, grads, strict=True)]
            if self._norm is not None:
                for grad in grads:
                    grad.mul_((self._max_norm / (self._norm.to(grad.device) + 1e-6)).clamp(max=1.0).to(grad.dtype))
        task = Task(one, grads, one.steps.due(one.of.segment))
        watch = self._optimizer.own.watch
        if watch is not None:
            watch.look(one.of.parameters)
        measured = step_one(task, task.gather(), metrics=self._optimizer.metrics_enabled)
        if watch is not None:
            watch.note(one.of.parameters)
        if measured is not None and is_counted(one, self._mesh):
            self._metrics.append(measured)
        for parameter in one.of.parameters:
            parameter.grad = None

    # -- after it -------------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the step: the remaining parameters are stepped, and the norm and the metrics of this step are published."""
        if hasattr(self._optimizer, "found_inf"):
            raise RuntimeError(
                "gradient release: got a GradScaler, whose scale has to be divided out before gradients are used, and they were used"
                " during the backward pass; the weights have been stepped with them. Accepted is training without one: bfloat16 needs"
                " none."
            )
        if self._accumulating:
            raise RuntimeError(
                "gradient release: optimizer.step() was called within accumulate(); call it after the last backward pass."
            )
        if any(parameter.grad is not None for group in self._optimizer.param_groups for parameter in group["params"]):
            self._begin()
        for waiting in self._all if self._begun else []:
            if not waiting.stepped:
                self._step_all(waiting)
        if self._squares:
            self._norm = self._joint_norm(self._squares)
        if self._optimizer.metrics_enabled and self._begun:
            self._optimizer.note_metrics(reduce(added, self._metrics) if self._metrics else None)
        self._end()

    def _end(self) -> None:
        self._squares, self._metrics, self._begun = [], [], False
        self._open.clear()


def _square(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return norm.square()


def _require_steps_apart(model: nn.Module, optimizer: TorchOptimizer) -> None:
    """Refuse an optimizer that cannot step one parameter without the others, or without other ranks.

    Raises:
        ValueError: Its transform requests something of all gradients, or ranks hold parts of whole tensors or blocks that a step needs.
        RuntimeError: Parameters that cannot be placed.
    """
    optimizers = [one for group in optimizer.own.groups for one in group.optimizers.values()]
    if any(one.reduces for one in optimizers):
        raise ValueError(
            "optimizer: its transform reduces over all gradients (as clip_by_global_norm does), which are never there at once; accepted are"
            " transforms that do not reduce. max_norm clips by the previous step's norm."
        )
    if any(one.needs_whole or one.per_tensor for one in optimizers) and any(map(is_dtensor, model.parameters())):
        raise ValueError(
            "optimizer: its transform must see whole tensors, of which ranks hold parts that come together in a step of all parameters;"
            " accepted for sharded parameters are transforms of the cut 'element'."
        )
    plan = optimizer.own.plan(optimizer.own_groups, frozenset())
    if optimizer.own.visiting or (plan is not None and any(one.rows is not None for one in plan.new)):
        raise ValueError(
            "optimizer: its policy keeps one number for a block of elements, and ranks hold parts of some blocks, which come together in a"
            " step of all parameters; accepted for these parameters are policies without blocks."
        )


def require_parameters_of(model: nn.Module, optimizer: TorchOptimizer) -> None:
    """Refuse an optimizer with parameters that are not the model's.

    Raises:
        ValueError: The message names them.
    """
    own = {id(parameter) for parameter in model.parameters()}
    strange = [
        f"param group {number}, parameter {index}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in own
    ]
    if strange:
        raise ValueError(f"optimizer: {', '.join(strange[:3])} is no parameter of the model; accepted are the model's.")


def enable_gradient_release(
    model: nn.Module, optimizer: TorchOptimizer, *, max_norm: float | None = None
) -> GradientRelease:
    """Step ``optimizer`` while ``model`` runs backward, and free each gradient at once.

    Without ``max_norm`` the results are those of the plain run, bit for bit. Gradients cannot be unscaled (``GradScaler``) or clipped by
    their own norm, because both need all gradients before the first is used.

    Args:
        model: The optimizer's model.
        optimizer: An optimizer of everybit_torch. Its transform must not reduce over all parameters.
        max_norm: Clip by the global norm of the *previous* step's gradients; the first step is not clipped. None: do not clip.

    Returns:
        A handle: ``accumulate()``, ``norm``, ``remove()``.

    Raises:
        TypeError: ``optimizer`` is not everybit_torch's.
        ValueError: A parameter, transform, option or wrapper that this cannot work with; the message names it.

    Examples:
        >>> import torch
        >>> from everybit_torch import AdamW, enable_gradient_release
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = AdamW(model.parameters())
        >>> release = enable_gradient_release(model, optimizer)
        >>> model(torch.ones(4)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """
    if not isinstance(optimizer, TorchOptimizer):
        raise TypeError(
            f"optimizer: got a {type(optimizer).__name__}; accepted are everybit_torch's optimizers, TorchOptimizer and its subclasses."
        )
    if optimizer.of_stepper:
        raise TypeError(
            "optimizer: got a FlatStepper's, which steps all parameters after their gradients were summed; accepted are optimizers that the"
            " program made itself."
        )
    if max_norm is not None:
        require("max_norm", max_norm, 0.0, schedule=False)
    if optimizer.release is not None:
        raise ValueError("optimizer: its gradients are released already; call remove() on that handle first.")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError(
            "model: got DistributedDataParallel, which averages gradients after they would have been used; accepted are models of one"
            " process."
        )
    _require_steps_apart(model, optimizer)
    require_parameters_of(model, optimizer)
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("model: holds gradients already; call optimizer.zero_grad() first.")
    release = GradientRelease(model, optimizer, max_norm)
    optimizer.release = release
    return release
