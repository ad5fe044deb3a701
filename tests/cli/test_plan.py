"""`atorch plan`: answers in every form, what fits, one line about what does not hold, and little memory."""

import json
import os
import resource
import subprocess
import sys

import pytest

from atorch.auto.strategy import Strategy
from atorch.cli import main
from atorch.cli.clusters import clusters_of
from atorch.cluster.spec import ClusterSpec
from tests.report.test_html import Page, data_of

SHAPE = "--layers 4 --hidden 256 --heads 4 --kv-heads 2 --ffn 512 --vocab 1000"
SMALL = [*SHAPE.split(), "--seq", "128"]
FEW = ["--exclude", "tensor_parallel,sequence_parallel,context_parallel,pipeline_parallel,offload,chunk"]  # is quick
HUGE = "--layers 126 --hidden 16384 --heads 128 --ffn 53248 --vocab 128256 --seq 8192"

KEYS = {
    *("schema", "strategy", "load_strategy", "numbers", "estimate", "measured", "baseline", "notes", "fits_narrowly"),
    *("rejected", "ranking", "near_ties", "decisive", "counterfactuals", "counts_by_axis", "candidates", "pareto"),
    *("num_compositions", "num_dry_runs", "num_unopened", "num_legal", "gap", "seconds", "nearest_miss", "simulated"),
    *("cluster", "global_batch", "objective", "memory_bytes", "usable_bytes", "num_params"),
    *("solved", "price", "training", "model", "seq", "recipe"),
}


def plan(*arguments: str) -> int:
    return main(["plan", *arguments, "--verify", "0"])


def test_a_shape_has_an_answer_in_every_form(tmp_path, capsys):
    data, page, saved = (tmp_path / name for name in ("plan.json", "plan.html", "strategy.json"))
    forms = ["--json", str(data), "--html", str(page), "--save", str(saved)]
    assert plan(*SMALL, *FEW, "--cluster", "2x4xA100-40GB", "--batch", "64", *forms) == 0
    output = capsys.readouterr()
    found = json.loads(data.read_text())
    said = " ".join(output.out.split())
    assert f"chosen {' + '.join(found['strategy'])} ties {len(found['near_ties'])} alternative" in said
    assert "within the estimate's error; chance that the likeliest is faster: " in said
    assert all(0.2 <= each["chance"] <= 1 for each in found["near_ties"])
    assert found["estimate"]["low_s"] < found["estimate"]["step_s"] < found["estimate"]["high_s"]
    assert found["estimate"]["low_bytes"] < found["estimate"]["peak_bytes"] < found["estimate"]["high_bytes"]
    assert not found["fits_narrowly"]
    assert "measure time five steps of this and of" in said
    assert found["decisive"][0]["saves"] > 0
    assert all(f"Wrote {path}: " in said for path in (data, page, saved))
    assert ", for load_strategy" in said
    assert "2 × 4 × NVIDIA A100" in output.out
    assert "parameters, read in" in output.err
    assert found["global_batch"] == 64
    written = Page(page.read_text())
    assert len(data_of(written)["labels"]) == len(found["candidates"]["label"])
    assert written.text_of("code")[0].startswith("atorch plan --layers 4 --hidden 256")
    strategy = Strategy.of(saved)
    assert [str(each) for each in strategy] == found["strategy"]
    assert Strategy.of(found["load_strategy"]) == strategy
    assert found["num_params"] > 1e6
    assert set(found) == KEYS, "docs/plan.md names the keys; a key that goes or changes raises SCHEMA"
    for entry in (*found["ranking"], *found["near_ties"], *found["pareto"]):
        assert [str(each) for each in Strategy.of(entry["load_strategy"])] == entry["strategy"]


def test_methods_are_left_out_and_put_in(tmp_path):
    data = tmp_path / "plan.json"
    options = ["--exclude", "fsdp, zero1", "--exclude", "compile", "--include", "checkpoint", "--json", str(data)]
    assert plan(*SMALL, *FEW, "--cluster", "8xA100-40GB", "--batch", "64", *options) == 0
    labels = json.loads(data.read_text())["candidates"]["label"]
    assert labels
    for label in labels:
        names = {method.partition("(")[0] for method in label.split(" + ")}
        assert "checkpoint" in names
        assert not names & {"fsdp", "zero1", "compile"}


