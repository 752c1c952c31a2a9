"""What a check means: what is wrong, what is harmless, what the build contains, what to do; as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specgram_lab.fixes import table
from specgram_lab.fixes.catalog import BY_NAME
from specgram_lab.grammars import OutputClass
from specgram_lab.servers import log, metrics
from specgram_lab.servers.answers import Outcome
from specgram_lab.servers.builds import contains, survey
from specgram_lab.servers.check import Seen, died, not_sent
from specgram_lab.servers.judging import WRONG

LEGACY = "drafted leaves grammar-invalid drafts out; what adaptive verification skipped is in it (vLLM up to 0.33)"
RFC = "drafted as proposed, verified apart (vllm#64156)"
ENDING = tuple(
    BY_NAME[name]
    for name in (
        "reasoning-end-in-window", "one-boundary", "stops-at-end", "pipeline-async-refused", "implicit-reasoning-end",
        "unseen-drafts-invalid", "masked-reasoning-ends",
    )
)  # fmt: skip
"""The changes without which a committed token can be refused and its request ends (`specgram_lab.fixes.rules`)."""
UNREAD = "its version does not say what is in it; specgram doctor --wheel tells it from the wheel or the source folder"


def problems(seen: Seen) -> list[str]:
    """Everything that is wrong, a sentence each; the exit code is 1 unless this is empty."""
    found = list(seen.broken)
    if died(seen):
        found.append("the server went away during the check")
    for outcome, count in sorted(seen.outcomes.items()):
        if outcome in (Outcome.OK, Outcome.NOT_SENT):
            continue
        first = next(item.answer for item in seen.judged if item.answer.outcome == outcome)
        words = f": {first.message}" if first.message else ""
        found.append(f"{count} of {len(seen.judged)} requests ended with {outcome}{words}")
    if not_sent(seen) and not seen.broken:
        reason = next(item.answer.message for item in seen.judged if item.answer.outcome is Outcome.NOT_SENT)
        found.append(f"{not_sent(seen)} of {len(seen.judged)} requests were not sent: {reason}")
    for kind in sorted(WRONG):
        items = [item for item in seen.judged if item.verdict is not None and item.verdict.kind is kind]
        if items and items[0].verdict is not None:
            first_item, verdict = items[0], items[0].verdict
            where = f" at character {verdict.position}" if verdict.position is not None else ""
            place = f"{first_item.where}, " if first_item.where else ""
            name = first_item.answer.ask.prompt_id
            found.append(f"{len(items)} outputs are {kind.value}, first {name}: {place}{verdict.detail}{where}")
    found += _from_log(seen)
    counted = seen.counted
    if counted is not None:
        found += metrics.breaches(counted)
    if seen.finished.get("error"):
        found.append(f"the server counted {seen.finished['error']} requests that ended in an error")
    return found


def _from_log(seen: Seen) -> Iterator[str]:
    report = seen.log
    if report is None:
        return
    if report.terminated:
        yield f"the log has {report.terminated} requests that the engine ended: the grammar refused a committed token"
    if report.phases["commit"] > report.terminated:
        number = report.phases["commit"] - report.terminated
        yield f"the log has {number} committed tokens that the grammar refused while the request went on"
    if report.failure_lines:
        yield f"the engine failed: {' '.join(report.failures[0].message.split())[:200]}"


def notes(seen: Seen) -> list[str]:
    """What is no fault and should be known."""
    found = list(seen.unseen)
    report = seen.log
    if report is not None:
        probes = report.phases["draft-probe"]
        if probes:
            found.append(
                f"{probes} drafted tokens were refused before they were committed: harmless, the request goes on"
            )
        found += report.notes
    counted = seen.counted
    total = counted.total if counted is not None else None
    if counted is not None:
        found += counted.notes
    if total is not None and total.drafts is not None and not total.draft_tokens:
        number = total.generation_tokens
        found.append(f"no drafts were proposed in {number if number is not None else 'these'} tokens")
    elif (total is None or total.drafts is None) and seen.after is not None:
        found.append("there are no speculative counters: no drafter, statistics off, or another server than vLLM V1")
    if seen.others:
        found.append(f"{seen.others} requests of other clients ended meanwhile and are in the counters too")
    truncated = seen.classes["truncated"]
    if truncated:
        found.append(f"{truncated} outputs were cut by max_tokens; what came is legal so far")
    unjudged = [item.verdict for item in seen.judged if item.verdict and item.verdict.kind is OutputClass.NOT_JUDGED]
    if unjudged:
        found.append(f"{len(unjudged)} outputs are not judged, the first: {unjudged[0].detail}")
    if seen.log is None:
        found.append("without --log, refusals of the grammar cannot be seen")
    return found


def advice(seen: Seen) -> list[str]:
    """What to do, a sentence each."""
    found = []
    words = " ".join(item.answer.message for item in seen.judged)
    if "--enable-auto-tool-choice" in words:
        found.append(
            "start the server with --enable-auto-tool-choice and its --tool-call-parser, or use prompts without tools"
        )
    if "min_p and logit_bias" in words:
        found.append("with a drafter vLLM refuses min_p above 0.00001 and logit_bias: leave them out of the requests")
    if seen.log is not None and seen.log.terminated:
        found += _of_dead_requests(seen)
    elif seen.log is not None and seen.log.phases["draft-probe"]:
        found.append(f"the refused drafts are harmless; {_of_refused_drafts(seen)}")
    if seen.classes["whitespace_runaway"]:
        found.append(
            "blanks without end are allowed by the grammar, not made by the drafter: compare with the drafter off"
        )
    if seen.classes["invalid"] or seen.classes["desync_after_end"]:
        found.append(
            "send the same prompts with the drafter off: if the outputs are valid then, it is the drafter's path"
        )
    if seen.outcomes[Outcome.OVERLOADED]:
        found.append("the server had no room: fewer requests at once (--concurrency), or a quieter hour")
    if seen.outcomes[Outcome.TLS] or any("SSL" in sentence for sentence in seen.broken):
        found.append("the certificate is not trusted, or the port speaks plain http: check the address's http or https")
    return found


def _of_dead_requests(seen: Seen) -> Iterator[str]:
    lacking = [fix for fix in ENDING if contains(fix, seen.version) is False]
    if lacking:
        first = max((table.since(fix.name) or "" for fix in lacking), key=table.order)
        names = "; ".join(f"{fix.about} ({fix.reference})" for fix in lacking)
        yield (
            f"requests die of refused tokens: vLLM {seen.version} lacks changes that {first} has, and which of them is"
            f" wanted here cannot be seen from outside: {names}"
        )
    elif all(contains(fix, seen.version) for fix in ENDING):
        yield f"requests die of refused tokens, and {seen.version} lacks no change known to help: report it to vLLM"
    else:
        yield f"requests die of refused tokens: {UNREAD}"
    total = seen.counted.total if seen.counted is not None else None
    if total is not None and not total.drafts:
        yield "no drafts were counted, so look at pipeline parallelism on runner V1: --no-async-scheduling"
    else:
        yield "until then no drafter for structured requests; with pipeline parallelism also --no-async-scheduling"


def _of_refused_drafts(seen: Seen) -> str:
    guard = BY_NAME["probe-guard"]
    contained = contains(guard, seen.version)
    if _names_refused_drafts(seen) or contained:
        return "this build asks the grammar beforehand, so there should be none: report it to vLLM with the log"
    if contained is None:
        return UNREAD
    return f"{table.since(guard.name)} and later no longer log those behind a reasoning end ({guard.reference})"


def _names_refused_drafts(seen: Seen) -> bool:
    """Its own words say "draft", as since vllm#48200, which asks the grammar before a draft is scheduled."""
    return bool(seen.log and any(e.kind.confirmed and e.kind.phase == "draft-probe" for e in seen.log.events))


