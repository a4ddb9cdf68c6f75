"""The attention kernels in Triton's interpreter, against float64. Run by ``test_kernel_interpreter.py`` in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from vajra_kernels.checks import (
    LSE_TOLERANCES,
    TOLERANCES,
    AttentionCase,
    expected,
    interpreter_cases,
    make_inputs,
    poisoned_call,
    run_case,
    worst_errors,
)
from vajra_kernels.config import A100, H200, DeviceFacts, TileConfig
from vajra_kernels.decode import decode_launches
from vajra_kernels.decode_plan import is_split, max_pieces, plan_launch
from vajra_kernels.launch import Launch, interpreted
from vajra_kernels.metadata import AttentionMetadata, StepMemo, build_metadata
from vajra_kernels.ragged import ragged_launches

CASES = interpreter_cases()
T = TypeVar("T")


def run_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()


def test_kernels_are_interpreted() -> None:
    assert interpreted()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_attention_equals_float64(case: AttentionCase, generator: torch.Generator) -> None:
    error, lse_error, _ = run_case(case, make_inputs(case, generator, "cpu"), H200)
    assert error < TOLERANCES[case.dtype]
    assert lse_error < LSE_TOLERANCES[case.dtype]


def random_case(draws: torch.Generator) -> AttentionCase:
    def pick(options: Sequence[T]) -> T:
        return options[int(torch.randint(len(options), (), generator=draws))]

    lens = []
    for _ in range(pick((1, 2, 3, 4))):
        new = pick((1, 1, 2, 17, 45))
        lens.append((new, new + pick(range(150))))
    dim = pick((64, 72, 96, 128))
    return AttentionCase(
        heads=pick(((4, 4), (8, 2), (7, 1), (10, 2))),
        dims=(dim, dim),
        block_size=pick((16, 32, 64, 112, 128)),
        lens=tuple(sorted(lens)),
        dtype=pick((torch.float32, torch.float16, torch.bfloat16)),
        window=pick((None, 1, 19, 80, 1000)),
        softcap=pick((None, 15.0)),
        head_major=pick((True, False)),
    )


@pytest.mark.parametrize("number", range(12))
def test_random_batches_equal_float64(number: int, generator: torch.Generator) -> None:
    case = random_case(generator)
    device = (H200, A100)[number % 2]
    error, lse_error, _ = run_case(case, make_inputs(case, generator, "cpu"), device)
    assert error < TOLERANCES[case.dtype], case
    assert lse_error < LSE_TOLERANCES[case.dtype], case


@pytest.mark.parametrize("tile_n", [16, 128])
def test_result_does_not_depend_on_the_tile(tile_n: int, generator: torch.Generator) -> None:
    case = AttentionCase((4, 2), (64, 64), 32, ((1, 70), (9, 150), (20, 20)), window=70)
    inputs = make_inputs(case, generator, "cpu")
    call = poisoned_call(case, inputs)
    run_all(ragged_launches(call, H200, TileConfig(32, tile_n, 4, 2)))
    assert max(worst_errors(call.out, call.lse, expected(case, inputs))) < LSE_TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[9]], ids=lambda case: case.label)
def test_a_wrong_block_or_window_is_seen(case: AttentionCase, generator: torch.Generator) -> None:
    """The comparison itself can fail: another sequence's block and a window one position longer give errors above tolerance."""
    inputs = make_inputs(case, generator, "cpu")
    wanted = expected(case, inputs)
    table = inputs.metadata.block_table.clone()
    column = 0 if case.window is None else 6
    table[1, column] = table[3, column]
    wrong = replace(inputs.metadata, block_table=table)
    call = poisoned_call(case, replace(inputs, metadata=wrong))
    run_all(ragged_launches(call, H200))
    assert worst_errors(call.out, call.lse, wanted)[0] > 10 * TOLERANCES[case.dtype]
    if case.window is not None:
        longer = replace(case, window=case.window + 1)
        assert run_case(longer, inputs, H200)[0] < TOLERANCES[case.dtype]
        assert worst_errors(poisoned_call(case, inputs).out, None, wanted)[0] == float("inf")
        call = poisoned_call(longer, inputs)
        run_all(ragged_launches(call, H200))
        assert worst_errors(call.out, call.lse, wanted)[0] > 10 * TOLERANCES[case.dtype]


