"""The training forwards against vLLM's own forward of the same checkpoint: same tokens and states, same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specgram_lab import models, paths
from specgram_lab.drafters import (
    batches,
    block,
    compose,
    data,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle3,
    evaluate,
    features,
    mtp,
    recipes,
    witness,
)
from specgram_lab.drafters.blocks import target_embedding
from specgram_lab.spec import Cell, parse_cell

pytestmark = pytest.mark.engine
WIDE = 40
"""Logits compared a step: the likeliest of both sides."""


def cell(method: str, folder: Path, k: int) -> Cell:
    return parse_cell(
        {
            "drafter": {"method": method, "model": str(folder), "k": k},
            "workload": {"prompts": "prose", "limit": 2, "max_tokens": 20, "concurrency": 1},
            "engine": {"runner": "v2", "record": False, "budget": {"policy": "all" if method == "dspark" else "off"}},
        }
    )


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return target_embedding(models.ensure(features.TARGET))


def disturb(module: torch.nn.Module, scale: float) -> None:
    """Weights that no symmetry or zero hides anything in."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (scale if parameter.dim() == 2 else 0.2 * parameter.abs().mean()))


def agree(ours: torch.Tensor, theirs: torch.Tensor, wide: int = WIDE) -> None:
    """Within what bfloat16 does to a forward pass, measured against the spread of the logits."""
    top = theirs.topk(wide, -1).indices
    ours_top, theirs_top = ours.gather(-1, top), theirs.gather(-1, top)
    error = (ours_top - theirs_top).abs().mean() / theirs[theirs.isfinite()].std()
    assert error < 0.05, f"logits differ by {error:.3f} of their spread"
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    assert same > 0.85, f"only {same:.2f} of the drafts are the same"


def block_states(model: block.BlockDrafter, request: dict[str, torch.Tensor], anchor: int) -> torch.Tensor:
    """(k, hidden): what the heads read at one anchor, from the states before it alone."""
    tokens = request["tokens"][None]
    with torch.inference_mode():
        context = model.context(request["aux"][None, :anchor])
        context = torch.nn.functional.pad(context, (0, 0, 0, tokens.shape[1] - anchor))
        return model.backbone(context, tokens, torch.tensor([[anchor]]))[0, 0]


def test_draft_model(tmp_path: Path, embedding: torch.Tensor) -> None:
    made = draft_model.DraftModel(embedding, batches.Vocabulary.of(torch.arange(3000), len(embedding)))
    disturb(made, 0.05)
    made.export(tmp_path / "module")
    compose.main(models.ensure(features.TARGET), tmp_path / "module", tmp_path / "drafter")
    model = draft_model.load(tmp_path / "module", embedding)
    for request in witness.observe(cell("draft_model", tmp_path / "drafter", 3), tmp_path / "seen"):
        rows = []
        for anchor, drafts in zip(request["anchors"].tolist(), request["drafts"], strict=True):
            tokens = torch.cat((request["tokens"][: anchor + 1], drafts))[None]
            with torch.inference_mode():
                rows.append(model.logits(tokens, torch.arange(tokens.shape[1])[None])[0, anchor : anchor + 3])
        agree(torch.stack(rows), request["logits"])


def test_dspark(tmp_path: Path, embedding: torch.Tensor) -> None:
    vocabulary = batches.Vocabulary.of(torch.arange(3000), len(embedding))
    made = dspark.DSpark(embedding, vocabulary, torch.full((len(block.TAPS) * 576,), 4.0))
    disturb(made, 0.05)
    made.export(tmp_path / "drafter")
    model = dspark.load(tmp_path / "drafter", embedding)
    for request in witness.observe(cell("dspark", tmp_path / "drafter", 5), tmp_path / "seen"):
        ours, sure = [], []
        for anchor, drafts in zip(request["anchors"].tolist(), request["drafts"], strict=True):
            before = torch.cat((request["tokens"][anchor : anchor + 1], drafts[:-1]))
            hidden = block_states(model, request, anchor)
            with torch.inference_mode():
                ours.append(model.logits(hidden, before))
                sure.append(model.confidence(hidden, before).sigmoid())
        agree(torch.stack(ours), request["logits"])
        assert (torch.stack(sure) - request["confidences"]).abs().max() < 0.05


def test_dflash(tmp_path: Path, embedding: torch.Tensor) -> None:
    vocabulary = batches.Vocabulary.of(torch.arange(3000), len(embedding))
    made = dflash.DFlash(embedding, vocabulary, torch.full((len(block.TAPS) * 576,), 4.0))
    disturb(made, 0.05)
    made.export(tmp_path / "drafter")
    model = dflash.load(tmp_path / "drafter", embedding)
    for request in witness.observe(cell("dflash", tmp_path / "drafter", 5), tmp_path / "seen"):
        states = [block_states(model, request, anchor) for anchor in request["anchors"].tolist()]
        agree(torch.stack(states) @ embedding.T, request["logits"])


