"""A model with its optimizer's weights for evaluation, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from everybit_torch.optim import TorchOptimizer


@runtime_checkable
class HasEvaluationWeights(Protocol):
    """A :class:`~everybit_torch.FlatStepper`."""

    def evaluation_weights(self) -> Any:
        """A context manager."""
        ...


@contextmanager
def evaluation_weights(optimizer: TorchOptimizer | HasEvaluationWeights) -> Iterator[None]:
    """Give the model the weights for evaluation inside; after it the model has the bits that it had before.

    The transform defines them (:meth:`everybit.Optimizer.eval_params`), such as the average of :func:`everybit.average_weights`. Without
    a definition they are the trained weights. They are rounded to the model's dtype. A checkpoint of the model that is saved inside
    holds these weights. Memory for another copy of the model's weights is taken, and for them in float32 while they are computed; of a
    stepper, for this rank's part of them, and every rank has to be here.

    Args:
        optimizer: An optimizer of everybit, or a ``FlatStepper``.

    Raises:
        TypeError: Another optimizer.
        RuntimeError: Inside: a step, another ``evaluation_weights``, or what would export or load weights or state. ``state_dict()`` has
            the trained weights, too.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import TorchOptimizer, evaluation_weights
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> def averaged(learning_rate):
        ...     return eb.chain(eb.adamw(learning_rate), eb.average_weights(0.99))
        >>> optimizer = TorchOptimizer(model.parameters(), averaged, lr=0.1)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> trained = model(torch.ones(1, 2))
        >>> with torch.no_grad(), evaluation_weights(optimizer):
        ...     bool(model(torch.ones(1, 2)) > trained)  # the average lags behind
        True
        >>> torch.equal(model(torch.ones(1, 2)), trained)
        True
    """
    if not isinstance(optimizer, TorchOptimizer):
        if not isinstance(optimizer, HasEvaluationWeights):
            raise TypeError(
                f"optimizer: got {type(optimizer).__name__}; accepted are optimizers of everybit, and a FlatStepper."
            )
        with optimizer.evaluation_weights():
            yield
        return

    if optimizer.of_stepper:
        optimizer.eval()  # which refuses where there are others
        yield
        return
    with optimizer.evaluated():
        yield
