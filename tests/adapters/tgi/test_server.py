"""Sockets, the standard services beside ours, drain and stop."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagedkv.adapters.rpc.sockets import claim_socket_path, parse_listen_address
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.adapters.tgi.server import GenerationServer
from pagedkv.plugin.config import ServerSection
from pagedkv.plugin.errors import ConfigError

NAME = "generate.v3.TextGenerationService"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def standard_health(channel, service=NAME):
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def wait_for_health(channel, expected):
    deadline_s = time.monotonic() + 5
    while standard_health(channel) != expected:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class TestSockets:
    def test_the_socket_carries_the_rank_and_is_its_owner_s_alone(self, served, tmp_path):
        path = tmp_path / "tgi-0"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        urls = served.wire.stub.ServiceDiscovery(pb.ServiceDiscoveryRequest()).urls
        assert list(urls) == [f"unix://{path}"]

    def test_a_dead_server_s_socket_is_replaced(self, backend, make_tokenizer, serving, tmp_path):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "tgi-0"))
        with serving(backend, make_tokenizer(), tmp_path) as served:
            served.wire.health()
        assert not (tmp_path / "tgi-0").exists()

    def test_a_live_server_s_socket_is_left_alone(self, served, make_backend, make_tokenizer, tmp_path):
        config = ServerSection(uds_path=str(tmp_path / "tgi"))
        second = GenerationServer(make_backend(), make_tokenizer(), config)
        with pytest.raises(ConfigError, match="another server listens"):
            served.call(second.start())
        served.call(second.stop())
        served.wire.health()

    def test_a_path_that_can_not_be_a_socket_is_refused(self, tmp_path):
        file = tmp_path / "file"
        file.write_text("keep me")
        for path, word in (
            (file, "no socket"),
            (tmp_path / "missing" / "x", "does not exist"),
            (tmp_path / ("x" * 108), "longer"),
        ):
            with pytest.raises(ConfigError, match=word):
                claim_socket_path(str(path))
        assert file.read_text() == "keep me"

    def test_a_server_needs_an_address(self, backend, make_tokenizer):
        with pytest.raises(ConfigError, match=r"uds_path or server\.listen"):
            GenerationServer(backend, make_tokenizer(), ServerSection())

    @pytest.mark.parametrize("address", ["localhost", ":80", "localhost:http", "localhost:70000", ""])
    def test_an_address_that_is_none_is_refused(self, address):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_listen_address(address)

    def test_ipv6_hosts_keep_their_brackets(self):
        assert parse_listen_address("[::1]:80") == ("[::1]", 80)

    def test_tcp_and_the_unix_socket_serve_side_by_side(self, backend, make_tokenizer, serving, tmp_path):
        with serving(backend, make_tokenizer(), tmp_path, listen="127.0.0.1:0") as served:
            target = served.server.tcp_address
            assert not target.endswith(":0")
            with grpc.insecure_channel(target) as channel:
                TextGenerationServiceStub(channel).Health(pb.HealthRequest(), timeout=5)
            served.wire.health()

    def test_a_port_in_use_is_refused(self, served, make_backend, make_tokenizer):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            config = ServerSection(listen=f"127.0.0.1:{taken.getsockname()[1]}")
            server = GenerationServer(make_backend(), make_tokenizer(), config)
            with pytest.raises(ConfigError, match="can't listen"):
                served.call(server.start())
            served.call(server.stop())


class TestStandardServices:
    def test_reflection_lists_the_services(self, served):
        stub = reflection_pb2_grpc.ServerReflectionStub(served.wire.channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in answer.list_services_response.service}
        assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

    def test_the_standard_health_service_follows_the_warm_up(self, backend, make_tokenizer, serving, tmp_path):
        with serving(backend, make_tokenizer(), tmp_path, warmup_limits=None) as served:
            assert standard_health(served.wire.channel) == "NOT_SERVING"
            served.wire.stub.Warmup(pb.WarmupRequest(max_prefill_tokens=8))
            wait_for_health(served.wire.channel, "SERVING")
            assert standard_health(served.wire.channel, "") == "SERVING"


class TestDrain:
    def test_running_requests_finish_while_new_ones_are_refused(self, served, wire):
        running = [wire.prefill(i, wire.request(i, "a", max_new_tokens=4)) for i in range(10)]
        drained = []
        thread = threading.Thread(target=lambda: drained.append(served.call(served.server.drain(20))))
        thread.start()
        wait_for_health(wire.channel, "NOT_SERVING")
        assert wire.refused(wire.health)[0] == UNAVAILABLE
        assert wire.refused(lambda: wire.prefill(50, wire.request(50, "k")))[0] == UNAVAILABLE
        assert not drained
        assert [wire.finish(response) for response in running] == [{i: "bcde"} for i in range(10)]
        thread.join(5)
        assert drained == [True]

    def test_a_drain_gives_up_in_time_and_stop_ends_what_is_left(self, backend, make_tokenizer, serving, tmp_path):
        with serving(backend, make_tokenizer(), tmp_path) as served:
            served.wire.prefill(1, served.wire.request(1, "a"))
            assert served.call(served.server.drain(0.1)) is False
            served.call(served.server.stop())
            assert not backend.requests

    def test_a_request_that_arrived_just_before_the_drain_is_not_forgotten(
        self, backend, make_tokenizer, serving, tmp_path
    ):
        tokenizing, go_on = threading.Event(), threading.Event()
        tokenizer = make_tokenizer()
        with serving(backend, tokenizer, tmp_path) as served:
            encode = tokenizer.encode
            tokenizer.encode = lambda *args, **keys: (tokenizing.set(), go_on.wait(10), encode(*args, **keys))[2]
            request = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[served.wire.request(1, "a", 2)]))
            call = served.wire.stub.Prefill.future(request)
            assert tokenizing.wait(5)
            assert served.call(served.server.drain(0.1)) is False
            go_on.set()
            assert served.wire.finish(call.result(5)) == {1: "bc"}
            assert served.call(served.server.drain(5)) is True

    def test_an_idle_server_is_drained_at_once(self, served):
        assert served.call(served.server.drain(10)) is True

    def test_a_call_in_flight_gets_its_answer_before_the_server_stops(self, backend, make_tokenizer, serving, tmp_path):
        entered = threading.Event()
        backend.before_step = lambda ids: (entered.set(), time.sleep(0.3))
        with serving(backend, make_tokenizer(), tmp_path) as served:
            request = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[served.wire.request(1, "a", 1)]))
            call = served.wire.stub.Prefill.future(request)
            assert entered.wait(5)
            served.call(served.server.stop())
            assert call.result(5).generations[0].generated_text.text == "b"
        assert not os.path.exists(tmp_path / "tgi-0")
