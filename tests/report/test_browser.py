"""The pages in a browser: what its scripts do, on wide and narrow screens, light and dark.

Chromium runs without a window, and looks at files of this machine only: ``uv run pytest -m browser``.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report.runs import CHARTS, leave_evaluation, leave_run, leave_talks
from tpu_grpo.report.run_page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed (apt-get install chromium)"),
]
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=3000"),
]
DARK, LIGHT = 0, 1
"""Blink's preferredColorScheme."""
PROBE = Path(__file__).with_name("probe.js")
FRAME = """<!doctype html>
<style>iframe {{ position: absolute; top: 0; left: 0; border: 0; height: 2000px }}</style>
<body><pre id="probe"></pre>
<script>
const told = [];
onmessage = (event) => {{
  const frames = [...document.querySelectorAll("iframe")];
  told[frames.findIndex((frame) => frame.contentWindow === event.source)] = JSON.parse(event.data);
  document.getElementById("probe").textContent = JSON.stringify(told);
}};
</script>
{frames}"""
SHOWN = '<iframe src="{page}.html" style="width:{width}px"></iframe>'
"""A window is 500 pixels wide at least; a frame may be as narrow as a phone. All begin where the window does."""
Probed = dict[tuple[str, int, int], dict[str, Any]]


def probed(pages: dict[str, Path], widths: list[int], scheme: int, directory: Path) -> Probed:
    """What the browser made of each page in each width, told by a script of this test at its end."""
    directory.mkdir()
    probe = f"<script>{PROBE.read_text()}</script></body>"
    for name, page in pages.items():
        (directory / f"{name}.html").write_text(page.read_text().replace("</body>", probe))
    cases = [(name, width, scheme) for name in pages for width in widths]
    frames = "".join(SHOWN.format(page=name, width=width) for name, width, _ in cases)
    (directory / "frame.html").write_text(FRAME.format(frames=frames))
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={directory / 'profile'}", "--window-size=1400,2000"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom", (directory / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r'<pre id="probe">([^<]*)</pre>', done.stdout)
    assert found is not None, done.stderr
    told = json.loads(html.unescape(found[1] or "[]"))
    assert len(told) == len(cases), "a script failed"
    assert None not in told, "a script failed"
    return dict(zip(cases, told, strict=True))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    leave_run(root / "first", 10, name="a_run_with_a_rather_long_name_that_must_wrap_somewhere")
    for step, values in ((0, [0.0, 1.0, 0.0]), (10, [1.0, 1.0, 0.0])):
        leave_evaluation(root / "first", step, values)
    return {
        "run": write_report(root / "first"),
        "talks": write_report(leave_talks(root / "talks")),
        "going": write_report(root / "first", goes_on=True, path=root / "going.html"),
    }


@pytest.fixture(scope="module")
def found(pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """All pages in both widths and schemes; the browser is started once for each scheme."""
    root = tmp_path_factory.mktemp("probed")
    return {k: v for scheme in (DARK, LIGHT) for k, v in probed(pages, [1280, 390], scheme, root / str(scheme)).items()}


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["run", "going", "talks"])
@pytest.mark.parametrize(("width", "columns"), [(1280, 2), (390, 1)])
@pytest.mark.parametrize("scheme", [DARK, LIGHT])
def test_a_page_fits_shows_values_and_loads_nothing(
    found: Probed, page: str, width: int, columns: int, scheme: int
) -> None:
    seen = found[page, width, scheme]
    assert (seen["width"], seen["columns"]) == (width, columns)
    assert (seen["errors"], seen["outside"], seen["overflow"], seen["loaded"]) == ([], [], [], [])
    background, ink = seen["colours"]
    assert contrast(background, ink) > 10
    assert (contrast(background, "rgb(0, 0, 0)") > contrast(background, "rgb(255, 255, 255)")) == (scheme == LIGHT)
    assert all(len(rows) > 1 for rows in seen["tips"].values())
    if page == "talks":
        turn, answer, by = seen["said"]
        assert (turn, by) == (ink, answer)
        assert 4.5 < contrast(background, answer) < contrast(background, turn) / 2
    else:
        assert list(seen["tips"]) == CHARTS


def test_values_show_where_the_pointer_is(found: Probed) -> None:
    seen = found["run", 1280, LIGHT]
    # steps 1 to 10: the middle is 5.5, and 5 is the nearest before it
    assert seen["tips"]["Reward"] == [
        ["step 5"],
        ["total ± standard deviation", "0.5"],
        ["$x_1$ <b>", "0.5"],
        ["exact_answer", "0.25"],
    ]
    assert seen["tips"]["Agreement of engine and trainer"] == [["step 5"], ["largest", "2.00e-5"], ["mean", "0"]]
    assert seen["tips"]["Time per stage"][1:] == [
        ["rollout", "1"], ["rewards", "0.1"], ["update", "0.5"], ["weight sync", "0.1"]
    ]  # fmt: skip
    assert seen["keys"] == ["step 2"]  # from step 1 two to the right and one back
