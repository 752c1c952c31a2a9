"""Replay: against a slow engine in plain Python, and against real engines, step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import small_engine
from small_engine import World

from specgram_lab.av import again, lookup, recording
from specgram_lab.av.replay import ReplayError, load, replay
from specgram_lab.spec import Budget, Cell, Drafter, Grammar, Workload

COLUMNS = ["step", "request_id", "request_step", "drafted", "scheduled", "verified", "accepted", "committed"]
POLICIES = [
    Budget(policy="off"),
    Budget(policy="all"),
    Budget(policy="none"),
    *(Budget(policy="fixed", value=float(n)) for n in (0, 1, 3, 5, 100)),
    *(Budget(policy="per_request", value=float(n)) for n in (1, 2)),
    *(Budget(policy="fraction", value=f) for f in (0.3, 0.7)),
    *(Budget(policy="native", verify_cost=(1.0, b)) for b in (0.01, 0.1, 0.4, 2.0)),
]


def world(seed: int, **other) -> World:
    draw = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in draw.integers(1, 40, 7))
    return World(seed, int(draw.integers(1, 6)), lengths, tuple(int(n) for n in draw.integers(3, 30, 7)), **other)


def cell(made: World, method="draft_model", concurrency=3, **workload) -> Cell:
    return Cell(
        drafter=Drafter(method=method, k=made.k, model="other" if method != "ngram" else None),
        grammar=Grammar(kind="json_object") if made.grammar else Grammar(),
        workload=Workload(prompts="records", concurrency=concurrency, **workload),
    )


def recorded(folder, made: World, policy="none", **asked):
    """A run of the slow engine, loaded."""
    spec = cell(made, **asked)
    rows = small_engine.decode(made, Budget(policy=policy), spec.workload.concurrency)
    return load([small_engine.write(folder / policy, made, spec, rows)])


def expected(made: World, budget: Budget, concurrency: int):
    """What the slow engine does, with accepted drafts of the output only."""
    rows = small_engine.decode(made, budget, concurrency)
    return [
        tuple(min(row[name], row["committed"]) if name == "accepted" else row[name] for name in COLUMNS) for row in rows
    ]


def found(replayed, budget: Budget):
    steps = replayed.steps[replayed.steps["policy"] == budget.label]
    return in_order(steps[COLUMNS].itertuples(index=False, name=None))


def in_order(rows):
    return sorted(rows, key=lambda row: (row[0], int(row[1])))


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_complete_recording_replays_every_policy_step_by_step(tmp_path, seed, chained, grammar):
    made = world(seed, chained=chained, grammar=grammar)
    method = "draft_model" if chained else "dspark"
    known = recorded(tmp_path, made, method=method)
    for budget in POLICIES:
        one = replay(known, [budget], detail=True)
        assert one.totals["refused"].tolist() == [""]
        assert found(one, budget) == in_order(expected(made, budget, 3)), budget


def test_all_policies_at_once_give_what_each_gives_alone(tmp_path):
    known = recorded(tmp_path, world(3, grammar=True))
    together = replay(known, POLICIES).totals
    alone = [replay(known, [budget]).totals.iloc[0] for budget in POLICIES]
    for row, one in zip(together.itertuples(index=False), alone, strict=True):
        assert list(row) == one.tolist()
    assert (together["drafted"] >= together["scheduled"]).all()
    assert (together["scheduled"] == together["verified"] + together["av_skipped"]).all()
    assert (together["verified"] >= together["accepted"]).all()
    assert together["output_tokens"].nunique() == 1


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("right", [0.4, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_a_full_run_replays_every_policy_where_the_drafter_is_asked_again(tmp_path, seed, right, grammar):
    made = world(seed, right=right, grammar=grammar)
    spec = cell(made)
    folder = small_engine.write(tmp_path, made, spec, small_engine.decode(made, Budget(policy="all"), 3))
    known = load([folder], small_engine.asked_again(made))
    for budget in POLICIES:
        done = replay(known, [budget], detail=True)
        assert done.totals["refused"].tolist() == [""]
        assert found(done, budget) == in_order(expected(made, budget, 3)), budget


def test_a_full_run_alone_says_where_it_cannot_be_replayed(tmp_path):
    known = recorded(tmp_path, World(1, 4, (30, 20), (4, 5), right=0.9), policy="all", concurrency=1)
    totals = replay(known, [Budget(policy="all"), Budget(policy="fixed", value=2.0)]).totals
    assert totals["refused"].iloc[0] == ""
    assert totals["refused"].iloc[1].startswith("the drafter's next token is not known for request 0 after ")
    assert totals["refused"].iloc[1].endswith("; the drafter asked again, or a run with budget none would tell")


def test_a_drafter_that_says_other_things_than_recorded_is_refused_unless_it_was_close(tmp_path):
    made = World(1, 4, (30,), (4,))
    recorded(tmp_path, made, policy="all", concurrency=1)
    said = small_engine.asked_again(made)
    place = next(iter(np.cumsum(load_committed(tmp_path / "all"))))
    said["0"].drafts[place - 1, 0] += 1
    with pytest.raises(ReplayError, match=f"asked again after {place} tokens of request 0 the drafter proposes"):
        load([tmp_path / "all"], said)
    said["0"].close[place - 1] = True
    known = load([tmp_path / "all"], said)
    assert found(replay(known, [Budget(policy="all")], detail=True), Budget(policy="all")) == expected(
        made, Budget(policy="all"), 1
    )


def test_a_step_on_a_draft_that_was_nearly_another_counts_as_narrow(tmp_path):
    made = World(1, 4, (30,), (4,))
    recorded(tmp_path, made, policy="all", concurrency=1)
    said = small_engine.asked_again(made)
    said["0"].close[:] = True
    known = load([tmp_path / "all"], said)
    totals = replay(known, [Budget(policy="all"), Budget(policy="none")]).totals
    began = len(load_committed(tmp_path / "all")) - 1
    assert totals["narrow"].tolist() == [0, 29 - began]


def test_a_second_run_fills_the_holes_of_the_first(tmp_path):
    made = World(4, 4, (30, 20), (4, 5), right=0.9)
    spec = cell(made, concurrency=1)
    folders = [
        small_engine.write(tmp_path / policy, made, spec, small_engine.decode(made, Budget(policy=policy), 1))
        for policy in ("all", "none")
    ]
    budget = Budget(policy="fixed", value=2.0)
    assert replay(load(folders[:1]), [budget]).totals["refused"].iloc[0] != ""
    assert found(replay(load(folders), [budget], detail=True), budget) == expected(made, budget, 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_smaller_k_is_the_beginning_of_every_draft(tmp_path, seed):
    made = World(seed, 5, (30, 20, 25), (4, 5, 6))
    known = recorded(tmp_path, made)
    for k in (1, 2, 4):
        shorter = World(seed, k, made.lengths, made.prompts)
        one = replay(known, [Budget(policy="off")], k=k, detail=True)
        assert found(one, Budget(policy="off")) == in_order(expected(shorter, Budget(policy="off"), 3))


@pytest.mark.parametrize(
    ("method", "k", "sentence"),
    [
        ("dspark", 2, "dspark proposes a block at once: with k=2 it would propose other tokens than with k=4"),
        ("dflash", 2, "dflash proposes a block at once"),
        ("draft_model", 9, "recorded with k=4: k=9 would need tokens that nobody proposed"),
    ],
)
def test_another_k_is_refused_where_it_is_another_proposal(tmp_path, method, k, sentence):
    known = recorded(tmp_path, World(0, 4, (10, 10), (3, 3)), method=method)
    with pytest.raises(ReplayError, match=sentence):
        replay(known, [Budget(policy="off")], k=k)


def test_a_block_drafter_is_refused_from_a_full_run_and_says_what_would_help(tmp_path):
    made = World(0, 4, (30, 30), (3, 3), chained=False)
    known = recorded(tmp_path, made, policy="all", method="dspark")
    totals = replay(known, [Budget(policy="all"), Budget(policy="fixed", value=1.0)]).totals
    assert totals["refused"].tolist()[0] == ""
    assert totals["refused"].tolist()[1].endswith("a run with budget none would tell")
    assert math.isnan(totals["verified"].astype("Float64").to_numpy(float, na_value=np.nan)[1])


@pytest.mark.parametrize(
    ("table", "columns", "sentence"),
    [
        ("runs", {"outcome": "killed"}, "ended as killed"),
        ("runs", {"scheduling_effective": "async"}, "was asynchronous"),
        ("steps", {"scheduled": 0, "verified": 0, "av_skipped": 0}, "length or token budget cut them"),
        ("steps", {"committed": 1}, "its output has"),
    ],
)
def test_runs_that_cannot_be_replayed_are_refused(tmp_path, table, columns, sentence):
    made = World(0, 4, (10, 10), (3, 3))
    recorded(tmp_path, made, policy="all")
    small_engine.rewrite(tmp_path / "all", table, **columns)
    with pytest.raises(ReplayError, match=sentence):
        load([tmp_path / "all"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workload": Workload(prompts="records", temperature=0.7)}, "sampled at temperature 0.7"),
        ({"drafter": Drafter(method="suffix", k=4)}, "the drafts of suffix are no function of the text"),
        (
            {"drafter": Drafter(method="ngram", k=1, rejection="synthetic", synthetic_rates=(0.5,))},
            "had its acceptance planted",
        ),
    ],
)
def test_cells_that_cannot_be_replayed_are_refused(tmp_path, change, sentence):
    made = World(0, 4, (10, 10), (3, 3))
    spec = cell(made).model_copy(update=change)
    rows = small_engine.decode(made, Budget(policy="all"), 3)
    with pytest.raises(ReplayError, match=sentence):
        load([small_engine.write(tmp_path / "run", made, spec, rows)])


@pytest.mark.parametrize(
    ("method", "table", "columns", "sentence"),
    [
        ("draft_model", "requests", {}, "the prompts of records are others than those of the run"),
        ("draft_model", "requests", {"token_ids": None}, "request 0 of run .* has no output"),
        ("draft_model", "runs", {"scheduling_effective": "async"}, "was asynchronous"),
        ("ngram", "requests", {}, "ngram is asked again as runner V2 looks, and the run was one of V1"),
        (
            "eagle3",
            "requests",
            {},
            "eagle3 cannot be asked again: what it proposes does not follow from the text alone",
        ),
    ],
)
def test_a_drafter_is_not_asked_about_a_run_that_cannot_be_replayed(tmp_path, method, table, columns, sentence):
    made = World(0, 4, (10, 10), (3, 3))
    recorded(tmp_path, made, policy="all", method=method)
    small_engine.rewrite(tmp_path / "all", table, **columns)
    with pytest.raises(ReplayError, match=sentence):
        again.ask(tmp_path / "all")


def test_runs_with_other_texts_are_not_put_together(tmp_path):
    folders = []
    for seed in (0, 1):
        made = World(seed, 4, (10, 10), (3, 3))
        recorded(tmp_path / str(seed), made, policy="all")
        folders.append(tmp_path / str(seed) / "all")
    with pytest.raises(ReplayError, match="request 0 has another output"):
        load(folders)


def test_a_schedule_needs_its_scenario(tmp_path):
    known = recorded(tmp_path, World(0, 4, (10, 10), (3, 3)))
    with pytest.raises(ReplayError, match="takes its budgets from a scenario"):
        replay(known, [Budget(policy="schedule")])


def naive_ngram(text, k, low, high):
    """The longest n-gram that ends the text and was there before, at its last occurrence."""
    for size in range(high, low - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if size < len(text) and text[start : start + size] == text[-size:]:
                found = text[start + size : start + size + k]
                return found + [text[-1]] * (k - len(found))
    return [text[-1]] * k


@pytest.mark.parametrize("seed", range(5))
def test_ngram_drafts_are_found_as_by_looking_everywhere(seed):
    text = [int(t) for t in np.random.default_rng(seed).integers(0, 4, 60)]
    for low, high, k in ((1, 3, 4), (2, 4, 3), (1, 1, 5), (3, 5, 2)):
        places = range(1, len(text))
        got = lookup.propose(text, list(places), k, low, high)
        assert got.tolist() == [naive_ngram(text[:n], k, low, high) for n in places]


def test_ngram_confidences_fall_with_depth_and_tell_texts_apart():
    total, length = np.arange(200) * 3700, np.arange(200) + 5
    found = lookup.confidence(total, length)
    assert ((found >= 0.5) & (found < 0.75)).all()
    assert len(np.unique(found)) > 190


def test_recording_marks_what_nobody_asked(tmp_path):
    made = World(2, 4, (12,), (3,), grammar=True)
    known = recorded(tmp_path, made, policy="all")
    asked = {int(at) for at in np.cumsum([0, *load_committed(tmp_path / "all")])[1:-1]}
    unknown = {at for at in range(1, 12) if known.valid[at] == recording.UNKNOWN}
    assert unknown == set(range(1, 12)) - asked


def load_committed(folder):
    from specgram_lab import ledger

    return ledger.read_table(folder, "steps")["committed"].tolist()
