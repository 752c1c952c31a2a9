"""Sends requests to an OpenAI-compatible server through the `openai` package, and records every attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from specgram_lab import grammars
from specgram_lab.servers.address import Address
from specgram_lab.servers.answers import RETRIED, Answer, Attempt, Call, Outcome, count, read_error, spec_metrics
from specgram_lab.servers.asking import Ask


@dataclass(frozen=True)
class Limits:
    """How much is asked at once and for how long. Seconds; ``total_s`` bounds all requests together.

    ``retries`` further attempts are made where `answers.RETRIED` has the outcome, after ``pause_s``, then twice that,
    and so on, or what the server asks for (``Retry-After``) if that is no more than ``longest_pause_s``.
    ``given_up`` requests in a row that timed out end the sending: the server hangs.
    """

    concurrency: int = 4
    timeout_s: float = 60.0
    total_s: float = 600.0
    retries: int = 2
    pause_s: float = 0.5
    longest_pause_s: float = 10.0
    given_up: int = 3


@dataclass
class _Draft:
    """An answer while it comes."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    def answer(self, ask: Ask, attempts: Sequence[Attempt]) -> Answer:
        calls = tuple(Call(name, arguments) for _, (name, arguments) in sorted(self.calls.items()))
        return Answer(ask, tuple(attempts), "".join(self.text), calls, **self.known)


def send(
    address: Address, model: str, asks: Sequence[Ask], limits: Limits, answered: Callable[[Answer], None] | None = None
) -> list[Answer]:
    """Send all ``asks``, at most ``limits.concurrency`` at once; one answer each, in order, whatever happens.

    ``answered`` is called with each as it ends. Returns within ``limits.total_s`` and a few seconds.
    """
    work = _send(address, model, asks, limits, answered)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as own:  # a notebook's kernel has a loop already
        return own.submit(asyncio.run, work).result()


async def _send(
    address: Address, model: str, asks: Sequence[Ask], limits: Limits, answered: Callable[[Answer], None] | None
) -> list[Answer]:
    import openai

    deadline = time.monotonic() + limits.total_s
    state = _State(address, model, limits, deadline)
    results: list[Answer] = [Answer(ask, ()) for ask in asks]
    room = asyncio.Semaphore(limits.concurrency)
    async with openai.AsyncOpenAI(
        base_url=address.api,
        api_key=address.key or "none",
        max_retries=0,
        timeout=limits.timeout_s,
        default_headers=address.headers() or None,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=not address.loopback),
    ) as client:

        async def one(number: int) -> None:
            async with room:
                results[number] = await state.ask(client, asks[number])
                if answered is not None:
                    answered(results[number])

        await asyncio.gather(*(one(number) for number in range(len(asks))))
    return results


