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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from atorch.errors import ArgumentError
from atorch.files import FileKind, read_bytes
from atorch.trainer_configs.shell.words import ASSIGNMENT, OPERATORS, end_of, tokens_of

MAX_CHARACTERS, MAX_EXPANDED, MAX_NUMBER, MAX_DEPTH = 2**17, 2**21, 10**15, 40
SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
FORMAT = FileKind("script", ArgumentError, max_bytes=MAX_CHARACTERS)
_RESERVED = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "select", "while", "until", "do", "done", "case", "esac", "{", "}")
)
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
_PLAIN: Sequence[re.Pattern[str]] = (re.compile(r"""[^\\'"$`]+"""), re.compile(r"""[^\\"$`]+"""))  # not quoted, quoted
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
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("-eq", "=="), operator.eq),
    **dict.fromkeys(("-ne", "!="), operator.ne),
    **dict.fromkeys(("-gt", ">"), operator.gt),
    **dict.fromkeys(("-ge", ">="), operator.ge),
    **dict.fromkeys(("-lt", "<"), operator.lt),
    **dict.fromkeys(("-le", "<="), operator.le),
}
"""Of numbers, in `[ … ]` and in `(( … ))`."""


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
    try:
        reader = _Reader(list(tokens_of(text)))
        reader.variables |= {name: list(values) for name, values in (given or {}).items()}
        for option, value in _SLURM.findall(text):
            reader.variables |= dict.fromkeys(_SLURM_NAMES.get(option, ()), [value.rpartition(":")[2]])
        reader.block(frozenset(), live=True, depth=0)
    except RecursionError:
        raise ArgumentError("a script is nested too deep") from None
    return Script(tuple(reader.commands), {name: tuple(values) for name, values in reader.variables.items()})


def is_known(word: str) -> bool:
    """False for a word that depends on what only a run can tell."""
    return "$" not in word and "`" not in word


