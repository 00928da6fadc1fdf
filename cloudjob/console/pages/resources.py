"""The resources that the nodes and ranks of a job used, over time."""

from __future__ import annotations

from cloudjob.console import charts
from cloudjob.console.pages.live import ChartView, ViewChoice
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(console: Console, job: Job) -> None:
    """Show the charts, and keep them up to date while the job runs."""

    async def find() -> list[charts.Chart]:
        journals = await in_thread(console.journals, job)
        status = job.last_status
        if status is None:
            status = await in_thread(job.status)
        return await in_thread(charts.resources, journals, status, choice.view)

    choice = ViewChoice()
    await ChartView(job, find, "The nodes have not recorded what they use", choice).start()
