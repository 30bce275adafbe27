"""When a router asks for health, and how."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pagedkv.adapters.tgi import generate_pb2 as pb

from .calls import PROBE_ID, Recording
from .loop_calls import LoopCall, named_batch_ids
from .rules import Tally

PROBE = pb.PrefillRequest(
    batch=pb.Batch(
        id=PROBE_ID,
        size=1,
        max_tokens=2,
        max_blocks=1,
        requests=[
            pb.Request(
                id=PROBE_ID,
                inputs="liveness",
                input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
                truncate=1,
                parameters=pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
                stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
                blocks=[0],
                slots=[0],
            )
        ],
    )
)


@dataclass(frozen=True)
class _HealthCheck:
    begin_ms: float
    end_ms: float
    is_probe: bool
    is_well: bool


def check_health(recording: Recording, calls: list[LoopCall], tally: Tally) -> None:
    """Every health check, beside the calls of the loop."""
    checks = []
    for call in recording.calls:
        if call.is_probe:
            tally.check("probe-content", call.request == PROBE, call.begin_ms, call.method)
        if call.is_probe or call.method == "Health":
            checks.append(_HealthCheck(call.begin_ms, call.end_ms, call.is_probe, call.error is None))
    failures = [call.end_ms for call in calls if call.error is not None and call.method in ("Prefill", "Decode")]
    failures += [check.end_ms for check in checks if not check.is_well]
    for check in checks:
        if check.is_probe:
            well = [c.begin_ms for c in checks if c.is_probe and c.is_well and c.end_ms < check.begin_ms]
            has_cause = any(max(well, default=0) < at_ms <= check.begin_ms for at_ms in failures)
            tally.check("probe-after-failure", has_cause, check.begin_ms, "Prefill")
    if len({call.rank for call in recording.calls}) == 1:
        for before, after in pairwise(checks):
            if not before.is_well and after.begin_ms >= before.end_ms:
                tally.check("probe-until-well", after.is_probe, after.begin_ms, "Health")
    for call in calls:
        if any(check.is_probe and check.begin_ms <= call.begin_ms for check in checks):
            is_forgotten = PROBE_ID not in named_batch_ids(call) | _named_request_ids(call)
            tally.check("probe-forgotten", is_forgotten, call.begin_ms, call.method)


def _named_request_ids(call: LoopCall) -> set[int]:
    request = call.request
    if call.method == "FilterBatch":
        return set(request.request_ids)
    if call.method == "Decode":
        return {id_ for batch in request.batches for id_ in batch.request_ids}
    return set(request.cached_batch.request_ids) if call.method == "Prefill" else set()