def test_dflash2(tmp_path: Path, embedding: torch.Tensor) -> None:
    vocabulary = batches.Vocabulary.of(torch.arange(3000), len(embedding))
    made = dflash2.DFlash2(embedding, vocabulary, torch.full((len(block.TAPS) * 576,), 4.0))
    disturb(made, 0.05)
    with torch.no_grad():  # a pair of tokens as loud as a token
        made.candidate_selector.successor_codebook.mul_(8)
    made.export(tmp_path / "drafter")
    model = dflash2.load(tmp_path / "drafter", embedding)
    every = torch.arange(len(embedding))
    for request in witness.observe(cell("dflash2", tmp_path / "drafter", 5), tmp_path / "seen"):
        ours, walks = [], []
        for anchor, drafts in zip(request["anchors"].tolist(), request["drafts"], strict=True):
            hidden = block_states(model, request, anchor)
            before = torch.cat((request["tokens"][anchor : anchor + 1], drafts[:-1]))
            with torch.inference_mode():
                ours.append(model.scores(hidden, every, hidden @ embedding.T, before))
                walks.append(model.drafts(hidden, before[0], before))
        candidates = request["logits"].isfinite()
        agree(torch.stack(ours).where(candidates, -torch.inf), request["logits"], wide=dflash2.TOP)
        assert (torch.stack(walks) == request["drafts"]).float().mean() > 0.85


def test_eagle3(tmp_path: Path, embedding: torch.Tensor) -> None:
    vocabulary = batches.Vocabulary.of(torch.arange(3000), len(embedding))
    made = eagle3.Eagle3(embedding, vocabulary, torch.full((len(block.TAPS) * 576,), 4.0))
    disturb(made, 0.05)
    made.export(tmp_path / "drafter")
    model = eagle3.load(tmp_path / "drafter", embedding)
    for request in witness.observe(cell("eagle3", tmp_path / "drafter", 3), tmp_path / "seen"):
        ours = []
        for anchor, drafts in zip(request["anchors"].tolist(), request["drafts"], strict=True):
            tokens = torch.cat((request["tokens"][: anchor + 1], drafts))
            following = recipes.shifted(tokens[None, 1:], 3, 0)[:, :anchor]
            with torch.inference_mode():
                ours.append(model.chains(request["aux"][None, :anchor], following, 3)[0, -1] @ embedding.T)
        agree(torch.stack(ours), request["logits"])


def test_mtp(tmp_path: Path, embedding: torch.Tensor) -> None:
    made = mtp.Mtp(embedding, batches.Vocabulary.of(torch.arange(3000), len(embedding)))
    disturb(made, 0.05)
    made.export(tmp_path / "drafter")
    mtp.carry(models.ensure(features.TARGET), tmp_path / "drafter", tmp_path / "target")
    model = mtp.load(tmp_path / "drafter", embedding)
    asked = cell("mtp", Path("target"), 1).model_dump(mode="json")
    asked["target"]["model"] = str(tmp_path / "target")
    for request in witness.observe(parse_cell(asked), tmp_path / "seen"):
        ours = []
        for anchor in request["anchors"].tolist():
            following = request["tokens"][1 : anchor + 1]
            with torch.inference_mode():
                ours.append(model.states(request["aux"][None, :anchor], following[None])[0, -1:] @ embedding.T)
        agree(torch.stack(ours), request["logits"])


def test_answers_come_with_the_states_and_tokens_of_a_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    cache = paths.cache_dir()
    target = models.ensure(features.TARGET)
    for part in ("models", "corpora"):
        (cache / part).mkdir(parents=True, exist_ok=True)
        (tmp_path / part).symlink_to(cache / part)
    monkeypatch.setenv("SPECGRAM_CACHE", str(tmp_path))
    assert data.generate(0, limit=5) == 0
    found = list(features.sequences("heldout"))
    assert {one.kind for one in found} == {"free", "json_schema"}
    assert len(found) == 10
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    for one in found:
        with torch.inference_mode():
            given = model(one.tokens[None], output_hidden_states=True)
        theirs = torch.cat([given.hidden_states[layer + 1][0] for layer in features.AUX_LAYERS[:2]], -1)
        ours = features.tapped(one.aux, features.AUX_LAYERS[:2])[:-1].float()
        close = torch.nn.functional.cosine_similarity(ours, theirs[:-1].float(), dim=-1)
        assert close.min() > 0.97
        rows = len(one) - one.prompt
        assert one.known.tolist() == [True] * rows + [False]
        assert one.top_ids[:rows, 0].tolist() == one.tokens[one.prompt :].tolist()  # temperature 0, under its grammar
        theirs_top = given.logits[0, one.prompt - 1 : -1].float().log_softmax(-1).gather(-1, one.top_ids[:rows])
        if one.kind == "free":
            assert (theirs_top[:, :3].exp() - one.top_logprobs[:rows, :3].exp()).abs().mean() < 0.02


@pytest.mark.engine
def test_a_trained_drafter_is_measured_on_an_engine(tmp_path: Path) -> None:
    found = evaluate.evaluate("dspark", tmp_path, limit=6)
    assert set(found) == {"json_schema", "free"}
    for one in found.values():
        assert one["outcome"] == "ok"
        assert one["mean_acceptance_length"] > 1.4  # 1.75 and 2.08 on all of the prompts
        assert len(one["per_position"]) == 5
        assert one["own_text"]["requests"] == 6
        assert one["own_text"]["differing"] == one["own_text"]["ties"]
        assert one["confidence"][0]["n"] == sum(b["n"] for b in one["confidence"][0]["bins"]) > 50
        assert one["confidence"][0]["expected_calibration_error"] < 0.5
    together = evaluate.pooled(found)
    assert [row["n"] for row in together[:1]] == [sum(one["confidence"][0]["n"] for one in found.values())]
    again = evaluate.to_text({"dspark": found}).splitlines()
    assert [line.split()[:2] for line in again[1:]] == [["dspark", kind] for kind in (*found, "confidence,")]
