"""What a case of a benchmark has to reach, judged and printed beside its time."""

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
        to: the implementation that "ratio" compares with.
    """

    figure: str
    bound: float
    impl: str = "triton"
    to: str = ""

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise ValueError(f"Goal: figure must be one of {sorted(FIGURES)}, got {self.figure!r}")
        if (self.figure == "ratio") != bool(self.to):
            raise ValueError(f"Goal: figure 'ratio', and no other, needs `to`, got figure {self.figure!r} and to {self.to!r}")

    def __str__(self) -> str:
        figure = f"ratio to {self.to}" if self.to else self.figure
        return f"{figure} {'<=' if FIGURES[self.figure] else '>='} {self.bound:g}"

    def columns(self, row: dict[str, Any], p50_us: dict[str, float]) -> dict[str, Any]:
        """Columns "goal", "goal_value" and "goal_met" for this row, or none where the goal is another implementation's or has no figure here.

        Args:
            row: a row of `self.impl` or another implementation.
            p50_us: times of all implementations of the case.
        """
        if row["impl"] != self.impl or (self.to and self.to not in p50_us):
            return {}
        value = p50_us[self.impl] / p50_us[self.to] if self.to else row.get(self.figure)
        if value is None:
            return {}
        return {"goal": str(self), "goal_value": round(value, 3), "goal_met": value <= self.bound if FIGURES[self.figure] else value >= self.bound}
