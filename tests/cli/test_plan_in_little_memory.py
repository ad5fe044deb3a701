"""The default plan of models of any size fits into the memory of a small machine, and says what it does."""

import json
import os
import resource
import subprocess
import sys

import pytest

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