@pytest.mark.parametrize(("what", "more"), [("devices", ["--batch", "64"]), ("batch", []), ("seq", ["--batch", "64"])])
def test_what_fits_is_found(what, more, tmp_path, capsys):
    data = tmp_path / "plan.json"
    size = ["--seq", "4096"] if what == "seq" else ["--seq", "128"]
    command = [*SHAPE.split(), *FEW, *size, "--cluster", "8xL4", "--solve", what, "--json", str(data), *more]
    assert plan(*command) == 0
    fit = json.loads(data.read_text())["solved"]
    assert fit["what"] == what
    assert [fit["size"], True] in fit["tried"]
    assert f"{fit['size']:,}" in capsys.readouterr().out
    fitting = [size for size, fits in fit["tried"] if fits]
    assert fit["size"] == (min(fitting) if what == "devices" else max(fitting))


def test_a_job_that_fits_nowhere_names_the_nearest_miss(capsys):
    assert plan(*HUGE.split(), "--cluster", "1xL4", "--batch", "1") == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "GiB" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--cluster", "8xL4"],
            "give one of a config.json, a folder that has one, a model on the Hub, a job (FILE.py:NAME), or",
        ),
        (["jobs.py:job", *SMALL, "--cluster", "8xL4"], "give one of a config.json"),
        (["nofile", "--cluster", "8xL4"], "there is no file or folder 'nofile', and no model of this name"),
        (["no/such/config.json", "--cluster", "8xL4"], "there is no file or folder 'no/such/config.json'"),
        (["owner/Qwen3-8Bb", "--cluster", "8xL4"], "did you mean Qwen/Qwen3-8B or"),
        (["Qwen/Qwen3-8B", "--optimizer", "adam8bit", "--gpu", "L4"], "did you mean 'adamw8bit'?"),
        (["tests/x.py:job", "--lora", "8", "--gpu", "L4"], "lora cannot be given for a job"),
        (["tests", "--cluster", "8xL4"], "the folder tests has no config.json"),
        (["pyproject.tml", "--cluster", "8xL4"], "did you mean 'pyproject.toml'?"),
        ([__file__, "--cluster", "8xL4"], "test_plan.py:NAME for a job in it"),
        ([*SMALL, "--cluster", "8xL4", "--cluster", "8xH1000"], "there is no cluster named 'H1000'"),
        ([*SMALL, "--cluster", "8xL4", "--cluster", "8xL4"], "8xL4 is given 2 times"),
        ([*SMALL, "--cluster", "8xL4", "--cluster", "4xL4", "--save", "s.json"], "--save writes the answer for one"),
        (["jobs.py:job", "--cluster", "8xL4"], "there is no file 'jobs.py'"),
        (["--model", "config.json", "--cluster", "8xL4"], "config.json"),
        (["--layers", "4", "--heads", "4", "--cluster", "8xL4"], "a shape needs --hidden, --ffn, --vocab as well"),
        ([*SHAPE.split(), "--cluster", "8xL4"], "give --seq"),
        ([*SMALL, "--heads", "3", "--cluster", "8xL4"], "--hidden 256, --heads 3"),
        ([*SMALL, "--top-k", "2", "--cluster", "8xL4"], "--top-k 2 of no experts"),
        ([*SMALL, "--experts", "4", "--top-k", "5", "--cluster", "8xL4"], "--top-k 5 of 4 experts"),
        ([*SMALL, "--gpu", "TPU v5e"], "is a TPU, and atorch plans for CUDA, ROCm and CPU devices"),
        ([*SMALL, "--cluster", "1x3090", "--gpu", "3090"], "--cluster 1x3090 is given 2 times"),
        ([*SMALL, "--cluster", "8xL44"], "there is no cluster named 'L44'"),
        ([*SMALL, "--cluster", "8xL4", "--batch", "0"], "--batch"),
        ([*SMALL, "--cluster", "8xL4", "--objective", "joy"], "joy"),
        ([*SMALL, "--cluster", "8xL4", "--exclude", "fdsp"], "fsdp"),
        ([*SMALL, "--cluster", "8xL4", "--html", "no/such/folder/p.html"], "no/such/folder"),
        ([*SMALL, "--cluster", "8xL4", "--solve", "devices"], "give --batch"),
        ([*SMALL, "--cluster", "8xL4", "--solve", "batch", "--batch", "8"], "leave --batch (global_batch) out"),
        (["examples/plan_llama.py:llama_8b", "--cluster", "8xL4", "--solve", "rank"], "lora cannot be given for a job"),
        (["Qwen/Qwen3-8B", "--cluster", "8xL4", "--solve", "model"], "leave MODEL and its shape out"),
        ([*SMALL, "--cluster", "8xL4", "--solve", "size"], "size"),
        ([*SMALL, "--cluster", "8xL4", "--max-step", "2"], "give a time above 0 with its unit"),
        ([*SMALL, "--cluster", "8xL4", "--max-step", "0s"], "max_step is '0s'"),
        ([*SMALL, "--cluster", "8xL4", "--until", "0"], "until is '0'; give tokens as '15T'"),
        ([*SMALL, "--cluster", "8xL4", "--until", "-1T"], "until is '-1T'"),
        ([*SMALL, "--cluster", "8xL4", "--until", "3 epochs"], "until is '3 epochs'"),
        ([*SMALL, "--cluster", "8xL4", "--mtbf", "1h"], "give its length, as --until 15T"),
        ([*SMALL, "--cluster", "8xL4", "--until", "1T", "--mtbf", "1ms"], "training never gets ahead"),
        ([*SMALL, "--cluster", "8xL4", "--until", "1T", "--restart", "soon"], "restart is 'soon'"),
        ([*SMALL, "--cluster", "8xL4", "--prices", "none.json"], "none.json"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(arguments, told, capsys):
    assert plan(*arguments) == 1
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if "parameters, read in" not in line]
    assert output.out == ""
    assert told in output.err
    assert [line[:8] for line in lines] == ["atorch: "]


