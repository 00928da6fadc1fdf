"""All ranks at a glance: one cell each, so that the one that differs stands out."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages.live import Live
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(console: Console, job: Job) -> None:
    """Show the grid, and keep it up to date while the job runs."""
    view = _Ranks(console, job)
    choice = ui.toggle(list(charts.RANK_VALUES), value=view.shows, on_change=view.choose)
    choice.props("dense unelevated no-caps toggle-color=primary").classes("states")
    await view.start()


class _Ranks(Live):
    def __init__(self, console: Console, job: Job) -> None:
        super().__init__(job)
        self.shows = next(iter(charts.RANK_VALUES))
        self._console = console

    async def choose(self, event: Any) -> None:
        self.shows = event.value
        await self.refresh()

    async def draw(self) -> None:
        journals = await in_thread(self._console.journals, self.job)
        option = await in_thread(charts.rank_grid, journals, self.shows)
        if option is None:
            ui.label("The nodes have not recorded their ranks yet.").classes("quiet")
            return
        chart = ui.echart(option, on_point_click=self._open)
        chart.style(f"width: 100%; height: {charts.grid_height_px(option)}px")

    def _open(self, event: Any) -> None:
        rank = event.data.get("rank") if isinstance(event.data, dict) else None
        if rank is not None:
            ui.navigate.to(f"/job/{self.job.id}/log?rank={int(rank)}")
