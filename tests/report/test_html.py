"""The page of a plan: well formed, without requests, safe with any name, and alive in a browser."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from datetime import date
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest

from atorch.report.figures import remarks, summary
from atorch.report.html import plan_fragment, plan_page, plans_page
from tests.report.answers import MEMORY, answer

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>&\"'\u2028"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "input"}


class Page(HTMLParser):
    """What stands in a page; fails where elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict]] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []  # (element, text)
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1][0], data))

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text_of(self, tag):
        return [text for name, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(plan_page(answer(400), "examples/plan_llama.py:job"))


def data_of(page: Page) -> dict:
    return json.loads(next(text for text in page.text_of("script") if text.startswith("{")))


def test_the_figures_are_in_the_page(page):
    plan = answer(400)
    words = " ".join(text for tag, text in page.texts if tag not in ("script", "style"))
    for said in (*plan["strategy"], "6.82 s", "615,402", "68.8 GiB", "128 × 8 × NVIDIA H100 80GB HBM3, 1,024 samples"):
        assert said in words
    for each in plan["rejected"]:
        assert each["reason"] in words
    assert "the allocator may reserve 5 GiB more" in words
    assert "tensor 4 would be 6.0% slower: twice as much" in words
    assert "total memory that torch reports" in words
    assert words.count("one port a device") == 2  # for both figures that it is the source of


def test_all_that_the_terminal_says_is_in_the_page():
    plan = answer(40) | {
        "fits_narrowly": True,
        "numbers": "parameters are bf16",
        "notes": ["of fused kernels"],
        "num_params": 8_030_000_000,
        "solved": {"words": "The longest sequence that fits: 8,192 tokens"},
        "load_strategy": ["parallel_mode", ["half", {"dtype": "bf16"}]],
    }
    plan["decisive"] = [{"saves": 0.034, "strategy": plan["near_ties"][0]["strategy"], "kind": ""}]
    made = Page(plan_page(plan, "job", "atorch plan 'my job.py:job'"))
    cells, facts = made.text_of("td"), made.text_of("dd")
    assert all(words in cells for name, words in remarks(plan))
    assert {"room", "ties", "measure", "search", "numbers", "parameters are bf16"} <= set(cells)
    assert {"8.03B", f"{4096 * 1024:,}"} <= set(facts)
    assert {"Note: of fused kernels.", "The longest sequence that fits: 8,192 tokens"} <= set(made.text_of("p"))
    assert made.text_of("pre") == ['[\n  "parallel_mode",\n  ["half", {"dtype": "bf16"}]\n]\n']
    assert made.text_of("code") == ["atorch plan 'my job.py:job'"]
    assert made.text_of("footer") == [f"atorch {version('atorch')}, {date.today()}: "]


def test_the_chosen_row_is_marked_and_bars_are_to_scale(page):
    rows = [each["class"] for each in page.named("tr") if "class" in each]
    assert rows[:3] == ["chosen", "tie", "tie"]
    assert rows.count("chosen") == 1
    assert [each.get("class") for each in page.named("div")].count("bar chosen") == 2
    memory = [float(each["width"]) for each in page.named("rect") if each["class"].startswith("k") and "x" in each]
    plan = answer(400)
    shares = [plan["estimate"]["memory"][name] / plan["memory_bytes"] * 100 for name in MEMORY]
    assert memory[: len(shares)] == pytest.approx(shares, abs=1e-3)


def test_several_clusters_are_on_one_page():
    answers = [("8xA", answer(40)), ("8xL4", "nothing fits: 12 GiB short"), (HOSTILE, answer(40))]
    made = Page(plans_page(answers, "job", "atorch plan job"))
    assert made.text_of("th")[:3] == ["8xA", "8xL4", HOSTILE]
    assert "nothing fits: 12 GiB short" in made.text_of("td")
    assert made.text_of("summary")[0] == "8xA"
    assert made.text_of("h2").count("Runners-up") == 2
    assert len([each["id"] for _, each in made.elements if "id" in each]) == 1  # of the data
    assert data_of(made) == {"step_s": []}


def test_a_notebook_shows_the_summary_as_a_table():
    plan = answer(40, name=HOSTILE)
    plan["strategy"] = [HOSTILE]
    made = Page(plan_fragment(plan))
    assert made.elements[0][0] == "table"
    assert made.text_of("td")[:2] == ["step", next(summary(plan))[1]]
    assert HOSTILE in made.text_of("td")


def test_every_candidate_can_be_read_back(page):
    found, given = data_of(page), answer(400)["candidates"]
    labels = [" + ".join(found["parts"][part] for part in parts) for parts in found["labels"]]
    assert labels == given["label"]
    assert [found["reasons"][why] for why in found["why"]] == given["why"]
    assert found["step_s"] == pytest.approx(given["step_s"], rel=1e-3)
    assert {name: set(values) for name, values in found["shares"].items()} == {
        "parameters": {30}, "optimizer": {25}, "activations": {20}, "gradients": {15}, "working": {10}
    }  # fmt: skip
    assert found["peak_bytes"] == pytest.approx(given["peak_bytes"], rel=1e-3)


def test_it_asks_for_nothing(page):
    policy = next(each["content"] for each in page.named("meta") if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")
    assert not [each for _, each in page.elements if {"src", "href", "style", "onload"} & each.keys()]
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "base", "object"}
    for tag in ("style", "script"):
        text = "".join(page.text_of(tag)[-1:])
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
        assert not re.search(r"https?://|@import|url\(", text)


def test_names_are_text_and_never_markup():
    plan = answer(20, name=HOSTILE)
    plan["rejected"][0]["reason"] = HOSTILE
    plan["cluster"]["device"]["name"] = HOSTILE
    plan["counterfactuals"][0]["change"] = HOSTILE
    plan["estimate"]["memory"][HOSTILE] = 1e9
    hostile, plain = Page(plan_page(plan, HOSTILE)), Page(plan_page(answer(20), "job"))
    assert hostile.named("script") == plain.named("script")
    assert not hostile.named("img")
    assert HOSTILE in hostile.text_of("h1")
    assert any(HOSTILE in label for label in data_of(hostile)["parts"])


def test_it_is_small_for_many_candidates():
    assert len(plan_page(answer(20_000))) < 20_000 * 60


def test_a_plan_of_a_search_on_the_devices_has_a_page_too():
    known = ("strategy", "estimate", "rejected", "num_compositions", "num_dry_runs", "seconds", "memory_bytes")
    plan = {name: value for name, value in answer(20).items() if name in known} | {"measured": None}
    assert data_of(Page(plan_page(plan)))["labels"] == []
    unknown = Page(plan_page({**plan, "estimate": None}))
    assert any("Step: not measured; not estimated" in text for text in unknown.text_of("td"))
    assert "20 compositions, 0 of them run, in 6.3 s." in Page(plan_fragment(plan)).text_of("td")


HARNESS = """<!DOCTYPE html><iframe id="frame" width="1100" height="3000" src="page.html"></iframe><pre id="told"></pre>
<script>
const frame = document.getElementById("frame"), told = {};
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, by = (id) => page.getElementById(id);
  const canvas = by("scatter"), data = JSON.parse(by("plan-data").textContent);
  told.title = page.title;
  told.requests = view.performance.getEntriesByType("resource").map((each) => each.name);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  told.colours = new Set(new Uint32Array(pixels.buffer)).size;
  told.all = by("count").textContent;
  told.fastest = by("matches").tBodies[0].rows[0].cells[0].textContent;
  canvas.dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowRight" }));
  const mark = by("tip"), x = parseFloat(mark.style.left), y = parseFloat(mark.style.top);
  told.keyed = mark.firstChild.textContent;
  told.spent = mark.children[2].textContent;
  canvas.dispatchEvent(new view.PointerEvent("pointerleave"));
  told.hidden = mark.hidden;
  const place = canvas.getBoundingClientRect();
  const over = (px, py) => new view.PointerEvent("pointermove", { clientX: place.left + px, clientY: place.top + py });
  canvas.dispatchEvent(over(x + 3, y - 2));
  told.hovered = mark.hidden ? null : mark.firstChild.textContent;
  by("filter").value = "tensor 8 + fsdp";
  by("filter").dispatchEvent(new view.Event("input"));
  told.filtered = by("count").textContent;
  told.rows = [...by("matches").tBodies[0].rows].map((row) => row.cells[0].textContent);
  told.reasons = page.querySelectorAll("#why-not tbody tr:not([hidden])").length;
  by("kinds").querySelector("input").click();
  told.boxed = by("count").textContent;
  by("filter").value = "no such method";
  by("filter").dispatchEvent(new view.Event("input"));
  const seen = (id) => by(id).checkVisibility();
  told.unmatched = [seen("matches"), seen("no-match"), seen("why-not"), seen("no-reason")];
  page.querySelector("details").open = true;
  page.querySelector(".copy").click();
  told.copied = view.getSelection().toString();
  frame.width = 400;
  told.narrow = page.documentElement.scrollWidth;
  document.getElementById("told").textContent = JSON.stringify(told);
};
</script>"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_it_works_in_a_browser(tmp_path: Path) -> None:
    plan = answer(300, name=HOSTILE) | {"load_strategy": ["fsdp", ["half", {"dtype": "bf16"}]]}
    (tmp_path / "page.html").write_text(plan_page(plan, HOSTILE), encoding="utf-8")
    (tmp_path / "harness.html").write_text(HARNESS, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    reach = ["--disable-web-security", "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *options, *reach, "--dump-dom", (tmp_path / "harness.html").as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ":CONSOLE" not in run.stderr, run.stderr  # what a script's error or a refused request would write
    found = re.search(r'<pre id="told">(.+?)</pre>', run.stdout, re.DOTALL)
    assert found, run.stdout[-2000:] + run.stderr[-2000:]
    told = json.loads(html.unescape(found[1]))

    labels, step_s = plan["candidates"]["label"], plan["candidates"]["step_s"]
    why = plan["candidates"]["why"]
    fastest = labels[min((index for index in range(300) if not why[index]), key=lambda index: step_s[index])]
    matching = [label for label in labels if "tensor 8" in label and "fsdp" in label]
    assert told["title"].startswith("Plan: </script>")
    assert told["requests"] == []
    assert told["colours"] > 10
    assert told["all"] == "300 of 300"
    assert told["fastest"] == told["keyed"] == told["hovered"] == fastest
    assert told["hidden"] is True
    assert told["spent"] == "parameters 30%, optimizer 25%, activations 20%, gradients 15%, working 10%"
    assert told["filtered"] == f"{len(matching)} of 300"
    assert set(told["rows"]) <= set(matching)
    assert told["rows"]
    assert told["reasons"] < len(plan["rejected"])
    assert told["unmatched"] == [False, True, False, True]
    assert json.loads(told["copied"]) == plan["load_strategy"]
    assert told["narrow"] <= 400
    assert int(told["boxed"].split()[0]) < len(matching)
