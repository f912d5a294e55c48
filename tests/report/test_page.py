"""The page: nothing from the network, no foreign script, no place of the computer."""

import base64
import gzip
import hashlib
import json
import re

import pytest
from plotly.offline import get_plotlyjs

from linearize.report.figures import empty_figure
from linearize.report.page import public, write_page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    figure = empty_figure().add_scatter(x=[1, 2], y=[3, 4])
    write_page(
        file, "compare.html.jinja", charts={"quality": {"a": figure}, "buckets": {}}, runs={},
        settings={"convert.window": ["<b>", 2]}, comparable=True,
    )  # fmt: skip
    return file.read_text(encoding="utf-8")


def unpacked(page, name):
    packed = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page).group(1)
    return gzip.decompress(base64.b64decode(packed)).decode()


def test_data_and_plotly_are_in_it(page):
    charts = json.loads(unpacked(page, "data"))["charts"]
    assert charts["quality"][0]["data"][0]["x"] == [1, 2]
    assert set(charts) == {"quality"}
    assert unpacked(page, "plotly") == get_plotlyjs()


def test_only_scripts_of_the_policy_run_and_nothing_is_fetched(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    policy = policy.replace("&#39;", "'")
    assert "default-src 'none'" in policy and "connect-src" not in policy
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL).group(1)
    for code in (script, get_plotlyjs()):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == []


def test_values_are_escaped(page):
    assert "<td>&lt;b&gt;</td>" in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/srv/somebody/my model", "my model"),
        ("~/text/*.txt", "*.txt"),
        (r"C:\Users\somebody\text.txt", "text.txt"),
        ("/data/folder/", "folder"),
        ("runs/quickstart", "runs/quickstart"),
        ("owner/name", "owner/name"),
        ({"a": ["/x/y", 1, None, True]}, {"a": ["y", 1, None, True]}),
    ],
    ids=str,
)
def test_a_path_from_the_root_is_its_last_part(value, shown):
    assert public(value) == shown
