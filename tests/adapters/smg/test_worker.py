"""What the gateway asks a worker about itself."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import grpc
import pytest

from pagedkv.adapters.smg import engine_pb2 as pb

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_model_and_server_info(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            model = await wire.call("GetModelInfo", pb.GetModelInfoRequest())
            assert (model.served_model_name, model.model_path) == ("tiny", str(lab.folder))
            assert model.max_context_length == 512
            assert (model.is_generation, model.supports_vision, list(model.eos_token_ids)) == (True, False, [0])
            assert json.loads(model.default_sampling_params_json) == {"temperature": 0.6}
            server = await wire.call("GetServerInfo", pb.GetServerInfoRequest())
            assert (server.data_parallel_size, server.block_size, server.max_num_seqs) == (1, 8, 16)

    run(play())


def test_loads_count_blocks_that_requests_hold_and_not_cached_ones(lab, run) -> None:
    async def play() -> None:
        async with lab.serve(num_blocks=64, max_num_sequences=2) as wire:
            await wire.generate(lab.ask(list(range(1, 90)), 4, ignore_eos=True))
            await wire.until_idle()
            (idle,) = (await wire.call("GetLoads", pb.GetLoadsRequest(include=["core"]))).loads
            assert (idle.token_usage, idle.num_used_tokens, idle.max_total_num_tokens) == (0.0, 0, 512)
            calls = [
                wire.stream("Generate", lab.ask(PROMPT, 200, ignore_eos=True, request_id=str(i)), timeout=60)
                for i in range(3)
            ]
            await calls[0].read()
            while True:
                (loads,) = (await wire.call("GetLoads", pb.GetLoadsRequest())).loads
                if (loads.num_running_reqs, loads.num_total_reqs) == (2, 3):
                    break
            assert (loads.num_waiting_reqs, loads.max_running_requests) == (1, 16)
            assert loads.token_usage > 0
            assert loads.num_waiting_uncached_tokens <= len(PROMPT)
            for call in calls:
                call.cancel()
            await wire.until_idle()

    run(play())


def test_tokenizer_comes_as_one_zip_with_its_digest_at_the_end(lab, run) -> None:
    files = {
        "tokenizer.json": "x" * 300_000,
        "config.json": "{}",
        "chat_template.jinja": "{{ 1 }}",
    }
    for name, text in {**files, "model.safetensors": "weights"}.items():
        (lab.folder / name).write_text(text)

    async def play() -> None:
        async with lab.serve() as wire:
            chunks = [chunk async for chunk in wire.stream("GetTokenizer", pb.GetTokenizerRequest(), timeout=30)]
            data = b"".join(chunk.data for chunk in chunks)
            assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
            assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert sorted(archive.namelist()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
                assert archive.read("tokenizer.json").decode() == files["tokenizer.json"]

    run(play())


def test_what_a_text_worker_has_not_is_unimplemented(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            for method in ("Embed", "StartProfile", "StopProfile"):
                call = wire.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{method}")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"")
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(play())
