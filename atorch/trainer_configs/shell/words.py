"""Words and operators of a shell text, as they are written: before quotes are taken off and variables put in."""

from __future__ import annotations

import re
from collections.abc import Iterator

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
OPERATORS = ("&&", "||", ";;", "\n", ";", "|", "&", "(", ")")
_OPERATOR = re.compile("|".join(map(re.escape, OPERATORS)))
_ENDS = " \t\r\n;&|()<>"
_NAME = re.compile(r"\w+|[@*#?$!-]", re.ASCII)
_REDIRECTION = re.compile(r"(?:[<>]|&>)[&<>|]* ?")
_SKIPPED = re.compile(r"[ \t\r]+|\\\r?\n|#[^\n]*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1", re.ASCII)


def end_of(text: str, at: int, within: str = "") -> int:
    """The index after the quoted text, the expansion or the character that begins at `at`.

    Args:
        within: the character that ends what is around it, such as a quotation mark.
    """
    char, is_quoted = text[at], within == '"'
    if char == "\\":
        return at + 2
    if char == "`" or (char == "'" and not is_quoted):
        return text.find(char, at + 1) + 1 or len(text)
    if text.startswith(("$(", "${"), at):
        close, at = ")" if text[at + 1] == "(" else "}", at + 2
    elif char == "$":
        name = _NAME.match(text, at + 1)
        return at + 1 if name is None else name.end()
    elif (char == '"' and not is_quoted) or (char == "(" and within == ")"):
        close, at = ")" if char == "(" else '"', at + 1
    else:
        return at + 1
    while at < len(text) and text[at] != close:
        at = end_of(text, at, close)
    return at + 1


def _end_of_word(text: str, at: int) -> int:
    begin = at
    while at < len(text) and text[at] not in _ENDS:
        at = end_of(text, at)
        if text[at : at + 1] == "(" and ASSIGNMENT.fullmatch(text, begin, at):
            at = end_of(text, at, ")")  # the members of an array
    return at


def tokens_of(text: str) -> Iterator[str]:
    """The words and operators of a text; comments, redirections and here-documents are left out.

    A word is as it is written, ((…)) as $((…)). No word equals one of `OPERATORS`.
    """
    at, heredocs = 0, list[str]()
    while at < len(text):
        if (skipped := _SKIPPED.match(text, at)) is not None:
            at = skipped.end()
        elif text.startswith("((", at):
            end = end_of(text, at, ")")
            yield f"${text[at:end]}"
            at = end
        elif (heredoc := _HEREDOC.match(text, at)) is not None:
            heredocs.append(heredoc[2])
            at = heredoc.end()
        elif (redirection := _REDIRECTION.match(text, at)) is not None:
            at = _end_of_word(text, redirection.end())
        elif (operator := _OPERATOR.match(text, at)) is not None:
            yield operator[0]
            at = operator.end()
            while operator[0] == "\n" and heredocs:
                close = re.compile(rf"^\s*{heredocs.pop(0)}\s*$", re.MULTILINE).search(text, at)
                at = close.end() if close is not None else len(text)
        else:
            end = _end_of_word(text, at)
            if not (text[end : end + 1] in ("<", ">") and text[at:end].isdigit()):  # the 2 of 2>&1
                yield text[at:end]
            at = end
