"""Runs a campaign: each layout in turn, and one report of all."""

import time
from typing import Any

from msgspec.structs import asdict

from tokenloom.supervisor.output import WriteLine

from ...report import machine
from .layout_run import LayoutRun, Note
from .layouts import layouts_of, run_layout
from .options import Campaign, ChaosOptions


async def run_campaign(
    name: str, campaign: Campaign, options: ChaosOptions, write_line: WriteLine, note: Note
) -> dict[str, Any]:
    """Run every layout and return the report, whose ``violations`` are empty after a success.

    ``write_line`` takes the output of the parts. Raises ``Unstable`` if the undisturbed mesh fails.
    """
    layouts = layouts_of(options, is_patient=campaign.is_of_host)
    report: dict[str, Any] = {
        "campaign": name,
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": machine.describe(),
        "options": asdict(options),
        "layouts": [],
    }
    for index, layout in enumerate(layouts):
        run = LayoutRun(layout, (index, len(layouts)), campaign, options, note)
        await run_layout(layout, options, cuts_links=campaign.is_of_links, write_line=write_line, work=run.work)
        report["layouts"].append(run.report())
    report["violations"] = [
        f"layout {layout['layout']}: {text}" for layout in report["layouts"] for text in layout["violations"]
    ]
    return report
