"""What the user declares for a report, each with a default that the report prints as an assumption."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..units import Duration


@dataclass(frozen=True)
class ReportSettings:
    """Numbers that no trace carries."""

    pue: float = 1.25
    """Power usage effectiveness: power of the whole site over power of the servers."""
    carbon_kg_per_kwh: float = 0.478
    """Carbon intensity of the electricity, kilograms of CO2 equivalent per kilowatt-hour."""
    checkpoint_interval_s: float = 1800.0
    """How often runs save, for the expected ETTR."""
    restart_s: float = 600.0
    """From a failure to training again, for the expected ETTR."""
    idle_below_pct: float = 5.0
    """GPU busy below this counts as idle."""
    busy_above_pct: float = 95.0
    """GPU busy above this counts as full."""
    stall_s: float = 600.0
    """Idle for longer than this before its end, a cancelled job counts as stalled."""
    top_users: int = 20
    """Users and teams that are listed by name."""
    retype: bool = False
    """Infer the type of every job, also of those that have one."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.pue <= 5.0:
            raise UsageError(f"a PUE of {self.pue:g}", hint="It is 1.0 or more: site power over server power")
        if not 0.0 <= self.carbon_kg_per_kwh <= 5.0:
            raise UsageError(
                f"a carbon intensity of {self.carbon_kg_per_kwh:g}",
                hint="Give kilograms per kWh, about 0.02 to 1",
            )
        if self.checkpoint_interval_s <= 0 or self.restart_s < 0:
            raise UsageError(
                "a checkpoint interval or restart time that is not positive", hint="Give e.g. 30m and 10m"
            )

    def sentences(self) -> list[str]:
        """The declared numbers in words, for the report."""
        return [
            f"PUE {self.pue:g}, carbon intensity {self.carbon_kg_per_kwh:g} kg CO2e per kWh",
            f"a checkpoint every {Duration(self.checkpoint_interval_s)} and {Duration(self.restart_s)} to restart, for the "
            "expected ETTR",
            f"GPU busy below {self.idle_below_pct:g} % is idle, above {self.busy_above_pct:g} % is full; a cancelled job "
            f"that was idle for more than {Duration(self.stall_s)} before its end was stalled",
        ]