def test_precision_and_host_memory_are_allowed(tmp_path, capsys):
    data = tmp_path / "plan.json"
    some = ["--exclude", "tensor_parallel,sequence_parallel,context_parallel,pipeline_parallel"]
    options = ["--precision", "fp32", "--host-memory", "--include", "offload", "--json", str(data)]
    assert plan(*SMALL, *some, "--cluster", "8xH100-80GB", "--batch", "64", *options) == 0
    found = json.loads(data.read_text())
    assert not any(each.startswith(("half", "amp_native", "fp8")) for each in found["strategy"])
    assert found["estimate"]["on_host_bytes"] > 0
    assert "of its memory for each device" in capsys.readouterr().out


def test_nothing_waits_in_host_memory_where_that_is_forbidden_or_a_size_is_looked_for(tmp_path):
    data = tmp_path / "plan.json"
    some = ["--exclude", "tensor_parallel,sequence_parallel,context_parallel,pipeline_parallel"]
    for more in (["--no-host-memory"], ["--solve", "devices"]):
        assert plan(*SMALL, *some, "--cluster", "8xH100-80GB", "--batch", "64", *more, "--json", str(data)) == 0
        labels = json.loads(data.read_text())["candidates"]["label"]
        assert not any("offload" in label or "chunk" in label for label in labels)


