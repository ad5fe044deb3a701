"""The jobs that configs of Hugging Face's models mean, and those that a command line names."""

import json
import sys

import pytest
import torch

from atorch.auto import sources
from atorch.auto.sources import config
from atorch.errors import ArgumentError

SMALL = {
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
LLAMA = {"model_type": "llama", **SMALL, "torch_dtype": "bfloat16"}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 64, "vocab_size": 100, "decoder_start_token_id": 0}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_source_positions": 50,
    "vocab_size": 51900,
}
BART = {**WHISPER, "model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": 100}
CLASSIFIED = {**BERT, "architectures": ["BertForSequenceClassification"]}
NAMELESS = {**BERT, "architectures": ["BertModel"]}  # without a loss
PART = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", **PART, "vocab_size": 100},
    "vision_config": {"model_type": "clip_vision_model", **PART, "image_size": 32, "patch_size": 8},
    "image_token_id": 99,
    "vision_feature_layer": -1,
}
VIT = {"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8}
RESNET = {"model_type": "resnet"}


@pytest.fixture
def written(tmp_path):
    """A function that writes a config and returns its path."""

    def write(data):
        path = tmp_path / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


@pytest.mark.parametrize(
    ("data", "seq", "name", "shape"),
    [
        (LLAMA, 16, "LlamaForCausalLM", (1, 16)),
        (BERT, 16, "BertForMaskedLM", (1, 16)),
        (T5, 16, "T5ForConditionalGeneration", (1, 16)),
        (VIT, None, "ViTForImageClassification", (1, 3, 32, 32)),
        (RESNET, None, "ResNetForImageClassification", (1, 3, 224, 224)),
        (WHISPER, 16, "WhisperForConditionalGeneration", (1, 80, 100)),
        (BART, 16, "BartForConditionalGeneration", (1, 16)),
        (CLASSIFIED, 16, "BertForSequenceClassification", (1, 16)),
        (NAMELESS, 16, "BertLMHeadModel", (1, 16)),
        (LLAVA, 20, "LlavaForConditionalGeneration", (1, 20)),
    ],
)
def test_a_config_means_a_job(data, seq, name, shape, written):
    job = config.job_of(written(data), seq)
    model = job["model"]()
    assert type(model).__name__ == name
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = job["sample_batch"]
    assert next(iter(batch.values())).shape == shape
    with torch.no_grad():
        assert job["loss_func"](batch, model(**batch)).dim() == 0


@pytest.mark.parametrize(("most", "length"), [(2048, 2048), (131072, 4096)])
def test_a_sample_is_as_long_as_the_model_takes_and_no_longer_than_usual(most, length, written, caplog):
    job = config.job_of(written({**LLAMA, "max_position_embeddings": most}), None)
    assert job["sample_batch"]["input_ids"].shape == (1, length)
    assert f"--seq is not given: {length:,} tokens a sample" in caplog.text


@pytest.mark.parametrize(
    ("data", "seq", "told"),
    [
        ("{", 16, "line 1 column 2: Expecting property name"),
        ("[]", 16, "holds no object"),
        ({**LLAMA, "model_type": "llamma"}, 16, "does not have; did you mean 'llama'?"),
        ({"model_type": "gpt2", "n_positions": 64}, 65, "a table of 64 positions; give --seq 64 at most"),
        ({**LLAMA, "num_attention_heads": 7}, 16, "ValueError: The hidden size (64) is not a multiple"),
        ({**LLAMA, "hidden_size": "wide"}, 16, "is not a config of a llama that transformers"),
        ({"hidden_size": 64}, 16, "has no model_type, so it is not a model's config"),
        (VIT, 16, "reads images; leave --seq out"),
        ({"model_type": "wav2vec2"}, 16, "name no class of transformers that has a loss; name one"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, 16, "which takes input_values for CTC: no"),
        ({**WHISPER, "max_target_positions": 40}, 41, "a table of 40 positions; give --seq 40 at most"),
        ({**BERT, "model_type": "roberta", "max_position_embeddings": 66}, 65, "give --seq 64 at most"),
        ({**BERT, "max_position_embeddings": 64}, 65, "a table of 64 positions; give --seq 64 at most"),
        (LLAVA, 16, "; give --seq 17 at least"),  # an image takes 16 tokens
    ],
)
def test_what_means_no_job_is_named(data, seq, told, written):
    with pytest.raises(ArgumentError) as error:
        config.job_of(written(data), seq)
    assert told in str(error.value)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_computes_positions_takes_longer_samples_than_it_was_made_for(written):
    job = config.job_of(written({**LLAMA, "max_position_embeddings": 8}), 16)
    assert job["sample_batch"]["input_ids"].shape == (1, 16)


TEXT = """
from dataclasses import dataclass
import neighbour

@dataclass
class Model:
    width: int

fixed = {"model": Model, "sample_batch": neighbour.BATCH}

def flexible(seq=4):
    return {"model": Model, "sample_batch": [0] * seq}

def number():
    return 3

def empty():
    return {"model": Model}
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file with jobs, and one beside it."""
    (tmp_path / "neighbour.py").write_text("BATCH = [7]\n")
    (tmp_path / "jobs_of_a_test.py").write_text(TEXT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return str(tmp_path / "jobs_of_a_test.py")


def test_a_dict_a_function_and_a_module_are_jobs(path, tmp_path, monkeypatch):
    fixed, flexible = sources.load(f"{path}:fixed"), sources.load(f"{path}:flexible")
    assert sources.arguments_of(fixed, "fixed", None)["sample_batch"] == [7]
    assert sources.arguments_of(flexible, "flexible", None)["sample_batch"] == [0, 0, 0, 0]
    assert sources.arguments_of(flexible, "flexible", 2)["sample_batch"] == [0, 0]
    assert (sources.takes_seq(fixed), sources.takes_seq(flexible)) == (False, True)

    fixed = sources.load(f"{path}:fixed")
    sources.arguments_of(fixed, "fixed", None).clear()
    assert sources.arguments_of(fixed, "fixed", None)

    monkeypatch.syspath_prepend(tmp_path)
    assert callable(sources.load("jobs_of_a_test:flexible"))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("jobs_of_a_test.py", "a job is FILE.py:NAME"),
        (":job", "a job is FILE.py:NAME"),
        ("none.py:job", "there is no file 'none.py'"),
        ("no_such_package.jobs:job", "there is no module 'no_such_package.jobs'"),
        ("{path}:flexibel", "did you mean 'flexible'?"),
    ],
)
def test_what_is_not_there_is_named(named, told, path):
    with pytest.raises(ArgumentError) as error:
        sources.load(named.format(path=path))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "seq", "told"),
    [
        ("number", None, "the job number is 3; a job is"),
        ("empty", None, "the job empty has no sample_batch"),
        ("fixed", 8, "takes no seq; let it be a function with a parameter seq"),
    ],
)
def test_what_is_no_job_is_named(name, seq, told, path):
    found = sources.load(f"{path}:{name}")
    with pytest.raises(ArgumentError) as error:
        sources.arguments_of(found, name, seq)
    assert told in str(error.value)
