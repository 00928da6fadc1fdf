"""The values of a line chart as a table, to read or to save."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from nicegui import ui

from cloudjob.console.charts import Chart
from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.widgets import column, grid
from cloudjob.console.text import displayable
from cloudjob.model.text import csv_cell


def chart_table(chart: Chart) -> None:
    """Show the values that a chart draws, in a dialog."""
    header, *rows = _rows(chart)
    columns = [
        column(str(place), displayable(str(name)), type="numericColumn", minWidth=90, flex=1)
        for place, name in enumerate(header)
    ]
    with ui.dialog(value=True) as dialog, ui.card().classes("table-dialog"):
        with ui.row().classes("w-full items-center"):
            heading(displayable(chart.title))
            ui.space()
            save = ui.button("CSV", icon="download", on_click=lambda: _save(chart))
            save.props("flat dense no-caps")
            close = ui.button(icon="close", on_click=dialog.close)
            close.props('flat dense round aria-label="Close"')
        values = [{str(place): value for place, value in enumerate(row)} for row in rows]
        grid(columns, rowData=values, rowHeight=28).classes("w-full table-grid")
    dialog.on_value_change(lambda event: None if event.value else dialog.delete())


def _save(chart: Chart) -> None:
    ui.download.content(as_csv(chart), "chart.csv", "text/csv")


def as_csv(chart: Chart) -> str:
    """Return the values that a chart draws as CSV, with the names of its lines in the first row."""
    text = io.StringIO()
    header, *rows = _rows(chart)
    csv.writer(text).writerows([[csv_cell(str(name)) for name in header], *rows])
    return text.getvalue()


def _rows(chart: Chart) -> Iterator[list[float | str | None]]:
    """Yield the names of the lines, and their values at each place."""
    values = {name: dict(points) for name, points in chart.lines.items()}
    yield [chart.x_name, *values]
    for x in sorted({x for each in values.values() for x in each}):
        yield [round(x, 3), *(each.get(x) for each in values.values())]
