"""The charts of the job page and of the report, as options of ECharts; start at ``lines``."""

from __future__ import annotations

from cloudjob.console.charts.lines import Shows as Shows
from cloudjob.console.charts.lines import View as View
from cloudjob.console.charts.phases import timeline as timeline
from cloudjob.console.charts.ranks import (
    RANK_VALUES as RANK_VALUES,
)
from cloudjob.console.charts.ranks import (
    last_steps as last_steps,
)
from cloudjob.console.charts.ranks import (
    rank_grid as rank_grid,
)
from cloudjob.console.charts.ranks import (
    rank_rows as rank_rows,
)
from cloudjob.console.charts.style import Chart as Chart
from cloudjob.console.charts.training import (
    compared_curves as compared_curves,
)
from cloudjob.console.charts.training import (
    curves as curves,
)
from cloudjob.console.charts.usage import resources as resources
