"""Optimizers with second moments that take less memory than their parameters, each a composition of transforms."""

from __future__ import annotations

from typing import Any, Literal

from everybit.base import Hyperparameter, require_word
from everybit.combinators import Chain, chain, masked, partition
from everybit.linalg import Which
from everybit.protocol import Transform
from everybit.schedules import relative_step_schedule
from everybit.transforms import (
    AdamMiniBlocks,
    add_decayed_weights,
    identity,
    running_mean,
    scale_by_adam,
    scale_by_adam_mini,
    scale_by_came,
    scale_by_factored_rms,
    scale_by_learning_rate,
    scale_by_parameter_rms,
    scale_by_sm3,
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


def adam_mini(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    head_size: int | None = None,
    weight_decay: Hyperparameter = 0.0,
    mask: Any = None,
    labels: Any = None,
) -> Chain:
    """Adam-mini (Zhang et al. 2024, https://arxiv.org/abs/2406.16793), as the authors' ``Adam_mini`` 1.1: one second moment for each block.

    Blocks are told by names: a head of queries and keys, a row of embeddings, of the output layer, of values, projections and MLPs, and
    whole tensors of the rest; biases have a second moment for each element, as in Adam. What went where is printed by
    ``eb.label_table(eb.AdamMiniBlocks(), dict(model.named_parameters()))``.

    Args:
        learning_rate: At least zero; AdamW's.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Added outside the root.
        head_size: Rows of a query or key that belong to one head; without it, a query or key is refused.
        weight_decay: Decoupled decay.
        mask: Where weights decay, as :func:`everybit.adamw` has it.
        labels: Instead of :class:`everybit.AdamMiniBlocks`: a function of (path, parameter), or a tree that is a prefix of the parameters',
            with labels ``"element"``, ``"head"``, ``"row"`` and ``"tensor"``. (``"tensor"`` alone is a tree for all parameters.)

    Raises:
        ValueError: A hyperparameter out of range. From ``init``: a parameter without name or without known block, rows that are
            no multiple of ``head_size``, a ``head_size`` without queries and keys.

    Examples:
        >>> import everybit as eb
        >>> optimizer = eb.with_policy(eb.adam_mini(3e-4, head_size=64, weight_decay=0.1, mask=eb.not_norm_or_bias), eb.policies.LEAN_BF16)
    """
    blocks: dict[str, Transform[Any]] = {
        "element": scale_by_adam(b1, b2, eps),
        "row": scale_by_adam_mini(b1, b2, eps, 1),
        "tensor": scale_by_adam_mini(b1, b2, eps),
    }
    heads = {} if head_size is None else {"head": scale_by_adam_mini(b1, b2, eps, head_size)}
    decay = add_decayed_weights(weight_decay)
    return chain(
        partition(
            {**blocks, **heads}, AdamMiniBlocks(head_size is not None) if labels is None else labels, optional=blocks
        ),
        decay if mask is None else masked(decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def sm3(
    learning_rate: Hyperparameter = 1e-1,
    *,
    b1: Hyperparameter | None = 0.9,
    b2: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-30,
    keep_greatest: bool = False,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """SM3 (Anil et al. 2019, https://arxiv.org/abs/1901.11150), as the authors', optax's and pytorch_optimizer's.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of a mean of directions, in [0, 1); None: no mean.
        b2: Decay rate of the squares, in [0, 1); None: they are summed up, as in the paper.
        eps: Added inside the root; optax has 1e-8.
        keep_greatest: Let no kept square fall; see :class:`~everybit.transforms.shared_moments.ScaleBySm3`.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_sm3(b2=b2, eps=eps, keep_greatest=keep_greatest),
        identity() if b1 is None else running_mean(b1),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
