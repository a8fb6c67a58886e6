"""Rows on their way from the worker to the driver: shared memory, its limits, and its end."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from cell import LAYERS, TOLERANCE, assert_right, difference, engine, is_0_3, patched
from speculators_vllm_compat.capture import ring as rings
from speculators_vllm_compat.capture.collect import Collector
from speculators_vllm_compat.capture.ring import Ring, RingEnd, RingPlan, make_ring, plan_ring
from speculators_vllm_compat.capture.steps import StepShape
from speculators_vllm_compat.capture.transfer import DeviceRows, Transfer
from speculators_vllm_compat.errors import ConfigurationError
from tiny_models import prompt

torch.set_num_threads(1)  # a thread pool from before a fork leaves the child's OpenMP waiting

PROMPTS = [prompt(n, seed=n) for n in (300, 5, 41, 17)]


def _listed(folder: str) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


# The memory itself.


@pytest.mark.parametrize(
    ("available", "limit", "slots"),
    [
        (1 << 40, None, 4),
        (1 << 40, 3 * 12288, 3),
        (1 << 40, 12288, 1),
        (1 << 40, 12287, None),
        (1 << 40, 0, None),
        (4 * 2 * 12288, None, 2),  # a quarter of it
        (0, None, None),
    ],
)
def test_size(available, limit, slots):
    """100 tokens of 64 bytes: a page of ids and two of rows a slot."""
    plan = plan_ring(100, 64, available, limit)
    assert plan == (slots and RingPlan(slots, 100, 12288))
    assert plan is None or plan.total_bytes == slots * 12288


def _fill(path: str, plan: RingPlan, shape: StepShape) -> None:
    end = RingEnd(path, plan, torch.device("cpu"))
    for slot in range(plan.slots):
        ids, rows = end.slot(slot, shape)
        ids.copy_(torch.arange(shape.tokens) + slot)
        rows.fill_(slot + 0.5)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_what_a_worker_writes_the_driver_reads(start_method):
    shape = StepShape(3, 7, 5, torch.bfloat16)
    plan = plan_ring(10, 3 * 5 * 2, 1 << 40, None)
    ring = Ring(plan)
    child = multiprocessing.get_context(start_method).Process(
        target=_fill, args=(*ring.address(), shape)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    for slot in range(plan.slots):
        ids, rows = ring.slot(slot, shape)
        assert ids.tolist() == [i + slot for i in range(7)]
        assert rows.shape == (3, 7, 5)
        assert rows.dtype is torch.bfloat16
        assert (rows == slot + 0.5).all()


def test_only_what_fits_goes_into_a_slot():
    plan = plan_ring(1000, 64, 1 << 40, None)
    ring = Ring(plan)
    end = RingEnd(*ring.address(), torch.device("cpu"))
    assert end.fits(StepShape(2, 1000, 8, torch.float32))
    assert not end.fits(StepShape(2, 1001, 8, torch.float32))
    assert not end.fits(StepShape(4, 1000, 8, torch.float32))


def test_collected_with_its_descriptor():
    before = set(_listed("/proc/self/fd"))
    ring = Ring(plan_ring(100, 64, 1 << 40, None))
    assert set(_listed("/proc/self/fd")) != before
    del ring
    gc.collect()
    assert set(_listed("/proc/self/fd")) == before


def test_no_memory_is_told_and_does_without(monkeypatch, caplog):
    monkeypatch.setattr(rings, "host_memory", lambda: (1000, 1000))
    with caplog.at_level(logging.WARNING):
        assert make_ring(8192, 1 << 16) is None
    assert "sent through vLLM's RPC" in caplog.text
    assert "Lower max_num_batched_tokens" in caplog.text


def test_memory_refused_by_the_system_is_told(monkeypatch, caplog):
    def refuse(*_args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level(logging.WARNING):
        assert make_ring(100, 64) is None
    assert "no shared memory for hidden states ([Errno 12] Cannot allocate memory)" in caplog.text


@pytest.mark.parametrize("text", ["many", "-1", "inf", "nan"])
def test_a_size_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("SPECULATORS_VLLM_COMPAT_RING_MB", text)
    with pytest.raises(ConfigurationError, match=f"is '{text}'; expected a number of megabytes"):
        make_ring(100, 64)


# The worker's side without a device of its own.


def test_two_sets_of_rows_are_used_in_turn_and_grow():
    rows = DeviceRows(2)
    like = torch.zeros(3, 4)
    first = rows.layer(0, 0, 3, like)
    assert rows.layer(2, 0, 3, like).data_ptr() == first.data_ptr()
    assert rows.layer(1, 0, 3, like).data_ptr() != first.data_ptr()
    assert rows.layer(2, 1, 9, like).shape == (9, 4)
    assert rows.all(2, 9).shape == (2, 9, 4)


def test_a_transfer_begins_anew():
    plan = plan_ring(10, 16, 1 << 40, None)
    ring = Ring(plan)
    transfer = Transfer()
    transfer.ring = RingEnd(*ring.address(), torch.device("cpu"))
    assert transfer.complete() == -1
    shape = StepShape(1, 2, 4, torch.float32)
    transfer.send(0, 0, shape, torch.ones(1, 2, 4), torch.tensor([7, 8]))
    assert transfer.complete(leave=2) == 0
    assert ring.slot(0, shape)[0].tolist() == [7, 8]
    transfer.reset()
    assert transfer.complete() == -1


# Whole calls.


@pytest.fixture(scope="module")
def generator():
    with (
        patched() as module,
        engine(module, max_model_len=512, max_num_batched_tokens=64) as made,
    ):
        yield made


def _held() -> tuple[int, int, int]:
    """Descriptors, memory shared without a name, and threads of this process."""
    descriptors = list(Path("/proc/self/fd").iterdir())
    nameless = [d for d in descriptors if "speculators_vllm_compat" in _target(d)]
    return len(descriptors), len(nameless), len(_listed("/proc/self/task"))


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # the one that the listing itself used
        return ""


def _named() -> list[str]:
    """Shared memory of ours that could outlive its processes."""
    return [name for name in _listed("/dev/shm") if "speculators" in name]


@pytest.mark.engine
@pytest.mark.parametrize("slots", [0, 1, 2, 3, 4])
def test_right_with_any_number_of_slots(monkeypatch, slots):
    budget = 512 if is_0_3() else 128  # 0.3.0 takes no less than max_model_len
    four_layers = 4 * 128 * 4  # of 128 float32
    size = plan_ring(budget, four_layers, 1 << 40, None).slot_bytes
    monkeypatch.setenv("SPECULATORS_VLLM_COMPAT_RING_MB", str(slots * size / 1e6))
    with (
        patched() as module,
        engine(module, max_model_len=512, max_num_batched_tokens=128) as made,
    ):
        assert _budget(made) == budget
        ring = made._hidden_states_ring
        assert (ring.plan.slots if ring else 0) == slots
        assert_right(made.generate(PROMPTS * 3), PROMPTS * 3)


def _budget(generator) -> int:
    return generator.vllm_config.scheduler_config.max_num_batched_tokens


@pytest.mark.engine
def test_a_step_is_one_round_trip(generator, monkeypatch):
    asked = []
    own = generator.executor.collective_rpc

    def counting(method, *args, **kwargs):
        asked.append(method)
        return own(method, *args, **kwargs)

    monkeypatch.setattr(generator.executor, "collective_rpc", counting)
    with patched():
        generator.generate(PROMPTS)
    steps = -(-sum(map(len, PROMPTS)) // _budget(generator))
    # On the CPU the last step's answer has its rows; a GPU's are waited for in one more.
    assert asked == ["_reset_capture", *["_run_capture_step"] * steps]


@pytest.mark.engine
def test_nothing_is_left_after_many_calls(generator):
    prompts = [prompt(20, seed=1)]
    with patched():
        generator.generate(prompts)
        before = _held()
        for _ in range(100):
            generator.generate(prompts)
    descriptors, nameless, threads = _held()
    assert (descriptors, nameless) == before[:2]
    assert threads < before[2] + 10  # vLLM may start one of its own; a hundred calls left none
    assert not _named()


_KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
from cell import engine, patched
with patched() as module:
    with engine(module) as made:
        made.generate([[5, 6, 7]])
        descriptor = made._hidden_states_ring.descriptor
        assert Path(f"/proc/self/fd/{{descriptor}}").readlink().name.startswith("memfd:")
        os.kill(made.executor.workers[0].proc.pid, signal.SIGKILL)
        try:
            made.generate([[5, 6, 7]])
        except Exception as error:
            print("told:", type(error).__name__)
        sys.stdout.flush()
        os._exit(0)  # vLLM's own sockets may wait for a worker that is gone
"""


