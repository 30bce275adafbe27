"""Sends a request of a kind, and checks that it ended as that kind does."""

from __future__ import annotations

from typing import Any

from .reference import Reference
from .request_kinds import Ending, RequestKind
from .traffic import Client, Reply

OK, INVALID = 200, 422


async def send(client: Client, kind: RequestKind) -> Reply:
    """Sends a request of this kind; MODEL in it is the name that the router lists."""
    body = dict(kind.body)
    if body.get("model") == "MODEL":
        body["model"] = (await client.get("/v1/models")).body["data"][0]["id"]
    if body.get("stream"):
        return Reply(OK, await client.events(kind.path, body))
    return await client.post(kind.path, body)


def check_outcome(kind: RequestKind, reply: Reply, reference: Reference) -> None:
    """Raises AssertionError where a request of the kind must not end so."""
    if kind.ending is Ending.REFUSED_BY_ROUTER:
        assert (reply.status, reply.body["error_type"]) == (INVALID, "validation")
    elif kind.path == "/generate":
        assert reply.status == OK, reply
        _check_generated(kind, reply, reference)
    elif kind.path == "/v1/completions":
        assert (reply.status, len(reply.body["choices"])) == (OK, 2)
    elif kind.body.get("stream"):
        assert not any("error" in event for event in reply.body)
    elif "tools" in kind.body and kind.ending is Ending.REFUSED_BY_SERVER:
        # The router looks for a call in the text of the refusal and says that there is none.
        assert (reply.status, reply.body["error_type"]) == (INVALID, "tool_error")
    else:
        assert reply.status == OK, reply
        _check_choice(kind, reply.body["choices"][0])


def _check_generated(kind: RequestKind, reply: Reply, reference: Reference) -> None:
    if kind.ending is Ending.REFUSED_BY_SERVER:
        assert (reply.finish_reason, reply.body["details"]["generated_tokens"]) == ("eos_token", 1)
    else:
        assert 1 <= len(reply.token_ids) == reply.body["details"]["generated_tokens"] <= 4
    if kind.same_as is not None:
        assert tuple(reply.token_ids) == reference.greedy(kind.body["inputs"], 4)


def _check_choice(kind: RequestKind, choice: dict[str, Any]) -> None:
    if kind.ending is Ending.REFUSED_BY_SERVER:
        assert choice["finish_reason"] == "stop"
    else:
        assert choice["finish_reason"] in ("length", "stop")
    if kind.body.get("logprobs"):
        assert len(choice["logprobs"]["content"]) == kind.body["max_tokens"]