def to_dict(seen: Seen) -> dict[str, Any]:
    """The whole report as plain data for JSON; no credentials, no NaN."""
    counted = seen.counted
    total = counted.total if counted is not None else None
    evidence = {
        "per-request-metrics": any(item.answer.spec_metrics is not None for item in seen.judged),
        "draft-probe-named": _names_refused_drafts(seen),
        "verified-counter": bool(total and total.verified_tokens is not None),
    }
    found = problems(seen)
    return {
        "server": seen.address.root,
        "model": seen.model,
        "version": seen.version,
        "ok": not found,
        "seconds": round(seen.seconds, 3),
        "problems": found,
        "notes": notes(seen),
        "advice": advice(seen),
        "requests": {"sent": len(seen.judged) - not_sent(seen), "outcomes": dict(sorted(seen.outcomes.items()))},
        "outputs": dict(sorted(seen.classes.items())),
        "acceptance": None
        if total is None or total.drafts is None
        else metrics.counters_dict(total)
        | {
            "counting": "rfc" if total.verified_tokens is not None else "engine",
            "meaning": RFC if total.verified_tokens is not None else LEGACY,
        },
        "engines": [{"labels": dict(k), **metrics.counters_dict(v)} for k, v in counted.engines.items()]
        if counted and total
        else [],
        "log": log.to_dict(seen.log) if seen.log is not None else None,
        "build": survey(seen.version, evidence),
        "answers": [_answer(item) for item in seen.judged],
    }


