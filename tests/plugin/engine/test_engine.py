"""The Python API on real models: every way to run a prompt gives the tokens of transformers' own generate."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.engine.running_request import RunningRequest
from pagedkv.plugin.errors import CapacityError, ConfigError, PluginError, RequestError, StepError, UnavailableError
from pagedkv.plugin.requests import CacheNamespace
from pagedkv.plugin.serving import thread_inbox
from pagedkv.plugin.serving.thread_inbox import ThreadInbox

MakeEngine = Callable[..., Engine]

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """40 prompts of 1 to 600 tokens."""
    random_ = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 600, *(random_.randint(1, 150) for _ in range(34))]
    return [random_.choices(range(17, 49152), k=length) for length in lengths]


@pytest.fixture(scope="session")
def expected(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' generate gives for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("paged", {}),
        ("paged", {"cache__num_blocks": 40}),
        ("paged", {"scheduler__max_step_tokens": 64}),
        ("paged", {"cache__prefix_caching": False, "cache__block_size": 32}),
        ("contiguous", {}),
    ],
    ids=["paged", "pool of a tenth", "chunks of 64", "no prefix cache", "contiguous"],
)
def test_forty_prompts_at_once_equal_transformers_generate(
    make_engine: MakeEngine,
    prompts: list[list[int]],
    expected: list[list[int]],
    backend: str,
    settings: dict[str, Any],
) -> None:
    engine = make_engine(backend, **settings)
    results = engine.generate(prompts, GREEDY)
    assert [result.token_ids for result in results] == expected
    assert {result.finish_reason for result in results} == {"length"}


def test_preempted_requests_go_on_as_if_nothing_had_happened(make_engine: MakeEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    short = [prompt[:16] for prompt in prompts[-6:]]
    wanted = [result.token_ids for result in make_engine().generate(short, params)]
    engine = make_engine(cache__num_blocks=12)
    assert [result.token_ids for result in engine.generate(short, params)] == wanted
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_real_model_answers_a_question(demo_model: Path, make_engine: MakeEngine, backend: str) -> None:
    engine = make_engine(backend, demo_model)
    [result] = engine.generate("The capital of France is", SamplingParams(max_new_tokens=6, top_n_tokens=3))
    assert result.text.startswith(" Paris")
    assert result.logprobs[0] == pytest.approx(-0.2606, abs=1e-3)
    assert [top.token_id for top in result.top_tokens[0]] == [7042, 260, 4528]
    assert len(result.token_ids) == 6
    assert result.ttft_s > 0
    assert result.tpot_s > 0


def test_results_come_in_order_for_strings_ids_and_parameters_each(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = engine.tokenizer.encode("Hello world")
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 1)]
    first, second = engine.generate(["Hello world", ids], params)
    assert first.prompt_ids == second.prompt_ids == ids
    assert first.token_ids[:1] == second.token_ids
    assert len(first.token_ids) == 3
    assert engine.generate([]) == []
    assert engine.generate(ids, params[0])[0].token_ids == first.token_ids


def test_stream_gives_the_pieces_of_the_whole_text(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [whole] = engine.generate("Once upon a time", GREEDY)
    pieces = list(engine.stream("Once upon a time", GREEDY))
    assert [piece.token_id for piece in pieces] == whole.token_ids
    assert "".join(piece.text for piece in pieces).startswith(whole.text.rstrip("�"))
    assert [piece.result is None for piece in pieces] == [True] * 11 + [False]
    assert pieces[-1].result is not None
    assert pieces[-1].result.token_ids == whole.token_ids


def test_closing_a_stream_ends_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream("Once upon a time", SamplingParams(max_new_tokens=1500, ignore_eos=True))
    for _ in range(5):
        next(stream)
    assert engine.stats().running == 1
    stream.close()
    assert engine.stats()["running"] == 0
    assert engine.stats()["num_used_blocks"] == 0


def test_stream_that_nobody_reads_ends_with_its_last_reference(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream("Once upon a time", SamplingParams(max_new_tokens=1500, ignore_eos=True))
    assert engine.stats()["running"] + engine.stats()["waiting"] == 1
    del stream
    assert engine.stats()["running"] + engine.stats()["waiting"] == 0
    with engine.stream("Once upon a time", GREEDY) as stream:
        next(stream)
    assert list(stream) == []


def test_stop_string_ends_a_request_and_is_in_its_text(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [free] = engine.generate("Once upon", SamplingParams(max_new_tokens=20, ignore_eos=True))
    stop = engine.tokenizer.decode(free.token_ids[4:6])
    [stopped] = engine.generate("Once upon", SamplingParams(max_new_tokens=20, ignore_eos=True, stop=(stop,)))
    assert stopped.finish_reason == "stop_sequence"
    assert stopped.text.endswith(stop)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) <= 6


def test_threads_share_steps(make_engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = make_engine()
    found: dict[int, list[int]] = {}

    def generate(index: int) -> None:
        [result] = engine.generate([prompts[index]], GREEDY)
        found[index] = result.token_ids

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict(enumerate(expected[:8]))


def test_samples_of_one_prompt_equal_requests_with_these_seeds(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(100, 200))
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=1.5, seed=40, n=4)
    [family] = engine.generate([prompt], params)
    assert engine.stats().copies >= 3
    alone = [
        engine.generate([prompt], SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=1.5, seed=seed))[0]
        for seed in range(40, 44)
    ]
    assert [sample.token_ids for sample in family.samples] == [one.token_ids for one in alone]
    assert [sample.seed for sample in family.samples] == [40, 41, 42, 43]
    assert family.token_ids == family.samples[0].token_ids
    assert len({tuple(sample.token_ids) for sample in family.samples}) > 1


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_four_beams_equal_those_of_transformers(
    tiny_model: Path, make_engine: MakeEngine, backend: str, length_penalty: float, early_stopping: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = list(range(300, 355))
    ids = torch.tensor([prompt])
    wanted = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=10,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    engine = make_engine(backend)
    beams = engine.beam_search(prompt, 4, 10, length_penalty=length_penalty, early_stopping=early_stopping)
    sequences = [[id_ for id_ in row[len(prompt) :].tolist() if id_ != 2] for row in wanted.sequences]
    assert [[id_ for id_ in beam.token_ids if id_ != 2] for beam in beams] == sequences
    assert [beam.score for beam in beams] == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-3)


def test_beams_share_the_blocks_of_their_prompt(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    step, most = engine.backend.step, [0]

    def watch(only: Any = None) -> Any:
        outputs = step(only)
        most[0] = max(most[0], engine.stats().num_used_blocks)
        return outputs

    monkeypatch.setattr(engine.backend, "step", watch)
    engine.beam_search(list(range(300, 500)), 4, 8)
    # 12 full blocks of the prompt, shared, and for each beam and the one it forks from a last block of its own.
    assert 13 <= most[0] <= 12 + 8


def test_bad_prompts_and_parameters_are_refused_before_anything_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="vocabulary"):
        engine.generate([[1, 2], [10**6]])
    with pytest.raises(RequestError, match="no tokens"):
        engine.generate([""])
    with pytest.raises(RequestError, match="string or a list"):
        engine.generate([3.5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="one each"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="greedy"):
        engine.generate("a", SamplingParams(n=2))
    with pytest.raises(RequestError, match="one sample"):
        engine.stream("a", SamplingParams(n=2, do_sample=True))
    with pytest.raises(RequestError, match="num_beams"):
        engine.beam_search("a", 0, 5)
    with pytest.raises(CapacityError, match="2048"):
        engine.generate([[5] * 2048])
    assert engine.stats().steps == 0


def test_prompt_one_token_over_the_limit_fails_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(limits__max_input_tokens=50)
    with pytest.raises(CapacityError, match="51 tokens"):
        engine.generate([[5] * 51])
    assert len(engine.generate([[5] * 50], GREEDY)[0].token_ids) == 12


def test_failed_step_raises_and_the_engine_lives_on(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    stream = engine.stream("beside", SamplingParams(max_new_tokens=2000, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.backend._model), "forward", lambda *_: 1 / 0)
        with pytest.raises(StepError, match="ZeroDivisionError"):
            engine.generate("Hello", GREEDY)
    with pytest.raises(StepError):
        list(stream)
    assert len(engine.generate("Hello", GREEDY)[0].token_ids) == 12


def test_prompts_of_another_namespace_do_not_hit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(100, 200))
    for namespace in (None, CacheNamespace(salt="tenant")):
        for num_cached_tokens in (0, 96):
            [result] = engine.generate([prompt], GREEDY, namespace=namespace)
            assert result.num_cached_tokens == num_cached_tokens


def test_contiguous_wastes_most_of_its_reservation_and_paged_nearly_nothing(make_engine: MakeEngine) -> None:
    """Requests of mean length 200 under a limit of 2048 tokens."""
    random_ = random.Random(0)
    params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
    wasted = {}
    for backend in ("contiguous", "paged"):
        engine = make_engine(backend, cache__num_blocks=8192)
        prompts = [[random_.randrange(17, 49152) for _ in range(length)] for length in range(170, 230, 4)]
        streams = [engine.stream(prompt, params) for prompt in prompts]
        for stream in streams:
            next(stream)
        stats = engine.stats()
        wasted[backend] = 1 - stats.kv_bytes_in_use / stats.kv_bytes_reserved
        assert stats.fragmentation == pytest.approx(wasted[backend])
        for stream in streams:
            stream.close()
    assert wasted["contiguous"] >= 0.8
    assert wasted["paged"] < 0.04


def test_wrong_names_and_places_are_explained(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="did you mean 'paged'"):
        Engine(tiny_model, backend="pagd")
    with pytest.raises(ConfigError, match=r"did you mean cache\.block_size"):
        Engine(tiny_model, config={"cache": {"blocksize": 16}})
    with pytest.raises(ConfigError, match="nowhere"):
        Engine(tmp_path / "nowhere")


def test_config_file_names_the_backend(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pagedkv.toml"
    file.write_text('backend = "contiguous"\n[cache]\nnum_blocks = 512\n')
    with Engine(tiny_model, config=file) as engine:
        assert engine.backend.info.backend == "contiguous"
        assert len(engine.generate("Hello", GREEDY)[0].token_ids) == 12


def test_all_of_the_model_runs_on_one_thread_whoever_calls(make_engine: MakeEngine, monkeypatch) -> None:
    """Each thread that enters a parallel region of a math library has a team of its own."""
    threads: set[int] = set()
    load, forward = TransformersModel.load, TransformersModel.forward

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*arguments)

        return note

    monkeypatch.setattr(TransformersModel, "load", noting(load))
    monkeypatch.setattr(TransformersModel, "forward", noting(forward))
    engine = make_engine()
    engine.generate("Hello", GREEDY)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: engine.generate("Hello", GREEDY), range(4)))
        pool.submit(engine.beam_search, "Hello", 2, 3).result()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_interrupt_ends_its_own_requests_and_leaves_the_engine_usable(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    [wanted] = engine.generate("beside", SamplingParams(max_new_tokens=300, ignore_eos=True))
    stream = engine.stream("beside", SamplingParams(max_new_tokens=300, ignore_eos=True))
    reads = []

    def read(inbox: ThreadInbox, timeout_s: float | None = None) -> Any:
        reads.append(inbox)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return whole(inbox, timeout_s)

    whole = ThreadInbox.read
    with monkeypatch.context() as patch:
        patch.setattr(ThreadInbox, "read", read)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["Hello", "Again"], SamplingParams(max_new_tokens=1500, ignore_eos=True))
    assert engine.stats().running <= 1
    assert [piece.token_id for piece in stream] == wanted.token_ids


def test_streams_lost_in_reference_cycles_end(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(20):
        stream = engine.stream("Once upon a time", SamplingParams(max_new_tokens=2000, ignore_eos=True))
        cycle: list[Any] = [stream]
        cycle.append(cycle)
    del stream, cycle
    gc.collect()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)


def test_a_reader_that_is_behind_pauses_its_stream_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_inbox, "MAX_UNREAD_STEPS", 8)
    engine = make_engine()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    [wanted] = engine.generate("Once upon a time", params)
    slow = engine.stream("Once upon a time", params)
    assert len(engine.generate("beside", params)[0].token_ids) == 60
    assert engine.stats().running == 1, "the slow stream holds its place"
    assert [piece.token_id for piece in slow] == wanted.token_ids
    dropped = engine.stream("Once upon a time", params)
    engine.generate("beside", params)
    del dropped
    assert engine.stats().running == 0


@pytest.mark.parametrize("stop", [(3,), (None,)])
def test_what_fails_after_the_start_leaves_nothing_behind(make_engine: MakeEngine, stop: Any) -> None:
    engine = make_engine()
    params = SamplingParams(max_new_tokens=1500, ignore_eos=True, stop=stop)
    with pytest.raises(TypeError):
        engine.generate(["Hello", "Again"], params)
    with pytest.raises(TypeError):
        engine.stream("Hello", params)
    assert engine.stats().running == 0
    assert len(engine.generate("Hello", GREEDY)[0].token_ids) == 12


def test_a_detokenizer_that_raises_ends_its_request_alone(make_engine: MakeEngine, monkeypatch) -> None:
    engine = make_engine()
    beside = engine.stream("beside", GREEDY)
    stream = engine.stream("Hello", SamplingParams(max_new_tokens=1500, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(RunningRequest, "take", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        with pytest.raises(ZeroDivisionError):
            engine.generate("Hello", SamplingParams(max_new_tokens=1500, ignore_eos=True))
    assert len(list(beside)) == 12
    assert engine.stats().running == 0


@pytest.mark.parametrize("num_blocks", range(13, 20))
def test_beams_in_a_tiny_pool_are_those_of_a_large_one(make_engine: MakeEngine, num_blocks: int) -> None:
    prompt = list(range(300, 500))
    wanted = [beam.token_ids for beam in make_engine().beam_search(prompt, 4, 6)]
    engine = make_engine(cache__num_blocks=num_blocks, limits__max_total_tokens=208)
    assert [beam.token_ids for beam in engine.beam_search(prompt, 4, 6)] == wanted


def test_beams_that_never_get_a_token_say_so(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "step", lambda only=None: [])
        with pytest.raises(CapacityError, match="4 beams finds no room"):
            engine.beam_search("Hello", 4, 6)


def test_beams_wait_for_streams_that_hold_the_pool(make_engine: MakeEngine) -> None:
    prompt = list(range(300, 400))
    wanted = [beam.token_ids for beam in make_engine().beam_search(prompt, 3, 4)]
    engine = make_engine(cache__num_blocks=20, limits__max_total_tokens=160)
    streams = [
        engine.stream(list(range(k, k + 60)), SamplingParams(max_new_tokens=60, ignore_eos=True)) for k in (20, 90)
    ]
    assert [beam.token_ids for beam in engine.beam_search(prompt, 3, 4)] == wanted
    assert [len(list(stream)) for stream in streams] == [60, 60]


def test_closing_ends_open_streams_with_an_error_and_calls_afterwards_too(tiny_model: Path) -> None:
    engine = Engine(tiny_model, config={"cache.num_blocks": 256})
    stream = engine.stream("Hello", SamplingParams(max_new_tokens=2000, ignore_eos=True))
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(UnavailableError):
        list(stream)
    with pytest.raises(UnavailableError):
        engine.generate("Hello")
    with pytest.raises(UnavailableError):
        engine.stats()


def test_an_engine_in_a_fork_says_what_to_do_and_does_not_hang(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate("Hello", GREEDY)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            engine.generate("Hello", GREEDY)
        except UnavailableError as error:
            engine.close()
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert b"spawn" in pipe.read()
    os.waitpid(child, 0)


@pytest.mark.parametrize("end", ["", "del engine, stream; gc.collect()", "raise SystemExit(0)"])
def test_a_program_that_closes_nothing_ends_well(tiny_model: Path, end: str) -> None:
    code = f"""
import gc
from pagedkv.plugin import Engine, SamplingParams
engine = Engine({str(tiny_model)!r}, config={{"cache.num_blocks": 512}})
stream = engine.stream("Hello", SamplingParams(max_new_tokens=2000, ignore_eos=True))
next(stream)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_time_to_the_first_token_counts_from_the_call(make_engine: MakeEngine) -> None:
    """Between steps the engine takes what was asked for while one ran."""
    engine = make_engine()
    blocked, go_on = threading.Event(), threading.Event()
    engine.loop.run_on_thread(lambda: (blocked.set(), go_on.wait()))
    blocked.wait()
    threading.Timer(0.3, go_on.set).start()
    [result] = engine.generate("Hello", GREEDY)
    assert result.ttft_s >= 0.25