class _State:
    """What the requests of one sending share: when it ends, and whether the server is still there."""

    def __init__(self, address: Address, model: str, limits: Limits, deadline: float) -> None:
        self.address, self.model, self.limits, self.deadline = address, model, limits, deadline
        self.gone = ""
        self.silent = 0

    async def ask(self, client: Any, ask: Ask) -> Answer:
        """One request with its attempts."""
        attempts: list[Attempt] = []
        while True:
            left = self.deadline - time.monotonic()
            if self.gone or left <= 0:
                reason = self.gone or f"the limit of {self.limits.total_s:g} s for all requests was reached"
                return Answer(ask, (*attempts, Attempt(Outcome.NOT_SENT, 0.0, None, reason)))
            draft, attempt, pause = await self._attempt(client, ask, min(self.limits.timeout_s, left))
            attempts.append(attempt)
            if attempt.outcome not in RETRIED or len(attempts) > self.limits.retries:
                self._note(attempt)
                return draft.answer(ask, attempts)
            await asyncio.sleep(pause if pause is not None else self.limits.pause_s * 2 ** (len(attempts) - 1))

    def _note(self, attempt: Attempt) -> None:
        self.silent = self.silent + 1 if attempt.outcome is Outcome.TIMEOUT else 0
        if attempt.outcome in (Outcome.UNREACHABLE, Outcome.TLS, Outcome.UNAUTHORISED):
            self.gone = self.gone or f"an earlier request ended with {attempt.outcome.value}"
        elif self.silent >= self.limits.given_up:
            self.gone = self.gone or f"{self.silent} requests in a row had no answer within {self.limits.timeout_s:g} s"

    async def _attempt(self, client: Any, ask: Ask, timeout_s: float) -> tuple[_Draft, Attempt, float | None]:
        draft = _Draft()
        begin = time.monotonic()
        status: int | None = None
        pause: float | None = None
        try:
            await asyncio.wait_for(self._call(client, ask, draft, begin), timeout_s)
            outcome, message = Outcome.OK, ""
        except TimeoutError:
            outcome, message = Outcome.TIMEOUT, f"no whole answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  whatever a server does becomes an outcome
            outcome, status, message = read_error(error)
            pause = self._retry_after(error)
        return draft, Attempt(outcome, time.monotonic() - begin, status, self.address.clean(message)), pause

    def _retry_after(self, error: Exception) -> float | None:
        headers = getattr(getattr(error, "response", None), "headers", {})
        try:
            wanted = float(headers.get("retry-after", ""))
        except ValueError:
            return None
        return wanted if 0 <= wanted <= self.limits.longest_pause_s else None

    async def _call(self, client: Any, ask: Ask, draft: _Draft, begin: float) -> None:
        endpoint = client.chat.completions if ask.endpoint == "chat" else client.completions
        answer = await endpoint.create(model=self.model, **ask.body)
        if ask.body.get("stream"):
            seen = False
            async for chunk in answer:
                seen = True
                self._piece(chunk, draft, begin)
            if not seen:
                raise ValueError("the stream held nothing of the API")
            if draft.known.get("finish_reason") is None:
                raise ConnectionResetError("the stream ended before its last piece")
        else:
            self._whole(answer, draft)

    @staticmethod
    def _common(content: Any, draft: _Draft) -> None:
        usage = getattr(content, "usage", None)
        if usage is not None:
            draft.known["prompt_tokens"] = count(getattr(usage, "prompt_tokens", None))
            draft.known["output_tokens"] = count(getattr(usage, "completion_tokens", None))
        for name, key in (("server_id", "id"), ("fingerprint", "system_fingerprint")):
            draft.known[name] = _name(getattr(content, key, None)) or draft.known.get(name)
        found = spec_metrics(getattr(content, "model_extra", None))
        if found is not None:
            draft.known["spec_metrics"] = found

    def _whole(self, content: Any, draft: _Draft) -> None:
        choices = getattr(content, "choices", None)
        if not choices:
            raise ValueError(f"an answer without choices, beginning with {str(content)[:60]!a}")
        self._common(content, draft)
        choice = choices[0]
        message = getattr(choice, "message", None)
        draft.known["finish_reason"] = _name(choice.finish_reason) or None
        draft.text.append(_text(choice.text if message is None else message.content))
        for number, call in enumerate(getattr(message, "tool_calls", None) or ()):
            draft.calls[number] = [_name(call.function.name), _text(call.function.arguments)]

    def _piece(self, chunk: Any, draft: _Draft, begin: float) -> None:
        self._common(chunk, draft)
        for choice in getattr(chunk, "choices", None) or ():
            delta = getattr(choice, "delta", None)
            piece = _text(getattr(choice, "text", None) if delta is None else delta.content)
            tools = getattr(delta, "tool_calls", None) or ()
            if (piece or tools) and "first_token_s" not in draft.known:
                draft.known["first_token_s"] = time.monotonic() - begin
            draft.text.append(piece)
            for call in tools:
                known = draft.calls.setdefault(count(call.index) or 0, ["", ""])
                known[0] += _name(call.function.name) if call.function else ""
                known[1] += _text(call.function.arguments) if call.function else ""
            draft.known["finish_reason"] = _name(choice.finish_reason) or draft.known.get("finish_reason")


def _text(value: object) -> str:
    """``value`` if it is a text, an empty one for None.

    Raises:
        ValueError: it is something else, which the API does not have there.
    """
    if value is not None and not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where a text is wanted")
    return value or ""


def _name(value: object) -> str:
    """`_text` of something that is no output: without lone surrogates, which cannot be printed."""
    return grammars.escape_surrogates(_text(value))
