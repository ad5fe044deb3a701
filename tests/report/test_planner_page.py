"""The page that plans in the browser gives the answers of `atorch plan`: by its Python without torch, and in Chromium.

The test in Chromium needs pyodide and wheels in a folder, build/pyodide (`make` makes it) or ATORCH_PYODIDE.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from atorch.cli import app
from tests.house.source import ROOT
from tests.report.test_html import BROWSER

PYODIDE = Path(os.environ.get("ATORCH_PYODIDE", ROOT / "build" / "pyodide"))
CDN = re.compile(r"https://cdn\.jsdelivr\.net/pyodide/v([\d.]+)/full/")
ABSENT = ("torch", "numpy", "psutil", "scipy", "rich", "typer", "transformers", "huggingface_hub", "safetensors")
EIGHT = {"model": "meta-llama/Llama-3.1-8B", "cluster": "8xH100-80GB", "seq": 8192, "batch": 128}
RTX = {"model": "Qwen/Qwen3-8B", "cluster": "1xrtx3090"}
SHAPE = {"layers": 8, "hidden": 1024, "heads": 16, "kv-heads": 4, "ffn": 4096, "vocab": 32000, "seq": 2048}

QUESTIONS: dict[str, tuple[dict, str]] = {
    "atorch plan meta-llama/Llama-3.1-8B --cluster 8xH100-80GB --batch 128 --seq 8192": (EIGHT, ""),
    "atorch plan Qwen/Qwen3-8B --cluster 1xrtx3090 --qlora --optimizer adamw8bit --no-host-memory": (
        {
            "model": "Qwen/Qwen3-8B",
            "cluster": "1xrtx3090",
            "qlora": True,
            "optimizer": "adamw8bit",
            "host-memory": "no",
        },
        "",
    ),
    "atorch plan --layers 8 --hidden 1024 --heads 16 --kv-heads 4 --ffn 4096 --vocab 32000 --cluster 8xA100-80GB --seq "
    "2048 --cross-entropy chunked": ({**SHAPE, "cluster": "8xA100-80GB", "cross-entropy": "chunked"}, ""),
    "unknown model": ({**EIGHT, "model": "meta-llama/Lama-3.1-8B"}, "did you mean meta-llama/Llama-3.1-8B"),
    "unknown cluster": ({**EIGHT, "cluster": "8xH1000"}, "there is no cluster named 'H1000'"),
    "no model": ({"cluster": "8xH100-80GB"}, "a model's name, or its shape"),
    "job": ({**EIGHT, "model": "os:getcwd"}, "has no model 'os:getcwd'"),
    "impossible shape": ({**SHAPE, "heads": 7, "cluster": "8xH100-80GB"}, "each divides the one before it"),
    "deep shape": ({**SHAPE, "layers": 10**9, "cluster": "8xH100-80GB"}, "from 1 to 10,000"),
    "nothing fits": ({**EIGHT, "cluster": "1xrtx3090", "host-memory": "no"}, "What would make it fit"),
    "huge batch": ({**EIGHT, "batch": 1e30}, "global_batch is 1e+30"),
    "invalid rank": ({**EIGHT, "lora": "many"}, "a rank of at least 1"),
}
"""By command or name: what is filled in, and a part of the error."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and the wheel beside it."""
    spec = spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    conf = module_from_spec(spec)
    spec.loader.exec_module(conf)
    out = tmp_path_factory.mktemp("site")
    conf.write_planner(out)
    return out


def answer_of(command: str, folder: Path) -> dict:
    """The data that the command writes, without its time."""
    path = folder / "answer.json"
    run = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json", str(path)])
    assert run.exit_code in (0, 3), run.output
    return comparable(path.read_text())


def comparable(answer: str) -> dict:
    """The data without its time, to nine digits: Pythons add numbers up in other ways since 3.12."""
    data = json.loads(answer, parse_float=lambda text: float(f"{float(text):.9g}"))
    return {name: value for name, value in data.items() if name != "seconds"}


