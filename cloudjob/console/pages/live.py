"""Parts of a page that follow a job; each is built once, and its charts are updated in place."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from nicegui import ui

from cloudjob.console.charts import Chart, Shows, View
from cloudjob.console.log_table import LogTable, Selection
from cloudjob.console.pages.chart_table import chart_table
from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.widgets import toggle
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

_REFRESH_S = 3.0
# The pause between two drawings, as a multiple of the time that a drawing took.
_PAUSE_FACTOR = 10
# The pause between two changes by one control.
_THROTTLE_S = 0.2
# The most seconds to wait for the log of an ended and of a running job, and between two looks.
_READ_S, _LIVE_READ_S, _POLL_S = 10.0, 2.0, 0.1


class Live:
    """A part of a page that redraws itself every few seconds while a job runs.

    Args:
        others: Further jobs that it shows.
    """

    def __init__(self, job: Job, others: Sequence[Job] = ()) -> None:
        self.job = job
        self._jobs = (job, *others)
        # A timer and a click may draw at the same time.
        self._drawing = asyncio.Lock()
        self._next_s = 0.0

    async def start(self) -> None:
        """Draw now, and repeatedly until the job has ended."""
        self._note = ui.label().classes("quiet")
        self.container = ui.column().classes("w-full gap-3")
        was_final = self._have_ended
        await self.refresh()
        if not was_final:
            timer = ui.timer(_REFRESH_S, lambda: self._on_timer(timer))

    @property
    def _have_ended(self) -> bool:
        return all(job.has_final_status for job in self._jobs)

    async def _on_timer(self, timer: ui.timer) -> None:
        if self._have_ended:
            timer.deactivate()
        elif time.monotonic() < self._next_s:
            return
        await self.refresh()

    async def refresh(self) -> None:
        """Draw now."""
        async with self._drawing:
            started = time.monotonic()
            try:
                note = await self.draw()
            except CloudJobError as error:
                note = error.message
            self._note.set_text(displayable(note))
            self._note.set_visibility(bool(note))
            self._next_s = time.monotonic() + _PAUSE_FACTOR * (time.monotonic() - started)

    def missing(self, text: str) -> str:
        """Return the note that something is missing, for now or for ever."""
        return f"{text}." if self.job.has_final_status else f"{text} yet."

    async def draw(self) -> str:
        """Draw or update; return a note to show above, empty for none."""
        raise NotImplementedError


class ViewChoice:
    """What the user chooses about the charts of a page.

    Args:
        has_steps: Whether the x axis may be the step or the time.
    """

    def __init__(self, *, has_steps: bool = False) -> None:
        self.view = View()
        self._has_steps = has_steps

    def build(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        """Show the controls; ``on_change`` is called with whether the x axis is another one."""

        async def change(**values: Any) -> None:
            self.view = self.view._replace(**values)
            await on_change("by_time" in values)

        if self._has_steps:
            toggle(["step", "time"], "step", lambda event: change(by_time=event.value == "time"))
        shows = ui.select([each.value for each in Shows], value=self.view.shows.value)
        shows.on_value_change(lambda event: change(shows=Shows(event.value)))
        shows.props('dense outlined options-dense label="Lines"').classes("lines-choice")
        scale = ui.switch("Logarithmic")
        scale.on_value_change(lambda event: change(is_logarithmic=bool(event.value)))
        ui.label("Smoothing").classes("quiet")
        smoothing = ui.slider(min=0, max=0.99, step=0.01, value=0).classes("smoothing")
        smoothing.props('dense aria-label="Smoothing"')
        smoothing.on(
            "change", lambda event: change(smoothing=float(event.args)), throttle=_THROTTLE_S
        )


class ChartView(Live):
    """Charts that share their zoom.

    Args:
        find: Returns the current charts.
        missing: What to say if there are no charts, without the full stop.
        choice: Controls above the charts.
    """

    def __init__(
        self,
        job: Job,
        find: Callable[[], Awaitable[list[Chart]]],
        missing: str,
        choice: ViewChoice | None = None,
        others: Sequence[Job] = (),
    ) -> None:
        super().__init__(job, others)
        self._find = find
        self._missing = missing
        self._choice = choice
        self._panels: dict[str, ChartPanel] = {}

    async def draw(self) -> str:
        """Add charts that are new, and update the others."""
        charts = await self._find()
        self._update(charts)
        if self._panels and not charts:
            return "There is nothing to draw this way."
        return "" if self._panels or not self._missing else self.missing(self._missing)

    def _update(self, charts: Sequence[Chart]) -> None:
        if charts and not self._panels:
            with self.container, ui.row().classes("w-full items-center gap-3"):
                if self._choice:
                    self._choice.build(self._redraw)
                ui.space()
                ui.label("The bar below a chart zooms all of them.").classes("quiet")
                reset = ui.button("Show all", icon="zoom_out_map")
                reset.on_click(lambda: self._run("zoomOut")).props("flat dense no-caps size=sm")
            with self.container:
                self._grid = ui.element("div").classes("charts")
        titles = {chart.title for chart in charts}
        for title, panel in self._panels.items():
            # A line by time, for example, needs lines of the log with times.
            panel.set_visibility(title in titles)
        for chart in charts:
            if chart.title in self._panels:
                self._panels[chart.title].update(chart)
            else:
                with self._grid:
                    self._panels[chart.title] = ChartPanel(chart)
                self._run("zoomTogether")

    async def _redraw(self, is_other_axis: bool) -> None:
        await self.refresh()
        if is_other_axis:
            self._run("zoomOut")

    def _run(self, function: str) -> None:
        ids = json.dumps([panel.id for panel in self._panels.values()])
        self.container.client.run_javascript(f"console_ui.{function}({ids})")


class ChartPanel:
    """A chart in a panel with its title and note.

    Args:
        is_text: Whether its texts can be selected and searched, which is slow with many points.
    """

    def __init__(
        self,
        chart: Chart,
        on_click: Callable[[Any], None] | None = None,
        *,
        is_text: bool = False,
    ) -> None:
        with ui.card().classes("panel") as self._card:
            with ui.row().classes("w-full items-center gap-2 no-wrap"):
                heading(displayable(chart.title))
                self._note = ui.label(displayable(chart.note)).classes("quiet chart-note")
                if chart.lines:
                    ui.space()
                    table = ui.button(icon="table_rows", on_click=self._show_table)
                    table.props('flat dense round size=sm aria-label="Show it as a table"')
                    table.tooltip("Table")
            renderer: Literal["svg", "canvas"] = "svg" if is_text else "canvas"
            self._chart = ui.echart(chart.option, on_click, renderer=renderer)
        self._chart.style(f"width: 100%; height: {chart.height_px}px")
        self._shown = chart

    @property
    def id(self) -> int:
        """The id of its chart on the page."""
        return self._chart.id

    def set_visibility(self, is_visible: bool) -> None:
        """Show or hide it."""
        self._card.set_visibility(is_visible)

    def update(self, chart: Chart) -> None:
        """Update the data of the chart; the zoom stays at the same values of the axis."""
        if chart == self._shown:
            return
        self._note.set_text(displayable(chart.note))
        if chart.height_px != self._shown.height_px:
            self._chart.style(f"height: {chart.height_px}px")
        self._shown = chart
        # NiceGUI's ``update`` would move or lose the zoom.
        option = json.dumps(chart.option)
        self._chart.client.run_javascript(f"console_ui.draw({self.id}, {option})")

    def _show_table(self) -> None:
        with self._chart.client:
            chart_table(self._shown)


async def until_read(log: LogTable) -> None:
    """Wait until the log of a job was read, at most some seconds; that of a running one to now."""
    begun_s = time.monotonic()
    before = 0
    while True:
        page = await in_thread(log.page, Selection(), 0, 0)
        # What a running job has written so far has been read once no more lines arrive.
        is_read_to_now = page.is_live and page.has_metrics and 0 < page.total == before
        is_read = page.is_complete or bool(page.error) or is_read_to_now
        limit_s = _LIVE_READ_S if page.is_live else _READ_S
        if is_read or time.monotonic() > begun_s + limit_s:
            return
        before = page.total
        await asyncio.sleep(_POLL_S)
