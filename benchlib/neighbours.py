"""The other nodes as a supervisor sees them: it tells them that it is there, and asks for them when ranks here fail."""

import contextlib
import dataclasses
import socket
from pathlib import Path

from benchlib import network, peers
from benchlib.attempts import Ending
from benchlib.peers import Lost


class Neighbours:
    """``introduction`` is what the ranks here are to tell the others about this node (``peers.NODE``)."""

    def __init__(self, run_dir: Path, launch: str, endpoint: str) -> None:
        """``endpoint`` is where the nodes meet; '' for a run of one node."""
        self.run_dir, self.launch, self.endpoint = run_dir, launch, endpoint
        self.introduction, self.address = launch, ""
        self._seen: list[Lost] | None = None
        self._listening: socket.socket | None = None
        if endpoint and (address := network.local_address(*network.split_endpoint(endpoint))):
            with contextlib.suppress(OSError):  # then the others cannot tell whether this node is there
                self._listening = peers.listen(address)
                self.address = address
                self.introduction = f"{launch} {address} {self._listening.getsockname()[1]}"

    def answer(self) -> None:
        """Make room for the next who ask whether this node is there."""
        if self._listening:
            peers.hang_up(self._listening)

    def close(self) -> None:
        """Stop telling the others that this node is there."""
        if self._listening:
            self._listening.close()

    def forget(self) -> None:
        """Forget who was lost: another attempt began."""
        self._seen = None

    def look(self, afresh: bool = False) -> list[Lost]:
        """Return the nodes of the present attempt that are not there any more.

        Who was lost at the first look stays lost; with ``afresh``, or where all were there, it is asked again.
        """
        if afresh or not self._seen:
            others = [node for node in peers.read(self.run_dir) if node.launch != self.launch] if self.endpoint else []
            self._seen = peers.lost(others)
        return self._seen

    def blame(self, ending: Ending, afresh: bool = False) -> Ending:
        """Return the ending with the nodes that were lost as its cause, where some were."""
        lost = self.look(afresh)
        if lost:
            words = "; ".join(one.words() for one in lost) + self._held_store(lost) + self._own_cable()
            rows = [one.as_json() for one in lost]
            reason = f"{words}; {ending.reason}" if ending.reason else words
            return dataclasses.replace(ending, reason=reason, culprit=min(lost[0].node.ranks), lost=rows)
        others = [node for node in peers.read(self.run_dir) if node.launch != self.launch] if self.endpoint else []
        if not others:
            return ending
        there = ", ".join(node.words() for node in others[:4]) + (", ..." if len(others) > 4 else "")
        return dataclasses.replace(
            ending, reason=f"{ending.reason}; the cause may lie on another node, see the status of {there}"
        )

    def _own_cable(self) -> str:
        name = network.carrier_lost(self.address) if self.address else ""
        return f"; the cable of {name} here is out, or that of its other end" if name else ""

    def _held_store(self, lost: list[Lost]) -> str:
        addresses = network.resolve(network.split_endpoint(self.endpoint)[0])
        if self.address not in addresses and any(one.node.address in addresses for one in lost):
            return f"; it held the rendezvous store ({self.endpoint}), so the nodes cannot meet again without it"
        return ""
