"""The shipped files are complete, each figure has its source, and people may write their names as they do."""

import json
from dataclasses import replace

import pytest

from atorch.cluster.catalogue import FILES, _meanings, describing, usual_devices
from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.errors import ArgumentError
from atorch.units import GiB

NAMES = sorted(path.stem for path in FILES.glob("*.json"))
DATA = {name: json.loads((FILES / f"{name}.json").read_text()) for name in NAMES}
MACHINES = [name for name in NAMES if "machine" in DATA[name]]
LINK = LinkSpec(bandwidth=1e9, latency_s=1e-5)


def leaves(data, above=""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        elif not isinstance(value, str):
            yield above + key


def test_the_accelerators_of_today_are_described():
    assert {
        "v100_16g", "v100_32g", "a100_40g", "a100_80g", "a100_pcie_40g", "a100_pcie_80g", "h100_80g", "h100_96g",
        "h100_pcie_80g", "h100_nvl_94g", "h200_141g", "b200", "gb200", "mi300x", "l4", "l40s", "a10", "a10g", "t4",
        "rtx4090", "rtx5090", "cpu", "rtx3090", "rtx4080", "rtx5080", "rtx5090_d", "rtx_a6000", "a40", "rtx_6000_ada",
        "rtx_pro_6000", "gh200", "gb10", "mi250x", "mi325x", "mi355x", "gaudi3",
    } <= set(NAMES)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_and_those_of_a_file_are_in_it(name):
    data = DATA[name]
    cluster = ClusterSpec.load(name)
    figures = [place for place in leaves(cluster.to_json_data()) if not place.startswith("sources")]
    if cluster.device.capability is None:
        figures.remove("device.capability")
    assert {"device.memory_gib", "host_link.bandwidth", "host_memory_gib", "device.efficiency.matmul"} <= set(figures)
    assert [place for place in figures if place != "num_nodes" and not cluster.source_of(place)] == []
    for place in leaves(data):
        if place not in ("aliases", "device.efficiency.matmul_half_flops") and not place.startswith("sources"):
            above = [place, *(place.rsplit(".", cut)[0] for cut in range(1, place.count(".") + 1))]
            assert any(each in data["sources"] for each in above), f"{place} is given, and its source is the base's"


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_counted_as_a_whole(name):
    one, four = ClusterSpec.load(name), ClusterSpec.load(f"4x{name}")
    assert (one.num_nodes, four.num_nodes) == (1, 4)
    assert four == replace(one, num_nodes=4) == ClusterSpec.load(f"4x{one.devices_per_node}x{name}")
    assert ClusterSpec.load(DATA[name]["machine"].split()[-1]) == one, "as its cloud writes it"
    with pytest.raises(ArgumentError, match=rf"3 devices on a machine that has {one.devices_per_node}; leave"):
        ClusterSpec.load(f"4x3x{name}")


def test_no_two_files_answer_to_one_name():
    keys = list(_meanings())
    assert dict(keys) == dict(reversed(keys))


def test_what_a_base_has_is_kept_changed_or_taken_away():
    t4, l4 = ClusterSpec.load("t4"), ClusterSpec.load("l4")
    assert "bfloat16" not in t4.device.peak_flops
    assert t4.device.launch_s == l4.device.launch_s
    assert t4.source_of("device.launch_s") == l4.source_of("device.launch_s")
    assert t4.source_of("device.memory_bandwidth") == "NVIDIA T4 data sheet: 320 GB/s"
    assert usual_devices("64xH100-80GB") == 8
    assert usual_devices("3xp5.48xlarge") == 8


def test_a_file_of_ones_own_may_have_a_base(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h100_80g", "inter_node": {"bandwidth": 1e10}, "sources": {}}))
    assert ClusterSpec.load(path) == ClusterSpec.load("h100_80g", overrides={"inter_node.bandwidth": 1e10})
    path.write_text(json.dumps({"base": "h100_80"}))
    with pytest.raises(ArgumentError, match=r"mine.json has the base 'h100_80'; did you mean 'h100_80g'"):
        ClusterSpec.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_of_a_file_agree_with_each_other(name):
    device = ClusterSpec.load(name).device
    peaks = device.peak_flops
    assert peaks["float16"] >= peaks["float32"]
    assert peaks.get("float8", 2 * peaks["float16"]) == pytest.approx(2 * peaks["float16"], rel=0.01)  # both are dense
    assert device.type == "cpu" or device.efficiency.matmul_share(2 * 8192**3) > 0.9 * device.efficiency.matmul


@pytest.mark.parametrize(
    ("written", "nodes", "devices", "device"),
    [
        ("8x8xH100-80GB", 8, 8, "NVIDIA H100 80GB HBM3"), ("8xH100-80GB", 1, 8, "NVIDIA H100 80GB HBM3"),
        ("h100_80g", 1, 8, "NVIDIA H100 80GB HBM3"), ("NVIDIA H100 80GB HBM3", 1, 8, "NVIDIA H100 80GB HBM3"),
        ("16 x 4 × a100 sxm4 40gib", 16, 4, "NVIDIA A100-SXM4-40GB"),
        ("2X1XV100-SXM2-16GB", 2, 1, "Tesla V100-SXM2-16GB"), ("4x4090", 1, 4, "NVIDIA GeForce RTX 4090"),
        ("RTX_4090", 1, 8, "NVIDIA GeForce RTX 4090"), ("B200-180GB", 1, 8, "NVIDIA B200"),
        ("8xMI300X", 1, 8, "AMD Instinct MI300X"), ("H200", 1, 8, "NVIDIA H200"),
        ("64xH100", 1, 64, "NVIDIA H100 80GB HBM3"), ("16x8xH100-96GB-HBM2e", 16, 8, "NVIDIA H100 96GB HBM2e (500 W)"),
        ("8xA100-PCIe-80GB", 1, 8, "NVIDIA A100 80GB PCIe"), ("NVIDIA A100 80GB PCIe", 1, 8, "NVIDIA A100 80GB PCIe"),
        ("8xL40S", 1, 8, "NVIDIA L40S"), ("2x72xGB200", 2, 72, "NVIDIA GB200"),
        ("p5.48xlarge", 1, 8, "NVIDIA H100 80GB HBM3"), ("16 x p4d.24xlarge", 16, 8, "NVIDIA A100-SXM4-40GB"),
        ("32xa3-megagpu-8g", 32, 8, "NVIDIA H100 80GB HBM3"),
        ("4xStandard_ND96isr_H100_v5", 4, 8, "NVIDIA H100 80GB HBM3"),
        ("2xBM.GPU.H100.8", 2, 8, "NVIDIA H100 80GB HBM3"),
        ("18xStandard_ND128isr_NDR_GB200_v6", 18, 4, "NVIDIA GB200"), ("CPU", 1, 2, "CPU"),
        ("1x3090", 1, 1, "NVIDIA GeForce RTX 3090"), ("GeForce RTX 3090 24GB", 1, 8, "NVIDIA GeForce RTX 3090"),
        ("RTX 5090D", 1, 8, "NVIDIA GeForce RTX 5090 D"), ("a6000", 1, 8, "NVIDIA RTX A6000"),
        ("RTX 6000 Ada", 1, 8, "NVIDIA RTX 6000 Ada Generation"), ("DGX Spark", 1, 1, "NVIDIA GB10"),
        ("RTX PRO 6000", 1, 8, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("GH200", 1, 1, "NVIDIA GH200 480GB"), ("Intel Gaudi 3", 1, 8, "Intel Gaudi 3"),
    ],
)  # fmt: skip
def test_a_name_is_read_as_people_write_it(written, nodes, devices, device):
    cluster = ClusterSpec.load(written)
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device.name) == (nodes, devices, device)


@pytest.mark.parametrize(
    ("written", "arguments", "told"),
    [
        ("h10", {}, "no cluster named 'h10', .*; say which: h100_80g, h100_96g"),
        ("8xA100", {}, "no cluster named 'A100', .*; say which: a100_40g, a100_80g, a100_pcie_40g, a100_pcie_80g"),
        ("V100", {}, "say which: v100_16g, v100_32g"),
        ("8xH100-8GB", {}, "no cluster named 'H100-8GB', .*; did you mean 'h100_80g'"),
        ("TPU v5", {}, "'TPU v5' is a TPU, and atorch plans for CUDA, ROCm and CPU devices"),
        ("4xv5e", {}, "'v5e' is a TPU"),
        ("RTX 3095", {}, "no cluster named 'RTX 3095', .*; did you mean 'rtx3090'"),
        ("2x4x8xL4", {}, "begins with 2 x 4 x 8; one count is of devices, two are of nodes"),
        ("0xL4", {}, "begins with 0"),
        ("8xL4", {"devices_per_node": 4}, "devices_per_node 8, and 4 is given"),
        ("L4", {"num_nodes": 0}, "num_nodes is 0; it is a whole number"),
        ("mine.json", {}, "there is no cluster file .*mine.json"),
        ("L4", {"overrides": {"intra_node.bandwith": 1e9}}, "unknown intra_node.bandwith; did you mean 'bandwidth'"),
        ("L4", {"overrides": {"device.name.first": 1}}, "has 'device.name.first', and 'name' is not an object"),
        ("L4", {"overrides": {"device.memory_gib": "much"}}, "device.memory_gib = 'much'"),
    ],
)
def test_a_fault_is_named(written, arguments, told):
    with pytest.raises(ArgumentError, match=told):
        ClusterSpec.load(written, **arguments)


def test_files_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = ClusterSpec.load("2xL4")
    cluster.save("mine.json")
    assert ClusterSpec.load("mine.json") == cluster
    assert ClusterSpec.load("4x1xmine.json") == replace(cluster, num_nodes=4, devices_per_node=1)
    assert ClusterSpec.load(tmp_path / "mine.json", num_nodes=3).world_size == 6
    cluster.save("2xmine.json")  # a file that is there is not taken apart
    assert ClusterSpec.load("2xmine.json", num_nodes=3).num_nodes == 3
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"bad\.json.: line 1 column 2"):
        ClusterSpec.load("bad.json")


def test_overrides_are_told_as_such():
    cluster = ClusterSpec.load("8x8xA100-80GB", overrides={"inter_node.bandwidth": 12.5e9, "host_link": {
        "bandwidth": 1e10, "latency_s": 0,
    }})  # fmt: skip
    assert cluster.inter_node == replace(ClusterSpec.load("a100_80g").inter_node, bandwidth=12.5e9)
    assert (
        cluster.source_of("inter_node.bandwidth") == cluster.source_of("host_link.bandwidth") == "given by the caller"
    )
    assert "NCCL" in cluster.source_of("inter_node.latency_s")


@pytest.mark.parametrize(
    ("name", "memory_gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.3, "h100_80g"), ("NVIDIA A100-SXM4-40GB", 39.4, "a100_40g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_80g"), ("Tesla V100-SXM2-16GB", 15.8, "v100_16g"),
        ("NVIDIA L4", 22.0, "l4"), ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA H100 PCIe", 79.1, "h100_pcie_80g"), ("NVIDIA H100 NVL", 93.1, "h100_nvl_94g"),
        ("NVIDIA L40S", 44.5, "l40s"), ("NVIDIA A100 80GB PCIe", 79.2, "a100_pcie_80g"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100_pcie_40g"), ("NVIDIA A10", 22.1, "a10"), ("NVIDIA A10G", 22.0, "a10g"),
        ("Tesla T4", 14.6, "t4"), ("NVIDIA GB200", 184.3, "gb200"), ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"), ("NVIDIA GeForce RTX 5090 D", 31.4, "rtx5090_d"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx3090"), ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA RTX A6000", 47.5, "rtx_a6000"), ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx_6000_ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0, "rtx_pro_6000"), ("NVIDIA GB10", 119.6, "gb10"),
        ("NVIDIA A40", 44.4, "a40"), ("AMD Instinct MI355X", 288.0, "mi355x"), ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA GH200 144G HBM3e", 141.0, None),
        ("NVIDIA L40", 44.5, None),
    ],
)  # fmt: skip
def test_a_device_finds_its_file(name, memory_gib, known):
    device = DeviceSpec(type="cuda", name=name, memory_bytes=memory_gib * GiB, capability=(9, 1))
    plain = ClusterSpec(device=device, num_nodes=2, devices_per_node=4, intra_node=LINK, inter_node=LINK)
    found = describing(plain)
    if known is None:
        assert found is None
    else:
        file = ClusterSpec.load(known, num_nodes=2, devices_per_node=4)
        own = replace(file.device, memory_bytes=device.memory_bytes, capability=(9, 1))
        assert found == replace(file, device=own, host_memory_bytes=plain.host_memory_bytes)
        assert "driver" in found.source_of("device.memory_gib")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_figures_of_the_files(name):
    cluster = ClusterSpec.load(name)
    page = (FILES.parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    device, links = cluster.device, (cluster.intra_node, cluster.inter_node, cluster.host_link)
    if name in MACHINES:
        rate = (cluster.inter_leaf or cluster.inter_node).bandwidth * cluster.devices_per_node * 8 / 1e9
        assert f"| `{name}` | {cluster.devices_per_node} × {device.name} | {rate:,.0f} |\n" in page
        return
    peak = device.peak_flops.get("bfloat16", device.peak_flops["float16"])
    figures = (
        f"{device.memory_bytes / GiB:.1f} GiB", f"{peak / 1e12:,.4g}", f"{device.efficiency.matmul:.0%}",
        f"{device.memory_bandwidth / 1e9:,.0f}", *(f"{link.bandwidth / 1e9:.3g}" for link in links),
    )  # fmt: skip
    assert f"| `{name}` | {device.name} | {' | '.join(figures)} |\n" in page
