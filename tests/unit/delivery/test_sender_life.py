"""Random lives of an outbox sender and its session against a model broker: answers, breaks, full disks, kills."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mqtt5
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.delivery.test_outbound import Line, outbox_rows
from tests.unit.journal.support import FAST, FillingDisk
from towline.errors import JournalFull
from towline.mqtt.events import PacketsReceived

OK, NOBODY, QUOTA, REFUSED = 0, 0x10, 0x97, 0x87


class SenderLife(RuleBasedStateMachine):
    """Messages of each QoS on a few topics; the broker keeps its session and knows QoS 2."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=FAST))
        self.now = 1000.0
        self.clock = patch.object(time, "monotonic", lambda: self.now)
        self.clock.start()
        self.disk = FillingDisk()
        self.line = Line(self.directory, 0, disk=self.disk)
        self.qos: list[int] = []
        #: payloads as the broker took them, in order; QoS 2 once per packet id until its release
        self.taken: list[int] = []
        self.held: set[int] = set()
        #: sent by the sender and not answered
        self.open: list[Any] = []
        self.unmatched: set[int] = set()
        self.refused: set[int] = set()
        self.postponed = False
        self.online = False

    @rule(topics=st.lists(st.sampled_from("abc"), min_size=1, max_size=4), qos=st.sampled_from([0, 1, 1, 2, 2]))
    def append(self, topics: list[str], qos: int) -> None:
        rows = [{"topic": t, "payload": b"%d" % n, "qos": qos} for n, t in enumerate(topics, len(self.qos))]
        try:
            self.line.outbox.append_batch(outbox_rows(*rows))
        except JournalFull:
            return
        self.qos += [qos] * len(topics)
        self.turn()

    @rule()
    def turn(self) -> None:
        try:
            self.line.sender.turn()
        except JournalFull:
            self._renew()
        self._collect()

    def _collect(self) -> None:
        for packet in self.line.packets:
            if isinstance(packet, mqtt5.PublishPacket):
                assert int(packet.payload) not in self.refused
                if int(packet.qos) < 2 or packet.packet_id not in self.held:
                    self.taken.append(int(packet.payload))
                if int(packet.qos) == 2:
                    self.held.add(packet.packet_id or 0)
            if isinstance(packet, mqtt5.PublishPacket | mqtt5.PubRelPacket) and packet.packet_id:
                self.open.append(packet)
        self.line.packets.clear()

    @precondition(lambda self: not self.online)
    @rule(window=st.sampled_from([1, 3, 65535]))
    def connect(self, window: int) -> None:
        self.online, self.open = True, []
        try:
            self.line.connect(window)
        except JournalFull:
            self._renew()
        self._collect()

    def _renew(self) -> None:
        self.online, self.open = False, []
        self.line.renew()

    @precondition(lambda self: self.online)
    @rule()
    def line_breaks(self) -> None:
        self.online, self.open = False, []
        self.line.end(
            PacketsReceived([mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode.SERVER_SHUTTING_DOWN)])
        )

    @precondition(lambda self: self.online and self.open)
    @rule(reason=st.sampled_from([OK, OK, OK, NOBODY, QUOTA, REFUSED]))
    def answer(self, reason: int) -> None:
        packet = self.open.pop(0)
        reply: Any
        if isinstance(packet, mqtt5.PubRelPacket):
            self.held.discard(packet.packet_id)
            reply = mqtt5.PubCompPacket(packet.packet_id)
        else:
            number = int(packet.payload)
            if reason in {QUOTA, REFUSED}:
                self.taken.remove(number)
                self.held.discard(packet.packet_id)
                self.postponed = self.postponed or reason == QUOTA
                self.refused |= {number} if reason == REFUSED else set()
            self.unmatched |= {number} if reason == NOBODY else set()
            if int(packet.qos) == 1:
                reply = mqtt5.PubAckPacket(packet.packet_id, reason_code=mqtt5.PubAckReasonCode(reason))
            else:
                reply = mqtt5.PubRecPacket(packet.packet_id, reason_code=mqtt5.PubRecReasonCode(reason))
        try:
            self.line.handle(PacketsReceived([reply]))
        except JournalFull:
            self._renew()
        self.turn()

    @rule(seconds=st.sampled_from([0.3, 2.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.turn()

    @rule(full=st.sampled_from([False, False, True]))
    def disk_fills(self, full: bool) -> None:
        self.disk.full = full

    @rule(flushed=st.booleans())
    def kill(self, flushed: bool) -> None:
        """What was not flushed is forgotten; QoS 0 and 1 may come again as new, QoS 2 under its packet id alone."""
        self.disk.full, self.online, self.open = False, False, []
        if flushed:
            self.line.sender.flush()
        self.line.outbox.close()
        self.line.sender.refused_messages.close()
        self.line = Line(self.directory, 0, disk=self.disk)

    @invariant()
    def sound(self) -> None:
        line = self.line
        once = [number for number in self.taken if self.qos[number] != 1]
        assert len(once) == len(set(once)), "QoS 0 and 2 are never doubled"
        status = line.sender.status()
        parts = [status[name] for name in ("queued", "in_flight", "delivered", "expired", "refused")]
        assert status["accepted"] == len(self.qos) == sum(parts), "[I11]"
        assert status["delivered"] == status["acknowledged"]
        waiting = [number for number, _ in line.outbox.held_ids.values() if number not in line.outbox.done_rows]
        assert all(line.outbox.first_offset <= number for number in waiting), "its row is there"
        oldest = line.sender.oldest_number
        assert oldest is None or line.outbox.first_offset <= oldest
        if not self.postponed:
            firsts = [n for n in dict.fromkeys(self.taken) if self.qos[n] == 2]
            assert firsts == sorted(firsts)

    def teardown(self) -> None:
        """With a kind broker and room everything is delivered or refused."""
        try:
            self.disk.full = False
            for _ in range(10 * len(self.qos) + 20):
                self.now += 100
                if not self.online:
                    self.connect(65535)
                self.turn()
                while self.open:
                    self.answer(OK)
            assert self.line.outbox.waiting_rows == 0
            missing = set(range(len(self.qos))) - set(self.taken) - self.refused
            assert {self.qos[number] for number in missing} <= {0}, "only QoS 0 may be lost"
        finally:
            self.clock.stop()
            self.line.outbox.close()
            shutil.rmtree(self.directory)


SenderLife.TestCase.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestSenderLife = SenderLife.TestCase


def test_the_row_of_a_refused_message_that_is_stored_is_not_needed() -> None:
    life = SenderLife()
    life.append(topics=["a"], qos=2)
    life.connect(window=1)
    life.answer(reason=REFUSED)
    life.kill(flushed=False)
    life.sound()
    life.turn()
    life.sound()
    life.teardown()
