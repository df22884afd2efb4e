"""Room ``flat``: models of which every rank has all weights, in flat buffers that ranks share out."""

from everybit_torch.flat.buffer_stepper import BufferStepper
from everybit_torch.flat.cycle import GradientCycle
from everybit_torch.flat.piece_optimizer import LabelledGroups, ShareOptimizer
from everybit_torch.flat.places import Buffer, Place
from everybit_torch.flat.validation import judge, laid_out

__all__ = [
    "Buffer", "BufferStepper", "GradientCycle", "LabelledGroups", "Place", "ShareOptimizer", "judge", "laid_out",
]  # fmt: skip
