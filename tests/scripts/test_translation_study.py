"""Table 4 in small: the task, its score, the network whole, cut, and across processes."""

import json
from pathlib import Path
from typing import Any

import grammar
import pytest
import split_transformer
import table4
import torch
import translation
from grammar import Grammar, Vocabulary, bleu
from torch import Tensor
from transformer import Batch, Shape, Stage, cut_behind, loss_of, network, start, translate

from dlrm_hybrid.compress import SparseBoundary

SHAPE = Shape(source_words=30, target_words=40, layers=2, width=8, inner_width=16, heads=2)
CUTS = (cut_behind(SHAPE, 1, decodes=False), cut_behind(SHAPE, 2, decodes=True))


def words(rows: int, length: int, known: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, known, (rows, length), generator=generator)


def a_batch() -> Batch:
    batch = Batch(words(3, 5, 30, 0), words(3, 7, 40, 1))
    batch.source_BS[1, 3:] = grammar.PAD
    batch.target_BT[2, 5:] = grammar.PAD
    return batch


def whole_of(density: float | None) -> Stage:
    cuts = {} if density is None else {cut: SparseBoundary(density) for cut in CUTS}
    return Stage(network(SHAPE, 0), 0, cuts)


def test_sentences_are_the_same_for_a_seed_and_others_for_another() -> None:
    first, again, other = Grammar(0), Grammar(0), Grammar(1)
    pairs = [first.pair() for _ in range(50)]
    assert pairs == [again.pair() for _ in range(50)]
    assert pairs != [other.pair() for _ in range(50)]


def stems(sentence: list[str], kind: str) -> list[str]:
    """The words of a kind as they are in the source, without gender and synonyms."""
    parts = [word.split("_") for word in sentence if word[0] == kind]
    endings = {"N": -1, "V": None, "n": None, "v": None}
    return ["_".join([one[0].replace("'", "")[: endings[kind]].lower(), *one[1:]]) for one in parts]


def test_translations_follow_the_rules() -> None:
    drawn = Grammar(0)
    reordered = 0
    for pair in (drawn.pair() for _ in range(500)):
        nouns, verbs = stems(pair.source, "n"), stems(pair.source, "v")
        assert sorted(stems(pair.target, "N")) == sorted(nouns)
        assert sorted(stems(pair.target, "V")) == sorted(verbs)
        assert pair.source.count(",") == 2 * pair.target.count("QUE")
        article: list[str] = []
        for name, *form in (word.split("_") for word in pair.target):
            article = form if name in ("LE", "UN") else article
            assert name[0] != "A" or form == article  # adjectives agree with what they belong to
        reordered += stems(pair.target, "N") != nouns
    assert 100 < reordered < 300


def test_bleu_by_hand() -> None:
    reference = ["the", "cat", "is", "on", "the", "mat"]
    assert bleu([reference], [reference]) == pytest.approx(100.0)
    # 5 of 6 words, 3 of 5 pairs, 2 of 4, 1 of 3
    other = ["the", "cat", "is", "on", "a", "mat"]
    assert bleu([other], [reference]) == pytest.approx(
        100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    )
    # shorter by two words: all precisions 1
    assert bleu([reference[:4]], [reference]) == pytest.approx(100 * 2.718281828 ** (1 - 6 / 4))
    # words count as often as the reference has them, and a corpus is no mean of sentences
    assert bleu([["the"] * 6], [reference]) == 0.0
    assert bleu([other, reference], [reference, reference]) == pytest.approx(
        100 * (11 / 12 * 8 / 10 * 6 / 8 * 4 / 6) ** 0.25
    )
    assert bleu([[]], [reference]) == 0.0


def test_words_come_back_from_their_numbers() -> None:
    known = Vocabulary([["a", "b"], ["b", "c"]])
    assert len(known) == 6
    assert known.ids(["c", "a"]) == [grammar.BEGIN, 5, 3, grammar.END]
    assert known.words([*known.ids(["c", "a"]), 4, grammar.PAD]) == ["c", "a"]


def test_what_fills_sentences_up_changes_nothing() -> None:
    whole, batch = whole_of(None).eval(), a_batch()
    longer = Batch(*(torch.nn.functional.pad(one, (0, 2)) for one in batch))
    short, long = whole(start(), batch).x_BTD, whole(start(), longer).x_BTD
    assert torch.allclose(long[:, :6], short, atol=1e-5)
    assert loss_of(whole(start(), longer), longer).item() == pytest.approx(
        loss_of(whole(start(), batch), batch).item(), rel=1e-5
    )


def test_the_decoder_does_not_see_what_comes() -> None:
    whole, batch = whole_of(None).eval(), a_batch()
    other = batch.target_BT.clone()
    other[:, 4:] = 3
    before = whole(start(), batch).x_BTD[:, :4]
    assert torch.equal(whole(start(), Batch(batch.source_BS, other)).x_BTD[:, :4], before)
    assert not torch.equal(
        whole(start(), Batch(batch.source_BS.flip(1), batch.target_BT)).x_BTD[:, :4], before
    )


def test_keeping_all_is_no_cut_to_the_bit() -> None:
    batch = a_batch()
    losses: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for density in (None, 1.0, 0.1):
        whole = whole_of(density)
        losses.append(loss_of(whole(start(), batch), batch))
        losses[-1].backward()
        gradients.append([one.grad for one in whole.parameters() if one.grad is not None])
    assert torch.equal(losses[0], losses[1])
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert not torch.equal(losses[0], losses[2])


