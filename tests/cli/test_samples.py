"""Samples whose form a config alone does not tell."""

import pytest
import transformers

from atorch.cli.config import SampleForm
from atorch.errors import ArgumentError
from tests.cli.test_config import LLAVA


@pytest.fixture
def form(tmp_path):
    config = transformers.LlavaConfig.from_dict({name: LLAVA[name] for name in LLAVA if name != "model_type"})
    return SampleForm(config, transformers.LlavaForConditionalGeneration, tmp_path)


def test_as_many_tokens_stand_for_an_image_as_it_has_features(form):
    assert (form.batch(20)["input_ids"] == 99).sum() == 16


def test_a_sample_has_room_for_its_image(form):
    with pytest.raises(ArgumentError, match="an image takes 16 tokens of .*; give --seq 17 at least"):
        form.batch(16)
