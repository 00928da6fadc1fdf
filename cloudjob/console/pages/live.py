"""A part of a page that is drawn again every few seconds while the job runs."""

from __future__ import annotations

from nicegui import ui

from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

_REFRESH_S = 3.0


class Live:
    """Draws itself below the place where it is started."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def start(self) -> None:
        """Draw, and again until the job has ended."""
        self._place = ui.column().classes("w-full gap-3")
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
        fresh = ui.column().classes("w-full gap-3")
        fresh.move(self._place.parent_slot.parent if self._place.parent_slot else self._place)
        with fresh:
            try:
                await self.draw()
            except CloudJobError as error:
                ui.label(error.message).classes("text-negative")
        self._place.delete()
        self._place = fresh

    async def draw(self) -> None:
        """Add the elements."""
        raise NotImplementedError
