"""Charts of a section of a report."""

from fedlight.report.parts import Chart


def charts(section):
    """The charts by their names, once each was drawn; it is told in words, and has numbers for its file."""
    charts = {part.name: part for part in section.parts if isinstance(part, Chart)}
    for chart in charts.values():
        chart.figure.draw_without_rendering()
        assert chart.alt.endswith(".")
        assert chart.caption.endswith(".")
        assert chart.rows
    return charts