def test_stages_one_after_the_other_are_the_whole() -> None:
    whole, batch = whole_of(0.25), a_batch()
    state = start()
    edges = [0, *CUTS, len(whole.blocks)]
    for first, last in zip(edges, edges[1:], strict=False):
        state = whole.part(first, last)(state, batch)
        if last in whole.boundaries:  # what lies at a cut belongs to neither side
            state = state._replace(z_BTF=whole.boundaries[last](state.z_BTF))
    assert torch.equal(state.x_BTD, whole(start(), batch).x_BTD)


def test_translations_take_the_likeliest_word_after_what_was_said() -> None:
    whole, batch = whole_of(0.25).eval(), a_batch()
    for row, said in enumerate(translate(whole, batch.source_BS)):
        assert said[0] == grammar.BEGIN
        ended = said.index(grammar.END) if grammar.END in said else len(said) - 1
        target_1T = torch.tensor([said[: ended + 1]])
        logits = whole(start(), Batch(batch.source_BS[row : row + 1], target_1T)).x_BTD
        assert logits.argmax(-1)[0].tolist() == said[1 : ended + 1]


def test_every_sentence_once_an_epoch() -> None:
    drawn = Grammar(0)
    pairs = [drawn.pair() for _ in range(70)]
    lots = translation.batches(pairs, 8, 0)
    for _ in range(2):
        seen = [pair for _ in range(9) for pair in next(lots)]
        assert sorted(map(str, seen)) == sorted(map(str, pairs))


def test_the_rate_rises_and_falls() -> None:
    plan = translation.Plan(workers=1, sparsity=0.0, seed=0, steps=100, lr=1.0)
    rates = [translation.rate(plan, step) for step in range(100)]
    assert rates.index(max(rates)) in (9, 10)
    assert rates[0] == pytest.approx(0.1)
    assert 0 < rates[-1] < 0.02


def test_training_learns_and_says_what_it_kept() -> None:
    given = translation.task(200, 20)
    plan = translation.Plan(workers=3, sparsity=0.9, seed=0, sentences=200, steps=12)
    found = translation.train(plan, given)
    assert found["losses"][-1] < found["losses"][0] - 0.5
    for boundary in found["boundaries"]:
        assert 0 < boundary["kept"] <= 13 / 128 * boundary["elements"]
    assert found["unmasked"]["test_loss"] != found["test_loss"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("workers", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_processes_train_as_one_does_to_the_bit(workers: int) -> None:
    plan = translation.Plan(workers=workers, sparsity=0.9, seed=1, sentences=100, steps=3)
    whole, parts = (
        split_transformer.together(plan, translation.task(100)),
        split_transformer.apart(plan),
    )
    assert split_transformer.differences(whole, parts) == []
    assert len(whole.losses) == 3
    sent = split_transformer.table(parts, 3)
    assert [row[:2] for row in sent.rows][-1] == ["all, with frames' heads", "both"]
    # It can tell: other weights, other bytes.
    parts[0].weights[1] = "another"
    parts[0].sent[split_transformer.Kind.ACTIVATION, split_transformer.CROSSING[0]] += 1
    assert len(split_transformer.differences(whole, parts)) == 2


def a_result(workers: int, sparsity: float, seed: int, loss: float, score: float) -> dict[str, Any]:
    return {
        "workers": workers,
        "sparsity": sparsity,
        "seed": seed,
        "variant": translation.USUAL,
        "train_loss": loss / 2,
        "test_loss": loss,
        "bleu": score,
        "unmasked": {"bleu": score - 1},
        "boundaries": [{"elements": 1000, "kept": 50 + 100 * seed}],
    }


RESULTS = [
    a_result(3, 0.9, 0, 0.51, 68.0),
    a_result(3, 0.9, 1, 0.404, 71.5),
    a_result(1, 0.0, 1, 0.40, 71.0),
    a_result(1, 0.0, 0, 0.50, 70.0),
]


def test_each_training_is_held_against_the_baseline_of_its_seed() -> None:
    found = table4.table(RESULTS)
    assert [row[:2] for row in found.rows] == [["baseline", "–"], ["90 %", "3"]]
    assert found.rows[0][2:5] == ["0.2250 ± 0.0354", "0.4500 ± 0.0707", "70.50 ± 0.71"]
    # 2 % and 1 % above, 2 below and 0.5 above
    assert found.rows[1][5:] == ["+1.5 ± 0.7", "-0.75 ± 1.77", "68.75", "10.0 %", "2"]


def test_a_seed_without_a_baseline_is_refused(tmp_path: Path) -> None:
    for number, result in enumerate(RESULTS[:3]):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="no baseline with seed 0"):
        table4.read(tmp_path)
    (tmp_path / "3.json").write_text(json.dumps(RESULTS[3]))
    assert len(table4.read(tmp_path)) == 4


def test_the_picture_has_a_point_for_each_training() -> None:
    losses, scores = table4.figure(RESULTS).axes
    drawn = [line for line in losses.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in drawn if len(line.get_ydata())] == [
        [pytest.approx(2.0), pytest.approx(1.0)]
    ]
    papers = [line for line in scores.lines if line.get_marker() == "x"]
    assert list(papers[0].get_ydata()) == [pytest.approx(one) for one in (0.06, 0.05, 0.03)]
