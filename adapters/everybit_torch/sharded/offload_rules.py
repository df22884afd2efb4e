"""The options with which offload works, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

from everybit.combinators import needs_whole_tensors
from everybit.protocol import any_per_tensor
from everybit_torch.sharded.gradient_norm import reduces_otherwise
from everybit_torch.sharded.offload import Offload
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.sharded.strategies import Sharding


def require_offload(
    offload: Offload, kind: Sharding, labelled: Mapping[str, LabelledTransform], *, keep_gradients: bool
) -> None:
    """Refuse to keep on the host what cannot be there.

    Args:
        offload: What is to be there.
        kind: What is sharded.
        labelled: What the model is stepped with.
        keep_gradients: A stepper's argument.

    Raises:
        ValueError: The message says what it does not go with.
    """
    whole = next((one.transform for one in labelled.values() if needs_whole_tensors(one.transform)), None)
    if offload.anything and whole is not None:
        raise ValueError(
            f"offload: got {offload!r} for {whole!r}, a part of which must see whole tensors (cut 'tensor'), while what lies on the host is"
            " stepped a piece at a time. Accepted are False, and transforms whose parts all have the cut 'element'."
        )
    if not (offload.weights or offload.gradients):
        return
    problem = None
    if not (offload.state and offload.weights and offload.gradients):
        problem = "where torch has a parameter, its gradient and its state on one device"
    elif not kind.params:
        problem = f"under {kind.strategy!r}, where every rank computes with weights that are whole"
    elif kind.outer == "optim":
        problem = "with outer='optim', which sends shards over the outer ranks"
    elif not keep_gradients:
        problem = "with keep_gradients=False, and main gradients in memory of the host's, which is kept"
    elif reduces_otherwise(labelled) or any_per_tensor([one.transform for one in labelled.values()]):
        problem = "for a transform that reduces, where all that can be is to clip by the global norm first"
    if problem is not None:
        raise ValueError(
            f"offload: got {offload!r} {problem}. Accepted are True, for the state alone, and under 'optim_grads_params'"
            " Offload(state=True, weights=True, gradients=True)."
        )
