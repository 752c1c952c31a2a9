"""Data and training of drafters, without an engine."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen3Config
from typer.testing import CliRunner

from specgram_lab import capabilities, lab, models, run, workloads
from specgram_lab.cli import app
from specgram_lab.drafters import (
    batches,
    bfcl,
    block,
    chain,
    compose,
    data,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle3,
    evaluate,
    features,
    heads,
    mtp,
    pairs,
    recipes,
    registry,
    support,
    ties,
    train,
)
from specgram_lab.drafters.blocks import target_embedding
from specgram_lab.paths import DATA
from specgram_lab.spec import parse_cell
from specgram_lab.sweeps import runner


@pytest.fixture(scope="module")
def chunks() -> list[data.Chunk]:
    return data.chunks()


def test_no_recipe_sees_a_held_out_prompt_or_schema(chunks: list[data.Chunk]) -> None:
    seen = {"train": (set(), set()), "heldout": (set(), set())}
    for chunk in chunks:
        texts, schemas = seen[chunk.split]
        for prompt in chunk.prompts:
            texts.add(prompt.line(chunk.kind)["messages"][0]["content"])
            if chunk.kind == "json_schema":
                schemas.add(json.dumps(prompt.schema, sort_keys=True))
    lab = [p for path in (DATA / "prompts").glob("*.jsonl") for p in workloads.read_prompts(path)]
    held_texts = seen["heldout"][0] | {turn["content"] for p in lab for turn in p.chat() if turn["role"] == "user"}
    held_schemas = seen["heldout"][1] | {json.dumps(p.schema, sort_keys=True) for p in lab if p.schema}
    assert len(seen["train"][0]) > 3000
    assert len(seen["heldout"][0]) >= 200
    assert not seen["train"][0] & held_texts
    assert not seen["train"][1] & held_schemas


def test_chunks_are_the_same_every_time(chunks: list[data.Chunk]) -> None:
    again = data.chunks()
    assert [(c.name, c.prompts) for c in again] == [(c.name, c.prompts) for c in chunks]


def test_small_schema_translates_types_and_closes_the_object() -> None:
    given = {
        "type": "dict",
        "properties": {
            "who": {"type": "String"},
            "how_much": {"type": "float"},
            "unit": {"type": "string", "enum": ["m", "ft"]},
            "marks": {"type": "tuple", "items": {"type": "integer"}},
        },
        "required": ["who", "how_much", "unit", "marks"],
    }
    schema = bfcl.small_schema(given)
    assert schema is not None
    assert [v.get("type", "enum") for v in schema["properties"].values()] == ["string", "number", "enum", "array"]
    assert schema["additionalProperties"] is False
    assert bfcl.small_schema({"properties": {"a b": {"type": "string"}}, "required": ["a b"]}) is None
    assert bfcl.small_schema({"properties": {}}) is None


def sequence(
    kind: data.Kind = "free", length: int = 12, prompt: int = 4, seed: int = 0, greedy: bool = False
) -> features.Sequence:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, 40, (length,), generator=generator)
    rows = length - prompt + 1
    ids = torch.stack([torch.randperm(30, generator=generator)[:4] + 20 for _ in range(rows)])
    if greedy:
        tokens[prompt:] = ids[:-1, 0]
    logprobs = torch.log(torch.tensor([0.6, 0.2, 0.1, 0.1])).expand(rows, 4)
    known = torch.ones(rows, dtype=torch.bool)
    if kind != "free":
        known[-2:] = False
    aux = torch.randn(length, 3 * 576, generator=generator)
    return features.Sequence("test", "group", kind, tokens, prompt, aux, ids, logprobs, known)


def test_labels_are_the_targets_greedy_token_and_its_distribution() -> None:
    free = sequence()
    greedy, ids, weights = batches.labels(free, batches.Vocabulary.of(torch.arange(60), 60))
    assert greedy.tolist() == free.top_ids[:-1, 0].tolist()
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(greedy)))
    torch.testing.assert_close(weights[0, 0] + weights[0, 1], torch.tensor(0.5 + 0.5 * 0.6))
    assert ids[:, 0].tolist() == greedy.tolist()


def test_behind_the_end_of_a_grammar_there_is_no_label() -> None:
    ended = sequence("json_schema")
    greedy, _, weights = batches.labels(ended, batches.Vocabulary.of(torch.arange(60), 60))
    assert greedy[:-1].tolist() == ended.top_ids[:-2, 0].tolist()
    assert greedy[-1] == -1
    assert weights[-1].sum() == 0


def test_a_token_outside_the_draft_vocabulary_weighs_nothing() -> None:
    free = sequence()
    kept = torch.tensor([t for t in range(60) if t != int(free.top_ids[0, 0])])
    _, ids, weights = batches.labels(free, batches.Vocabulary.of(kept, 60))
    assert weights[0, :2].tolist() == [0.0, 0.0]
    assert torch.equal(kept[ids[1, 0]], free.top_ids[1, 0])


def test_shifted_looks_ahead() -> None:
    rows = torch.tensor([[1, 2, 3]])
    assert recipes.shifted(rows, 2, 0).tolist() == [[[1, 2], [2, 3], [3, 0]]]


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return torch.randn(64, 576, generator=torch.Generator().manual_seed(0))


def small(embedding: torch.Tensor, method: str) -> recipes.Trainee:
    kept = batches.Vocabulary.of(torch.arange(10, 60), 64)
    unit = torch.ones(len(block.TAPS) * 576)
    blocks = {"dspark": dspark.DSpark, "dflash": dflash.DFlash, "dflash2": dflash2.DFlash2}
    if method in blocks:
        return blocks[method](embedding, kept, unit)
    if method == "mtp":
        return mtp.Mtp(embedding, kept)
    if method == "eagle3":
        return eagle3.Eagle3(embedding, kept, unit)
    return draft_model.DraftModel(embedding, kept)


@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2", "draft_model", "eagle3", "mtp"])
def test_training_lowers_the_loss_and_learns_the_drafts(embedding: torch.Tensor, method: str) -> None:
    trainee = small(embedding, method)
    pool = [sequence(seed=seed) for seed in range(4)]
    batch = batches.collate(pool, trainee.vocabulary, with_aux=True)
    optimisers = trainee.optimisers()
    losses = []
    for step in range(60):
        loss = trainee.loss(batch, torch.Generator().manual_seed(step))
        trainee.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    with torch.inference_mode():
        right, there = trainee.eval().right(batch)
    assert right[there].float().mean() > 0.6


def test_training_goes_on_where_it_was(embedding: torch.Tensor, tmp_path: Path) -> None:
    batch = batches.collate([sequence()], batches.Vocabulary.of(torch.arange(10, 60), 64), with_aux=True)

    def step(trainee: recipes.Trainee, optimisers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
        trainee.zero_grad()
        trainee.loss(batch, torch.Generator().manual_seed(0)).backward()
        for optimiser in optimisers:
            optimiser.step()
        return [parameter.detach().clone() for parameter in trainee.parameters()]

    first = small(embedding, "dspark")
    own = first.optimisers()
    step(first, own)
    train.save(tmp_path, first, own, 1, 2.5, "this one")
    again = small(embedding, "dspark")
    others = again.optimisers()
    with pytest.raises(SystemExit, match="another recipe"):
        train.load(tmp_path, again, others, "that one")
    assert train.load(tmp_path, again, others, "this one") == (1, 2.5)
    for one, two in zip(step(first, own), step(again, others), strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2"])
def test_a_block_sees_nothing_at_or_after_its_anchor(embedding: torch.Tensor, method: str) -> None:
    trainee = small(embedding, method)
    assert isinstance(trainee, block.BlockDrafter)
    one = sequence()
    aux = features.tapped(one.aux, block.TAPS)
    anchors = torch.tensor([[6, 8]])
    with torch.inference_mode():
        before = trainee.backbone(trainee.context(aux[None]), one.tokens[None], anchors)
        changed = aux.clone()
        changed[6:] += 3
        after = trainee.backbone(trainee.context(changed[None]), one.tokens[None], anchors)
    torch.testing.assert_close(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])


def test_convolutions_are_vllms() -> None:
    from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv

    made = dflash2.Convolution()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(3, 6, 576, generator=generator)
    groups = 576 // dflash2.GROUP
    with torch.inference_mode():
        kernel = made.coefficients(x)
        own = made.kernel_projection(x.flatten(0, 1)).reshape(18, 2, dflash2.KERNEL, groups)
        for side in (0, 1):
            theirs = _grouped_conv(
                x.flatten(0, 1), own[:, side], made.base_kernel[side], 6, groups, dflash2.GROUP, dflash2.KERNEL
            )
            torch.testing.assert_close(made.apply(x, kernel[..., side, :, :]).flatten(0, 1), theirs)


def test_an_engine_anchors_where_its_last_draft_ended() -> None:
    good = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 1], [1, 0], [1, 1], [0, 1]], dtype=torch.bool)
    assert recipes.walked(good, [4, 3]).tolist() == [True, False, False, True, True, False, True]


def test_a_recipe_sets_whole_groups_of_prompts_aside(chunks: list[data.Chunk]) -> None:
    groups = {prompt.group for chunk in chunks if chunk.split == "train" for prompt in chunk.prompts}
    aside = {group for group in groups if train.is_aside(group, dspark.PLAN)}
    assert 0.07 < len(aside) / len(groups) < 0.13
    assert not any(train.is_aside(group, dflash.PLAN) for group in groups)


def test_the_confidence_head_is_fitted_to_what_was_set_aside(embedding: torch.Tensor) -> None:
    trainee = small(embedding, "dspark")
    assert isinstance(trainee, dspark.DSpark)
    pool = [replace(sequence(seed=seed, length=40, greedy=True), group=f"group {seed}") for seed in range(6)]
    sampled = sequence(seed=9, length=40)
    assert pool[0].greedy
    assert not sampled.greedy
    before = trainee.report(pool)["calibration"]
    trainee.finish([*pool, sampled])
    after = trainee.report(pool)["calibration"]
    assert [row["n"] for row in after] == [row["n"] for row in before]
    anchors = sum(len(s) - s.prompt - 1 for s in pool)
    assert 0.8 * anchors < after[0]["n"] <= anchors
    assert all(one["n"] >= two["n"] for one, two in itertools.pairwise(after))
    assert after[0]["expected_calibration_error"] < 0.1 < before[0]["expected_calibration_error"]


def test_the_loss_at_a_head_is_cross_entropy_and_so_are_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, tokens, candidates = 2 * heads.ROWS + 44, 500, 5

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16().float()  # what the head computes with

    states, learned = drawn(rows, 24).requires_grad_(), drawn(tokens, 8).requires_grad_()
    fixed, offsets = drawn(tokens, 16), torch.zeros(tokens)
    offsets[400:] = 2.0
    ids = torch.randint(0, tokens, (rows, candidates), generator=generator)
    weights, importance = torch.rand(rows, candidates, generator=generator), torch.rand(rows, generator=generator)
    logits = states @ torch.cat((fixed, learned), -1).T + offsets
    each = -(logits.log_softmax(-1).gather(-1, ids) * weights).sum(-1)
    wanted = (each * importance).sum()
    found, best = heads.cross_entropy(states, fixed, learned, offsets, ids, weights, importance)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)
    assert (best == (logits - offsets).argmax(-1)).float().mean() > 0.98
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, (states, learned)),
        torch.autograd.grad(3 * wanted, (states, learned)),
        strict=True,
    ):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_tokens_that_are_drawn_stand_for_all_others() -> None:
    vocabulary = batches.Vocabulary.of(torch.arange(100, 200), 5000)
    tokens, offsets = heads.competing(vocabulary, torch.Generator().manual_seed(0))
    assert tokens[:100].tolist() == vocabulary.kept.tolist()
    assert not set(tokens[100:].tolist()) & set(vocabulary.kept.tolist())
    assert offsets[:100].count_nonzero() == 0
    torch.testing.assert_close(offsets[100:].exp().sum(), torch.tensor(4900.0))


def test_muon_takes_the_matrices_of_the_layers_alone(embedding: torch.Tensor) -> None:
    trainee = small(embedding, "dspark")
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    muon, adam = ({names[id(p)] for g in one.param_groups for p in g["params"]} for one in trainee.optimisers())
    assert muon | adam == set(names.values())
    assert not muon & adam
    assert {name.split(".")[0] for name in muon} == {"fc", "layers"}
    assert {name for name in adam if "proj" in name} == {
        "confidence_head.proj.weight", "confidence_head.proj.bias"
    }  # fmt: skip


def test_eagle3_chains_are_what_one_chain_alone_is(embedding: torch.Tensor) -> None:
    trainee = small(embedding, "eagle3")
    assert isinstance(trainee, eagle3.Eagle3)
    one = sequence()
    following = recipes.shifted(torch.nn.functional.pad(one.tokens[None, 1:], (0, 1)), 3, 0)
    with torch.inference_mode():
        aux = features.tapped(one.aux[None], block.TAPS)
        together = trainee.chains(aux, following, 3)[0, 5]
        alone = trainee.chains(aux[:, :6], following[:, :6], 3)[0, 5]
        late = trainee.chains(aux, following, 3, first=4)[0]
    torch.testing.assert_close(together, alone)
    assert len(late) == len(one) - 4
    torch.testing.assert_close(late[1], alone)


def test_draft_model_with_the_targets_table_is_a_llama(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = models.ensure(features.TARGET)
    table = target_embedding(target)
    made = draft_model.DraftModel(table, batches.Vocabulary.of(torch.arange(0, 300, 2), len(table)))
    made.export(tmp_path / "module")
    compose.main(target, tmp_path / "module", tmp_path / "whole")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    ours = draft_model.load(tmp_path / "module", table)
    ids = torch.randint(0, len(table), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.logits(ids, torch.arange(9).expand(2, 9)), theirs(ids).logits, rtol=1e-3, atol=1e-3
        )


def test_the_target_carried_over_to_mimo_says_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    target = models.ensure(features.TARGET)
    mtp.carry(target, None, tmp_path)
    ids = torch.randint(0, 49152, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        original = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)(ids).logits
        # MiMo's decoder is Qwen2's, which is what transformers knows
        carried = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(carried, original, rtol=1e-4, atol=1e-4)


def test_a_trained_name_is_a_model(tmp_path: Path) -> None:
    for row in registry.listing():
        assert (models.ensure(row["name"]) / "model.safetensors").is_file()
        assert Path(row["card"]).is_file()
    assert models.model_dir(str(tmp_path)) == tmp_path


def test_all_drafters_together_fit_their_budgets_and_forty_megabytes(tmp_path: Path) -> None:
    table = torch.randn(49152, 576, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for name in train.RECIPES:
        made = small(table, name)
        made.export(tmp_path / name)
        size = sum(path.stat().st_size for path in (tmp_path / name).iterdir()) / 1e6
        budget = re.search(r"^Budget: ([0-9.]+) MB\.$", sys.modules[type(made).__module__].__doc__ or "", re.M)
        assert budget is not None
        assert size <= float(budget[1]), f"{name} takes {size:.2f} MB"
        total += size
    assert total < 40


def test_a_pair_of_a_block_drafter_has_one_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path / name)
    for name, k in (("dflash", 5), ("eagle3", 3)):
        (tmp_path / name).mkdir()
        registry.write_card(tmp_path / name, {"method": name, "k": k})
    assert pairs.lengths("dflash", [1, 3, 5]) == [5]
    assert pairs.lengths("eagle3", [1, 3, 5]) == [1, 3, 5]
    assert pairs.parts("dflash")["drafter"] == {"method": "dflash", "model": "dflash", "k": 5}
    assert pairs.parts("eagle3", 1)["drafter"]["k"] == 1


def test_a_module_is_measured_inside_the_target_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedding: torch.Tensor
) -> None:
    from safetensors import safe_open

    target = models.ensure(features.TARGET)
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path / name)
    monkeypatch.setenv("SPECGRAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / features.TARGET).symlink_to(target)
    made = mtp.Mtp(embedding, batches.Vocabulary.of(torch.arange(64), 64))
    made.export(tmp_path / "mtp")
    registry.write_card(tmp_path / "mtp", {"method": "mtp", "k": 1})
    assert pairs.parts("mtp") == {"target": {"model": "mtp"}, "drafter": {"method": "mtp", "model": "target", "k": 1}}
    assert not models.is_ready("mtp")
    folder = models.ensure("mtp")
    assert models.is_ready("mtp")
    with safe_open(folder / "model.safetensors", "pt") as file:
        held = file.get_tensor("model.mtp_layers.0.input_proj.weight").float()
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
    torch.testing.assert_close(held, made.input_proj.weight.detach(), rtol=1e-2, atol=1e-3)
    begun = folder.stat().st_mtime
    assert models.ensure("mtp") == folder
    assert folder.stat().st_mtime == begun
    with torch.no_grad():
        made.input_proj.weight.add_(1.0)
    made.export(tmp_path / "mtp")
    assert models.model_dir("mtp") != folder


def test_a_finished_run_is_that_of_the_drafters_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "folder", lambda name: tmp_path / name)
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / registry.WEIGHTS).write_bytes(b"one")
    drafter = {"method": "eagle3", "model": "eagle3", "k": 3}
    cell = parse_cell({"drafter": drafter, "workload": {"inline": ["x"]}})
    assert run.inputs(cell) == {}  # without a card there is no such drafter
    registry.write_card(tmp_path / "eagle3", {"method": "eagle3"})
    before = run.inputs(cell)
    (tmp_path / "eagle3" / registry.WEIGHTS).write_bytes(b"two")
    assert set(before) == set(run.inputs(cell)) == {"drafter"}
    assert before != run.inputs(cell)


def test_a_drafter_of_another_method_is_refused() -> None:
    drafter = {"method": "eagle3", "model": "dspark", "k": 3}
    cell = parse_cell({"drafter": drafter, "workload": {"inline": ["x"]}, "engine": {"runner": "v2"}})
    assert capabilities.refusal(cell) == "dspark is a drafter for dspark, not eagle3"


def test_a_parting_of_two_greedy_texts_is_judged_by_the_targets_logits(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "text": "Name a colour."}\n{"id": "b", "text": "Count to three."}\n', encoding="utf-8")
    workload = parse_cell({"workload": {"prompts": str(path)}}).workload

    def requests(*answers: list[int]) -> pd.DataFrame:
        return pd.DataFrame({"prompt_id": ["a", "b"], "repeat": 0, "token_ids": list(answers)})

    own = requests([1000, 1001, 1002], [28, 29])
    assert ties.partings(own, own) == []
    assert ties.partings(own, requests([1000, 1001, 1002], [28, 30, 31])) == [ties.Parting("b", (28,), 29, 30)]
    assert ties.partings(own, requests([1000, 1001], [28, 29])) == [ties.Parting("a", (1000, 1001), 1002, None)]
    found = ties.compared(own, requests([1000, 1001], [28, 30, 31]), workload, features.TARGET)
    assert {name: found[name] for name in ("requests", "differing")} == {"requests": 2, "differing": 2}
    assert len(found["gaps"]) == 1  # where an answer has ended there are no two tokens

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.ensure(features.TARGET)
    chat = [{"role": "user", "content": "Count to three."}]
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        last = model(torch.tensor([[*ids, 28]])).logits[0, -1]
    size = float(last[[29, 30]].abs().max())
    wanted = float((last[29] - last[30]).abs()) / (2.0 ** (np.floor(np.log2(size)) - 7))
    assert found["gaps"][0] == pytest.approx(wanted, rel=1e-2, abs=1e-2)
    assert found["ties"] == (wanted <= ties.SPACINGS)


def test_bf16_has_eight_significant_bits() -> None:
    for size in (0.3, 1.0, 17.2, 40.0):
        value = torch.tensor(size).bfloat16()
        step = ties.spacing(float(value))
        assert float(torch.nextafter(value, torch.tensor(1e9, dtype=torch.bfloat16)) - value) == step


def test_where_a_drafter_runs_is_a_matrix_with_reasons(tmp_path: Path) -> None:
    made = support.cells(["dspark"], [{"kind": "none"}], {"inline": ["x"]})
    assert len(made) == 2 * 8
    refused = [cell for cell in made if capabilities.refusal(cell) and cell.engine.runner == "v1"]
    found = support.table(lab.run(refused, tmp_path))
    assert list(found["drafter"].value_counts().loc[["dspark", "suffix"]]) == [4, 4]
    ran = found.iloc[:1].assign(runner="v2", outcome="ok", reason=None, length=2.125)
    row = lab.read(tmp_path).runs.iloc[:1]
    got = {f"{name}_effective": row[f"{name}_requested"] for name in ("scheduling", "budget")}
    changed = replace(lab.read(tmp_path), runs=row.assign(outcome="ok", runner_effective="v2", **got))
    assert support.table(changed)["reason"].tolist() == ["the engine ran with runner v2 instead of v1"]
    shown = support.matrix(pd.concat([found, ran]))
    assert shown.loc[("dspark", 5), ("v2", *found[["scheduling", "budget", "grammar"]].iloc[0])] == "2.12"
    assert shown.loc[("dspark", 5), "v1"].eq("-").all()
    assert support.reasons(found).splitlines()[0] == "drafter dspark exists for Model Runner V2 only (dspark)"


def test_calibration_of_all_prompts_is_that_of_the_kinds_together() -> None:
    def kind(n: int, accepted: float) -> dict[str, list[dict[str, object]]]:
        return {
            "confidence": [{"position": 0, "bins": [{"bin": 0.55, "confidence": 0.5, "accepted": accepted, "n": n}]}]
        }

    (row,) = evaluate.pooled({"free": kind(30, 0.6), "json_schema": kind(10, 0.2), "none": {}})
    assert (row["n"], row["expected_calibration_error"], row["bins"][0]["accepted"]) == (40, 0.0, 0.5)
    assert row["bins"][0]["low"] < 0.5 < row["bins"][0]["high"]


def test_two_evaluations_do_not_share_a_folder(tmp_path: Path) -> None:
    with runner.locked(tmp_path):
        done = CliRunner().invoke(app, ["drafters", "evaluate", "draft_model", "--out", str(tmp_path)])
    assert isinstance(done.exception, run.OutputFolderError)
    assert "has a runner already" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def naive_drafts(model, ids, k):
    """One token after another, the whole text computed each time."""
    found = []
    for _ in range(k):
        found.append(chain.said(model(torch.tensor([ids])).logits[0, -1]))
        ids = [*ids, found[-1][0]]
    return found


@pytest.mark.parametrize("length", [1, 2, 12])
def test_a_draft_model_asked_as_a_tree_says_what_it_says_token_by_token(length):
    torch.manual_seed(length)
    model = LlamaForCausalLM(tiny(LlamaConfig)).eval()
    prompt, text = torch.randint(0, 40, (9,)).tolist(), torch.randint(0, 40, (length,)).tolist()
    with torch.inference_mode():
        text[: length // 2] = [
            token for token, _, _ in naive_drafts(model, prompt, length // 2)
        ]  # some drafts are kept
        tree = chain.drafts(model, prompt, text, 4)
        one_by_one = [naive_drafts(model, prompt + text[:at], 4) for at in range(1, length)]
    assert tree["drafts"] == [[token for token, _, _ in row] for row in one_by_one]
    odds = [[odd for _, odd, _ in row] for row in one_by_one]
    assert np.allclose(np.array(tree["odds"]), np.array(odds), atol=1e-4)


def test_models_that_do_not_see_the_whole_text_are_not_asked_as_a_tree():
    assert chain.whole_attention(tiny(LlamaConfig))
    assert chain.whole_attention(tiny(Qwen3Config))
    assert not chain.whole_attention(tiny(MistralConfig, sliding_window=8))
    assert not chain.whole_attention(tiny(Qwen3Config, use_sliding_window=True, sliding_window=8, max_window_layers=0))


def tiny(kind, **other):
    return kind(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=40, **other,
    )  # fmt: skip
