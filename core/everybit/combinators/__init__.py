"""Combinators: transforms that are made of other transforms."""

from everybit.combinators.accumulate import accumulate
from everybit.combinators.cautious import Cautious, cautious
from everybit.combinators.chain import Chain, NamedChain, chain, named_chain, zero_step
from everybit.combinators.ema_nesterov import ema_nesterov
from everybit.combinators.learning_rates import layerwise_decay, mup_scales
from everybit.combinators.lookahead import Lookahead, lookahead
from everybit.combinators.masked import Masked, Partition, masked, partition
from everybit.combinators.routing import matrices_of, missed, routing, routing_tables, shown_matrices
from everybit.combinators.skipping import apply_if_finite, skip_large_updates
from everybit.combinators.whole_tensors import needs_whole_tensors, step_cost

__all__ = [
    "Cautious", "Chain", "Lookahead", "Masked", "NamedChain", "Partition", "accumulate", "apply_if_finite", "cautious", "chain",
    "ema_nesterov", "layerwise_decay", "lookahead", "masked", "matrices_of", "missed", "mup_scales", "named_chain", "needs_whole_tensors",
    "partition", "routing", "routing_tables", "shown_matrices", "skip_large_updates", "step_cost", "zero_step",
]  # fmt: skip
