"""How far a text is JSON: complete, a legal beginning, or wrong from a position on (RFC 8259, no recursion)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Tail = Literal["blank", "string", "number", "other"]

_BLANK = re.compile(r"[ \t\n\r]*")
_STRING_BODY = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OPEN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?")
_LITERALS = ("true", "false", "null")


@dataclass(frozen=True)
class Scan:
    """What a scan found. All positions count characters from the start of the text.

    ``end`` is where the first complete value ends; None while it is not complete. ``error`` is the first
    character that no JSON text can have there, ``why`` says so in words. ``tail`` is what the scan stood in when
    it ended, ``tail_length`` how many characters of it there are. ``longest_blank`` counts the longest run of
    blanks between tokens, ``blank_position`` is where it starts.
    """

    start: int
    end: int | None = None
    error: int | None = None
    why: str = ""
    tail: Tail = "other"
    tail_length: int = 0
    longest_blank: int = 0
    blank_position: int = 0


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.start = 0
        self.stack: list[str] = []
        self.expect = "value"
        self.error: tuple[int, str] | None = None
        self.tail: Tail = "other"
        self.tail_length = 0
        self.longest_blank = 0
        self.blank_position = 0

    def run(self) -> Scan:
        self._blanks()
        self.start = self.position
        while self.expect != "done" and self.error is None and self.position < len(self.text):
            self._token()
            if self.error is None and self.expect != "done":
                self._blanks()
        end = self.position if self.expect == "done" and self.error is None else None
        error, why = self.error or (None, "")
        return Scan(self.start, end, error, why, self.tail, self.tail_length, self.longest_blank, self.blank_position)

    def _blanks(self) -> None:
        match = _BLANK.match(self.text, self.position)
        length = len(match.group()) if match else 0
        if length:
            if length > self.longest_blank:
                self.longest_blank, self.blank_position = length, self.position
            self.tail, self.tail_length = "blank", length
        self.position += length

    def _token(self) -> None:
        here = self.text[self.position]
        if self.expect in ("value", "value or ]"):
            self._value(here)
        elif self.expect in ("name", "name or }"):
            if here == '"':
                self._string()
                self.expect = ":"
            else:
                self._close(here, "}")
        elif self.expect == ":":
            if here == ":":
                self._step("value")
            else:
                self._wrong("a colon")
        elif here == ",":
            self._step("name" if self.stack[-1] == "}" else "value")
        else:
            self._close(here, self.stack[-1])

    def _value(self, here: str) -> None:
        if here == "{":
            self.stack.append("}")
            self._step("name or }")
        elif here == "[":
            self.stack.append("]")
            self._step("value or ]")
        elif here == '"':
            self._string()
            self._ended()
        elif here == "-" or "0" <= here <= "9":
            self._number()
            self._ended()
        elif here == "]":
            self._close(here, "]")
        else:
            self._literal()
            self._ended()

    def _close(self, here: str, closer: str) -> None:
        allowed = {"name or }": "}", "value or ]": "]", ", or close": closer}.get(self.expect)
        if here == allowed:
            self.stack.pop()
            self._step("")
            self._ended()
        else:
            wanted = {"name": "a name", "name or }": "a name or }", ", or close": f"a comma or {closer}"}
            self._wrong(wanted.get(self.expect, "a value"))

    def _step(self, expect: str) -> None:
        self.position += 1
        self.expect = expect
        self.tail, self.tail_length = "other", 1

    def _ended(self) -> None:
        self.expect = ", or close" if self.stack else "done"
        if self.position > len(self.text):  # the token was still open when the text ended
            self.position, self.expect = len(self.text), "open"

    def _open(self) -> None:
        self.position = len(self.text) + 1

    def _string(self) -> None:
        begin = self.position
        body = _STRING_BODY.match(self.text, begin + 1)
        stop = body.end() if body else begin + 1
        self.tail, self.tail_length = "string", stop - begin
        if stop == len(self.text):
            self._open()
        elif self.text[stop] == '"':
            self.position = stop + 1
        elif (escape := _OPEN_ESCAPE.match(self.text, stop)) and escape.end() == len(self.text):
            self._open()
        else:
            self.position = stop
            kind = "a legal escape" if self.text[stop] == "\\" else "a string without raw control characters"
            self._wrong(kind)

    def _number(self) -> None:
        begin = self.position
        partial = _OPEN_NUMBER.match(self.text, begin)
        stop = partial.end() if partial else begin
        whole = _NUMBER.match(self.text, begin)
        self.tail, self.tail_length = "number", stop - begin
        if whole and whole.end() == stop:
            self.position = stop
        elif stop == len(self.text):
            self._open()
        else:
            self.position = stop
            self._wrong("a digit")

    def _literal(self) -> None:
        begin = self.position
        rest = self.text[begin : begin + 5]
        for word in _LITERALS:
            if rest.startswith(word):
                self.position = begin + len(word)
                self.tail, self.tail_length = "other", len(word)
                return
            if word.startswith(rest) and begin + len(rest) == len(self.text):
                self.tail, self.tail_length = "other", len(rest)
                self._open()
                return
        self._wrong("a value" if self.expect == "value" else "a value or ]")

    def _wrong(self, wanted: str) -> None:
        found = self.text[self.position]
        self.error = (self.position, f"found {found!a}, wanted {wanted}")


def scan(text: str) -> Scan:
    """Scan ``text`` from its start up to the end of its first JSON value, in linear time."""
    return _Scanner(text).run()