def test_clusters_stand_beside_each_other(tmp_path, capsys):
    data, page = tmp_path / "plans.json", tmp_path / "plans.html"
    clusters = ["--cluster", "8xL4", "--cluster", "2x8xH100-80GB", "--cluster", "1xT4"]
    assert plan(*SMALL, *FEW, "--batch", "64", *clusters, "--json", str(data), "--html", str(page)) == 0
    assert Page(page.read_text()).text_of("th")[:3] == ["8xL4", "2x8xH100-80GB", "1xT4"]
    told = capsys.readouterr()
    assert all(name in told.out for name in ("8xL4", "2x8xH100-80GB", "1xT4", "tokens/s", "fastest"))
    assert told.err.count("parameters, read in") == 1
    found = json.loads(data.read_text())["clusters"]
    assert list(found) == ["8xL4", "2x8xH100-80GB", "1xT4"]
    assert found["2x8xH100-80GB"]["cluster"]["num_nodes"] == 2


def test_where_nothing_fits_on_one_of_several_the_others_are_told(tmp_path, capsys):
    small = ["--layers", "24", "--hidden", "2048", "--heads", "16", "--ffn", "8192", "--vocab", "32000"]
    command = [*small, "--seq", "2048", *FEW, "--no-host-memory", "--batch", "64"]
    assert plan(*command, "--cluster", "8xH100-80GB", "--cluster", "1xT4") == 0
    assert "nothing fits" in " ".join(capsys.readouterr().out.split())
    assert plan(*command, "--cluster", "1xT4", "--cluster", "1xV100-16GB") == 2
    told = capsys.readouterr().err
    assert "nothing fits on any of 2 clusters. 1xT4: " in told
    assert "1xV100-16GB: nothing fits" in told


def test_a_file_that_says_nothing_of_a_node_has_none_that_is_too_large(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ClusterSpec.load("1xL4").save("mine.json")
    assert [name for name, _ in clusters_of(["8xmine.json", "16xL4"])] == ["8xmine.json", "16xL4"]
    assert capsys.readouterr().err == "16xL4 is one node of 16 devices; 2x8xL4 would be 2 nodes of 8\n"


def test_what_fits_is_found_on_each_cluster(capsys):
    command = [*SMALL, *FEW, "--solve", "devices", "--batch", "64", "--cluster", "8xL4", "--cluster", "8xH100-80GB"]
    assert plan(*command) == 0
    assert "fits devices 1 devices 1" in " ".join(capsys.readouterr().out.split())


def test_whole_runs_stand_beside_each_other_with_their_price(tmp_path, capsys):
    data, offers = tmp_path / "plans.json", tmp_path / "prices.json"
    offers.write_text('{"date": "2026-01-02", "prices": [{"device": "L4", "per_hour": 0.5}]}')
    clusters = ["--cluster", "8xL4", "--cluster", "8xH100-80GB", "--batch", "64"]
    priced = ["--until", "1B", "--prices", str(offers), "--json", str(data)]
    assert plan(*SMALL, *FEW, *clusters, *priced) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in ("device-hours", "goodput", "one hour $4.00", "1M tokens $"))
    assert "no price is known for NVIDIA H100 80GB HBM3; give a price file" in said
    found = json.loads(data.read_text())
    assert found["schema"] == 1
    run = found["clusters"]["8xL4"]["training"]
    assert run["steps"] == -(-(10**9) // (64 * 128))
    assert run["cost"] == pytest.approx(run["device_hours"] * 0.5) == pytest.approx(run["hours"] * 4)
    assert found["clusters"]["8xH100-80GB"]["training"]["cost"] is None
    assert plan(*SMALL, *FEW, *clusters, "--objective", "cost") == 0
    assert "1M tokens $" in " ".join(capsys.readouterr().out.split())


def test_the_largest_model_of_the_catalogue_is_found(tmp_path, capsys):
    data, page = tmp_path / "plan.json", tmp_path / "plan.html"
    files = ["--json", str(data), "--html", str(page)]
    assert plan("--solve", "model", "--qlora", "--gpu", "rtx3090", "--seq", "2048", *files) == 0
    found = json.loads(data.read_text())["solved"]
    assert found["words"] in capsys.readouterr().out.replace("\n", " ")
    assert found["model"] in page.read_text()
    fitting = [row["num_params"] for row in found["tried"] if row["fits"]]
    assert max(fitting) == found["size"] < max(row["num_params"] for row in found["tried"])


def test_a_model_on_the_hub_is_planned_as_its_training_is_described(tmp_path, capsys):
    data = tmp_path / "plan.json"
    recipe = ["--lora", "16:q,v", "--optimizer", "adamw8bit", "--cross-entropy", "chunked", "--seq", "512"]
    assert plan("qwen/qwen3-8b", *recipe, "--gpu", "rtx3090", "--json", str(data)) == 0
    found = json.loads(data.read_text())
    assert "cross_entropy" in found["strategy"]
    assert found["num_params"] == pytest.approx(8.19e9, rel=0.01)
    assert "qwen/qwen3-8b, lora 16:q,v" in " ".join(capsys.readouterr().out.split())


def test_the_status_says_whether_it_fits_with_room_or_narrowly(tmp_path):
    command = ["Qwen/Qwen3-8B", "--lora", "16", "--optimizer", "adamw8bit", "--gpu", "rtx3090"]
    assert plan(*command, "--seq", "4096") == 0  # one that is as fast and needs all of the memory is not taken
    assert plan(*command, "--seq", "4096", "--reserve", "0.23") == 3
    assert plan(*command, "--seq", "4096", "--reserve", "0.23", "--gpu", "H100") == 0
    assert plan(*command, "--seq", "4096", "--max-step", "1s") == 2
    assert plan(*command, "--seq", "131072") == 2


def test_a_gpu_is_one_device_unless_it_is_counted(tmp_path):
    data = tmp_path / "plan.json"
    assert plan(*SMALL, *FEW, "--gpu", "RTX 3090", "--gpu", "2 x 3090", "--json", str(data)) == 0
    found = json.loads(data.read_text())["clusters"]
    assert [(name, answer["cluster"]["devices_per_node"]) for name, answer in found.items()] == [
        ("1xRTX 3090", 1),
        ("2 x 3090", 2),
    ]


@pytest.mark.parametrize(("columns", "more"), [("40", ["--top", "2"]), ("200", ["--verbose"])])
def test_what_is_printed_is_as_wide_as_the_terminal_and_as_long_as_asked(columns, more, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert plan(*SMALL, *FEW, "--batch", "64", "--cluster", "8xL4", *more) == 0
    shown = capsys.readouterr().out
    widths = [len(line) for line in shown.splitlines()]
    assert int(columns) / 2 < max(widths) <= int(columns)
    assert ("compositions, by axis" in " ".join(shown.split())) == ("--verbose" in more)


pytest.importorskip("transformers")

MOST_BYTES = 2 * 2**30
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}


def shape(kind, hidden, layers, heads, ffn):
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn}
    return {**kind, **sizes, "num_key_value_heads": 8}


