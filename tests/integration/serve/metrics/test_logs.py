"""The log: one structured line for each ended request, and never a prompt unless the config asks for it."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from pagedkv.adapters.rpc.request_log import to_text
from pagedkv.integration.serve.logs import JsonFormatter

PROMPT = 'a secret\nrequest ended: request_id=9 "quoted"'


def _ended(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("request ended: ")]


def _ask(lab, caplog: pytest.LogCaptureFixture, **server_keys) -> None:
    async def run() -> None:
        async with lab.serve(lab.make_backend(64), **server_keys) as served:
            await served.finish(await served.prefill(1, lab.ask(7, PROMPT, 3)))
            await served.finish(await served.prefill(2, lab.ask(8, PROMPT, 3)))
            await served.prefill(3, lab.ask(9, PROMPT, 30))
            await served.clear()

    caplog.set_level(logging.INFO, logger="pagedkv")
    asyncio.run(run())


def test_each_ended_request_has_one_line_with_its_numbers(lab, caplog) -> None:
    _ask(lab, caplog)
    fields = [record.fields for record in _ended(caplog)]
    assert [(one["request_id"], one["reason"]) for one in fields] == [(7, "length"), (8, "length"), (9, "aborted")]
    assert [one["generated_tokens"] for one in fields] == [3, 3, 1]
    assert {one["prompt_tokens"] for one in fields} == {len(PROMPT)}
    assert [one["cached_tokens"] for one in fields] == [0, 40, 40]
    assert all(0 <= one["queue_s"] <= one["ttft_s"] <= one["total_s"] for one in fields)
    assert _ended(caplog)[0].getMessage().startswith("request ended: request_id=7 reason=length prompt_tokens=")
    assert not any("secret" in record.getMessage() or "secret" in str(vars(record)) for record in caplog.records)


def test_a_prompt_is_logged_where_the_config_asks_for_it_and_can_not_forge_a_line(lab, caplog) -> None:
    _ask(lab, caplog, log_prompts=True)
    lines = [record.getMessage() for record in _ended(caplog)]
    assert len(lines) == 3
    assert not any("\n" in line for line in lines)
    for record, line in zip(_ended(caplog), lines, strict=True):
        written = line.split(" prompt=", 1)[1]
        assert json.loads(written) == record.fields["prompt"]


def test_capacity_is_logged_once_with_the_bytes_of_a_token(lab, caplog) -> None:
    _ask(lab, caplog)
    (record,) = [record for record in caplog.records if record.getMessage().startswith("capacity: ")]
    fields = json.loads(record.getMessage().removeprefix("capacity: "))
    assert fields == record.fields
    assert (fields["num_blocks"], fields["block_size"], fields["max_cache_tokens"]) == (64, 8, 512)
    assert fields["kv_bytes_total"] == 512 * fields["bytes_per_token"]


def test_json_lines_are_those_that_the_launcher_reads_with_the_fields_beside() -> None:
    record = logging.LogRecord("pagedkv.x", logging.WARNING, "x.py", 1, "request %d\nended", (7,), None)
    record.fields = {"request_id": 7}
    line = JsonFormatter("rank 100%: ").format(record)
    assert "\n" not in line
    written = json.loads(line)
    assert written["text"] == "rank 100%: request 7\nended"
    assert written["record"]["level"] == {"name": "WARNING"}
    assert (written["record"]["name"], written["record"]["extra"]) == ("pagedkv.x", {"request_id": 7})


@pytest.mark.parametrize(
    ("value", "word"), [(None, "-"), (0.25, "0.25"), ("a b", '"a b"'), ("x=y", '"x=y"'), ("é", '"\\u00e9"')]
)
def test_values_are_words_or_quoted(value, word) -> None:
    assert to_text({"name": value}) == f"name={word}"
