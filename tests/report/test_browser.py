"""Pages in headless Chromium: silent, drawn, switched, and without a word to the network."""

import shutil

import pytest
from sampleruns import results, save_run

from linearize.stages import compare, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first, second = save_run(folder / "first"), save_run(folder / "second", found=results())
    report(first)
    compare([first, second], page=folder / "compare.html")
    return {"report": first / "report.html", "compare": folder / "compare.html"}


@pytest.fixture
def visit(browser, pages):
    """Opens a page; afterwards nothing was said on its console and nothing left the computer."""
    contexts, said, asked = [], [], []

    def open_page(name, **options):
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def see(page, selector):
    """Scrolls to a chart and waits until it is drawn."""
    page.locator(selector).scroll_into_view_if_needed()
    page.wait_for_selector(f"{selector} .main-svg")


def colors(page):
    return page.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " document.querySelector('[data-chart=ablation]')._fullLayout.font.color]"
    )


CHARTS = [
    "ablation",
    "buckets",
    "recall",
    "transfer",
    "finetune",
    "fidelity",
    "efficiency",
    "memory",
]


def test_every_chart_is_drawn(visit):
    page = visit("report")
    for name in CHARTS:
        see(page, f'[data-chart="{name}"]')
    for part in ("teacher", "student", "row"):
        see(page, f"#viewer-{part}")
    assert page.title() == "first · linearize"  # the script in a sample is text
    assert page.locator("#problem").is_hidden()


def test_a_comparison_is_drawn(visit):
    page = visit("compare")
    for name in ("quality", "buckets", "transfer", "fidelity"):
        see(page, f'[data-chart="{name}"]')


def test_a_switch_changes_the_chart_by_keyboard(visit):
    page = visit("report")
    see(page, '[data-chart="ablation"]')
    page.locator('input[name="switch-ablation"]').first.focus()
    page.keyboard.press("ArrowRight")
    title = page.locator('[data-chart="ablation"] .xtitle')
    assert title.text_content() == "KL to teacher, nats"


def test_colours_follow_the_system_and_the_toggle(visit):
    page = visit("report", color_scheme="dark")
    see(page, '[data-chart="ablation"]')
    dark = colors(page)
    page.locator('input[name="theme"][value="light"]').check(force=True)
    light = colors(page)
    assert dark[0] != light[0] and dark[1] != light[1]
    page.locator('input[name="theme"][value="dark"]').check(force=True)
    assert colors(page) == dark
    page.locator('input[name="theme"][value="light dark"]').check(force=True)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(
        "color => document.querySelector('[data-chart=ablation]')._fullLayout.font.color === color",
        arg=light[1],
    )


def test_hovering_tells_the_number(visit):
    page = visit("report")
    see(page, '[data-chart="transfer"]')
    page.locator('[data-chart="transfer"] .point').first.hover(force=True)
    page.wait_for_selector('[data-chart="transfer"] .hovertext')
    assert "100 tokens: 1" in page.locator('[data-chart="transfer"] .hovertext').text_content()


def test_the_reader_chooses_text_head_and_token(visit):
    page = visit("report")
    see(page, "#viewer-row")
    drawn = "document.getElementById('viewer-row').data[0].y.filter(y => y !== null).length"
    assert page.locator("#viewer-text option").count() == 3
    assert page.locator("#viewer-head option").count() == 8
    said = page.locator("#viewer-token").text_content()
    before = page.evaluate(drawn)
    page.locator("#viewer-query").focus()
    page.keyboard.press("Home")
    assert page.locator("#viewer-token").text_content() != said
    assert page.evaluate(drawn) == 1 < before  # the first token sees itself
    page.locator("#passage-teacher span").nth(20).click()
    assert page.locator("#viewer-token").text_content().endswith("(20)")
    page.select_option("#viewer-text", index=1)
    page.select_option("#viewer-head", index=7)
    assert page.locator("#viewer-token").text_content().endswith("(20)")
    assert page.locator("#passage-student .query").count() == 1


def test_a_phone_shows_it_without_scrolling_sideways(visit):
    page = visit("report", viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    for name in CHARTS:
        see(page, f'[data-chart="{name}"]')
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_paper_shows_charts_that_were_never_scrolled_to(visit):
    page = visit("report", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot .main-svg").first.is_visible()
    undrawn = "[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.main-svg'))"
    assert page.evaluate(f"{undrawn}.length") == 0
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") > 0
