"""Words and operators of a shell text, before variables are put in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from atorch.errors import ArgumentError

MAX_DEPTH = 40
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_OPERATORS = ("&&", "||", ";;", "\n", ";", "|", "&", "(", ")")
_ENDS = " \t\r\n;&|()<>"
_NAME = re.compile(r"\w+|[@*#?$!-]", re.ASCII)
_REDIRECTION = re.compile(r"[&<>|]+ ?")
_SKIPPED = re.compile(r"[ \t\r]+|\\\r?\n|#[^\n]*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1", re.ASCII)


@dataclass(frozen=True)
class Part:
    text: str
    quoted: bool
    kind: str = "text"  # "parameter": `text` is what stands in ${…}; "arithmetic": in $((…)); "unknown": as written


@dataclass
class ShellWord:
    parts: list[Part] = field(default_factory=list)
    array: list[ShellWord] | None = None  # the members, of NAME=(…)

    @property
    def plain(self) -> str:
        """The text if nothing in it is quoted or expanded, else an empty one."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return part.text if part is not None and part.kind == "text" and not part.quoted else ""


def _closing(text: str, at: int, pair: str) -> int:
    """The index after the bracket that closes the one at `at`; the end of the text if none does."""
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and pair != "((":
            quote = char
        elif char == pair[0]:
            depth += 1
        elif char == pair[-1]:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)


def _dollar(text: str, at: int, quoted: bool) -> tuple[Part, int]:
    """The expansion that begins with the `$` or backquote at `at`, and the index after it."""
    if text[at] == "`":
        end = text.find("`", at + 1) + 1 or len(text)
        return Part(text[at:end], quoted, "unknown"), end
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "()")
        return Part(text[at + 3 : end - 2], quoted, "arithmetic"), end
    if text.startswith("$(", at):
        end = _closing(text, at + 1, "()")
        return Part(text[at:end], quoted, "unknown"), end
    if text.startswith("${", at):
        end = _closing(text, at + 1, "{}")
        return Part(text[at + 2 : end - 1], quoted, "parameter"), end
    name = _NAME.match(text, at + 1)
    if name is None:
        return Part("$", quoted), at + 1
    return Part(name[0], quoted, "parameter"), name.end()


def word_at(text: str, at: int, ends: str) -> tuple[ShellWord, int]:
    """The word that begins at `at` and goes up to one of the characters `ends`, and the index after it."""
    word, plain, end = ShellWord(), "", len(text)

    def flush(quoted: bool = False) -> None:
        nonlocal plain
        if plain or quoted:
            word.parts.append(Part(plain, quoted))
        plain = ""

    while at < end and text[at] not in ends:
        char = text[at]
        if char == "\\":
            plain += "" if text[at + 1 : at + 2] == "\n" else text[at + 1 : at + 2]
            at += 2
        elif char == "'":
            flush()
            close = text.find("'", at + 1) % (end + 1)
            plain, at = text[at + 1 : close], close + 1
            flush(quoted=True)
        elif char == '"':
            flush()
            at, before = at + 1, len(word.parts)
            while at < end and text[at] != '"':
                if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                    plain += text[at + 1 : at + 2].strip("\n")
                    at += 2
                elif text[at] in "$`":
                    flush()
                    part, at = _dollar(text, at, quoted=True)
                    word.parts.append(part)
                else:
                    plain += text[at]
                    at += 1
            flush(quoted=bool(plain) or len(word.parts) == before)  # "" is a word, and "${NONE[@]}" is none
            at += 1
        elif char in "$`":
            flush()
            part, at = _dollar(text, at, quoted=False)
            word.parts.append(part)
        else:
            plain += char
            at += 1
    flush()
    return word, at


def tokens_of(text: str, depth: int) -> Iterator[ShellWord | str]:
    """The words and operators of a text; comments, redirections and here-documents are left out."""
    if depth > MAX_DEPTH:
        raise ArgumentError(f"a script is nested deeper than {MAX_DEPTH} levels")
    at, waiting = 0, list[str]()
    while at < len(text):
        char = text[at]
        if (skipped := _SKIPPED.match(text, at)) is not None:
            at = skipped.end()
        elif text.startswith("((", at):
            end = _closing(text, at, "()")
            yield ShellWord([Part(text[at + 2 : end - 2], True, "arithmetic")])
            at = end
        elif (heredoc := _HEREDOC.match(text, at)) is not None:
            waiting.append(heredoc[2])
            at = heredoc.end()
        elif char in "<>" or text.startswith("&>", at):
            begin = _REDIRECTION.match(text, at)
            at = word_at(text, begin.end() if begin is not None else at, _ENDS)[1]
        elif (found := next((sign for sign in _OPERATORS if text.startswith(sign, at)), None)) is not None:
            yield found
            at += len(found)
            if found == "\n":
                at, waiting = _after(text, at, waiting), []
        else:
            word, at = word_at(text, at, _ENDS)
            if text[at : at + 1] == "(" and ASSIGNMENT.fullmatch(word.plain):
                end = _closing(text, at, "()")
                inside = tokens_of(text[at + 1 : end - 1], depth + 1)
                word.array = [token for token in inside if isinstance(token, ShellWord)]
                at = end
            if not (text[at : at + 1] in ("<", ">") and word.plain.isdigit()):  # the 2 of 2>&1
                yield word


def _after(text: str, at: int, waiting: Sequence[str]) -> int:
    """The index after the here-documents that end with the words `waiting`."""
    for word in waiting:
        end = re.compile(rf"^\s*{word}\s*$", re.MULTILINE).search(text, at)
        at = end.end() if end is not None else len(text)
    return at
