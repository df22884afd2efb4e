"""Optimizers with second moments that take less memory than their parameters, each a composition of transforms."""

from __future__ import annotations

from typing import Any, Literal

from everybit.base import Hyperparameter, require_word
from everybit.combinators import Chain, chain
from everybit.linalg import Which
from everybit.protocol import Transform
from everybit.schedules import relative_step_schedule
from everybit.transforms import (
    add_decayed_weights,
    identity,
    running_mean,
    scale_by_came,
    scale_by_factored_rms,
    scale_by_learning_rate,
    scale_by_parameter_rms,
    subtract_decayed_weights,
    subtract_relative_decay,
)

MomentumOf = Literal["steps", "directions"]
"""What Adafactor's momentum averages: steps, with their sizes, or the directions before them."""

DecayBy = Literal["step", "learning_rate", "alone"]
"""What Adafactor's weight decay is multiplied by: the size of the step, the learning rate without that of the weights, or nothing."""


def adafactor(
    learning_rate: Hyperparameter | None = None,
    *,
    b1: Hyperparameter | None = None,
    beta2_decay: Hyperparameter = -0.8,
    b2_cap: Hyperparameter = 1.0,
    eps1: Hyperparameter = 1e-30,
    eps2: Hyperparameter = 1e-3,
    clip_threshold: Hyperparameter | None = 1.0,
    scale_parameter: bool = True,
    weight_decay: Hyperparameter = 0.0,
    decay_by: DecayBy = "step",
    momentum_of: MomentumOf = "steps",
    dimensions: Which = "last",
    min_size_to_factor: int = 1,
    step_offset: int = 0,
) -> Chain:
    """Adafactor as the paper has it (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235), and its other flavours by arguments.

    The defaults are the paper's, of mesh-tensorflow and Hugging Face's ``Adafactor``. torch's flavour is :func:`everybit.torch_adafactor`.

    Args:
        learning_rate: Size of a step relative to the weights, at least zero. None: the paper's, :func:`everybit.relative_step_schedule`;
            Hugging Face's ``warmup_init`` is ``relative_step_schedule(slope=1e-6)``.
        b1: Decay rate of a momentum, in [0, 1); None: no momentum.
        beta2_decay: The share of the newest squares in step t is ``t ** beta2_decay``; at most zero.
        b2_cap: The greatest decay rate of squares, in [0, 1]; timm has 0.999.
        eps1: Added to the squares before their means are taken.
        eps2: The least root mean square of weights that a step is relative to.
        clip_threshold: The root mean square to which a direction is limited; None, as timm: it is not.
        scale_parameter: Multiply steps by the root mean square of the weights; timm does not.
        weight_decay: Decay.
        decay_by: ``"step"``: a step shrinks weights by ``weight_decay`` times its size, learning rate times root mean square, as Hugging
            Face's; ``"learning_rate"``: times the learning rate alone; ``"alone"``: by ``weight_decay`` itself, as optax.
        momentum_of: ``"steps"``: the momentum averages steps, as the paper's code, Hugging Face and optax; ``"directions"``: the directions
            before learning rate and weights are looked at, as timm.
        dimensions: ``"last"``: factor over the last two dimensions, ``"largest"``: the two largest, as optax and timm.
        min_size_to_factor: Factor a tensor only if both of these are at least so long; optax has 128, timm 16.
        step_offset: Updates to leave out of t: those of an earlier run with a count that goes on.

    Raises:
        ValueError: A hyperparameter out of range, or another word.

    Examples:
        >>> import everybit as eb
        >>> fine_tuning = eb.adafactor(1e-3, scale_parameter=False)  # as Hugging Face's Trainer has it
        >>> vision = eb.adafactor(
        ...     1e-3, b1=0.9, b2_cap=0.999, clip_threshold=None, scale_parameter=False, momentum_of="directions",
        ...     dimensions="largest", min_size_to_factor=16,
        ... )  # as timm's adafactor_bv
    """
    require_word("momentum_of", momentum_of, MomentumOf)
    require_word("decay_by", decay_by, DecayBy)
    rate: Hyperparameter = relative_step_schedule() if learning_rate is None else learning_rate
    momentum: list[Transform[Any]] = [] if b1 is None else [running_mean(b1)]
    size = scale_by_parameter_rms(eps2) if scale_parameter else identity()
    first, last = (momentum, []) if momentum_of == "directions" else ([], momentum)
    # Decay that passes through a momentum would not be decay.
    before: list[Transform[Any]] = []
    after: list[Transform[Any]] = []
    if decay_by == "alone":
        after = [subtract_decayed_weights(weight_decay)]
    elif decay_by == "step" and scale_parameter and last:
        after = [subtract_relative_decay(weight_decay, rate, eps2)]
    elif decay_by == "step" and not last:
        before = [add_decayed_weights(weight_decay)]
    else:
        after = [subtract_decayed_weights(weight_decay, rate, 1.0)]
    return chain(
        scale_by_factored_rms(
            beta2_decay=beta2_decay,
            b2_cap=b2_cap,
            eps1=eps1,
            clip_threshold=clip_threshold,
            dimensions=dimensions,
            min_size_to_factor=min_size_to_factor,
            step_offset=step_offset,
        ),
        *first,
        *before,
        size,
        scale_by_learning_rate(rate),
        *last,
        *after,
    )


def came(
    learning_rate: Hyperparameter = 2e-4,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter = 0.9999,
    eps1: Hyperparameter = 1e-30,
    eps2: Hyperparameter = 1e-16,
    clip_threshold: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """CAME (Luo et al. 2023, https://arxiv.org/abs/2307.02047), as the authors' ``CAME``.

    Args:
        learning_rate: Non-negative, of the size of AdamW's.
        b1: Decay rate of the mean of directions, in [0, 1).
        b2: Decay rate of the squares, in [0, 1).
        b3: Decay rate of the instability, in [0, 1).
        eps1: Added to the squares.
        eps2: Added to the squared differences.
        clip_threshold: The root mean square to which a direction is limited.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_came(b1, b2, b3, eps1, eps2, clip_threshold),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
