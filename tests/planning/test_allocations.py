"""What operations of everybit allocate inside is counted."""

from __future__ import annotations

import torch

import everybit as eb
from everybit.linalg import eigenvectors
from everybit_torch.planning.allocations import AllocationCounter


def test_what_an_iteration_allocates_is_counted() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    with AllocationCounter() as counter:
        eb.orthogonalize().update(x, eb.orthogonalize().init(x), x)
    # In 16 bits: the matrix before and after a product, and the two products with its transpose; the result is not there yet.
    assert counter.peak >= 2 * (2 * 64 * 128 + 2 * 64 * 64)


def test_what_a_decomposition_allocates_is_counted() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with AllocationCounter() as counter:
        eigenvectors(x @ x.T)
    # In 64 bits: the matrix, what is decomposed, and the vectors in two orders.
    assert counter.peak >= 8 * 4 * 64 * 64
