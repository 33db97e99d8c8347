"""The files of one world, all in its own directory, so that controller, supervisors and ranks need no other meeting point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.world.wire import Topology

# The kernel's limit on the path of a unix socket, less the longest name below.
_LONGEST_DIRECTORY = 107 - len("/engine99")


@dataclass(frozen=True, slots=True)
class WorldFiles:
    directory: Path

    def __post_init__(self) -> None:
        if len(str(self.directory)) > _LONGEST_DIRECTORY:
            raise ValueError(f"{self.directory} is too long for unix sockets (at most {_LONGEST_DIRECTORY} characters); "
                             "set TMPDIR to a shorter directory")

    @property
    def hub(self) -> str:
        return f"ipc://{self.directory}/hub"

    def engine(self, index: int) -> str:
        return f"ipc://{self.directory}/engine{index}"

    def position(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.position"

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def write_topology(self, topology: Topology) -> None:
        (self.directory / "topology.json").write_bytes(msgspec.json.encode(topology))

    def read_topology(self) -> Topology:
        return msgspec.json.decode((self.directory / "topology.json").read_bytes(), type=Topology)
