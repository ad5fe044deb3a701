"""Jobs with a published answer: layouts in atorch's methods, and when a choice holds."""

import math
from dataclasses import replace

import pytest

from benchmarks.known_jobs import SPEED, Job, judged, known_jobs, shown
from benchmarks.published.strategies import strategy_of
from tests.benchmarks.test_rows import row


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {},
            "parallel_mode(tensor 2, data 4, pipeline 2) + half(bf16) + sequence_parallel(megatron) + tensor_parallel",
        ),
        ({}, "pipeline_parallel + zero1 + micro_batch(size=2)"),
        ({"vpp": "4"}, "pipeline_parallel(interleaved, interleave=4)"),
        ({"fsdp": "FSDP2", "tp": "1", "pp": "1", "sp": "", "dp": ""}, "fsdp + micro_batch(size=2, each)"),
        ({"fsdp": "HSDP", "tp": "1", "pp": "1", "sp": "", "dp": ""}, "parallel_mode(zero 8, data 2)"),
        ({"ckpt": "full"}, " + checkpoint + "),
        ({"ckpt": "selective"}, "checkpoint(selective=True)"),
        ({"precision": "fp8"}, " + fp8 + "),
        ({"compile": "True"}, " + compile + "),
        ({"cp": "2", "dp": ""}, "context_parallel"),
        ({"zero": "0"}, " + ddp + "),
    ],
)
def test_a_layout_in_atorchs_methods(given, words):
    assert words in str(strategy_of(row(**given)))


def test_every_job_has_a_source_and_a_measured_speed():
    jobs = list(known_jobs())
    assert len(jobs) >= 20
    assert all(each.source and (each.result("step_time_s") or each.result("tok_s_gpu")) for each in jobs)
    assert len({each.name for each in jobs}) == len(jobs)


def test_a_choice_holds_where_it_is_no_slower_than_what_was_published():
    job = Job(
        name="a", source="b", measured_s=1.0, estimated_s=1.1, published_s=1.0, published_fits=True, chosen_s=1.01
    )
    assert job.holds == (True, True)
    assert replace(job, chosen_s=1.2).holds == (True, False)
    assert replace(job, chosen_s=1.2, published_fits=False).holds == (True, True)  # nobody could run it
    assert replace(job, estimated_s=1.0 + SPEED + 0.01).holds == (False, True)
    refused = Job(name="a", source="b", measured_s=1.0, refused="strange")
    assert refused.holds == (False, False)
    assert refused.error == -1
    assert math.isnan(refused.gain)
    assert "strange" in shown(refused)


def test_a_job_is_estimated_at_its_layout_and_planned_for():
    (small,) = (each for each in known_jobs() if each.name == "Megatron 22B, 8 A100")
    job = judged(small, plans=True)
    assert abs(job.error) < 0.3
    assert "tensor 8" in job.published
    assert job.chosen_s < 1.1 * job.published_s
    assert "chosen" in shown(job)
