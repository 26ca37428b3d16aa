"""`AsyncPublisher`: the same publisher for asyncio."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from towline.publisher.publisher import Publisher
from towline.publisher.receipt import Receipt


class AsyncPublisher:
    """A `Publisher` whose waits are awaits; arguments are the same. An asynchronous context manager.

    The stages of a `Receipt` can be awaited: ``await receipt.at_broker``.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._given = (args, settings)
        self._publisher: Publisher | None = None

    @property
    def publisher(self) -> Publisher:
        """The publisher underneath: status, journal id, epoch.

        Raises:
            RuntimeError: It is not open.
        """
        if self._publisher is None:
            raise RuntimeError("open it first: async with AsyncPublisher(...) as publisher")
        return self._publisher

    async def __aenter__(self) -> Self:
        args, settings = self._given
        self._publisher = await asyncio.to_thread(Publisher, *args, **settings)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(0 if kind else 30.0)

    async def publish(self, topic: str, payload: bytes | str = b"", *, wait: bool = True, **properties: Any) -> Receipt:
        """Hand over a message; see `Publisher.publish` for arguments and errors."""
        publisher = self.publisher
        if properties.get("timeout") is not None:  # it takes the message back when it runs out
            return await asyncio.to_thread(publisher.publish, topic, payload, wait=wait, **properties)
        if publisher.crowded:  # it would wait, and the loop must not
            receipt = await asyncio.to_thread(publisher.publish, topic, payload, wait=False, **properties)
        else:
            receipt = publisher.publish(topic, payload, wait=False, **properties)
        if wait:
            await receipt.on_disk
        return receipt

    async def flush(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - as `Publisher.flush`
        *,
        end_to_end: bool | None = None,
    ) -> int:
        """Wait until everything is at the broker, or has its receipt; see `Publisher.flush`."""
        return await asyncio.to_thread(self.publisher.flush, timeout, end_to_end=end_to_end)

    async def close(
        self,
        timeout: float = 30.0,  # noqa: ASYNC109 - as `Publisher.close`
        *,
        end_to_end: bool | None = None,
    ) -> int:
        """End; see `Publisher.close`."""
        return await asyncio.to_thread(self.publisher.close, timeout, end_to_end=end_to_end)
