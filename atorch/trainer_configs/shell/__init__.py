"""Commands of a shell script, found by reading it: nothing is run, and no other file is opened.

Assignments, arrays, `export`, `${NAME:-default}`, integer arithmetic, `if` and `case` are followed. What only a run can
tell stays as it is written, such as `$1` and `$(nvidia-smi)`: a word with a `$` is not known. The body of a loop or of
a function is read once, a branch whose condition is not known not at all.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from atorch.errors import ArgumentError
from atorch.files import FileKind, read_bytes
from atorch.trainer_configs.shell.words import ASSIGNMENT, MAX_DEPTH, Part, ShellWord, tokens_of, word_at

if TYPE_CHECKING:
    from atorch.trainer_configs.source import Source

MAX_CHARACTERS, MAX_EXPANDED, MAX_NUMBER = 2**17, 2**21, 10**15
SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
FORMAT = FileKind("script", ArgumentError, max_bytes=MAX_CHARACTERS)
_RESERVED = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "select", "while", "until", "do", "done", "case", "esac", "{", "}")
)
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
_PARAMETER = re.compile(r"(\w+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
_SLURM = re.compile(r"^#SBATCH\s+-{1,2}(nodes|N|ntasks-per-node|gpus-per-node|gres)[= ]\s*([\w:]+)", re.MULTILINE)
_SLURM_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nodes", "N"), ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    **dict.fromkeys(("gpus-per-node", "gres"), ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
_SUM = re.compile(r"(?!.*\d[A-Za-z_])[\w\s+*/%()-]{1,200}", re.ASCII | re.DOTALL)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge},
    **{"-lt": operator.lt, "-le": operator.le},
}


@dataclass(frozen=True)
class Command:
    """A command that the script would run: its words, and the variables that are set for it alone."""

    words: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Script:
    commands: tuple[Command, ...]
    variables: Mapping[str, tuple[str, ...]]
    """The values at the end; several for an array."""

    @property
    def main_command(self) -> Command:
        """The longest command that does not only print its words."""
        run = (command for command in self.commands if command.words[:1] not in (("echo",), ("printf",)))
        return max(run, key=lambda command: len(command.words), default=Command((), {}))

    @property
    def main_words(self) -> tuple[str, ...]:
        """The words of `main_command`, after the variables that are set for it alone."""
        command = self.main_command
        return (*(f"{name}={value}" for name, value in command.variables.items()), *command.words)


def read_script(text: str, given: Mapping[str, Sequence[str]] | None = None) -> Script:
    """The commands and variables of a script or of one command line.

    Args:
        given: variables that are set before it begins; "@" has the script's arguments.

    Raises:
        ArgumentError: the text is too long, is nested too deep, or would expand to too much.
    """
    if len(text) > MAX_CHARACTERS:
        raise ArgumentError(f"a script of {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    reader = _Reader(list(tokens_of(text, 0)))
    reader.variables |= {name: list(values) for name, values in (given or {}).items()}
    for option, value in _SLURM.findall(text):
        reader.variables |= dict.fromkeys(_SLURM_NAMES.get(option, ()), [value.rpartition(":")[2]])
    reader.block(frozenset(), live=True, depth=0)
    return Script(tuple(reader.commands), {name: tuple(values) for name, values in reader.variables.items()})


def is_known(word: str) -> bool:
    """False for a word that depends on what only a run can tell."""
    return "$" not in word and "`" not in word


class _Reader:
    """The state of reading: tokens and their place, variables, and the commands so far."""

    def __init__(self, tokens: list[ShellWord | str]) -> None:
        self.tokens, self.at = tokens, 0
        self.variables: dict[str, list[str]] = {}
        self.commands: list[Command] = []
        self.spent = 0

    def block(self, ends: frozenset[str], live: bool, depth: int) -> str:
        """Read commands up to one of the words or operators `ends`, which is returned; "" at the end of the text.

        Without `live` nothing that is read has an effect.
        """
        if depth > MAX_DEPTH:
            raise ArgumentError(f"a script is nested deeper than {MAX_DEPTH} levels")
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, str):
                self.at += 1
                if token in ends:
                    return token
                continue
            word = token.plain
            if word in _RESERVED or word == "!":
                self.at += 1
                if word in ends:
                    return word
                if word == "if":
                    self._if(live, depth + 1)
                elif word in ("for", "select", "while", "until"):
                    self._loop(live, depth + 1)
                elif word == "case":
                    self._case(live, depth + 1)
                continue
            self._command(self._words(), live)
        return ""

    def _words(self) -> list[ShellWord]:
        """The words up to the next operator."""
        began = self.at
        while self.at < len(self.tokens) and not isinstance(self.tokens[self.at], str):
            self.at += 1
        return [token for token in self.tokens[began : self.at] if isinstance(token, ShellWord)]

    def _command(self, words: Sequence[ShellWord], live: bool) -> None:
        if not live:
            return
        given, alone = list(words), dict[str, str]()
        declares = bool(given) and given[0].plain in _DECLARING
        names = [word for word in given if declares or not alone and self._assigned(word)]
        if declares or len(names) == len(given):
            for word in names:
                self._assign(word)
            return
        while given and (assigned := self._assigned(given[0])):
            alone[assigned[1]] = self._joined(given.pop(0))[assigned.end() :]
        expanded = [text for word in given for text in self._expanded(word)]
        if "-c" in expanded[1:-1]:  # of `bash -c "a command"`
            at = expanded.index("-c", 1) + 1
            expanded[at : at + 1] = expanded[at].split()
        if expanded[:1] == ["shift"] and "@" in self.variables:
            self.variables["@"] = self.variables["@"][int(expanded[1]) if "".join(expanded[1:2]).isdecimal() else 1 :]
        self.commands.append(Command(tuple(expanded), alone))

    @staticmethod
    def _assigned(word: ShellWord) -> re.Match[str] | None:
        first = word.parts[0] if word.parts else None
        return ASSIGNMENT.match(first.text) if first and first.kind == "text" and not first.quoted else None

    def _assign(self, word: ShellWord) -> None:
        assigned = self._assigned(word)
        if assigned is None:
            return
        name, appends = assigned[1], bool(assigned[2])
        old = self.variables.get(name, []) if appends else []
        if word.array is not None:
            self.variables[name] = [*old, *(text for member in word.array for text in self._expanded(member))]
        else:
            self.variables[name] = ["".join(old[:1]) + self._joined(word)[assigned.end() :], *old[1:]]

    def _joined(self, word: ShellWord) -> str:
        return self._spend("".join(" ".join(self._values(part)) for part in word.parts))

    def _expanded(self, word: ShellWord) -> list[str]:
        """The words that a word becomes: what is not quoted is split at spaces."""
        made, grows = list[list[str]](), False
        for part in word.parts:
            pieces = self._values(part)
            if part.kind == "parameter" and not part.quoted and pieces[:1] != ["${" + part.text + "}"]:
                text = " ".join(pieces)
                pieces = text.split()
                grows = grows and not text[:1].isspace()
            for index, piece in enumerate(pieces):
                if index == 0 and grows and made:
                    made[-1].append(piece)
                else:
                    made.append([piece])
            grows = bool(pieces) or grows
        return [self._spend("".join(pieces)) for pieces in made]

    def _values(self, part: Part, depth: int = 0) -> list[str]:
        if part.kind in ("text", "unknown"):
            return [part.text]
        if part.kind == "arithmetic":
            number = self._number(part.text)
            return [f"$(({part.text}))" if number is None else str(number)]
        found = _PARAMETER.fullmatch(part.text)
        if found is None or depth > MAX_DEPTH:
            return ["${" + part.text + "}"]
        name, index, action, default = found.groups()
        arguments = self.variables.get("@", [])
        if name in ("@", "*"):
            return [self._spend(value) for value in arguments]
        place = int(name) if re.fullmatch("[1-9][0-9]{0,5}", name) else 0
        values = arguments[place - 1 : place] or None if place else self.variables.get(name)
        missing = values is None or action and action.startswith(":") and not "".join(values)
        if action and action[-1] in "+?" and missing:
            return [] if action[-1] == "+" else ["${" + part.text + "}"]
        if action and missing == (action[-1] != "+"):
            word, _ = word_at(default or "", 0, "")
            values = ["".join(" ".join(self._values(inner, depth + 1)) for inner in word.parts)]
            if action[-1] == "=":
                self.variables[name] = values
        if values is None:
            return [f"${name}"]
        if index is None:
            return [self._spend(value) for value in values[:1]]
        if index in ("@", "*"):
            return [self._spend(value) for value in values]
        return values[int(index) : int(index) + 1] if index.isdigit() and len(index) < 6 else ["${" + part.text + "}"]

    def _spend(self, text: str) -> str:
        self.spent += len(text)
        if self.spent > MAX_EXPANDED:
            raise ArgumentError(f"the variables of a script expand to more than {MAX_EXPANDED:,} characters")
        return text

    def _number(self, text: str) -> int | None:
        """The value of integer arithmetic; None if it is not known."""
        bare = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
        if _SUM.fullmatch(bare) is None:
            return None
        try:
            return self._computed(ast.parse(bare, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, KeyError, OverflowError):
            return None

    def _computed(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            number = node.value
        elif isinstance(node, ast.Name):
            number = int(self.variables[node.id][0])
        elif isinstance(node, ast.BinOp):
            number = _ARITHMETIC[type(node.op)](self._computed(node.left), self._computed(node.right))
        else:
            raise ValueError
        if abs(number) > MAX_NUMBER:
            raise ValueError
        return number

    def _if(self, live: bool, depth: int) -> None:
        """Read an `if` to its `fi`; where a condition is not known, no branch has an effect."""
        taken: bool | None = False
        while True:
            holds = self._condition(depth) if live and taken is False else None
            end = self.block(frozenset(("else", "elif", "fi")), live and taken is False and holds is True, depth)
            if taken is False:
                taken = holds
            if end == "else":
                self.block(frozenset(("fi",)), live and taken is False, depth)
            if end != "elif":
                return

    def _condition(self, depth: int) -> bool | None:
        """The truth of the commands up to `then`; None if it is not known."""
        holds: bool | None = None
        joined, negated, is_open = "", False, False  # open: within [[ …, which holds && and || as well
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, str):
                joined = token if token in ("&&", "||") else joined
                self.at += 1
                continue
            if token.plain == "then":
                self.at += 1
                return holds
            if token.plain == "!":
                negated, self.at = True, self.at + 1
                continue
            words = self._words()
            one = self._truth([ShellWord([Part("[[", False)]), *words] if is_open else words)
            is_open = (is_open or words[0].plain == "[[") and words[-1].plain != "]]"
            one = one if one is None or not negated else not one
            if joined == "&&":
                holds = False if False in (holds, one) else None if None in (holds, one) else True
            elif joined == "||":
                holds = True if True in (holds, one) else None if None in (holds, one) else False
            else:
                holds = one
            joined, negated = "", False
        return holds

    def _truth(self, words: Sequence[ShellWord]) -> bool | None:
        """The truth of one test, such as `[ $A = b ]`; None if it is not known."""
        if len(words) == 1 and words[0].parts and words[0].parts[0].kind == "arithmetic":
            sides = re.fullmatch(r"(.+?)(==|!=|<=|>=|<|>)(.+)", words[0].parts[0].text)
            if sides is None:
                return None
            left, right = self._number(sides[1]), self._number(sides[3])
            symbols = {"==": "-eq", "!=": "-ne", "<=": "-le", ">=": "-ge", "<": "-lt", ">": "-gt"}
            return None if left is None or right is None else bool(_NUMBERS[symbols[sides[2]]](left, right))
        if not words or words[0].plain not in ("[", "[[", "test"):
            return None
        terms = [self._joined(word) for word in words[1:] if word.plain not in ("]", "]]")]
        negated = bool(terms) and terms[0] == "!"
        holds = self._compared(terms[negated:])
        return holds if holds is None else holds != negated

    def _compared(self, terms: Sequence[str]) -> bool | None:
        if len(terms) == 2 and terms[0] in ("-z", "-n"):
            empty = not terms[1] or re.fullmatch(r"\$\w+", terms[1]) is not None  # a variable that is not set
            return empty == (terms[0] == "-z")
        if len(terms) != 3 or not is_known(terms[0]) or not is_known(terms[2]):
            return None
        left, compares, right = terms
        if compares in ("=", "=="):
            return left == right
        if compares == "!=":
            return left != right
        if compares in _NUMBERS and left.isdecimal() and right.isdecimal() and len(left + right) < 30:
            return bool(_NUMBERS[compares](int(left), int(right)))
        return None

    def _loop(self, live: bool, depth: int) -> None:
        """Read a loop to its `done`, its body once, with the first value of the variable."""
        words = self._words()
        if live and len(words) > 2 and words[1].plain == "in":
            values = [text for word in words[2:] for text in self._expanded(word)]
            self.variables[words[0].plain] = values[:1]
        self.block(frozenset(("do",)), False, depth)
        self.block(frozenset(("done",)), live, depth)

    def _case(self, live: bool, depth: int) -> None:
        """Read a `case` to its `esac`, with the first branch that matches."""
        words = self._words()
        subject = self._joined(words[0]) if words and live else "$"
        live, patterns = live and is_known(subject), words[2:]
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if isinstance(token, ShellWord):
                if token.plain == "esac":
                    return
                patterns.append(token)
            elif token == ")":
                matches = live and any(fnmatchcase(subject, self._joined(pattern)) for pattern in patterns)
                patterns = []
                if self.block(frozenset((";;", "esac")), matches, depth) == "esac":
                    return
                live = live and not matches


def called_by(text: str) -> tuple[tuple[str, ...], Path]:
    """The words of a command line, and the folder of the script that it calls, as `TP=2 bash train.sh 8B`.

    Of a script that is there, they are those of its main command.

    Raises:
        ArgumentError: as `read_script`.
    """
    script = read_script(text)
    command = script.main_command
    words = command.words[1:] if command.words[:1] in (("bash",), ("sh",)) else command.words
    path = Path(words[0]) if words else Path()
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        return script.main_words, Path()
    alone = {name: (value,) for name, value in command.variables.items()}
    given: Mapping[str, Sequence[str]] = {**script.variables, **alone, "@": words[1:]}
    return read_script(read_bytes(path, FORMAT).decode(errors="replace"), given).main_words, path.parent


def command_of(source: Source) -> tuple[Command, Mapping[str, tuple[str, ...]]]:
    """The longest command of a source, and the variables of its script; a script's file is read again.

    Raises:
        ArgumentError: as `read_script`.
    """
    path = Path(source.name)
    if not source.data and path.suffix.lower() in SUFFIXES and os.path.isfile(path):
        script = read_script(read_bytes(path, FORMAT).decode(errors="replace"))
        return script.main_command, script.variables
    words, variables = list(source.words), dict[str, str]()
    while words and (assigned := ASSIGNMENT.match(words[0])) is not None:
        variables[assigned[1]] = words.pop(0)[assigned.end() :]
    return Command(tuple(words), variables), {}