MODELS = {
    "8B": (shape(LLAMA, 4096, 32, 32, 14336), "8x8xH100-80GB", 128),
    "70B": (shape(LLAMA, 8192, 80, 64, 28672), "8x8xH100-80GB", 256),
    "405B": (shape(LLAMA, 16384, 126, 128, 53248), "64x8xH100-80GB", 512),
    "8x7B": (shape(MIXTRAL, 4096, 32, 32, 14336), "8x8xH100-80GB", 256),
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_takes_little_memory(name, tmp_path):
    config, cluster, batch = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "atorch", "plan", "--model", str(tmp_path / "config.json"), "--seq", "8192"]
    command += ["--cluster", cluster, "--batch", str(batch), "--json", str(tmp_path / "plan.json")]
    with open(tmp_path / "said", "w") as said:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, preexec_fn=limited)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    told = (tmp_path / "said").read_text()
    assert child.returncode in (0, 3), told  # 3: it fits narrowly
    assert used.ru_maxrss * 1024 <= MOST_BYTES
    assert "reading" in told
    assert "searching" in told
    for each in json.loads((tmp_path / "plan.json").read_text())["simulated"]:
        assert each.get("peak_bytes", 0) > 0 or each["why_not"]


def limited():
    resource.setrlimit(resource.RLIMIT_DATA, (4 * MOST_BYTES, 4 * MOST_BYTES))