@pytest.mark.engine
def test_nothing_is_left_after_a_worker_is_killed():
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED.format(path=sys.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "told: " in ended.stdout, ended.stderr[-2000:]
    assert not _named()


@pytest.mark.engine
def test_a_worker_that_cannot_open_it_is_told_and_does_without(monkeypatch, caplog):
    monkeypatch.setattr(Ring, "address", lambda self: ("/proc/self/fd/987654", self.plan))
    with (
        caplog.at_level(logging.WARNING),
        patched() as module,
        engine(module) as made,
    ):
        assert made._hidden_states_ring is None
        assert "a worker could not open the memory shared with it" in caplog.text
        assert_right(made.generate(PROMPTS), PROMPTS)


@pytest.mark.engine
def test_answers_of_another_step_are_found_out(generator, monkeypatch):
    own = Collector._ask

    def lagging(self, method, *arguments):
        reply = own(self, method, *arguments)
        return {**reply, "step": reply.get("step", 0) - 1}

    with monkeypatch.context() as patch, patched():
        patch.setattr(Collector, "_ask", lagging)
        with pytest.raises(Exception, match="the worker answered for step -1; expected step 0"):
            generator.generate(PROMPTS)
    with patched():
        assert_right(generator.generate(PROMPTS), PROMPTS)


# One result after the other.


@pytest.mark.engine
def test_iterating_gives_every_result_with_its_position(generator):
    with patched():
        found = list(generator.generate_iter(PROMPTS))
    assert sorted(index for index, _ in found) == [0, 1, 2, 3]
    for index, result in found:
        assert result["input_ids"].tolist() == PROMPTS[index]
        assert difference([result], "llama", LAYERS) < TOLERANCE


@pytest.mark.engine
def test_results_come_before_the_last_step(generator, monkeypatch):
    """The shortest sequence is handed over while the others are still being computed."""
    prompts = [prompt(20, seed=1), *(prompt(500, seed=n) for n in range(2, 8))]
    expected = -(-sum(map(len, prompts)) // _budget(generator))
    steps = []
    own = Collector.run

    def counting(self, output):
        steps.append(output)
        yield from own(self, output)

    monkeypatch.setattr(Collector, "run", counting)
    with patched():
        results = generator.generate_iter(prompts)
        index, _ = next(results)
        assert index == 0
        assert len(steps) < expected
        assert sorted(i for i, _ in results) == [1, 2, 3, 4, 5, 6]
        assert len(steps) == expected


@pytest.mark.engine
def test_what_is_handed_over_is_not_kept(generator):
    with patched():
        for _, result in generator.generate_iter(PROMPTS):
            for states in [weakref.ref(tensor) for tensor in result.pop("hidden_states")]:
                assert states() is None  # nobody else held the tensor


@pytest.mark.engine
def test_closed_early_leaves_the_generator_usable(generator):
    with patched():
        results = generator.generate_iter([prompt(5, seed=1), prompt(400, seed=2)])
        next(results)
        with pytest.raises(RuntimeError, match="is under way; expected one call at a time"):
            generator.generate(PROMPTS)
        results.close()
        assert not generator.scheduler.requests
        assert_right(generator.generate(PROMPTS), PROMPTS)


@pytest.mark.engine
def test_arguments_are_checked_before_the_first_result(generator):
    with patched():
        with pytest.raises(ValueError, match="token_ids cannot be empty"):
            generator.generate_iter([])
        assert_right(generator.generate(PROMPTS), PROMPTS)