def _answer(item: Any) -> dict[str, Any]:
    from specgram_lab.grammars import escape_surrogates

    answer, verdict = item.answer, item.verdict
    return {
        "request_id": answer.ask.request_id, "prompt_id": answer.ask.prompt_id, "repeat": answer.ask.repeat,
        "outcome": answer.outcome.value, "finish_reason": answer.finish_reason,
        "class": verdict.kind.value if verdict else None, "detail": verdict.detail if verdict else None,
        "position": verdict.position if verdict else None, "where": item.where or None,
        "text": escape_surrogates(answer.text),
        "calls": [
            {"name": escape_surrogates(c.name), "arguments": escape_surrogates(c.arguments)} for c in answer.calls
        ],
        "output_tokens": answer.output_tokens, "spec_metrics": answer.spec_metrics,
        "attempts": [
            {"outcome": a.outcome.value, "seconds": round(a.seconds, 3), "status": a.status, "message": a.message}
            for a in answer.attempts
        ],
    }  # fmt: skip


def to_text(report: dict[str, Any]) -> str:
    """`to_dict` for a terminal: the verdict first, then what it stands on."""
    what = f"{report['server']}, model {report['model'] or 'unknown'}, vLLM {report['version'] or 'of unknown version'}"
    lines = [what, ""]
    outcomes = ", ".join(f"{count} {name}" for name, count in report["requests"]["outcomes"].items()) or "none"
    lines.append(f"requests     {outcomes}")
    lines.append(
        "outputs      " + (", ".join(f"{n} {name}" for name, n in report["outputs"].items()) or "none to judge")
    )
    events = report["log"]["fsm_events"] if report["log"] else None
    seen = f"{events['draft-probe']} draft-probe, {events['commit']} commit" if events else "not seen"
    lines.append(f"FSM events   {seen}")
    lines.append(f"died         {events['terminated_requests'] if events else 'not seen'}")
    lines += _acceptance_lines(report["acceptance"])
    for title, name in (("wrong", "problems"), ("to know", "notes"), ("to do", "advice")):
        lines += _section(title, report[name])
    lines += ["", "this build (as far as can be seen):"]
    marks = {True: "yes", False: "no", None: "unknown"}
    lines += [f"  {marks[row['contained']]:8}{row['about']} ({row['reference']})" for row in report["build"]]
    lines += ["", "something is wrong" if report["problems"] else "nothing is wrong"]
    return "\n".join(lines)


def _acceptance_lines(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["acceptance   not seen"]
    rate = found["acceptance_rate"]
    length = found["mean_acceptance_length"]
    verified = f", verified {found['verified_tokens']}" if "verified_tokens" in found else ""
    shown = f"{rate:.1%} of drafted" if rate is not None else "no rate"
    return [
        f"acceptance   {shown}, mean acceptance length {f'{length:.2f}' if length is not None else 'n/a'}"
        f" (spec steps {found['drafts']}, drafted {found['draft_tokens']}{verified},"
        f" accepted {found['accepted_tokens']})",
        f"counting     {found['counting']}: {found['meaning']}",
    ]


def _section(title: str, sentences: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *(f"  - {sentence}" for sentence in sentences)] if sentences else []
