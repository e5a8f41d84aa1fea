"""The page in a headless Chromium: one browser, one page of two made-up runs, many looks."""

import json
import re
import shutil

import pytest
from made_up_run import write_run
from tiny_world import write_lines

from fedlight.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ATTACK = (
    "<script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">&amp; {{ 7 * 7 }}"
)
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of two runs of which one answers in HTML, and whose last row of visits is cut in half."""
    folder = tmp_path_factory.mktemp("report")
    for seed, name in enumerate(("good", "<i>bad</i>")):
        write_run(folder / "runs" / name.replace("/", ""), rounds=5, clients=12, seed=seed)
    bad = folder / "runs" / "<i>bad<i>"
    line = {"fields": {"prompt": ATTACK}, "completions": [ATTACK]}
    (bad / "completions.jsonl").write_text(json.dumps(line) + "\n")
    with (bad / "visits.csv").open("a") as file:
        file.write("5,c0")
    rows = [{"row": n, "prompt": f"{n}", "group": f"subject {n % 13:02}", "score": n % 2} for n in range(130)]
    write_lines(bad / "tasks/test/mmlu.jsonl", *map(json.dumps, rows))
    both = [(method, seed) for method in (ATTACK, "m") for seed in (0, 1)]
    rows = [{"method": method, "seed": seed, "x": 0.5 + seed, "y": 1.5 - seed} for method, seed in both]
    (folder / "runs" / "results.json").write_text(json.dumps({"rows": rows}))
    return write_report([folder / "runs"], folder / "page.html")


@pytest.fixture(scope="module")
def tab(page):
    """A tab that has the page open, and what it has asked for and complained about."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            ],
        )
        opened = browser.new_page(color_scheme="light", viewport={"width": 1280, "height": 800})
        opened.complaints, opened.asked = [], []
        opened.on("console", lambda message: opened.complaints.append(message.text))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.goto(page.as_uri())
        yield opened
        browser.close()


def test_it_opens_without_complaints_and_asks_for_nothing_else(tab, page):
    assert tab.complaints == []
    assert tab.asked == [page.as_uri()]
    ids = tab.eval_on_selector_all("[id]", "all => all.map(element => element.id)")
    assert len(ids) == len(set(ids))
    assert "visits.csv 1 of 6 rows are not whole" in tab.locator(".faults").text_content()


def test_every_figure_is_there_and_has_a_size(tab, page):
    figures = tab.locator("figure.chart .broad svg")
    assert figures.count() >= 6
    for box in [figures.nth(place).bounding_box() for place in range(figures.count())]:
        assert box["width"] > 200
        assert box["height"] > 100
    alts = [figures.nth(place).get_attribute("aria-label") for place in range(figures.count())]
    assert all(alts)
    ids = tab.eval_on_selector_all("figure", "all => all.map(f => f.id)")
    names = {figure.removeprefix("figure-") for figure in ids}
    files = page.with_name("page_files")
    assert {file.stem for file in files.glob("*.png")} == names
    assert {file.stem for file in files.glob("*.csv")} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files.glob("*.png"))


def test_every_reference_inside_of_figures_leads_somewhere(page):
    text = page.read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert used
    assert used <= ids


def test_texts_of_data_stay_texts(tab):
    assert tab.title() == "runs · fedlight report"
    answer = tab.locator("dd", has_text="onerror").first
    assert answer.text_content() == ATTACK
    assert tab.locator("main img").count() == 0
    assert tab.locator("main script").count() == 0
    assert "<i>bad<i>" in tab.locator("#overview").text_content()


def test_dark_and_light(tab):
    def colors():
        return tab.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('.chart svg')).fill]"""
        )

    light = colors()
    tab.emulate_media(color_scheme="dark")
    dark = colors()
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    tab.click("#theme")
    assert colors() == light
    tab.click("#theme")
    assert colors() == dark
    tab.emulate_media(color_scheme="light")


def test_a_phone_need_not_scroll_sideways(tab):
    before = tab.viewport_size
    tab.set_viewport_size(PHONE)
    for fold in tab.locator("details").all():
        fold.evaluate("fold => { fold.open = true; }")
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    tab.set_viewport_size(before)


def test_on_a_phone_the_widest_figure_is_another_one_with_legible_texts(tab):
    before = tab.viewport_size
    broad, narrow = (tab.locator(f"#figure-results_runs .{name} svg") for name in ("broad", "narrow"))
    assert (broad.is_visible(), narrow.is_visible()) == (True, False)
    tab.set_viewport_size(PHONE)
    assert (broad.is_visible(), narrow.is_visible()) == (False, True)
    heights = "all => all.map(text => text.getBoundingClientRect().height)"
    assert min(narrow.locator("text").evaluate_all(heights)) > 9
    tab.set_viewport_size(before)


def test_an_edge_behind_which_there_is_more_is_shaded(tab):
    box = tab.locator("#overview .scroll").last
    shade = box.evaluate("box => getComputedStyle(box).backgroundAttachment")
    assert shade == "local, local, scroll, scroll"


def test_tables_are_sorted_by_keyboard(tab):
    table = tab.locator("#overview table").last
    first = table.locator("tbody th").first.text_content()
    button = table.locator("thead button").first
    button.focus()
    tab.keyboard.press("Enter")
    assert table.locator("thead th").first.get_attribute("aria-sort") == "ascending"
    tab.keyboard.press("Enter")
    names = table.locator("tbody th").all_text_contents()
    assert names == sorted(names, key=str.lower, reverse=True)
    assert first in names


def test_a_long_table_shows_ten_lines_and_then_all(tab):
    """In whichever order: the first ten of it are there."""
    table = tab.locator("table[data-first]")
    lines, more = table.locator("tbody tr"), tab.locator("button.more")
    assert lines.count() == 13
    assert [line.is_visible() for line in lines.all()] == [True] * 10 + [False] * 3
    assert more.text_content() == "3 more"
    for _ in range(2):
        table.locator("thead button").first.click()
    assert lines.first.text_content().startswith("subject 12")
    assert [line.is_visible() for line in lines.all()] == [True] * 10 + [False] * 3
    more.click()
    assert all(line.is_visible() for line in lines.all())
    assert more.count() == 0


def test_a_line_under_the_pointer_stands_out(tab):
    svg = tab.locator("figure.chart svg:has([data-series])").first
    svg.scroll_into_view_if_needed()
    svg.locator("[data-series] path").last.dispatch_event("pointerenter")
    svg.locator("[data-series]").last.dispatch_event("pointerenter")
    assert "picking" in svg.get_attribute("class")
