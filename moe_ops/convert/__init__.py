"""Checkpoints to MXFP8 or FP8-block: convert, verify, inspect. See the README's section on converting a checkpoint."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ops.convert.conversion import convert as convert
    from moe_ops.convert.inspection import inspect as inspect
    from moe_ops.convert.report import Report as Report
    from moe_ops.convert.source import ConvertError as ConvertError
    from moe_ops.convert.types import Options as Options
    from moe_ops.convert.verification import Verification as Verification
    from moe_ops.convert.verification import verify as verify

_HOME = {
    "ConvertError": "source",
    "Options": "types",
    "Report": "report",
    "Verification": "verification",
    "convert": "conversion",
    "inspect": "inspection",
    "verify": "verification",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ops.convert' has no attribute {name!r}")
    return getattr(importlib.import_module(f"moe_ops.convert.{_HOME[name]}"), name)
