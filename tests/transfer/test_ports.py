"""Ports: no two holders ever share one, dead or alive, in this process or another."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from td_serve.errors import ConfigError
from td_serve.transfer.ports import PortLease, lease_ports

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
from pathlib import Path
from td_serve.transfer.ports import lease_ports
first, last, count, directory = sys.argv[1:]
lease = lease_ports(
    int(first), int(last), count=int(count), host="127.0.0.1", directory=Path(directory)
)
print(lease.first, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def span() -> tuple[int, int]:
    """Six consecutive ports that nothing on this machine listens on."""
    start = 23000 + os.getpid() % 500 * 6  # two test runs on one machine begin apart
    for first in range(start, 30000, 6):
        if all(is_free(port) for port in range(first, first + 6)):
            return first, first + 5
    raise AssertionError("no six free ports in a row")


def is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def hold(span: tuple[int, int], folder: Path, count: int = 1) -> PortLease:
    return lease_ports(*span, count=count, host=HOST, directory=folder)


@pytest.fixture
def other(span: tuple[int, int], tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds two ports, and has said so."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, span), "2", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == span[0]
        yield child
        child.kill()


def test_leases_never_overlap_and_take_the_lowest(span: tuple[int, int], tmp_path: Path) -> None:
    leases = [hold(span, tmp_path, count) for count in (1, 2, 3)]
    assert [(lease.first, lease.count) for lease in leases] == [
        (span[0], 1),
        (span[0] + 1, 2),
        (span[0] + 3, 3),
    ]
    for lease in leases:
        lease.release()


def test_an_exhausted_range_is_refused_by_name_and_leaves_nothing_held(
    span: tuple[int, int], tmp_path: Path
) -> None:
    first, last = span
    with hold((first + 3, first + 3), tmp_path):
        with pytest.raises(ConfigError, match=rf"no 4 consecutive free ports in {first}..{last} "):
            hold(span, tmp_path, 4)
        # The runs that it tried, three ports and two, are free again.
        with hold(span, tmp_path, 3) as lease:
            assert lease.first == first
        with hold((first + 4, last), tmp_path, 2) as lease:
            assert lease.first == first + 4


def test_a_range_the_wrong_way_round_has_no_ports(span: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nixl\.port_range: no 1 consecutive free ports in "):
        hold((span[1], span[0]), tmp_path)


def test_several_ports_are_consecutive_around_one_that_is_held(
    span: tuple[int, int], tmp_path: Path
) -> None:
    with hold((span[0] + 1, span[1]), tmp_path), hold(span, tmp_path, 3) as lease:
        assert lease.first == span[0] + 2


def test_released_ports_can_be_held_again_and_releasing_twice_is_safe(
    span: tuple[int, int], tmp_path: Path
) -> None:
    first = hold(span, tmp_path)
    first.release()
    second = hold(span, tmp_path)
    first.release()
    with hold(span, tmp_path) as third:
        assert (second.first, third.first) == (span[0], span[0] + 1)
    second.release()


def test_a_port_that_something_listens_on_is_skipped(span: tuple[int, int], tmp_path: Path) -> None:
    with closing(socket.create_server((HOST, span[0] + 1))):
        with hold(span, tmp_path, 2) as lease:
            assert lease.first == span[0] + 2
        with hold(span, tmp_path) as lease:
            assert lease.first == span[0]


def test_a_listener_on_one_address_is_seen_from_all(span: tuple[int, int], tmp_path: Path) -> None:
    with (
        closing(socket.create_server((HOST, span[0]))),
        lease_ports(*span, directory=tmp_path) as lease,
    ):
        assert lease.first == span[0] + 1


def test_a_held_port_can_be_bound_by_its_holder(span: tuple[int, int], tmp_path: Path) -> None:
    with hold(span, tmp_path) as lease, closing(socket.create_server((HOST, lease.first))):
        pass


def test_another_process_is_respected_while_it_lives(
    span: tuple[int, int], tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    with hold(span, tmp_path, 4) as lease:
        assert lease.first == span[0] + 2
    assert other.stdin is not None
    other.stdin.close()
    assert other.wait() == 0
    with hold(span, tmp_path) as lease:
        assert lease.first == span[0]


def test_a_killed_process_gives_its_ports_back(
    span: tuple[int, int], tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    with hold(span, tmp_path) as lease:
        assert lease.first == span[0] + 2
    other.send_signal(signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL
    with hold(span, tmp_path, 2) as lease:
        assert lease.first == span[0]


def test_leases_are_this_users_alone(span: tuple[int, int], tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    with hold(span, folder):
        assert folder.stat().st_mode & 0o777 == 0o700
