"""Charts of a section of a report."""

from fedlight.report.parts import Chart


def charts(section):
    """The charts by their names."""
    return {part.name: part for part in section.parts if isinstance(part, Chart)}
