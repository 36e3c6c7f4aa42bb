"""Several runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workflow.compare import course, labels
from workflow.figures.style import CYCLE, DASHES, empty, escaped, styled
from workflow.view import View

TITLE = "The best score so far"


def courses(views: Sequence[View]) -> go.Figure:
    """The best score so far of each run, against the trials that ended and the node-hours used."""
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    is_empty = True
    for place, (name, view) in enumerate(zip(labels(views), views, strict=True)):
        run = course(view)
        is_empty &= not np.isfinite(run.best).any()
        line = {"color": CYCLE[place % len(CYCLE)], "dash": DASHES[place % len(DASHES)]}
        for column, along in enumerate((run.trials, run.node_hours), start=1):
            step = go.Scatter(
                x=along,
                y=run.best,
                name=escaped(name),
                line={**line, "shape": "hv", "width": 2.5},
                legendgroup=name,
                showlegend=column == 1,
            )
            figure.add_trace(step, row=1, col=column)
    if is_empty:
        return empty(TITLE, "no trial has a score yet")
    figure = styled(figure, TITLE)
    figure.update_xaxes(title_text="trials that ended", col=1)
    figure.update_xaxes(title_text="node-hours", col=2)
    label = f"{escaped(views[0].metric)} ({views[0].goal})"
    return figure.update_yaxes(title_text=label, col=1)
