"""Optimizers of matrices, with another optimizer for what is no matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from everybit.aliases import adamw
from everybit.combinators.chain import Chain, chain
from everybit.combinators.masked import Partition, partition
from everybit.labels import plain_name
from everybit.matrix_views import MatrixView, view_for
from everybit.orthogonalization import Arithmetic, Coefficients, Normalization
from everybit.scalars import Hyperparameter, Scalar
from everybit.transform import Transform
from everybit.transforms.decay_variants import add_cautious_decay
from everybit.transforms.orthogonalize import Scale, orthogonalize
from everybit.transforms.running_mean import running_mean
from everybit.transforms.stateless import scale_by_learning_rate
from everybit.transforms.trace import trace
from everybit.transforms.weight_decay import add_decayed_weights, subtract_decayed_weights

Decay = Literal["decoupled", "coupled", "independent", "cautious"]
"""How weights of matrices decay."""

NOT_HIDDEN = r"(^|[._])(\w*emb\w*|wte|wpe|lm_head|head|classifier|output)([._]|$)"
"""Names of the first and last layers, whose matrices are not orthogonalized: a table of vectors is no linear map between hidden states."""


@dataclass(frozen=True, slots=True)
class HiddenMatrices:
    """Labels of parameters: ``"matrix"``, one of ``views`` by its pattern, or ``"others"``; made by :func:`muon`."""

    views: tuple[tuple[str, MatrixView], ...] = ()
    others: str = NOT_HIDDEN

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the label of a parameter."""
        name = plain_name(path)
        for pattern, _ in self.views:
            if re.search(pattern, name):
                return pattern
        hidden = view_for(parameter.shape) is not None and not re.search(self.others, name)
        return "matrix" if hidden else "others"
