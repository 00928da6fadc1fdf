"""A part of a page that is drawn again every few seconds while the job runs."""

from __future__ import annotations

import asyncio

from nicegui import ui

from cloudjob.console.pages.words import text
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

_REFRESH_S = 3.0


class Live:
    """Draws itself below the place where it is started."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # A timer and a click may both draw.
        self._drawing = asyncio.Lock()

    async def start(self) -> None:
        """Draw, and again until the job has ended."""
        self._place = ui.column().classes("w-full")
        was_final = self.job.has_final_status
        await self.refresh()
        if not was_final:
            timer = ui.timer(_REFRESH_S, lambda: self._again(timer))

    async def _again(self, timer: ui.timer) -> None:
        if self.job.has_final_status:
            timer.deactivate()
        await self.refresh()

    async def refresh(self) -> None:
        """Draw once more."""
        async with self._drawing:
            before = list(self._place)
            with self._place, ui.column().classes("w-full gap-3"):
                try:
                    await self.draw()
                except CloudJobError as error:
                    ui.label(text(error.message)).classes("text-negative")
            for element in before:
                element.delete()

    async def draw(self) -> None:
        """Add the elements."""
        raise NotImplementedError
