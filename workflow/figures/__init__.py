"""Figures of a run, as plotly has them: for the notebook, the report, and a paper.

Each is a function of a `View` alone; one that has nothing to show says so in its middle.
"""
