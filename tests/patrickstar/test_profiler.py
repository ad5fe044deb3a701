"""What a profile holds, and its file."""

import json
from pathlib import Path

import pytest

from atorch.errors import ArgumentError, CheckpointError
from atorch.patrickstar.profiler import Profile, Profiler, TierInterval
from tests.patrickstar.recorded import recorded


def test_a_recording_has_what_happened_between_start_and_end(tmp_path: Path) -> None:
    watch = Profiler()
    watch.works_on("cuda:0", 1000)
    watch.holds("PARAM_FP16", 0, "CPU", 64)
    watch.phase("forward")  # not recorded
    watch.moment(10)
    watch.start()
    watch.phase("forward")
    watch.holds("PARAM_FP16", 0, "GPU", 64)
    watch.moment(100)
    watch.holds("PARAM_FP16", 0, "GPU", 0)
    watch.phase("backward")
    watch.moment(40)
    watch.end()
    watch.moment(50)
    watch.save(tmp_path / "profile.pkl")

    data = json.loads((tmp_path / "profile.pkl").read_text())
    assert (data["format"], data["version"]) == ("atorch profile", 1)
    profile = Profile.load(tmp_path / "profile.pkl")
    assert profile.device == "cuda:0"
    assert profile.budget_bytes == 1000
    assert [(each.moment, each.name) for each in profile.phases] == [(0, "forward"), (1, "backward")]
    device = [(each.moment, each.total_bytes, each.chunk_bytes) for each in profile.memory if each.tier == "GPU"]
    assert device == [(1, 100, 64), (2, 40, 0)]
    host = [each for each in profile.memory if each.tier == "CPU"]
    assert all(each.chunk_bytes == 64 < each.total_bytes for each in host)
    assert [(each.moment, each.tier, each.num_bytes) for each in profile.chunks] == [
        (0, "CPU", 64),  # where it was when the recording began
        (0, "GPU", 64),
        (1, "GPU", 0),
    ]
    times = [each.time_s for each in (*profile.phases, *profile.memory, *profile.chunks)]
    assert all(0 <= each <= profile.end_s for each in times)


def test_another_engine_has_other_chunks() -> None:
    watch = Profiler()
    watch.works_on("cpu", None)
    watch.holds("PARAM_FP16", 7, "CPU", 64)
    watch.works_on("cpu", None)
    watch.start()
    watch.moment(0)
    watch.end()
    assert watch.recorded().chunks == ()
    assert watch.recorded().memory[1].chunk_bytes == 0


def test_a_second_recording_is_a_fresh_one() -> None:
    watch = Profiler()
    for _ in range(2):
        watch.start()
        watch.phase("forward")
        watch.moment(1)
        watch.end()
    assert len(watch.recorded().phases) == 1
    assert watch.recorded().memory[-1].moment == 1


def test_calls_out_of_order_and_an_empty_recording_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Profiler()
    with pytest.raises(ArgumentError, match=r"without profiler\.start"):
        watch.end()
    with pytest.raises(ArgumentError, match="no profile yet"):
        watch.save(tmp_path / "profile.json")
    watch.start()
    with pytest.raises(ArgumentError, match=r"call profiler\.end first"):
        watch.start()
    with pytest.raises(ArgumentError, match="no profile yet"):
        watch.save(tmp_path / "profile.json")
    watch.end()
    watch.recorded()
    assert "the profile is empty" in caplog.text


def test_a_chunk_is_on_the_device_while_it_has_a_copy_there() -> None:
    profile = recorded(chunks=3, room=1, steps=1, stepped_on_device=1)
    stays = list(profile.stays("PARAM_FP16"))
    assert {stay.tier for stay in stays if stay.chunk == 2} == {"GPU"}
    first = sorted(stay for stay in stays if stay.chunk == 0)
    assert [stay.tier for stay in first] == ["GPU", "CPU", "GPU", "CPU"]
    assert all(one.end_s == other.start_s for one, other in zip(first, first[1:], strict=False))
    assert (first[0].start_s, first[-1].end_s) == (0.0, profile.end_s)
    assert list(profile.stays("MOMENTUM")) == [
        TierInterval(0, 0.0, profile.end_s, "CPU"),
        TierInterval(1, 0.0, profile.end_s, "CPU"),
        TierInterval(2, 0.0, profile.end_s, "GPU"),
    ]


def test_phases_end_where_the_next_begins() -> None:
    profile = recorded(steps=1)
    spans = profile.spans()
    assert [span.name for span in spans] == ["forward", "backward", "optimizer", "other"]
    assert all(one.end_s == other.start_s for one, other in zip(spans, spans[1:], strict=False))
    assert spans[-1].end_s == profile.end_s


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x80\x04\x95 a pickle", "pickles, which are not read"),
        (b'{"version": 2}', "version is 2"),
        (b'{"chunks": [[0, 0.0, "PARAM_FP16", 0, "TPU", 1]]}', r"chunks\.0\.4 is 'TPU'"),
    ],
)
def test_a_file_that_is_no_profile_is_told_with_the_place(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "profile.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        Profile.load(tmp_path / "profile.pkl")


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no profile"):
        Profile.load(tmp_path / "nowhere.json")
    with pytest.raises(CheckpointError, match="cannot be written"):
        recorded().save(tmp_path / "no folder" / "profile.json")


def test_times_can_begin_with_the_first_phase() -> None:
    late = recorded(steps=1)
    shift = 10.0
    late = late.model_copy(
        update={
            "end_s": late.end_s + shift,
            "phases": tuple(each._replace(time_s=each.time_s + shift) for each in late.phases),
            "memory": tuple(each._replace(time_s=each.time_s + shift) for each in late.memory),
            "chunks": tuple(each._replace(time_s=each.time_s + shift * (each.moment > 0)) for each in late.chunks),
        }
    )
    early = late.from_first_phase()
    assert early.spans()[0].start_s == 0.0
    assert early.end_s == pytest.approx(recorded(steps=1).end_s)
    assert {stay.start_s for stay in early.stays("MOMENTUM")} == {0.0}
