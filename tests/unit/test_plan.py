"""The layer table of the released model, spelled out, and of other configurations."""

import dataclasses
import itertools

from cedar.config import Half, LayerPlan, Mode, ModelConfig, plan_layers, released, tiny

E, D, X = Half.ENCODER, Half.DECODER, Half.DRAFT
W, F, I, U = Mode.WINDOW, Mode.FULL, Mode.REINDEX, Mode.REUSE  # noqa: E741
N = None

# index, half, mode, ratio, kv source, top-k source, candidate source, Engram, builds candidates
RELEASED = [
    (0, E, W, 0, N, N, N, False, False),
    (1, E, W, 0, N, N, N, True, False),
    (2, E, F, 2, 2, 2, N, False, False),
    (3, E, U, 2, 2, 2, N, False, False),
    (4, E, U, 2, 2, 2, N, False, False),
    (5, E, U, 2, 2, 2, N, False, False),
    (6, E, U, 2, 2, 2, N, False, False),
    (7, E, U, 2, 2, 2, N, False, False),
    (8, E, F, 2, 8, 8, N, False, False),
    (9, E, U, 2, 8, 8, N, False, False),
    (10, E, U, 2, 8, 8, N, False, False),
    (11, E, U, 2, 8, 8, N, False, False),
    (12, E, U, 2, 8, 8, N, False, False),
    (13, E, U, 2, 8, 8, N, False, False),
    (14, E, F, 2, 14, 14, N, True, False),
    (15, E, U, 2, 14, 14, N, False, False),
    (16, E, U, 2, 14, 14, N, False, False),
    (17, E, U, 2, 14, 14, N, False, False),
    (18, E, U, 2, 14, 14, N, False, False),
    (19, E, U, 2, 14, 14, N, False, False),
    (20, D, F, 1, 20, 20, N, False, True),
    (21, D, U, 1, 20, 20, N, False, False),
    (22, D, U, 1, 20, 20, N, False, False),
    (23, D, U, 1, 20, 20, N, False, False),
    (24, D, I, 1, 20, 24, 20, False, False),
    (25, D, U, 1, 20, 24, N, False, False),
    (26, D, U, 1, 20, 24, N, False, False),
    (27, D, U, 1, 20, 24, N, False, False),
    (28, D, I, 1, 20, 28, 20, False, False),
    (29, D, U, 1, 20, 28, N, False, False),
    (30, D, U, 1, 20, 28, N, False, False),
    (31, D, U, 1, 20, 28, N, False, False),
    (32, D, I, 1, 20, 32, 20, False, False),
    (33, D, U, 1, 20, 32, N, False, False),
    (34, D, U, 1, 20, 32, N, False, False),
    (35, D, U, 1, 20, 32, N, False, False),
    (36, D, I, 1, 20, 36, 20, False, False),
    (37, D, U, 1, 20, 36, N, False, False),
    (38, D, U, 1, 20, 36, N, False, False),
    (39, D, U, 1, 20, 36, N, False, False),
    (40, X, W, 0, N, N, N, False, False),
    (41, X, W, 0, N, N, N, False, False),
    (42, X, W, 0, N, N, N, False, False),
]


def as_rows(plan: tuple[LayerPlan, ...]) -> list[tuple[object, ...]]:
    return [dataclasses.astuple(layer) for layer in plan]


def test_released_table() -> None:
    assert as_rows(plan_layers(released())) == RELEASED


def test_table_follows_the_configuration() -> None:
    moved = dataclasses.replace(released(), engram_layer_ids=(1, 15))
    assert as_rows(plan_layers(moved)) != RELEASED


def test_tiny_has_every_transition_of_the_released_model() -> None:
    def transitions(config: ModelConfig) -> set[tuple[Mode, Mode]]:
        modes = [layer.mode for layer in plan_layers(config) if layer.half is not X]
        return set(itertools.pairwise(modes))

    plan = plan_layers(tiny())
    assert transitions(released()) <= transitions(tiny())
    assert {(p.half, p.mode) for p in plan_layers(released())} <= {(p.half, p.mode) for p in plan}
    assert {p.mode for p in plan if p.engram} == {W, F}
    assert any(p.builds_candidates for p in plan)
    assert any(p.candidate_source is not None for p in plan)


def test_later_full_source_searches_inside_the_pool() -> None:
    config = dataclasses.replace(tiny(), kv_source_layers=(2, 4, 6, 8))
    layer = plan_layers(config)[8]
    assert (layer.mode, layer.kv_source, layer.candidate_source) == (F, 8, 6)
    assert plan_layers(config)[10].kv_source == 8


def test_reindex_layer_may_build_the_pool() -> None:
    plan = plan_layers(dataclasses.replace(tiny(), candidate_source_layer=8))
    assert plan[8].mode is I
    assert plan[8].builds_candidates
    assert plan[8].candidate_source is None
    assert plan[11].candidate_source == 8


def test_without_a_pool_nobody_searches_in_one() -> None:
    plan = plan_layers(dataclasses.replace(tiny(), candidate_source_layer=-1))
    assert all(p.candidate_source is None and not p.builds_candidates for p in plan)


def test_window_layer_between_readers_reads_nothing() -> None:
    ratios = list(tiny().compress_ratios)
    ratios[3] = 0
    plan = plan_layers(dataclasses.replace(tiny(), compress_ratios=tuple(ratios)))
    assert (plan[3].mode, plan[3].kv_source, plan[3].topk_source) == (W, None, None)


def test_middle_layer_of_an_odd_number_is_in_the_decoder() -> None:
    config = dataclasses.replace(
        tiny(), n_layers=13, compress_ratios=(0,) * 2 + (2,) * 4 + (1,) * 7 + (0,) * 2
    )
    assert [p.index for p in plan_layers(config) if p.half is E] == [0, 1, 2, 3, 4, 5]
