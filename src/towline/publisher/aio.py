"""`AsyncPublisher`: the same publisher for asyncio."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from towline.publisher.publisher import Publisher
from towline.publisher.receipt import Completion, Receipt

T = TypeVar("T")


class AsyncStage(Generic[T]):
    """A stage of a message, to be awaited; as often as you like.

    Awaiting raises what `Completion.result` raises. Cancelling the wait cancels nothing else.
    """

    def __init__(self, stage: Completion[T]) -> None:
        self._stage = stage

    def done(self) -> bool:
        """Whether it has happened, or failed."""
        return self._stage.done()

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> T:
        if not self._stage.done():
            loop = asyncio.get_running_loop()
            reached = asyncio.Event()

            def notify(_stage: Completion[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(reached.set)

            self._stage.add_done_callback(notify)
            await reached.wait()
        return self._stage.result(0)


class AsyncReceipt:
    """A published message.

    Attributes:
        on_disk: Awaitable: durable; its result is the message's number in the outbox.
        at_broker: Awaitable: the broker has it; its result is the reason code, as `Receipt` says. Fails when it was
            refused for good, or expired.
        end_to_end: Awaitable: it is in Kafka; for a publisher with receipts.
    """

    def __init__(self, receipt: Receipt) -> None:
        self.topic = receipt.topic
        self.on_disk = AsyncStage(receipt.on_disk)
        self.at_broker = AsyncStage(receipt.at_broker)
        self.end_to_end = AsyncStage(receipt.end_to_end)


class AsyncPublisher:
    """A `Publisher` whose waits are awaits; arguments are the same. An asynchronous context manager."""

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

    async def publish(
        self, topic: str, payload: bytes | str = b"", *, wait: bool = True, **properties: Any
    ) -> AsyncReceipt:
        """Hand over a message; see `Publisher.publish` for arguments and errors."""
        publisher = self.publisher
        if properties.get("timeout") is not None:  # it takes the message back when it runs out
            return AsyncReceipt(await asyncio.to_thread(publisher.publish, topic, payload, wait=wait, **properties))
        if publisher.crowded:  # it would wait, and the loop must not
            receipt = await asyncio.to_thread(publisher.publish, topic, payload, wait=False, **properties)
        else:
            receipt = publisher.publish(topic, payload, wait=False, **properties)
        awaitable = AsyncReceipt(receipt)
        if wait:
            await awaitable.on_disk
        return awaitable

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
