"""A cell or a lane for each rank, in which ranks that differ stand out."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from cloudjob.console import charts, rank_lanes
from cloudjob.console.pages.live import ChartPanel, Live, until_read
from cloudjob.console.pages.widgets import column, short_grid, toggle
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.model import times
from cloudjob.tracking import Job

_MISSING = "The nodes have not recorded their ranks"
_NO_STEPS = "No rank has printed a metric with a step"


_COLUMNS = (
    column("rank", "Rank", width=80, type="numericColumn"),
    column("node", "Node", width=80, type="numericColumn"),
    column("state", "State", width=160),
    column("silent", "Silent (s)", width=110, type="numericColumn"),
    column("cpu", "CPU (%)", width=100, type="numericColumn"),
    column("memory", "Memory (MB)", width=130, type="numericColumn"),
    column("step", "Step", width=90, type="numericColumn"),
    column("line", "Last line", flex=1, minWidth=200, cellClass="mono", tooltipField="line"),
)


async def build(console: Console, job: Job) -> None:
    """Show the grid, and keep it up to date while the job runs."""
    view = _Ranks(console, job)
    options = [charts.RANK_VALUES[0], rank_lanes.TITLE, *charts.RANK_VALUES[1:]]
    toggle(options, view.shows, view.choose)
    await view.start()
    table = _Table(console, job)
    await table.start()


class _Ranks(Live):
    def __init__(self, console: Console, job: Job) -> None:
        super().__init__(job)
        self.shows = charts.RANK_VALUES[0]
        self._console = console
        self._panel: ChartPanel | None = None
        self._drawn = ""

    async def choose(self, event: Any) -> None:
        self.shows = event.value
        await self.refresh()

    async def draw(self) -> str:
        shows = self.shows
        journals = await in_thread(self._console.journals, self.job)
        steps = {}
        if shows == "step":
            steps = charts.last_steps(await in_thread(self._console.metrics, self.job))
        status = self.job.last_status
        if status is None:
            status = await in_thread(self.job.status)
        if shows == rank_lanes.TITLE:
            zero_s = times.seconds_of(status.created_at)
            chart = await in_thread(rank_lanes.rank_lanes, journals, zero_s)
        else:
            chart = await in_thread(charts.rank_grid, status, journals, shows, steps)
        if self._panel and chart and chart.title == self._drawn:
            self._panel.update(chart)
            return self._failed_rank()
        self.container.clear()
        self._panel, self._drawn = None, ""
        if chart is None:
            return self.missing(_NO_STEPS if shows == "step" and journals.ranks else _MISSING)
        with self.container:
            self._panel, self._drawn = ChartPanel(chart, self._open), chart.title
        return self._failed_rank()

    def _failed_rank(self) -> str:
        """Return the rank that made the job fail; cloudjob ended the others after it."""
        status = self.job.last_status
        failure = status.failure if status else None
        if failure is None or failure.rank is None:
            return ""
        return f"Rank {failure.rank} made the job fail: {failure.message}"

    def _open(self, event: Any) -> None:
        """Show the stacks of a running job for a lane, and the log of a rank for its cell."""
        if self.shows == rank_lanes.TITLE and not self.job.has_final_status:
            ui.navigate.to(f"/job/{self.job.id}/stacks")
            return
        rank = event.data.get("rank") if isinstance(event.data, dict) else None
        if rank is not None:
            ui.navigate.to(f"/job/{self.job.id}/log?rank={int(rank)}")


class _Table(Live):
    """A row for each rank, with the last line that it has printed."""

    def __init__(self, console: Console, job: Job) -> None:
        super().__init__(job)
        self._console = console
        self._grid: ui.aggrid | None = None

    async def draw(self) -> str:
        if self.job.has_final_status:
            await until_read(await in_thread(self._console.log, self.job.id))
        rows = await in_thread(self._rows)
        if self._grid:
            self._grid.run_grid_method("setGridOption", "rowData", rows)
        elif rows:
            with self.container:
                self._grid = short_grid(_COLUMNS, rows, **{":getRowId": "p => `${p.data.rank}`"})
                self._grid.on("cellClicked", self._open)
        return ""

    def _rows(self) -> list[dict[str, Any]]:
        status = self.job.last_status or self.job.status()
        steps = charts.last_steps(self._console.metrics(self.job))
        lines = self._console.log(self.job.id).last_lines()
        return charts.rank_rows(status, self._console.journals(self.job), steps, lines)

    def _open(self, event: Any) -> None:
        ui.navigate.to(f"/job/{self.job.id}/log?rank={int(event.args['data']['rank'])}")
