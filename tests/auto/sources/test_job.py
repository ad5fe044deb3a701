"""Jobs that a command line names."""

import sys

import pytest

from atorch.auto import sources
from atorch.errors import ArgumentError

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
