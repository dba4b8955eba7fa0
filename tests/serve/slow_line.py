"""A line between a consumer and a server, as a proxy: ``slow_line.py PORT HOST PORT_THERE`` listens on 127.0.0.1
and 127.0.0.2.

It says "ready", and then does what each line on its standard input says, a JSON object of attributes of ``Line``. It
says when it cuts a connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys

_CHUNK_BYTES = 1 << 14


class Line:
    """``delay_s``: each way. ``bytes_per_s``: to the consumer; None: as fast as can be.

    ``cuts``: [how, bytes] each; the next connection that has brought the consumer so many bytes ends there: by a
    "reset", by an orderly "end", or by a "stall", in which no more bytes come, and nobody is told.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.cuts: list[tuple[str, int]] = []
        self._there = host, port

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(*self._there)
        except OSError:
            writer.transport.abort()
            return
        ends = [writer, their_writer]
        await asyncio.gather(
            self._carry(reader, their_writer, ends, to_consumer=False),
            self._carry(their_reader, writer, ends, to_consumer=True),
        )

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
        *,
        to_consumer: bool,
    ) -> None:
        """One direction, to its end."""
        arrived: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)
        feeding = asyncio.create_task(self._feed(source, arrived))
        carried = 0
        try:
            while True:
                due_s, data = await arrived.get()
                await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
                if not data:
                    break
                how = ""
                if to_consumer and self.cuts and carried + len(data) >= self.cuts[0][1]:
                    how, after = self.cuts.pop(0)  # at once: it is for this connection, and for no other
                    data = data[: after - carried]
                    print(f"{how} after {after} bytes", flush=True)
                sink.write(data)
                await sink.drain()
                carried += len(data)
                if how:
                    await self._cut(how, ends)
                if to_consumer and self.bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
        except OSError:
            pass  # one of the two is gone
        finally:
            feeding.cancel()
            for end in ends:
                end.close()

    async def _feed(self, source: asyncio.StreamReader, arrived: asyncio.Queue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = await source.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            await arrived.put((asyncio.get_running_loop().time() + self.delay_s, data))

    async def _cut(self, how: str, ends: list[asyncio.StreamWriter]) -> None:
        if how == "stall":
            await asyncio.Event().wait()
        for end in ends:
            if how == "reset":
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.transport.abort()
            else:
                end.close()


async def main() -> None:
    port, host, port_there = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    line = Line(host, port_there)
    server = await asyncio.start_server(line.connected, ["127.0.0.1", "127.0.0.2"], port)
    print("ready", flush=True)
    async with server:
        while text := await asyncio.to_thread(sys.stdin.readline):
            for name, value in json.loads(text).items():
                setattr(line, name, value)


if __name__ == "__main__":
    asyncio.run(main())
