"""The page in a real browser: it loads by itself, its controls and keys change what is shown, and it fits a phone."""

import io
import shutil

import pytest
from rich.console import Console

from shaver.lab.report.output import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(toy_run, tmp_path_factory):
    (page,) = write_report(
        [toy_run], tmp_path_factory.mktemp("page"), formats=["html"], console=Console(file=io.StringIO())
    )
    return page


@pytest.fixture
def open_page(browser, page_file):
    """Opens the page; at the end nothing must have failed, and nothing but the file must have been asked for."""
    contexts, problems, requests = [], [], []

    def open_(width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
    assert {url for url in requests if not url.startswith("data:")} == {page_file.as_uri()}


def picture(page, name="curves"):
    return page.locator(f"#{name}-plot > svg").inner_html()


def test_it_loads_and_every_plot_is_drawn(open_page):
    page = open_page()
    for name in ("curves", "pareto", "training"):
        assert page.locator(f"#{name}-plot > svg path").count() > 2, name
    assert page.locator("h1").inner_text() == "Tiny FCN on breast cancer"
    assert page.locator(".card").count() == 1


def test_the_first_picture_compares_map_and_spam_by_one_criterion(open_page):
    page = open_page()
    assert page.locator("#curves-plot .curve").count() == 2
    assert page.locator("#curves-key").inner_text().split("\n") == ["MAP (weight decay)", "SpaM (learned prior)"]
    styles = page.locator("#curves-plot .curve").evaluate_all("curves => curves.map(c => c.style.stroke)")
    assert len(set(styles)) == 2, "told apart by colour"
    bands = page.locator("#curves-plot .band").evaluate_all("bands => bands.map(b => +getComputedStyle(b).opacity)")
    assert len(bands) == 2
    assert min(bands) >= 0.2


def test_the_cost_plot_leaves_out_networks_that_are_no_use(open_page):
    page = open_page()
    page.locator("#pareto-criterion").get_by_label("random").check()
    ticks = page.locator("#pareto-plot > svg text[text-anchor=end]").all_text_contents()
    values = [float(text) for text in ticks if text.replace(".", "").isdigit()]
    assert min(values) >= 70, "the best is above 90, and random pruning ends near 40"


def test_the_contents_are_inside_the_window(open_page):
    page = open_page(width=1400)
    boxes = [link.bounding_box() for link in page.locator("nav a").all()]
    assert len(boxes) >= 6
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 1400 for box in boxes)
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_a_phone_says_that_tables_scroll(open_page):
    wide, phone = open_page(width=1400), open_page(width=390)
    for name in ("size", "tables"):
        assert phone.locator(f"#{name} .swipe").first.is_visible()
    assert not wide.locator("#size .swipe").first.is_visible()


def test_size_and_speed_has_a_speed(open_page):
    page = open_page()
    heads = page.locator("#size table.sheet").first.locator("thead th").all_inner_texts()
    assert heads[-1] == "speed"


def test_controls_change_the_picture(open_page):
    page = open_page()
    before = picture(page)
    page.get_by_role("radio", name="negative log likelihood").check()
    nll = picture(page)
    assert nll != before
    curves = page.locator("#curves-plot .curve")
    count = curves.count()
    page.locator("#curves-criterion").get_by_label("random").check()
    assert curves.count() == count + 2  # MAP's and SpaM's
    page.locator("#curves-prior").get_by_label("layer-wise").check()
    assert curves.count() == (count + 2) * 3 // 2
    page.locator("#curves-method").get_by_label("MAP").uncheck()
    assert curves.count() == count + 2
    page.locator("#curves-method").get_by_label("SpaM").uncheck()
    assert "Nothing is selected" in page.locator("#curves-plot").inner_text()


def test_colour_follows_what_is_compared(open_page):
    page = open_page()
    page.locator("#curves-prior").get_by_label("layer-wise").check()
    assert page.locator("#curves-key").inner_text().split("\n")[-2:] == ["layer-wise", "parameter-wise"]


def test_hover_shows_the_values_of_the_table(open_page):
    page = open_page()
    plot = page.locator("#curves-plot > svg")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert page.locator("#curves-plot .tip").is_hidden()
    page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 60)
    tip = page.locator("#curves-plot .tip")
    assert tip.is_visible()
    assert "99 % sparsity" in tip.inner_text()
    shown = dict(line.split("\t") for line in tip.inner_text().split("\n") if "\t" in line)
    table = page.locator("#tables table.sheet").first
    row = table.locator("tbody tr").first.locator("td").last.inner_text().split()  # OPD, MAP, 99 %
    assert shown["MAP (weight decay), OPD"] == f"{row[0]} ± {row[1].removeprefix('±')}"
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_keys_read_the_values(open_page):
    page = open_page()
    page.locator("#curves-plot > svg").focus()
    tip = page.locator("#curves-plot .tip")
    page.keyboard.press("ArrowRight")
    assert "dense" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "50 % sparsity" in tip.inner_text()
    first = page.locator("#curves-plot .tip .near").inner_text()
    page.keyboard.press("ArrowDown")
    assert page.locator("#curves-plot .tip .near").inner_text() != first
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.get_by_role("radio", name="accuracy").focus()
    before = picture(page)
    page.keyboard.press("ArrowRight")  # the next measure, as in any group of radio buttons
    assert picture(page) != before


def test_training_shows_the_evidence(open_page):
    page = open_page()
    before = picture(page, "training")
    page.get_by_role("radio", name="log evidence").check()
    assert picture(page, "training") != before
    assert page.locator("#training-key li").count() == 2  # MAP has none


def test_dark_follows_the_system_and_the_button(open_page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = open_page(color_scheme="light")
    dark = open_page(color_scheme="dark")
    assert light.evaluate(background) != dark.evaluate(background)
    light.get_by_role("button", name="Dark").click()
    assert light.evaluate(background) == dark.evaluate(background)
    assert light.get_by_role("button", name="Light").is_visible()
    light.emulate_media(media="print")
    assert light.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [360, 768])
def test_it_fits_narrow_screens(open_page, width):
    page = open_page(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    labels = page.locator("#curves-plot > svg text").all()
    edges = [label.bounding_box() for label in labels]
    assert all(box["x"] >= -1 and box["x"] + box["width"] <= width + 1 for box in edges)


def test_without_scripts_the_tables_are_there(open_page, browser, page_file):
    page = open_page(java_script_enabled=False)
    assert page.locator("table.sheet").count() >= 3
    assert "tables below have the numbers" in page.locator("#curves-plot").inner_text()


def test_details_open_for_the_printer(open_page):
    page = open_page()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
