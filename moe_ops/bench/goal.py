"""What a case of a benchmark has to reach, judged and printed beside its time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: figure -> whether it has to be at most the bound (True) or at least (False)
FIGURES = {"p50_us": True, "of_limit": False, "ratio": True, "beyond_launcher_us": True}


@dataclass(frozen=True)
class Goal:
    """A bound on one figure of one implementation's row.

    Attributes:
        figure: "p50_us" (time), "of_limit" (share of what the machine allows), "ratio" (p50_us over that of the implementation `to` in the same
            case), "beyond_launcher_us" (CPU time of one eager call beyond that of Triton's own launcher for the same launches).
        bound: at most this; at least, for "of_limit".
        impl: the implementation that has to reach it.
        to: the implementation that "ratio" compares with; of several, the fastest.
    """

    figure: str
    bound: float
    impl: str = "triton"
    to: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise ValueError(f"Goal: figure must be one of {sorted(FIGURES)}, got {self.figure!r}")
        if (self.figure == "ratio") != bool(self.to):
            raise ValueError(f"Goal: figure 'ratio', and no other, needs `to`, got figure {self.figure!r} and to {self.to!r}")

    @property
    def rivals(self) -> tuple[str, ...]:
        """Whom "ratio" compares with."""
        return (self.to,) if isinstance(self.to, str) else self.to

    def __str__(self) -> str:
        against = self.rivals[0] if len(self.rivals) == 1 else f"the best of {', '.join(self.rivals)}"
        return f"{f'ratio to {against}' if self.to else self.figure} {'<=' if FIGURES[self.figure] else '>='} {self.bound:g}"

    def columns(self, row: dict[str, Any], p50_us: dict[str, float]) -> dict[str, Any]:
        """Columns "goal", "goal_value" and "goal_met" for this row, or none where the goal is another implementation's or has no figure here.

        Of several rivals all have to be there, or a faster one might be missing; "goal_to" names the fastest.

        Args:
            row: a row of `self.impl` or another implementation.
            p50_us: times of all implementations of the case.
        """
        if row["impl"] != self.impl or any(rival not in p50_us for rival in self.rivals):
            return {}
        best = min(self.rivals, key=p50_us.__getitem__) if self.to else ""
        value = p50_us[self.impl] / p50_us[best] if best else row.get(self.figure)
        if value is None:
            return {}
        met = value <= self.bound if FIGURES[self.figure] else value >= self.bound
        named = {"goal_to": best} if len(self.rivals) > 1 else {}
        return {"goal": str(self), "goal_value": round(value, 3), "goal_met": met, **named}


def gain_columns(rows: Sequence[dict[str, Any]], at_least: float) -> dict[str, Any]:
    """The goal's columns for many cases together: the geometric mean of how many times faster than the rival the judged rows are.

    Args:
        rows: rows that a goal "ratio" judged, one of each case.
        at_least: what the mean has to reach.
    """
    gain = math.exp(-sum(math.log(row["goal_value"]) for row in rows) / len(rows))
    return {"goal": f"geometric mean of rival / ours >= {at_least:g}", "goal_value": round(gain, 3), "goal_met": gain >= at_least}
