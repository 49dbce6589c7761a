"""Edges between replicas: which a process has, and that all of a request goes over the one it was opened for."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tests.fake_stages import deploy_config
from triptych.config.schema import ConnectorConfig, ConnectorExtra
from triptych.connectors import inproc
from triptych.connectors.contract import Handoff, Receiver, Sender
from triptych.connectors.endpoint import Endpoint
from triptych.stages.arrivals import Arrivals
from triptych.stages.build import StageLoader
from triptych.stages.contract import Outbox, Stage, StageContext
from triptych.stages.handoffs import Handoffs

SOURCES, TARGETS = ("talker:0", "talker:1"), ("code2wav:0", "code2wav:1", "code2wav:2")


class Net:
    """Edges from every source to every target, with the stages' halves of them."""

    def __init__(self, window: int = 2) -> None:
        edges = {
            (source, target): inproc.connect(f"{source}->{target}", source, ConnectorExtra(window=window))
            for source in SOURCES
            for target in TARGETS
        }
        self.handoffs = {
            source: Handoffs({target: edges[source, target][0] for target in TARGETS}, async_chunk=True)
            for source in SOURCES
        }
        self.arrivals = {
            target: Arrivals({source: edges[source, target][1] for source in SOURCES}) for target in TARGETS
        }

    def open(self, request_id: str, source: str, target: str) -> None:
        self.handoffs[source].open(request_id, target)
        self.arrivals[target].open(request_id, source)


def codes(value: int) -> dict[str, Any]:
    return {"codes": np.full(1, value, np.int32)}


def took(arrivals: Arrivals) -> list[tuple[str, int, int]]:
    """(request, seq, value) of everything that has come, which is released."""
    taken = []
    for item in arrivals.receive():
        assert isinstance(item, Handoff)
        taken.append((item.request_id, item.seq, int(item.arrays["codes"][0])))
        arrivals.release(item)
    return taken


def test_what_a_request_sends_arrives_where_it_was_opened_and_nowhere_else() -> None:
    net = Net()
    for number, (source, target) in enumerate((source, target) for source in SOURCES for target in TARGETS):
        net.open(f"r{number}", source, target)
        net.handoffs[source].push(f"r{number}", codes(number))
    for place, target in enumerate(TARGETS):
        expected = [(f"r{place}", 0, place), (f"r{place + 3}", 0, place + 3)]
        assert sorted(took(net.arrivals[target])) == expected


def test_credit_is_that_of_one_edge_and_names_the_request_it_frees() -> None:
    net = Net(window=1)
    net.open("slow", "talker:0", "code2wav:0")
    net.open("quick", "talker:0", "code2wav:1")
    talker = net.handoffs["talker:0"]
    assert talker.push("slow", codes(0)) and not talker.push("slow", codes(1))
    for value in range(3):
        assert talker.push("quick", codes(value), final=value == 2)
        assert took(net.arrivals["code2wav:1"]) == [("quick", value, value)]
    assert talker.flush() == []
    assert took(net.arrivals["code2wav:0"]) == [("slow", 0, 0)]
    assert talker.flush() == ["slow"]
    assert took(net.arrivals["code2wav:0"]) == [("slow", 1, 1)]


def test_a_request_that_was_refused_is_closed_to_every_source() -> None:
    net = Net(window=1)
    arrivals = net.arrivals["code2wav:2"]
    arrivals.close("a")  # never opened here, and nobody said where it would have come from
    for source in SOURCES:
        net.handoffs[source].open("a", "code2wav:2")
        # Into the void: without credit, and still not parked.
        assert all(net.handoffs[source].push("a", codes(value)) for value in range(3))
    assert took(arrivals) == []


def test_a_route_to_no_replica_is_an_error() -> None:
    net = Net()
    with pytest.raises(KeyError):
        net.handoffs["talker:0"].open("a", "code2wav:9")
    with pytest.raises(KeyError):
        net.arrivals["code2wav:0"].open("a", "talker:9")


class RecordingEndpoint:
    def __init__(self, process: str) -> None:
        self.process = process
        self.made: dict[str, tuple[str, str, str]] = {}

    def edge(
        self, *, source: str, target: str, source_process: str, target_process: str, config: ConnectorConfig
    ) -> tuple[Sender | None, Receiver | None]:
        self.made[f"{source}->{target}"] = (source_process, target_process, config.kind)
        half = cast(Any, f"{source}->{target}")
        return (
            half if source_process == self.process else None,
            half if target_process == self.process else None,
        )


@pytest.mark.parametrize(
    ("process", "edges"),
    [
        (
            "speech:1",
            {
                "thinker:0->talker:1": ("text:0", "speech:1", "shm"),
                "thinker:1->talker:1": ("text:1", "speech:1", "shm"),
                "talker:1->code2wav:0": ("speech:1", "text:0", "shm"),
                "talker:1->code2wav:1": ("speech:1", "text:1", "shm"),
            },
        ),
        (
            "text:0",
            {
                f"{source}->{target}": (*places, "shm")
                for number in range(3)
                for source, target, places in (
                    ("thinker:0", f"talker:{number}", ("text:0", f"speech:{number}")),
                    (f"talker:{number}", "code2wav:0", (f"speech:{number}", "text:0")),
                )
            },
        ),
    ],
)
def test_a_process_has_an_edge_for_each_pair_with_an_end_in_it(
    process: str, edges: dict[str, tuple[str, str, str]]
) -> None:
    deploy = deploy_config(processes=("text", "speech", "text"), replicas=(2, 3, 2))
    endpoint = RecordingEndpoint(process)
    contexts: list[StageContext] = []

    def load(context: StageContext) -> Stage:
        contexts.append(context)
        return cast(Stage, context)

    StageLoader(
        deploy=deploy, model="m", process=process, outbox=cast(Outbox, None), endpoint=cast(Endpoint, endpoint)
    ).load(load)
    assert endpoint.made == edges
    assert [context.config for context in contexts] == list(deploy.processes[process])
    for context in contexts:
        assert (context.config.process, context.config.devices, context.config.num_replicas) == (process, "cpu", 1)
    if process == "speech:1":
        [talker] = contexts
        assert list(talker.receivers["thinker"]) == ["thinker:0", "thinker:1"]
        assert list(talker.senders["code2wav"]) == ["code2wav:0", "code2wav:1"]
    else:
        thinker, vocoder = contexts
        assert list(thinker.senders) == ["talker"] and not thinker.receivers
        assert list(vocoder.receivers["talker"]) == ["talker:0", "talker:1", "talker:2"] and not vocoder.senders


def test_the_names_of_a_stage_without_replicas_have_no_number() -> None:
    endpoint = RecordingEndpoint("speech")
    StageLoader(
        deploy=deploy_config(),
        model="m",
        process="speech",
        outbox=cast(Outbox, None),
        endpoint=cast(Endpoint, endpoint),
    )
    assert list(endpoint.made) == ["thinker->talker", "talker->code2wav"]
