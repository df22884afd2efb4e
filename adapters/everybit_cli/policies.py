"""Policies as they are named on the command line."""

from __future__ import annotations

import difflib
from pathlib import Path

import everybit as eb
from everybit_cli.errors import OptionError
from everybit_torch.config import load_policy

POLICY_FILES = (".toml", ".json", ".yaml", ".yml")
AUTOCAST = "AMP"
"""Float32 storage, and a model that computes in bfloat16 where ``torch.autocast`` does: mixed precision as torch has it."""


def named_policy(name: str, option: str = "--policies", *, autocast: bool = False) -> tuple[str, eb.Policy]:
    """Return the name and the policy that are meant by an option, or by an item of it.

    Args:
        name: A preset, or a file that describes a policy.
        option: The option as it is typed.
        autocast: Accept :data:`AUTOCAST`, too. It is a way to run a model, stored as FP32, and no policy.

    Raises:
        OptionError: Neither a preset nor a file that describes a policy.
    """
    path = Path(name)
    if path.suffix in POLICY_FILES:
        try:
            return path.stem, load_policy(path)
        except OSError as error:
            raise OptionError(
                option, f"{name} ({(error.strerror or str(error)).lower()})", "a file that can be read"
            ) from None
        except ValueError as error:
            raise OptionError.saying(error, option) from None
    if autocast and name.upper() == AUTOCAST:
        return AUTOCAST, eb.policies.FP32
    preset = eb.policies.PRESETS.get(name.upper())
    if preset is not None:
        return name.upper(), preset
    close = difflib.get_close_matches(name.upper(), eb.policies.PRESETS, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise OptionError(
        option,
        f"{name}{meant}",
        f"{', '.join([*eb.policies.PRESETS, *[AUTOCAST] * autocast])}, or a path that ends in {', '.join(POLICY_FILES)}",
    )
