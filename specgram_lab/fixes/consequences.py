"""What follows for one server on one build, or for anybody's, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgram_lab.fixes import table
from specgram_lab.fixes.catalog import BY_NAME
from specgram_lab.fixes.rules import KINDS, RULES, Kind, Rule
from specgram_lab.fixes.setting import Setting


@dataclass(frozen=True)
class Consequence:
    """One thing that follows. ``report`` is R0 to R4, or empty for a change outside them.

    It follows from the fix where it is ``present``, else from its absence. ``upgrade`` is the first release of the
    table that has the fix and keeps it, for this server's device, ``upgrade_cuda`` whatever the device; None where
    there is none.
    """

    fix: str
    reference: str
    report: str
    kind: Kind
    when: str
    says: str
    see: str
    avoid: str
    present: bool
    upgrade: str | None
    upgrade_cuda: str | None

    @property
    def do(self) -> str:
        """What to do, in words."""
        if self.upgrade is not None:
            return f"take vLLM {self.upgrade} or later; until then: {self.avoid}"
        if self.upgrade_cuda is not None:
            return f"{self.avoid}; mended in {self.upgrade_cuda}, which is for CUDA only"
        return self.avoid if self.present else f"{self.avoid}; no release up to {list(table.known())[-1]} mends it"


def following(setting: Setting) -> list[Consequence]:
    """What follows for a configuration, the worst first."""
    return _sorted([_consequence(rule, setting) for rule in RULES if _fires(rule, setting) and rule.concerned(setting)])


def possible(setting: Setting) -> list[Consequence]:
    """What could follow for some server that starts on this build, the worst first."""
    rules = [rule for rule in RULES if not rule.present and rule.kind != "does not start" and _fires(rule, setting)]
    return _sorted([_consequence(rule, setting) for rule in rules if setting.findings[rule.fix].state != "no-feature"])


def _fires(rule: Rule, setting: Setting) -> bool:
    needed = rule.requires is None or setting.findings[rule.requires].good
    return needed and setting.findings[rule.fix].good == rule.present


def _sorted(consequences: Sequence[Consequence]) -> list[Consequence]:
    return sorted(consequences, key=lambda found: KINDS.index(found.kind))


def _consequence(rule: Rule, setting: Setting) -> Consequence:
    finding = setting.findings[rule.fix]
    unknown = finding.state == "unknown"
    says = f"{rule.says} (the fix is there in part: {finding.words})" if finding.state == "partial" else rule.says
    if unknown:
        says = f"this build's code has another shape than those read so far; it may be that {rule.says}"
    return Consequence(
        fix=rule.fix,
        reference=BY_NAME[rule.fix].reference,
        report=rule.report,
        kind="unknown" if unknown else rule.kind,
        when=rule.when,
        says=says,
        see=rule.see,
        avoid=rule.avoid,
        present=rule.present,
        upgrade=None if rule.present else table.since(rule.fix, table.for_cpu() if setting.for_cpu else None),
        upgrade_cuda=None if rule.present else table.since(rule.fix),
    )