def test_the_python_of_the_page_gives_the_answers_of_the_command_without_torch(site: Path, tmp_path: Path) -> None:
    with ZipFile(site / "atorch.whl") as wheel:
        wheel.extractall(tmp_path / "packages")
    source = re.search(r'<script id="python".*?>(.*?)</script>', (site / "planner.html").read_text(), re.DOTALL)
    assert source
    code = f"import json, sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n{source[1]}\n"
    code += (
        "print(json.dumps([json.loads(ask(json.dumps(form), name)) for name, form in json.load(sys.stdin).items()]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps({name: form for name, (form, _) in QUESTIONS.items()}),
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for (name, (_, problem)), answer in zip(QUESTIONS.items(), json.loads(run.stdout), strict=True):
        if problem:
            assert problem in answer["problem"], name
            assert "Traceback" not in answer["problem"]
        else:
            assert comparable(answer["data"]) == answer_of(name, tmp_path), name
            assert name in answer["page"]
            assert "atorch_strategy" in json.loads(answer["strategy"])


HARNESS = """<!DOCTYPE html><iframe id="frame" width="400" height="900"></iframe><script>
const frame = document.getElementById("frame"), told = { errors: [] };
const wait = async (is) => { while (!is()) await new Promise((done) => setTimeout(done, 50)); };
async function drive() {
  const { first, second } = await (await fetch("/questions")).json();
  frame.src = "/planner.html?" + new URLSearchParams(first);
  await new Promise((done) => (frame.onload = done));
  const view = frame.contentWindow, by = (id) => view.document.getElementById(id);
  view.onerror = (message) => told.errors.push(message);
  await wait(() => /loaded|Planning/.test(by("status").textContent));
  told.loaded = view.performance.now();
  await wait(() => !by("answer").hidden || !by("problem").hidden);
  told.planned = view.performance.now();
  told.status = by("status").textContent;
  told.problem = by("problem").textContent;
  told.command = by("command").textContent;
  told.data = await (await fetch(by("data").href)).text();
  told.strategy = await (await fetch(by("strategy").href)).json();
  await wait(() => by("page").style.height);
  told.heading = by("page").contentDocument.querySelector("h1").textContent;
  told.narrow = view.document.documentElement.scrollWidth;
  told.models = by("models").options.length;
  for (const [name, value] of Object.entries(second)) by("question").elements[name].value = value;
  by("plan").click();
  await wait(() => !by("problem").hidden);
  told.second = [by("problem").textContent, by("answer").hidden, by("plan").disabled];
  by("plan").click();
  by("stop").click();
  await wait(() => /loaded/.test(by("status").textContent));
  told.stopped = by("plan").disabled;
}
drive().catch((error) => told.errors.push(String(error))).then(() =>
  fetch("/told", { method: "POST", body: JSON.stringify(told) }));
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the page with pyodide from a folder in place of its CDN, and takes what the harness found."""

    def __init__(self, *given, made: dict[str, bytes], told: list[dict], ended: threading.Event) -> None:
        self.made, self.told, self.ended = made, told, ended
        super().__init__(*given, directory=str(PYODIDE))

    def do_GET(self) -> None:
        content = self.made.get(self.path.partition("?")[0])
        if content is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path.partition("?")[0].endswith("html") else "text/plain")
        self.end_headers()
        self.wfile.write(content)
        return None

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.ended.set()

    def log_message(self, *given) -> None:
        pass


def lock_of(folder: Path) -> bytes:
    """Pyodide's list of packages, with the wheels of a folder in place of those on its CDN."""
    lock = json.loads((folder / "pyodide-lock.json").read_text())
    for wheel in folder.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        known = lock["packages"][name.replace("_", "-")]
        known |= {"version": version, "file_name": wheel.name, "sha256": sha256(wheel.read_bytes()).hexdigest()}
    return json.dumps(lock).encode()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.skipif(not (PYODIDE / "pyodide.asm.wasm").is_file(), reason="no pyodide: make build/pyodide")
def test_the_page_plans_in_a_browser(site: Path, tmp_path: Path) -> None:
    page, version = CDN.subn("/", (site / "planner.html").read_text())
    assert version == 1
    made = {
        "/planner.html": page.encode(), "/atorch.whl": (site / "atorch.whl").read_bytes(),
        "/harness.html": HARNESS.encode(), "/pyodide-lock.json": lock_of(PYODIDE),
        "/questions": json.dumps({"first": EIGHT, "second": {"model": "", "layers": "3"}}).encode(),
    }  # fmt: skip
    told, ended = list[dict](), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, made=made, told=told, ended=ended))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    options += ["--disable-component-update", "--remote-debugging-port=0", f"--user-data-dir={tmp_path / 'profile'}"]
    browser = subprocess.Popen(
        [str(BROWSER), *options, f"http://127.0.0.1:{server.server_port}/harness.html"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert ended.wait(180)
    finally:
        browser.terminate()
        browser.wait(20)
        server.shutdown()
        server.server_close()
    (found,) = told
    assert not found["errors"]
    assert not found["problem"]
    command = next(iter(QUESTIONS))
    assert found["command"] == command
    assert comparable(found["data"]) == answer_of(command, tmp_path)
    assert found["heading"] == EIGHT["model"]
    assert found["narrow"] <= 400
    assert found["models"] > 200
    assert found["second"] == ["a shape needs --hidden, --heads, --ffn, --vocab as well", True, False]
    assert found["stopped"] is False
    seconds = re.search(r"Planned in ([\d.]+) s", found["status"])
    assert seconds
    assert float(seconds[1]) <= 3.0, f"{found['status']}; loaded after {found['loaded'] / 1000:.1f} s"