class _Reader:
    """The state of reading: tokens and their place, variables, and the commands so far."""

    def __init__(self, tokens: list[str]) -> None:
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
            if token not in OPERATORS and token not in _RESERVED and token != "!":
                self._command(self._words(), live)
                continue
            self.at += 1
            if token in ends:
                return token
            if token == "if":
                self._if(live, depth + 1)
            elif token in ("for", "select", "while", "until"):
                self._loop(live, depth + 1)
            elif token == "case":
                self._case(live, depth + 1)
        return ""

    def _words(self) -> list[str]:
        """The words up to the next operator."""
        began = self.at
        while self.at < len(self.tokens) and self.tokens[self.at] not in OPERATORS:
            self.at += 1
        return self.tokens[began : self.at]

    def _command(self, words: list[str], live: bool) -> None:
        if not live:
            return
        if words[0] in _DECLARING or all(map(ASSIGNMENT.match, words)):
            for word in words:
                self._assign(word)
            return
        alone = dict[str, str]()
        while assigned := ASSIGNMENT.match(words[0]):
            alone[assigned[1]] = self._joined(words.pop(0)[assigned.end() :])
        expanded = [text for word in words for text in self._expanded(word)]
        if "-c" in expanded[1:-1]:  # of `bash -c "a command"`
            at = expanded.index("-c", 1) + 1
            expanded[at : at + 1] = expanded[at].split()
        if expanded[:1] == ["shift"] and "@" in self.variables:
            self.variables["@"] = self.variables["@"][int(expanded[1]) if "".join(expanded[1:2]).isdecimal() else 1 :]
        self.commands.append(Command(tuple(expanded), alone))

    def _assign(self, word: str) -> None:
        assigned = ASSIGNMENT.match(word)
        if assigned is None:
            return
        name, value = assigned[1], word[assigned.end() :]
        old = self.variables.get(name, []) if assigned[2] else []
        if value.startswith("("):
            members = (member for member in tokens_of(value[1:-1]) if member not in OPERATORS)
            self.variables[name] = [*old, *(text for member in members for text in self._expanded(member))]
        else:
            self.variables[name] = ["".join(old[:1]) + self._joined(value), *old[1:]]

    def _joined(self, word: str) -> str:
        return self._spend("".join(" ".join(values) for values, _ in self._parts(word)))

    def _expanded(self, word: str) -> list[str]:
        """The words that a word becomes: what is not quoted is split at spaces."""
        made, grows = list[str](), False
        for values, splits in self._parts(word):
            if splits:
                text = " ".join(values)
                values, grows = text.split(), grows and not text[:1].isspace()
            for index, value in enumerate(values):
                if index == 0 and grows and made:
                    made[-1] += value
                else:
                    made.append(value)
            grows = bool(values) or grows
        return [self._spend(text) for text in made]

    def _parts(self, word: str, is_quoted: bool = False) -> Iterator[tuple[list[str], bool]]:
        """The values of each part of a word, and whether they are split at spaces."""
        at = 0
        while at < len(word):
            plain = _PLAIN[is_quoted].match(word, at)
            end = end_of(word, at, '"' if is_quoted else "") if plain is None else plain.end()
            part, at = word[at:end], end
            if part[0] == "\\":
                is_kept = is_quoted and part[1:] not in ('"', "\\", "$", "`", "\n")
                text = part if is_kept else part[1:].strip("\n")
                yield [text] if text else [], False
            elif part[0] == "'" and not is_quoted:
                yield [part[1:].removesuffix("'")], False
            elif part[0] == '"':
                inner = part[1:].removesuffix('"')
                yield from self._parts(inner, is_quoted=True) if inner else [([""], False)]
            elif part.startswith("$(("):
                number = self._number(part[3:-2])
                yield [part if number is None else str(number)], False
            elif part[0] != "$" or len(part) == 1 or part.startswith("$("):
                yield [part], False
            else:
                values = self._parameter(part[2:-1] if part.startswith("${") else part[1:])
                yield ([part], False) if values is None else (values, not is_quoted)

    def _parameter(self, text: str) -> list[str] | None:
        """The values of ${…}; None for what only a run can tell."""
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return None
        name, index, action, default = found.groups()
        arguments = self.variables.get("@", [])
        if name in ("@", "*"):
            return [self._spend(value) for value in arguments]
        place = int(name) if re.fullmatch("[1-9][0-9]{0,5}", name) else 0
        values = arguments[place - 1 : place] or None if place else self.variables.get(name)
        missing = values is None or action and action.startswith(":") and not "".join(values)
        if action and action[-1] in "+?" and missing:
            return [] if action[-1] == "+" else None
        if action and missing == (action[-1] != "+"):
            values = [self._joined(default or "")]
            if action[-1] == "=":
                self.variables[name] = values
        if values is None:
            return [f"${name}"]
        if index is None:
            return values[:1]
        if index in ("@", "*"):
            return values
        return values[int(index) : int(index) + 1] if index.isdigit() and len(index) < 6 else None

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
            holds = self._condition() if live and taken is False else None
            end = self.block(frozenset(("else", "elif", "fi")), live and taken is False and holds is True, depth)
            if taken is False:
                taken = holds
            if end == "else":
                self.block(frozenset(("fi",)), live and taken is False, depth)
            if end != "elif":
                return

    def _condition(self) -> bool | None:
        """The truth of the commands up to `then`; None if it is not known."""
        holds: bool | None = None
        joined, negated, is_open = "", False, False  # open: within [[ …, which holds && and || as well
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token in OPERATORS or token in ("then", "!"):
                self.at += 1
                joined = token if token in ("&&", "||") else joined
                negated = negated or token == "!"
                if token == "then":
                    return holds
                continue
            words = self._words()
            one = self._truth(["[[", *words] if is_open else words)
            is_open = (is_open or words[0] == "[[") and words[-1] != "]]"
            one = one if one is None or not negated else not one
            if joined == "&&":
                holds = False if False in (holds, one) else None if None in (holds, one) else True
            elif joined == "||":
                holds = True if True in (holds, one) else None if None in (holds, one) else False
            else:
                holds = one
            joined, negated = "", False
        return holds

    def _truth(self, words: Sequence[str]) -> bool | None:
        """The truth of one test, such as `[ $A = b ]`; None if it is not known."""
        if len(words) == 1 and words[0].startswith("$(("):
            sides = re.fullmatch(r"(.+?)(==|!=|<=|>=|<|>)(.+)", words[0][3:-2])
            if sides is None:
                return None
            left, right = self._number(sides[1]), self._number(sides[3])
            return None if left is None or right is None else _COMPARISONS[sides[2]](left, right)
        if words[0] not in ("[", "[[", "test"):
            return None
        terms = [self._joined(word) for word in words[1:] if word not in ("]", "]]")]
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
        if compares in ("=", "==", "!="):
            return (left == right) == (compares != "!=")
        if compares in _COMPARISONS and left.isdecimal() and right.isdecimal() and len(left + right) < 30:
            return _COMPARISONS[compares](int(left), int(right))
        return None

    def _loop(self, live: bool, depth: int) -> None:
        """Read a loop to its `done`, its body once, with the first value of the variable."""
        words = self._words()
        if live and len(words) > 2 and words[1] == "in":
            values = [text for word in words[2:] for text in self._expanded(word)]
            self.variables[words[0]] = values[:1]
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
            if token == "esac":
                return
            if token not in OPERATORS:
                patterns.append(token)
            elif token == ")":
                matches = live and any(fnmatchcase(subject, self._joined(pattern)) for pattern in patterns)
                patterns = []
                if self.block(frozenset((";;", "esac")), matches, depth) == "esac":
                    return
                live = live and not matches


def called_by(text: str) -> tuple[Script, Path]:
    """The script of a command line, or that which it calls, as `TP=2 bash train.sh 8B`, and its folder.

    Raises:
        ArgumentError: as `read_script`.
    """
    script = read_script(text)
    command = script.main_command
    words = command.words[1:] if command.words[:1] in (("bash",), ("sh",)) else command.words
    path = Path(words[0]) if words else Path()
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        return script, Path()
    alone = {name: (value,) for name, value in command.variables.items()}
    given = {**script.variables, **alone, "@": words[1:]}
    return read_script(read_bytes(path, FORMAT).decode(errors="replace"), given), path.parent
