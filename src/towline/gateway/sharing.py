"""How the gateways of one line share its messages, and which of them one is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from towline.delivery.members import HashedShare, KeyLevel

__all__ = ["ShareSettings", "ShareWay"]


class ShareWay(StrEnum):
    """How a line's messages are shared."""

    #: Each member has filters of its own, and no topic is taken by two of them: order per topic and device.
    FILTERS = "filters"
    #: Each member has the same filters, and stores what hashes to it: order per device, or per topic.
    HASH = "hash"
    #: A shared subscription, ``$share/GROUP/FILTER``: the broker chooses, and order is not promised.
    SUBSCRIPTION = "subscription"


class ShareSettings(BaseModel):
    """One member among the gateways of a line.

    Attributes:
        line: The line.
        member: This one.
        members: The names of all, sorted: the place of a name is the member's number.
        way: How they share.
        key: What is hashed, as the bridge file calls it; "" for the whole topic.
        keys: Filter and level of the topic where that stands.
        client_id: The line's, without the name of a member.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    line: str = Field(min_length=1)
    member: str = Field(min_length=1)
    members: tuple[str, ...] = Field(min_length=1)
    way: ShareWay
    key: str = ""
    keys: tuple[tuple[str, Annotated[int, Field(ge=0)]], ...] = ()
    client_id: str = ""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if tuple(sorted(set(self.members))) != self.members or self.member not in self.members:
            raise ValueError("members are names in order, each once, and one of them is this member")
        return self

    @property
    def place(self) -> int:
        """Which of the members this is, from 0."""
        return self.members.index(self.member)

    @property
    def hashed(self) -> HashedShare | None:
        """What this member stores; None where the broker gives it nothing else."""
        if self.way is not ShareWay.HASH:
            return None
        return HashedShare(len(self.members), self.place, tuple(KeyLevel(*one) for one in self.keys))

    def id_of(self, member: str) -> str:
        """The MQTT client id of a member."""
        return f"{self.client_id}-{member}"

    @property
    def promise(self) -> dict[str, object]:
        """What must not change while messages wait: which of the line's messages are in this member's journal."""
        said: dict[str, object] = {"way": self.way.value}
        if self.way is ShareWay.HASH:
            said |= {"members": list(self.members), "key": self.key}
        return said
