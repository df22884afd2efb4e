"""What is wrong with the code of exact sums, as JSON; a program, because what stands in for a GPU stays in a process."""

from __future__ import annotations

import json
import sys
import warnings

import torch

from gpu_codegen.sums import Sum, broken

SUMS = [
    Sum(2),
    Sum(2, adds=True),
    Sum(8, divisor=8.0),
    # Into float32: Triton's interpreter cuts off what it converts to bfloat16.
    Sum(3, torch.float16, adds=True, divisor=3.0, scale=0.25),
    Sum(16, torch.float32, divisor=24.0),
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(dict(zip(map(str, SUMS), broken(SUMS), strict=True))) + "\n")
