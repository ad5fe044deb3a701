"""`atorch strategy show` prints what is in a strategy file, and one line about what is none."""

from atorch.auto.strategy import Strategy
from atorch.cli import main


def test_it_shows_methods_and_knobs(tmp_path, capsys):
    file = tmp_path / "s.json"
    Strategy.of(["parallel_mode", ("amp_native", "bf16")]).save(str(file))
    assert main(["strategy", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("parallel_mode", "amp_native", "bf16", "precision"))


def test_a_file_that_is_no_strategy_is_one_line(tmp_path, capsys):
    file = tmp_path / "s.json"
    file.write_text("[1, 2")
    assert main(["strategy", "show", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("atorch: ")
    assert told.count("\n") == 1
