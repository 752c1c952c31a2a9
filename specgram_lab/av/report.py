"""What a notebook on budgets needs: budgets compared, priced under cost curves, confidences against what came true.

Its figures are in `specgram_lab.av.figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specgram_lab import lab, stats
from specgram_lab.av import costs
from specgram_lab.av import tables as budget_tables
from specgram_lab.av.costs import CostCurve
from specgram_lab.av.estimator import REFIT_INTERVAL, Estimator
from specgram_lab.av.recording import Recording
from specgram_lab.av.replay import replay
from specgram_lab.spec import Budget

_KEYS = ["run_id", "request_id"]


def read(results: lab.Results) -> dict[str, pd.DataFrame]:
    """``av_steps`` and ``av_proposals`` of all cells of a grid."""
    return budget_tables.read([results.folder / "cells" / str(run_id) for run_id in results.runs["run_id"]])


def cells(
    budgets: Sequence[dict[str, Any]],
    concurrencies: Sequence[int],
    *,
    workload: dict[str, Any],
    engine: dict[str, Any] | None = None,
    **grid: Any,
) -> list[Any]:
    """`lab.grid` for each budget and concurrency; n-gram drafters get the patch ``av-ngram``."""
    found = []
    for concurrency in concurrencies:
        for budget in budgets:
            for drafter in grid["drafters"]:
                ranked = ["av-ngram"] if drafter["method"] in ("ngram", "ngram_gpu") else []
                found += lab.grid(
                    **{**grid, "drafters": [drafter]},
                    workload={**workload, "concurrency": concurrency},
                    runners=["v2"],
                    engine={**(engine or {}), "budget": budget, "patches": ranked},
                )
    return found


def table(results: lab.Results, curves: Sequence[CostCurve]) -> pd.DataFrame:
    """One row a run: what became of its drafts, and output tokens a second as each curve would have it.

    Returns:
        run_id, drafter, k, grammar, concurrency, scheduling, budget; drafted, av_skipped, verified, accepted, steps
        (of the engine); ``refits`` of the acceptance estimator (empty without one; 0: vLLM's first guess ranks);
        ``accepted_per_verified``; ``outputs`` (valid / judged, empty without a grammar; what is not valid was cut by
        max_tokens, or is counted in the table requests); ``texts``, outputs that are those of the run with budget all
        (in bfloat16 the target rounds differently with other numbers of tokens, and a tie may fall otherwise); one
        column ``tokens_per_s: NAME`` a curve, from the sizes of the real steps without a prefill, for outputs as they
        are, also where the limit of tokens cut them. Runs without adaptive verification have no record and no estimate.
    """
    good = results.runs[results.runs["outcome"] == "ok"]
    av = {str(run_id): part for run_id, part in read(results)["av_steps"].groupby("run_id")}
    rows = []
    for run in good.to_dict("records"):
        steps = results.steps[results.steps["run_id"] == run["run_id"]]
        row = {name: run[name] for name in ("run_id", "drafter", "k", "grammar", "concurrency")}
        row |= {"scheduling": run["scheduling_effective"], "budget": run["budget_effective"]}
        row |= {name: int(steps[name].sum()) for name in ("drafted", "av_skipped", "verified", "accepted")}
        row["steps"] = steps["step"].nunique()
        row["refits"] = _refits(av.get(run["run_id"]))
        row["accepted_per_verified"] = row["accepted"] / row["verified"] if row["verified"] else None
        row["outputs"] = _valid(results.requests[results.requests["run_id"] == run["run_id"]])
        row["texts"] = ""
        for curve in curves if run["run_id"] in av else ():
            row[f"tokens_per_s: {curve.name}"] = speed(steps, av[run["run_id"]], curve)
        rows.append(row)
    frame = pd.DataFrame(rows)
    if len(frame):
        frame["texts"] = _texts(frame, results.requests)
    return frame


def _refits(av_steps: pd.DataFrame | None) -> int | None:
    found = pd.Series(dtype="Int64") if av_steps is None else av_steps["refits"].dropna()
    return int(found.max()) if len(found) else None


def _texts(runs: pd.DataFrame, requests: pd.DataFrame) -> list[str]:
    """Of each run the outputs that are those of the run with budget all, of all; empty where there is no such run."""
    own = {
        str(run_id): {str(r): list(ids) for r, ids in zip(part["request_id"], part["token_ids"], strict=True)}
        for run_id, part in requests.dropna(subset="token_ids").groupby("run_id")
    }
    keys = list(map(tuple, runs[["drafter", "k", "grammar", "concurrency", "scheduling"]].to_numpy().tolist()))
    every = zip(keys, runs["budget"], runs["run_id"], strict=True)
    full = {key: own[run_id] for key, budget, run_id in every if budget == "all"}
    found = []
    for key, run_id in zip(keys, runs["run_id"], strict=True):
        texts = full.get(key)
        same = sum(text == (texts or {}).get(request) for request, text in own[run_id].items())
        found.append("" if texts is None else f"{same}/{len(texts)}")
    return found


def _valid(requests: pd.DataFrame) -> str:
    judged = requests["output_class"].dropna()
    return f"{int((judged == 'valid').sum())}/{len(judged)}" if len(judged) else ""


def speed(steps: pd.DataFrame, av_steps: pd.DataFrame, curve: CostCurve) -> float:
    """Output tokens a second of one run's steps as ``curve`` has it; steps with a prefill are left out.

    NaN where no other step is there.
    """
    prefills = steps.loc[steps["request_step"] == 0, "step"]
    sizes = av_steps[~av_steps["step"].isin(prefills)]
    tokens = int(steps.loc[~steps["step"].isin(prefills), "committed"].sum())
    requests, widths = sizes["requests"].to_numpy(int), sizes["tokens"].to_numpy(int)
    draft, verify = curve.tables(int(requests.max(initial=0)), int(widths.max(initial=0)))
    ms = float((draft[requests] + verify[widths]).sum())
    return tokens / ms * 1000 if ms else float("nan")


def landing(results: lab.Results) -> pd.DataFrame:
    """Where vLLM's argmax lands: of each run's steps with drafts, how many had this share of the scheduled verified.

    Returns run_id, ``share`` (0 to 1, the native budget over the scheduled drafts) and ``steps``.
    """
    av = read(results)["av_steps"].dropna(subset=["native"])
    share = (av["native"] / av["scheduled"]).round(2)
    return av.assign(share=share).groupby(["run_id", "share"], as_index=False).agg(steps=("step", "size"))


def verdicts(steps: pd.DataFrame, proposals: pd.DataFrame) -> pd.DataFrame:
    """One row a drafted token: how sure the drafter was, and what became of it.

    Returns:
        run_id, request_id, step (in which it was to be verified), position, confidence (given that those before it
        are accepted), feature, ``survival`` (the product up to here), ``observed`` (the target gave a verdict: it was
        verified, and all before it accepted), ``judged`` (the target or, before it, the grammar gave one),
        ``accepted``, ``invalid`` (the grammar refuses it).
    """
    steps = steps.sort_values([*_KEYS, "step"], ignore_index=True)
    steps["after"] = steps.groupby(_KEYS)["step"].shift(1)
    drafts = steps[steps["drafted"] > 0].merge(
        proposals.rename(columns={"step": "after"}), on=[*_KEYS, "after"], how="left", validate="one_to_one"
    )
    drafts = drafts[drafts["confidences"].notna()]  # a drafter that vLLM did not ask says nothing
    drafts["position"] = drafts["drafted"].map(lambda drafted: list(range(drafted)))
    long = drafts.explode("position", ignore_index=True)
    position = long["position"].astype(int)
    long["position"] = position
    long["confidence"] = [row[p] for row, p in zip(long["confidences"], position, strict=True)]
    long["survival"] = [float(np.prod(row[: p + 1])) for row, p in zip(long["confidences"], position, strict=True)]
    known = [row is not None and np.ndim(row) > 0 for row in long["features"]]
    long["feature"] = [row[p] if k else None for row, p, k in zip(long["features"], position, known, strict=True)]
    reached = position <= long["accepted"]
    long["observed"] = (position < long["verified"]) & reached
    long["accepted"] = position < long["accepted"]
    long["invalid"] = position >= long["grammar_valid"]
    long["judged"] = long["observed"] | (long["invalid"] & reached)
    return long[
        [*_KEYS, "step", "position", "confidence", "feature", "survival", "observed", "judged", "accepted", "invalid"]
    ]


def reliability(seen: pd.DataFrame, bins: int = 10) -> pd.DataFrame:
    """Confidence against reality: how often drafts of about the same confidence were accepted.

    ``seen``: `verdicts`. Returns ``bin`` (its middle), mean ``confidence``, ``accepted`` (fraction) with its Wilson
    interval ``low``, ``high``, and ``n``; only tokens that the target or the grammar judged count.
    """
    seen = seen[seen["judged"].astype(bool)]
    place = np.minimum((seen["confidence"].astype(float) * bins).astype(int), bins - 1)
    rows = []
    for number, part in seen.groupby(place):
        found = stats.rate(int(part["accepted"].sum()), len(part), event="accepted", per="draft_token")
        rows.append({
            "bin": (int(str(number)) + 0.5) / bins, "confidence": float(part["confidence"].mean()),
            "accepted": found.value, "low": found.low, "high": found.high, "n": len(part),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=["bin", "confidence", "accepted", "low", "high", "n"])


def calibration_error(bins: pd.DataFrame) -> float:
    """Over bins of `reliability`: how far confidence and acceptance are apart, weighed by the tokens in the bin.

    Expected calibration error, Guo et al., 2017, equation 3.
    """
    apart = (bins["confidence"] - bins["accepted"]).abs()
    return float((apart * bins["n"]).sum() / bins["n"].sum())


def calibration(seen: pd.DataFrame, bins: int = 10) -> pd.DataFrame:
    """One row a draft position (from 0): ``n`` tokens judged, mean ``confidence``, ``accepted`` (fraction), and
    ``expected_calibration_error`` (`calibration_error`).
    """
    rows = []
    for position, part in seen[seen["judged"].astype(bool)].groupby("position"):
        found = reliability(part, bins)
        rows.append({
            "position": int(str(position)), "n": len(part), "confidence": float(part["confidence"].mean()),
            "accepted": float(part["accepted"].mean()), "expected_calibration_error": calibration_error(found),
        })  # fmt: skip
    columns = ["position", "n", "confidence", "accepted", "expected_calibration_error"]
    return pd.DataFrame(rows, columns=columns)


def labels(seen: pd.DataFrame) -> pd.DataFrame:
    """What the acceptance estimator is taught, by run: verdicts, refusals, and refusals that are the grammar's alone.

    ``seen``: `verdicts`. Returns run_id, ``observed``, ``refused`` (labels 0), ``by_grammar`` (of these, tokens that
    the grammar refuses), and ``share`` (by_grammar / observed) with its Wilson interval.
    """
    rows = []
    for run_id, part in seen.groupby("run_id"):
        judged = part[part["observed"].astype(bool)]
        refused = judged[~judged["accepted"].astype(bool)]
        by_grammar = int(refused["invalid"].sum())
        found = stats.rate(by_grammar, len(judged), event="grammar_refusal", per="verdict")
        rows.append({
            "run_id": run_id, "observed": len(judged), "refused": len(refused), "by_grammar": by_grammar,
            "share": found.value, "low": found.low, "high": found.high,
        })  # fmt: skip
    return pd.DataFrame(rows)


def wasted(steps: pd.DataFrame) -> pd.DataFrame:
    """Budget that grammar-invalid drafts took: by run, ``verified``, of these ``invalid``, and ``invalid_share``."""
    invalid = (steps["verified"] - steps["grammar_valid"]).clip(lower=0)
    found = steps.assign(invalid=invalid).groupby("run_id", as_index=False)[["verified", "invalid"]].sum()
    return found.assign(invalid_share=found["invalid"] / found["verified"].where(found["verified"] > 0))


def drift(results: lab.Results) -> pd.DataFrame:
    """The estimator's slope and intercepts, step by step: run_id, step, name (``slope``, ``intercept 0``...), value."""
    av = read(results)["av_steps"].dropna(subset=["slope"])
    rows = []
    for row in av.to_dict("records"):
        rows.append((row["run_id"], row["step"], "slope", row["slope"]))
        rows += [(row["run_id"], row["step"], f"intercept {k}", float(v)) for k, v in enumerate(row["intercepts"])]
    return pd.DataFrame(rows, columns=["run_id", "step", "name", "value"])


def refit(seen: pd.DataFrame, *, without_invalid: bool) -> pd.DataFrame:
    """The estimator of one run fitted again from its verdicts, with or without those that are the grammar's.

    ``seen``: `verdicts` of one run. With all of them the result is what vLLM's own fit gave, up to rounding (where
    scheduling is asynchronous vLLM's own sees a verdict up to a step later, and differs in the second digit);
    without those of grammar-invalid tokens it is what the estimator would know of the drafter alone. Predictions
    are made anew as the coefficients change.

    Returns:
        One row a fit: step (the one it followed), slope, and ``intercept 0`` to ``intercept k-1``.
    """
    k = int(seen["position"].max()) + 1
    estimator = Estimator(1, k)
    judged = seen[seen["observed"].astype(bool)]
    if without_invalid:
        judged = judged[~judged["invalid"].astype(bool)]
    by_step = {int(str(step)): part for step, part in judged.groupby("step")}
    rows = []
    coefficients = estimator.slope.copy(), estimator.intercepts.copy()
    for step in range(int(seen["step"].max()) + 1):
        if step in by_step:
            part = by_step[step]
            shape = (1, len(part), k)
            features, observed = np.zeros(shape, np.float32), np.zeros(shape, bool)
            label = np.zeros(shape, bool)
            at = np.arange(len(part)), part["position"].to_numpy(int)
            features[0][at], observed[0][at] = part["feature"].to_numpy(np.float32), True
            label[0][at] = part["accepted"].to_numpy(bool)
            estimator.observe(features, estimator.predict(features), observed, label)
        if (step + 1) % REFIT_INTERVAL == 0:
            estimator.refit()
            coefficients = estimator.slope, estimator.intercepts
            rows.append((step, float(coefficients[0][0]), *map(float, coefficients[1][0])))
    return pd.DataFrame(rows, columns=["step", "slope", *(f"intercept {at}" for at in range(k))])


def both_fits(seen: pd.DataFrame, results: lab.Results) -> pd.DataFrame:
    """One run's coefficients as recorded, and as they would be without verdicts on grammar-invalid tokens.

    Returns step, name, value and ``which`` (``recorded`` or ``spared``), from the first step to the last.
    """
    every = drift(results)
    recorded = every[every["run_id"] == seen["run_id"].iloc[0]].drop(columns="run_id")
    first = recorded[recorded["step"] == recorded["step"].min()]
    fitted = refit(seen, without_invalid=True).melt("step", var_name="name")
    spared = pd.concat([first, fitted], ignore_index=True)
    last = spared.groupby("name", sort=False, as_index=False).last().assign(step=recorded["step"].max())
    whole: pd.DataFrame = pd.concat([spared, last])
    both: pd.DataFrame = pd.concat([recorded.assign(which="recorded"), whole.assign(which="spared")], ignore_index=True)
    return both


def spoiled(seen: pd.DataFrame, runs: pd.DataFrame, results: lab.Results) -> pd.DataFrame:
    """How far verdicts on grammar-invalid tokens moved each run's estimator.

    Args:
        seen: `verdicts` of all runs.
        runs: run_id and what tells the runs apart.
        results: where the recorded coefficients are.

    Returns:
        ``runs`` with, for the last fit: ``refits``, slope as ``recorded``, as ``again`` from all verdicts (a check: the
        same but for rounding, asynchronously but for a step) and ``spared``, and ``p recorded`` and ``p spared``: the
        mean probability that each gives the first token of a draft that the grammar accepts, beside ``p real``, how
        many of these were accepted.
        Runs that were never fitted have no row.
    """
    state = read(results)["av_steps"].dropna(subset=["slope"]).sort_values("step").groupby("run_id").last()
    rows = []
    for run in runs.to_dict("records"):
        own = seen[seen["run_id"] == run["run_id"]]
        again, spared = (refit(own, without_invalid=flag) for flag in (False, True))
        if again.empty:
            continue
        last = state.loc[run["run_id"]]
        first = own[(own["position"] == 0) & ~own["invalid"].astype(bool) & own["observed"].astype(bool)]
        fits = {"recorded": (last["slope"], last["intercepts"][0])}
        fits |= {
            name: (fit["slope"].iloc[-1], fit["intercept 0"].iloc[-1])
            for name, fit in (("again", again), ("spared", spared))
        }
        row: dict[str, Any] = {
            **{str(key): value for key, value in run.items()},
            "refits": int(last["refits"]),
            **{f"slope {n}": float(f[0]) for n, f in fits.items()},
        }
        features = first["feature"].to_numpy(float)
        for name in ("recorded", "spared"):
            slope, intercept = fits[name]
            row[f"p {name}"] = float(np.mean(1 / (1 + np.exp(-(slope * features + intercept)))))
        rows.append(row | {"p real": float(first["accepted"].mean())})
    found = ["refits", "slope recorded", "slope again", "slope spared", "p recorded", "p spared", "p real"]
    return pd.DataFrame(rows, columns=[*runs.columns, *found])


def policies(k: int, concurrency: int, curves: Sequence[CostCurve]) -> list[Budget]:
    """A spread of budgets to replay: none, all, fixed and per-request ones, and the argmax under each curve."""
    found = [Budget(policy="none"), Budget(policy="all")]
    found += [Budget(policy="per_request", value=float(n)) for n in range(1, k)]
    found += [Budget(policy="fixed", value=float(n)) for n in range(1, k * concurrency)]
    return found + [Budget(policy="native", costs=curve) for curve in curves]


def what_if(recording: Recording, curve: CostCurve) -> pd.DataFrame:
    """All `policies` replayed and priced under ``curve``, the fastest first."""
    k, concurrency = recording.cell.drafter.k, recording.cell.workload.concurrency
    done = replay(recording, policies(k, concurrency, [curve]), costs=curve).totals
    done["accepted_per_verified"] = done["accepted"] / done["verified"].where(done["verified"] > 0)
    done["over_all"] = done["tokens_per_s"] / done.loc[done["policy"] == "all", "tokens_per_s"].iloc[0]
    columns = ["policy", "tokens_per_s", "over_all", "engine_steps", "verified", "accepted", "accepted_per_verified"]
    columns += ["narrow", "inexact", "refused"]
    return done.sort_values("tokens_per_s", ascending=False)[columns].reset_index(drop=True)


def best(known: Mapping[tuple[str, str, int], Recording], curves: Sequence[CostCurve]) -> pd.DataFrame:
    """The fastest policy of `what_if`, a row a recording (by drafter, grammar and concurrency) and curve."""
    rows = []
    for (drafter, grammar, concurrency), recording in known.items():
        for curve in curves:
            about = {"drafter": drafter, "grammar": grammar, "concurrency": concurrency, "curve": curve.name}
            rows.append(about | what_if(recording, curve).iloc[0].to_dict())
    return pd.DataFrame(rows)


def scaled(curve: CostCurve, factor: float) -> CostCurve:
    """The curve with the cost of every token beyond the first multiplied."""
    first = curve.verify[0].ms
    verify = tuple(costs.Point(size=p.size, ms=first + (p.ms - first) * factor) for p in curve.verify)
    return curve.model_copy(update={"verify": verify, "name": f"{curve.name} x {factor:.2g}"})


def reach(curves: Sequence[CostCurve]) -> str:
    """How far each curve was measured, for a caption: beyond its last point the last slope goes on."""
    return "; ".join(f"{curve.name} to {curve.verify[-1].size} tokens a step" for curve in curves)


def all_curves() -> list[CostCurve]:
    """Every curve in ``data/costs``."""
    return [costs.load(name) for name in costs.names()]


def save(frame: pd.DataFrame, folder: Path, name: str) -> pd.DataFrame:
    """Write a table beside the figures, and give it back."""
    frame.to_csv(folder / f"{name}.csv", index=False)
    return frame
