"""The pages' figures: tables are as the records have them, and the prose says no other number."""

import doctest
import importlib
import re
from functools import cache

import pytest
from published.claims import MARGIN, VERDICT, contradictions
from published.commands import arguments
from published.compare import deviation
from published.measurements import ROOT, Published, load
from published.prose import QUOTING, figures_in, figures_of, results, unknown
from published.tables import BLOCK, PAGES, RESULTS, figures, rendered, said, table

pytestmark = pytest.mark.slow  # reads every page for every number

MEASUREMENTS = sorted(load().measurements)
CHECK_SECONDS, REPRODUCE_SECONDS = 60, 1700  # by the clock; two measurements at once
REMEDY = "write it with: python benchmarks/reproduce.py render"


@cache
def published() -> Published:
    return load()


@pytest.mark.parametrize(
    "name",
    ["claims", "commands", "compare", "figures", "measurements", "papers", "prose", "rerun", "tables"],
)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"published.{name}")).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_as_the_records_have_them(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rendered(text, published()) == text, REMEDY


def test_every_table_stands_on_one_page():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"<!-- table: (.*) -->", text)
    tables = [name for one in published().measurements.values() for name in one.tables]
    assert sorted(named) == sorted([*tables, *published().tables])
    assert len(BLOCK.findall(text)) == len(named)  # each has its end


def test_the_prose_has_no_other_numbers_and_figures_that_it_quotes_are_found():
    assert list(unknown(published())) == []
    known = figures_of(published(), "Devices")
    assert "0.253" in known
    assert "0.254" not in known


def test_what_the_prose_is_said_to_have_stands_there():
    """Else figures that nobody reads would count as published."""
    texts = results() | {page: (ROOT / page).read_text(encoding="utf-8") for page in QUOTING}
    for one in published().measurements.values():
        there = {number.removesuffix(" %") for number in figures_in(texts[one.section])}
        for figure in said(published(), one):
            assert {number.removesuffix(" %") for number in figures_in(figure.text)} <= there, figure.column


def test_no_section_has_a_table_of_figures_beside_the_written_ones():
    for section, text in results().items():
        cells = [cell.strip() for cell in re.findall(r"(?<=\|)[^|\n]+(?=\|)", BLOCK.sub("", text))]
        assert [cell for cell in cells if re.fullmatch(r"[\d.,]+( ± [\d.]+)?", cell)] == [], section


def test_settings_are_of_sections_and_a_changed_cell_is_noticed():
    assert published().pages["results"]["settings"].keys() <= results().keys()
    text = (ROOT / RESULTS[1]).read_text(encoding="utf-8")
    block = BLOCK.search(text)[0]
    assert rendered(text.replace(block, re.sub(r"0\.\d+", "0.999", block, count=1)), published()) == text


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurements(name):
    """What stands in docs/results.toml means something, row for row."""
    one = published().measurements[name]
    assert one.section in {*results(), *QUOTING}
    shown = figures(published(), one)
    assert shown
    identities = [tuple(str(row.get(key)) for key in (*one.key, "seed")) for row in one.rows]
    assert len(set(identities)) == len(identities)
    columns = {column for row in one.rows for column in row}
    assert {*one.key} <= columns
    assert deviation(1.0, 1.0, one.elsewhere or "exact", ".3f") == 0
    if one.rerun == "test":
        assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[\w/]+\.py)`", one.why))
        assert "`tests/" in one.why
    if not one.is_transcribed:
        assert one.record["command"] == one.command
    if one.is_rerun:
        assert arguments(one.command, ROOT)
        assert arguments(one.rerun_command or one.command, ROOT)
        assert {"commit", "date", "machine", "versions"} <= set(one.record)


def test_reruns_take_no_longer_than_they_may():
    """By what docs/results.toml says of each."""
    seconds = {
        kind: [one.rerun_seconds for one in published().measurements.values() if one.rerun == kind]
        for kind in ("check", "reproduce")
    }
    assert max(sum(seconds["check"]) / 2, *seconds["check"]) <= CHECK_SECONDS
    everything = seconds["check"] + seconds["reproduce"]
    assert max(sum(everything) / 2, *everything) <= REPRODUCE_SECONDS


def test_no_verdict_is_one_that_its_intervals_contradict():
    claims = table(published(), "claims")[0]
    assert list(contradictions(claims)) == []
    assert f"margin, {MARGIN:g} of an accuracy" in results()["The papers' claims"]
    assert len(VERDICT.findall(claims)) > claims.count("\n") / 2  # they are found
