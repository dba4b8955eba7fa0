"""What many servers and many consumers do to each other, on the real plan: no bytes are moved, only requests.

::

    python bench/many_machines.py [--servers 1000] [--consumers 1000] [--records 1e9] [--seconds 2]

Each consumer has its part of the data set, ``shard=(i, n)``, and asks for the rows of its windows in order, some
requests at a time, of servers that it draws as ``loaderd.remote.servers`` does. A server makes so many records a
second, one request after the other; now and then one dies, with all that it was asked for, and is back after a
while. What is measured for real: the table that a consumer gets at its start, and the plan that it makes of it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import loaderd
from loaderd.options import StreamOptions
from loaderd.plan.passes import Pass, PassPlan
from loaderd.plan.positions import PassSequence
from loaderd.plan.rows import DatasetRows
from loaderd.remote.servers import draw
from loaderd.remote.tables import table_from_wire, table_to_wire

BLOCK_RECORDS = 1024
ROWS_PER_REQUEST = 4096
REQUESTS_AT_A_TIME = 8
RECORDS_PER_S = 1_500_000
MEAN_LIFE_S = 60.0
DOWN_S = 5.0
TIMEOUT_S = 1.0


@dataclass
class Server:
    """``free_s``: when it has made what it was asked for; ``until_s``: when it is back, if it is away."""

    free_s: float = 0.0
    until_s: float = 0.0
    life: int = 0
    asked: int = 0


@dataclass
class Consumer:
    """What it knows of each server: requests on their way, time of answers, until when it is aside."""

    tickets: int
    servers: list[int]
    on_the_way: Counter[int] = field(default_factory=Counter)
    answer_s: dict[int, float] = field(default_factory=dict)
    aside_s: dict[int, float] = field(default_factory=dict)


def table_and_plan(num_records: int, num_consumers: int) -> dict[str, Any]:
    """What a consumer's start costs: bytes of the table, seconds and bytes of the plan, and its requests an epoch."""
    counts = np.full(-(-num_records // BLOCK_RECORDS), BLOCK_RECORDS, np.int64)
    dataset = loaderd.Dataset("x", loaderd.schemas.chess_eval())
    began_s = time.perf_counter()
    wire, _ = table_to_wire(
        dataset, [counts], num_shards=1000, of={}, listing=None, damages=[], left_out="", files=[]
    )
    made_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    table = table_from_wire(wire, "http://a:1/train")
    read_s = time.perf_counter() - began_s
    options = StreamOptions(512, shard=(0, num_consumers), workers=1)
    began_s = time.perf_counter()
    rows = DatasetRows(table.counts[0], 0, True)
    pass_sequence = PassSequence(options, rows.num_records, options.window_records(table.row_bytes), {})
    batches = pass_sequence.batches(Pass(0, 1))
    plan = PassPlan(rows, batches, 0, True, 0)
    first = plan.slices_of(plan.first_window_from(0))
    planned_s = time.perf_counter() - began_s
    return {
        "blocks": len(counts),
        "table_bytes": len(wire),
        "table_made_s": made_s,
        "table_read_s": read_s,
        "first_window_planned_s": planned_s,
        "plan_bytes": 16 * len(counts) + counts.nbytes,
        "ranges_of_a_window": len(first),
        "requests_an_epoch": -(-num_records // num_consumers // ROWS_PER_REQUEST),
    }


class Simulation:
    """Events in the order of their times."""

    def __init__(self, num_servers: int, num_consumers: int, tickets: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.servers = [Server() for _ in range(num_servers)]
        self.consumers = [Consumer(tickets, list(range(num_servers))) for _ in range(num_consumers)]
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.number = 0
        self.answered = self.made_twice = self.lost = 0
        self.latencies: list[float] = []
        for server in range(num_servers):
            self.at(self.rng.expovariate(1 / MEAN_LIFE_S), "dies", server)
        for consumer in range(num_consumers):
            for _ in range(min(REQUESTS_AT_A_TIME, tickets)):
                self.at(self.rng.random() * 0.1, "asks", consumer)

    def at(self, when_s: float, what: str, *args: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (when_s, self.number, what, args))

    def run(self, seconds: float) -> None:
        while self.events and self.events[0][0] < seconds:
            now_s, _, what, args = heapq.heappop(self.events)
            getattr(self, what)(now_s, *args)

    def dies(self, now_s: float, number: int) -> None:
        server = self.servers[number]
        server.life += 1
        server.until_s = server.free_s = now_s + DOWN_S
        self.at(server.until_s + self.rng.expovariate(1 / MEAN_LIFE_S), "dies", number)

    def asks(self, now_s: float, number: int) -> None:
        consumer = self.consumers[number]
        consumer.tickets -= 1
        self.asks_again(now_s, number)

    def asks_again(self, now_s: float, number: int) -> None:
        consumer = self.consumers[number]
        there = [each for each in consumer.servers if consumer.aside_s.get(each, 0.0) <= now_s] or consumer.servers
        known = [(consumer.on_the_way[each], consumer.answer_s.get(each, 0.0)) for each in there]
        chosen = there[draw(known, self.rng)]
        server = self.servers[chosen]
        consumer.on_the_way[chosen] += 1
        if server.until_s > now_s:
            self.at(now_s + 0.001, "fails", number, chosen)
            return
        server.asked += 1
        server.free_s = max(server.free_s, now_s) + ROWS_PER_REQUEST / RECORDS_PER_S
        if server.free_s - now_s > TIMEOUT_S:
            self.made_twice += 1
            self.at(now_s + TIMEOUT_S, "fails", number, chosen)
            return
        self.latencies.append(server.free_s - now_s)
        self.at(server.free_s, "answers", number, chosen, server.life, round(1e9 * (server.free_s - now_s)))

    def answers(self, now_s: float, number: int, chosen: int, life: int, took_ns: int) -> None:
        consumer = self.consumers[number]
        if self.servers[chosen].life != life:  # it has died meanwhile
            self.lost += 1
            self.fails(now_s, number, chosen)
            return
        consumer.on_the_way[chosen] -= 1
        took_s = took_ns / 1e9
        before_s = consumer.answer_s.get(chosen, took_s)
        consumer.answer_s[chosen] = before_s + 0.2 * (took_s - before_s)
        self.answered += 1
        if consumer.tickets:
            self.asks(now_s, number)

    def fails(self, now_s: float, number: int, chosen: int) -> None:
        consumer = self.consumers[number]
        consumer.on_the_way[chosen] -= 1
        consumer.aside_s[chosen] = now_s + 1.0
        self.asks_again(now_s, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--consumers", type=int, default=1000)
    parser.add_argument("--records", type=float, default=1e9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of simulated time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = table_and_plan(int(options.records), options.consumers)
    simulation = Simulation(options.servers, options.consumers, start["requests_an_epoch"], options.seed)
    simulation.run(options.seconds)
    asked = np.array([server.asked for server in simulation.servers])
    latencies = np.sort(simulation.latencies)
    start |= {
        "simulated_s": options.seconds,
        "answered": simulation.answered,
        "records_per_s": round(simulation.answered * ROWS_PER_REQUEST / options.seconds),
        "asked_of_a_server": [int(asked.min()), float(np.median(asked)), int(asked.max())],
        "latency_s_p50_p99_max": [float(latencies[int(q * (len(latencies) - 1))]) for q in (0.5, 0.99, 1.0)],
        "lost_with_a_server": simulation.lost,
        "timed_out": simulation.made_twice,
    }
    print(json.dumps(start, indent=1))


if __name__ == "__main__":
    main()
