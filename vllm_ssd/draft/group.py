"""Several drafts that build one tree between them, each on a device of its own.

To the proposer they are one draft: it is told once and told for all, and what they push comes in one
stream, each push marked with the part of the tree that its draft builds. Which outcomes belong to which
part is agreed on beforehand (`forecast.Part`): the drafts never speak with each other. One that dies is
brought back by its own link while the others go on. Knows nothing about trees; messages pass through.
"""

import time
from collections.abc import Iterator, Sequence

import msgspec

from vllm_ssd.draft.link import DraftLink, State
from vllm_ssd.messages import ELSEWHERE, Outcome, Push, Ready, Round


class DraftGroup:
    """Two or more drafts with the interface of one (`DraftLink`)."""

    def __init__(self, members: Sequence[DraftLink]) -> None:
        """`members`: by part, not started yet."""
        self._members = list(members)
        self._known = [0] * len(self._members)  # incarnation of each, when it was last seen up
        self._builder = self._members[0]  # who was last asked for JIT drafts
        self._awaited: list[int] = []  # seq_ids that wait for them

    # ---- how they are ----

    @property
    def state(self) -> State:
        """UP while any of them is."""
        states = [member.state for member in self._members]
        return next((state for state in (State.UP, State.STARTING) if state in states), State.DOWN)

    @property
    def incarnation(self) -> int:
        """Changes when a member has come up anew: all sequences are then begun anew, at all members.

        The others could go on with what they have, but this is rare and the same for all.
        """
        return sum(self._known)

    @property
    def ready(self) -> Ready | None:
        """The smallest limits of those that are up; None if none is."""
        found = [member.ready for member in self._members if member.state is State.UP]
        if not found:
            return None
        return msgspec.structs.replace(
            found[0],
            num_kv_slots=min(ready.num_kv_slots for ready in found),
            max_length=min(ready.max_length for ready in found),
        )

    @property
    def restarts(self) -> int:
        """How often drafts were started again, all together."""
        return sum(member.restarts for member in self._members)

    @property
    def is_up(self) -> bool:
        """Whether all of them are loaded and, as far as is known, alive. May be asked from any thread."""
        return all(member.is_up for member in self._members)

    @property
    def pid(self) -> int | None:
        """Process id of the first that has one."""
        return next((member.pid for member in self._members if member.pid is not None), None)

    def describe(self) -> str:
        """Where they run."""
        return ", ".join(member.describe() for member in self._members)

    # ---- start and end ----

    def start(self) -> None:
        """Start all; returns at once. Raises `OSError` or `zmq.ZMQError`, and then none runs."""
        try:
            for member in self._members:
                member.start()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self, timeout: float) -> None:
        """Block until all are loaded. Raises `RuntimeError` if one fails or takes too long."""
        deadline = time.monotonic() + timeout
        try:
            for member in self._members:
                member.wait_until_ready(max(deadline - time.monotonic(), 0.0))
        except BaseException:
            self.close()
            raise
        self._notice()

    def give_up(self, reason: str, part: int) -> None:
        """What this one sent is of no use: it begins anew."""
        self._members[part].give_up(reason)

    def close(self) -> None:
        """Part from all for good."""
        for member in self._members:
            member.close()

    # ---- messages ----

    def send(self, message: Round) -> None:
        """Tell those that are up. Rows that wait are drafted for by the first of them alone.

        The others rest on these rows until `send_late`: without the drafts that a verification is to
        look at there is little to bet on.
        """
        up = self._up()
        self._awaited = [outcome.seq_id for outcome in message.outcomes if outcome.wanted]
        if up and self._awaited:
            self._builder = up[0]
            up[0].send(message)
            up, message = up[1:], msgspec.structs.replace(message, outcomes=list(map(_elsewhere, message.outcomes)))
        for member in up:
            member.send(message)

    def send_late(self, message: Round) -> None:
        """What the waiting rows of the last round got, for those that did not build it."""
        for member in self._up():
            if member is not self._builder:
                member.send(message)

    def receive(self, timeout: float = 0.0) -> Iterator[Push]:
        """What they pushed since the last call; waits, if asked to, for whoever has JIT drafts to build."""
        for member in self._members:
            yield from member.receive(timeout if member is self._builder else 0.0)
        self._notice()
        if self._awaited and self._builder.state is not State.UP:
            # Its place is taken in the next round; those that wait now need not.
            yield Push(0, [], [], self._awaited, 0.0, 0.0, part=self._members.index(self._builder))
            self._awaited = []

    def _up(self) -> list[DraftLink]:
        return [member for member in self._members if member.state is State.UP]

    def _notice(self) -> None:
        """Which of them have come up anew."""
        for part, member in enumerate(self._members):
            if member.state is State.UP:
                self._known[part] = member.incarnation


def _elsewhere(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, wanted=ELSEWHERE) if outcome.wanted else outcome