def test_every_sequence_may_be_split_differently(generator: torch.Generator) -> None:
    """A long sequence has several pieces, a short one and a padding row one each, which they write themselves."""
    case = AttentionCase((4, 1), (64, 64), 16, ((1, 700), (1, 3), (1, 0), (1, 257)), torch.float16)
    error, lse_error, launches = run_case(case, make_inputs(case, generator, "cpu"), H200)
    assert [launch.kernel.__name__ for launch in launches] == ["plan_kernel", "decode_kernel", "merge_kernel"]
    assert error < TOLERANCES[case.dtype]
    assert lse_error < LSE_TOLERANCES[case.dtype]


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("device", [H200, replace(H200, num_sms=1)], ids=["large", "small"])
def test_plans_cover_every_position_once(window: int | None, device: DeviceFacts, generator: torch.Generator) -> None:
    """Planned for bounds of 5,000 tokens a sequence, as a captured launch is, and read with other lengths."""
    for num_seqs in (1, 5, 40):
        bounds = metadata_of_bounds(num_seqs, 5000)
        lens = torch.randint(0, 900, (num_seqs,), generator=generator, dtype=torch.int32)
        lens[0] = 5000
        bounds.kv_lens.copy_(lens)
        assert is_split(bounds, 2, 64, window, device)
        num_pieces = max_pieces(bounds, 2, 64, device)
        assert num_pieces <= num_seqs + 8 * device.num_sms // 2
        plan = torch.full((2 * num_pieces + num_seqs + 2,), -7, dtype=torch.int32)
        plan_launch(plan, bounds, num_pieces, 2, 64, window, device).run()
        seqs, begins = plan[:num_pieces].tolist(), plan[num_pieces : 2 * num_pieces].tolist()
        starts, size = plan[2 * num_pieces : -1].tolist(), int(plan[-1])
        assert size % 64 == 0
        assert seqs[starts[-1] :] == [-1] * (num_pieces - starts[-1])
        for seq, length in enumerate(lens.tolist()):
            visible = length if window is None else length - max(length - window, 0) // 64 * 64
            pieces = range(starts[seq], starts[seq + 1])
            assert [seqs[piece] for piece in pieces] == [seq] * len(pieces)
            assert [begins[piece] for piece in pieces] == [size * k for k in range(len(pieces))]
            assert len(pieces) == max(1, -(-visible // size))
        assert size >= 128


def metadata_of_bounds(num_seqs: int, longest: int) -> AttentionMetadata:
    """Metadata whose host-side integers are bounds alone."""
    made = build_metadata([1] * num_seqs, [longest] * num_seqs, torch.zeros((num_seqs, longest // 10)), 16)
    return replace(made, memo=StepMemo())


@pytest.mark.parametrize("lens", [((9, 1800),), ((1, 1500), (1, 40), (5, 1700), (3, 3))])
def test_few_tokens_behind_a_long_context_share_it_among_programs(
    lens: tuple[tuple[int, int], ...], generator: torch.Generator
) -> None:
    case = AttentionCase((4, 2), (64, 64), 16, lens)
    error, lse_error, launches = run_case(case, make_inputs(case, generator, "cpu"), H200)
    (ragged,) = [launch for launch in launches if launch.kernel.__name__ == "ragged_kernel"]
    assert ragged.grid[2] == 3
    assert error < TOLERANCES[case.dtype]
    assert lse_error < LSE_TOLERANCES[case.dtype]


def test_lse_is_optional(generator: torch.Generator) -> None:
    for lens in (((1, 50), (1, 20)), ((1, 50), (12, 20)), ((1, 400),)):
        case = AttentionCase((4, 2), (64, 64), 16, lens)
        inputs = make_inputs(case, generator, "cpu")
        call = poisoned_call(case, inputs, with_lse=False)
        launches = decode_launches(call, H200) if all(new == 1 for new, _ in lens) else ragged_launches(call, H200)
        run_all(launches)
        assert worst_errors(call.out, None, expected(case, inputs))[0] < TOLERANCES[case.dtype]
