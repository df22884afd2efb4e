"""Matrices: how a parameter is seen as some, their products, orthogonal factors, Kronecker factors and projections."""

from everybit.linalg.factored_moments import Which, factored_dimensions
from everybit.linalg.kronecker import Block, Kronecker, Sides, root_mean_square
from everybit.linalg.operations import eigenvectors, inverse_roots, orthonormal, product
from everybit.linalg.orthogonalization import (
    PUBLISHED, Arithmetic, Batching, Coefficients, NewtonSchulz, Normalization, Triple, iterated,
)  # fmt: skip
from everybit.linalg.views import (
    MatrixView, batched, flattened, heads, interleaved, matrix, row_blocks, transposed, view_for,
)  # fmt: skip
from everybit.linalg.whitening import fitted

__all__ = [
    "PUBLISHED", "Arithmetic", "Batching", "Block", "Coefficients", "Kronecker", "MatrixView", "NewtonSchulz", "Normalization", "Sides",
    "Triple", "Which", "batched", "eigenvectors", "factored_dimensions", "fitted", "flattened", "heads", "interleaved", "inverse_roots",
    "iterated", "matrix", "orthonormal", "product", "root_mean_square", "row_blocks", "transposed", "view_for",
]  # fmt: skip
