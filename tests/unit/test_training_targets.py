"""What the trainers of the tiny voice aim at: where a picture shows a word, when a word is said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from training import talker_batch
from training.alignment import words_of_phones
from training.domain import COLOURS, DIRECTIONS, SHAPES, number
from training.naming import names_of
from training.pictures import coverage, draw_number, draw_shape, draw_video, patches, words_of_figures
from training.rows import NO_CODE, UNKNOWN, SpeechExample, sources
from training.sounds import sound_rows
from training.tiny_config import tiny_config
from training.tokenizer import build_tokenizer
from training.train_talker import POINTERS, TalkerTrainee


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.mark.parametrize("value", [0, 7, 10, 17, 20, 42, 99, 100, 105, 110, 117, 120, 142, 300, 999])
def test_the_figures_of_a_number_stand_for_the_words_that_say_it(value: int) -> None:
    words = words_of_figures(value)
    assert len(words) == len(str(value))
    assert {word for figure in words for word in figure} == set(number(value).split())


def test_a_number_is_covered_from_left_to_right() -> None:
    picture = draw_number(random.Random(3), 142)
    _, grid = patches([picture])
    assert grid == (1, 6, 6)
    marks = coverage([picture], grid)
    assert [words for words, _ in marks] == [("one", "hundred"), ("forty",), ("two",)]
    columns = torch.arange(3.0).repeat(3)
    middles = [float((share * columns).sum() / share.sum()) for _, share in marks]
    assert middles[0] < middles[1] < middles[2]


def test_a_shape_covers_its_part_of_a_picture_and_nothing_else() -> None:
    rng = random.Random(1)
    for colour, shape in ((COLOURS[0], SHAPES[0]), (COLOURS[3], SHAPES[4])):
        picture = draw_shape(rng, colour, shape)
        _, grid = patches([picture])
        [(words, share)] = coverage([picture], grid)
        assert words == (colour, shape)
        assert len(share) == grid[1] * grid[2] // 4
        inked = np.asarray(picture.marks[0].where).mean() / 255
        assert float(share.mean()) == pytest.approx(inked, abs=0.02)


def test_the_rows_of_a_video_show_where_the_shape_is_at_their_time() -> None:
    video = draw_video(random.Random(2), "red", "star", DIRECTIONS[1], 4)
    _, grid = patches(video)
    [(words, share)] = coverage(video, grid)
    assert words == ("red", "star", "right")
    times, high, wide = grid[0], grid[1] // 2, grid[2] // 2
    by_column = share.reshape(times, high, wide).sum(1)
    middles = (by_column * torch.arange(wide)).sum(1) / by_column.sum(1)
    assert times == 2 and middles[0] < middles[1]


def test_rows_that_name_what_they_show_have_the_least_loss(tokenizer: Tokenizer) -> None:
    names = names_of(tokenizer)
    picture = draw_shape(random.Random(1), "red", "star")
    _, grid = patches([picture])
    covered = coverage([picture], grid)
    rows = torch.zeros(len(covered[0][1]), names.table.shape[1])
    silent = names.seen([rows], [covered])
    for word in ("red", "star"):
        rows[covered[0][1] >= 0.12] += 12 * names.table[names.shown[names.words.index(word)]]
    assert names.seen([rows], [covered]) < 0.2 * silent
    assert names.named([rows]) == [{"red", "star"}]


def test_a_spelling_leaves_out_blanks_and_repeats(tokenizer: Tokenizer) -> None:
    names = names_of(tokenizer)
    said = tokenizer.encode("say two two").ids
    path = [said[0], said[0], names.blank, said[1], names.blank, said[2]]
    assert names.spelt([names.table[path]]) == [said]


def test_phones_belong_to_words_also_where_a_word_sounds_otherwise_than_alone() -> None:
    # "a" alone is "ey", in a sentence "ax".
    said = ["pau", "ax", "r", "eh", "d", "pau", "k", "r", "ao", "s", "pau"]
    lexicon = [["ey"], ["r", "eh", "d"], ["k", "r", "ao", "s"]]
    assert words_of_phones(said, lexicon) == [None, 0, 1, 1, 1, None, 2, 2, 2, 2, None]


def test_rows_of_a_clip_follow_whole_seconds_and_the_rest() -> None:
    assert [sound_rows(samples) for samples in (16_000, 24_000, 160 * 101)] == [13, 20, 14]


def test_what_the_talker_would_have_said_is_read_back_by_the_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker_batch, "OWN_ANSWERS", 1.0)
    monkeypatch.setattr(talker_batch, "OWN_FRAMES", 1.0)
    frames = [[1, 2], [3, 4], [5, 6]]
    lone = [[7, NO_CODE]] * 2
    example = SpeechExample([0] * 5, [*lone, *frames], frames, 1, [UNKNOWN] * 3, [0] * 3, [UNKNOWN] * 3)
    batch = talker_batch.Batch([example], end=99, pad=0)
    own = torch.tensor([[11, 12], [13, 14], [15, 16], [0, 0]])
    batch.give_back(own)
    assert batch.codes[0].tolist() == [*lone, [11, 12], [13, 14], [15, 16]]
    assert batch.targets.tolist() == [*frames, [99, 99]]


def test_a_frame_looks_at_the_row_of_its_word_unless_that_is_still_to_come() -> None:
    # Words 0 and 1 begin at tokens 0 and 2; the first frame of speech is predicted by row 10.
    assert sources([0, 1, 1, None, 1], {0: 0, 1: 2}, first=10) == [10, UNKNOWN, 12, UNKNOWN, 12]


def test_the_pointers_weights_are_those_of_the_rows_that_frames_look_at(tokenizer: Tokenizer) -> None:
    trainee = TalkerTrainee(tiny_config(tokenizer)).eval()
    frames = [[1] * trainee.groups, [2] * trainee.groups]
    lone = [[7] + [NO_CODE] * (trainee.groups - 1)] * 2
    example = SpeechExample([3, 4, 5, 6], [*lone, *frames], frames, 1, [4, 5], [0, 0], [1, 2])
    batch = talker_batch.Batch([example, example], trainee.end, pad=0)
    rows = trainee.embed(batch.text_ids, batch.codes)
    with torch.no_grad():
        _, _, looks = trainee.states(batch)
        whole = trainee.talker.model(inputs_embeds=rows, use_cache=False, output_attentions=True).attentions
    for (layer, head), weights in zip(POINTERS, looks, strict=True):
        wanted = torch.stack([whole[layer][:, head, 1, 1], whole[layer][:, head, 2, 2]], 1)
        assert torch.equal(weights.view(2, 3)[:, :2], wanted) and wanted.max() < 1
    assert batch.sources.tolist() == [1, 2, UNKNOWN] * 2
