"""docs/rooms.py as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location("rooms", Path(__file__).parents[2] / "docs/rooms.py")
assert _SPEC is not None
assert _SPEC.loader is not None
rooms: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rooms)
