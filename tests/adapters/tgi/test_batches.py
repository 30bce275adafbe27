"""The table of batches against a dictionary of lists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pagedkv.adapters.tgi.batches import BatchTable, LiveRequest
from pagedkv.plugin.errors import DuplicateRequestError, NotFoundError, RequestError
from pagedkv.plugin.requests import Request, RequestId, SamplingParams


def live(request_id: int) -> LiveRequest:
    return LiveRequest(Request(RequestId(request_id), (1,), SamplingParams()), SimpleNamespace(), 0.0)


class BatchTableMachine(RuleBasedStateMachine):
    """Opens, joins, filters and ends batches at random; the model is which request ids a batch id holds, in order."""

    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.table = BatchTable()
        self.model: dict[int, list[int]] = {}
        self.next_id = 0

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def known(self, batch_id: int) -> bool:
        if batch_id in self.model:
            return True
        with pytest.raises(NotFoundError):
            self.table.find([batch_id])
        return False

    @rule(target=batches, count=st.integers(1, 3))
    def open(self, count: int) -> int:
        ids = self.new_ids(count)
        batch_id = 1000 + ids[0]
        self.table.check_free(batch_id)
        self.table.open(batch_id, [live(id_) for id_ in ids])
        self.model[batch_id] = ids
        with pytest.raises(DuplicateRequestError):
            self.table.check_free(batch_id)
        return batch_id

    @rule(target=batches, first=consumes(batches), second=consumes(batches))
    def join(self, first: int, second: int):
        if not (self.known(first) and self.known(second)):
            return multiple(first, second)
        self.table.join(self.table.find([first, second]))
        self.model[first] += self.model.pop(second)
        return first

    @rule(batch_id=batches, data=st.data())
    def retain(self, batch_id: int, data: st.DataObject) -> None:
        if not self.known(batch_id):
            return
        ids = self.model[batch_id]
        kept = data.draw(st.lists(st.sampled_from(ids), unique=True))
        if not kept:
            with pytest.raises(RequestError):
                self.table.retain(batch_id, [])
            return
        _, dropped = self.table.retain(batch_id, kept)
        assert {live.request.id for live in dropped} == set(ids) - set(kept)
        self.model[batch_id] = kept if dropped else ids

    @rule(batch_id=batches)
    def retain_an_unknown_request(self, batch_id: int) -> None:
        with pytest.raises(NotFoundError):
            self.table.retain(batch_id, [RequestId(10**6), *self.model.get(batch_id, [])])

    @rule(batch_id=batches, data=st.data())
    def end_requests(self, batch_id: int, data: st.DataObject) -> None:
        if not self.known(batch_id):
            return
        ended = data.draw(st.lists(st.sampled_from(self.model[batch_id]), unique=True))
        self.table.remove_requests(ended)
        self.model[batch_id] = [id_ for id_ in self.model[batch_id] if id_ not in ended]
        if not self.model[batch_id]:
            del self.model[batch_id]

    @rule(batch_id=consumes(batches))
    def pop(self, batch_id: int) -> None:
        popped = [live.request.id for live in self.table.pop([batch_id, 10**6])]
        assert popped == self.model.pop(batch_id, [])

    @rule()
    def pop_all(self) -> None:
        popped = sorted(live.request.id for live in self.table.pop_all())
        assert popped == sorted(id_ for ids in self.model.values() for id_ in ids)
        self.model.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        found = {batch.id: list(batch.requests) for batch in self.table.find(list(self.model))}
        assert found == self.model
        assert self.table.num_requests == sum(map(len, self.model.values()))


TestBatchTable = BatchTableMachine.TestCase


def test_a_batch_named_twice_is_refused():
    table = BatchTable()
    table.open(1, [live(1)])
    with pytest.raises(RequestError, match="twice"):
        table.find([1, 1])
