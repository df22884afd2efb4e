"""The rule for vmap that older versions of torch are given."""

from __future__ import annotations

import pytest
import torch

from everybit.base.older_torch import _view


@pytest.mark.parametrize("batched", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.uint8, torch.int32])
def test_members_are_read_as_another_dtype_one_by_one(batched: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    members = x.unbind(batched)
    if batched == 2 and dtype in (torch.uint8, torch.int32):
        for refused in (lambda: members[0].view(dtype), lambda: _view(None, (batched, None), x, dtype)):
            with pytest.raises(RuntimeError, match="stride"):
                refused()
        return
    found, place = _view(None, (batched, None), x, dtype)
    expected = [member.view(dtype) for member in members]
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(place), expected, strict=True))
