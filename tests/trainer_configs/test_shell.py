"""Shell scripts are read as bash reads them, and nothing in them runs."""

import shutil
import subprocess

import pytest

from atorch.errors import ArgumentError
from atorch.trainer_configs import Source, target
from atorch.trainer_configs.shell import read_script

SCRIPTS = {
    "variables": 'A=2\nB="$A x"\nexport C=${B:-none}\nrun $A "$B" ${C} \'$A\' ${D:-d e} "${D-f g}" ${A:+set} ${D:+set}',
    "arrays": 'A=(--x 1 "b c")\nA+=("--y 2")\nB=("${A[@]}" --z)\nrun ${A[@]} end "${B[@]}" ${A[1]} $A',
    "nothing": 'A=()\nB=\nrun "${A[@]}" $B "$B" ${A[*]}',
    "text": 'A="--x 1 \\\n  --y 2"\nA="$A --z"\nA+=" --w"\nrun $A',
    "lines": "run a \\\n  b # c\n# run d\nrun 'e # f' g#h",
    "numbers": "N=3\nG=8\nW=$(($N * G))\nX=$((W / 5 % 3 - (2 + 1)))\nrun $W $X $((1+1))",
    "if": 'A=b\nif [ "$A" == c ]; then X=1; elif [[ $A = b ]] && [ 3 -gt 2 ]; then X=2; else X=3; fi\nrun $X',
    "not": 'if ! [ -z "$Q" ]; then X=1; else X=2; fi\nif [[ -n $Q || 1 -eq 1 ]]; then Y=1; fi\nrun $X $Y',
    "else": "A=1\nif [ $A -eq 0 ]\nthen X=1\nelse\n  if [ $A -lt 5 ]; then X=4; fi\nfi\nrun $X",
    "sum": "A=1\nif (( A > 0 )); then Y=5; fi\nif (( $A == 2 )); then Y=6; fi\nrun $Y",
    "case": "A=7B\ncase $A in\n  1B|2B) X=1 ;;\n  7*) X=2\n  ;;\n  *) X=3 ;;\nesac\nrun $X",
    "here": "cat > /dev/null <<EOT\nrun not this $(\nEOT\nrun this 2>&1 > /dev/null",
    "alone": "A=1 B='2 3' run x\nrun ${A:-unset}",
    "joined": 'A=5\nrun a${A}b --x=$A/c"d e"$A;run y&&run z',
    "default": ': ${A:=7}\nB=${C:-${A}}\nrun $A "$B" ${1:-first}',
    "function": 'N=2\nstart() {\n  run "$N"\n}\nstart',
    "eval": 'C="run --a 1"\neval "$C --b"',
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_runs_it(name):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    text = SCRIPTS[name]
    shown = subprocess.run(
        [bash], input='exec 3>&1; run() { printf "%s\\n" "$@" "--" >&3; }\n' + text + "\n",
        capture_output=True, text=True, timeout=20, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    ran = [block.split("\n")[:-1] for block in shown.stdout.split("--\n")[:-1]]
    read = []
    for command in read_script(text).commands:
        words = list(command.words)
        words = words[1].split() if words[:1] == ["eval"] else words
        read += [words[1:]] if words[:1] == ["run"] else []
    assert read == ran


def test_what_only_a_run_tells_stays_as_it_is_written():
    (command,) = read_script("run $1 $(hostname) `date` ${X##*/} ${#A} $((X + 1)) $HOME").commands
    assert command.words == ("run", "$1", "$(hostname)", "`date`", "${X##*/}", "${#A}", "$((X + 1))", "$HOME")


def test_a_branch_of_an_unknown_condition_has_no_effect():
    script = read_script("X=0\nif [ $(whoami) = root ]; then X=1; else X=2; fi\nif [ -d /tmp ]; then X=3; fi\nrun $X")
    assert script.commands[-1].words == ("run", "0")


def test_slurm_says_how_many_nodes_there_are():
    script = read_script("#SBATCH --nodes=48\n#SBATCH --gres=gpu:8\nN=$SLURM_NNODES\nrun $N $SLURM_GPUS_ON_NODE")
    assert script.main_command.words == ("run", "48", "8")


def test_nothing_runs(tmp_path):
    path = tmp_path / "made"
    for text in (
        f"touch {path}",
        f"X=$(touch {path})",
        f"`touch {path}`",
        f"A=$((`touch {path}`))",
        f"<(touch {path})",
    ):
        read_script(text)
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60,
        "A=(x x x x)\n" + "A=(${A[@]} ${A[@]})\n" * 60,
        "A=(" * 10_000,
        "case a in a) " * 10_000,
        "x" * 200_000,
    ],
    ids=["word", "array", "nested arrays", "nested cases", "long"],
)
@pytest.mark.timeout(60)
def test_a_script_that_grows_without_bound_is_refused(text):
    with pytest.raises(ArgumentError):
        read_script(text)


def test_a_file_that_only_sets_variables_has_its_words(tmp_path):
    path = tmp_path / "model.sh"
    path.write_text("MODEL_ARGS=(\n  --num-layers 4 # blocks\n  --hidden-size 8\n)\nA=1\n")
    source = Source.of(str(path))
    assert (source.command, source.variables["MODEL_ARGS"]) == ((), ("--num-layers", "4", "--hidden-size", "8"))


def test_a_script_takes_variables_and_arguments(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "TP=${TP:-1}\nif [ $1 = 8B ]; then N=32; else N=2; fi\nshift\n"
        'torchrun pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers $N --seq-length ${2:-64} "$@" $5 $1_x'
    )
    made = Source.of(f"TP=2 bash {path} 8B --bf16 128")
    assert made.words == (
        *("torchrun", "pretrain_gpt.py", "--tensor-model-parallel-size", "2", "--num-layers", "32"),
        *("--seq-length", "128", "--bf16", "128", "$5", "$1_x"),
    )
    assert made.folder == tmp_path
    assert Source.of(str(path)).words[2:5] == ("--tensor-model-parallel-size", "1", "--num-layers")
    setup = target("megatron").read(made)
    assert [entry.key for entry in setup.entries if "only a run tells what it holds" in entry.note] == ["$5", "$1_x"]
