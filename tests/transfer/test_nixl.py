"""NIXL as it really came up: what UCX says, and that hearing it costs nobody anything.

The agents here are real ones, in processes of their own.
"""

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.config import NixlConfig
from td_serve.errors import ConfigError
from td_serve.transfer.nixl import (
    UcxLog,
    assert_transports,
    engine_env,
    side_channel_host,
    transports_in,
)

ROOT = Path(__file__).parents[2]
LINE = "[1795986609.082039] [vm:6370 :0]      ucp_worker.c:1997 UCX  INFO    init "
SELF = LINE + "self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
INTRA = LINE + "intra-node cfg#1 tag(sysv/memory)  rma(cma/memory)  am(sysv/memory tcp/lo)"
INTER = LINE + "inter-node cfg#2 rma(srd/rdmap0s6-rail)  am(srd/rdmap0s6-rail srd/rdmap0s7-rail)"
NOISE = [
    "[1795986609.000001] [vm:6370 :0]  ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded",
    "[1795986609.000002] [vm:6370 :0]  parser.c:2587 UCX  INFO  UCX_* env variables: UCX_TLS=rc,ud",
    "[1795986609.000003] [vm:6370 :0]  ucp_worker.c:1997 UCX  WARN    init self cfg#0 am(dc/mlx5)",
    "",
]
AGENT = """
from nixl._api import nixl_agent, nixl_agent_config
nixl_agent("x", nixl_agent_config(backends=["UCX"]))
"""


@pytest.fixture
def log() -> Iterator[UcxLog]:
    log = UcxLog()
    yield log
    log.close()


# ------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("scope", "transports"),
    [
        ("self", ["cma", "tcp"]),
        ("intra-node", ["cma", "sysv", "tcp"]),
        ("inter-node", ["srd"]),
        ("other", []),
    ],
)
def test_transports_are_read_by_scope(scope: str, transports: list[str]) -> None:
    log = "\n".join([*NOISE, SELF, INTRA, INTER])
    assert transports_in(log, scope) == transports


def test_the_scope_of_an_agent_alone_is_itself() -> None:
    assert transports_in(SELF) == ["cma", "tcp"]
    assert transports_in("\n".join(NOISE)) == []
    assert transports_in("") == []


def test_several_workers_add_up() -> None:
    other = LINE + "self cfg#1 am(posix/memory)"
    assert transports_in(f"{SELF}\n{other}\n") == ["cma", "posix", "tcp"]


devices = st.sampled_from(["tcp/lo", "tcp/eth0", "cma/memory", "srd/rdmap0s6-rail", "self/memory"])
lanes = st.lists(
    st.tuples(st.sampled_from(["am", "rma_am", "ka", "tag"]), st.lists(devices, min_size=1)),
    min_size=1,
)


@given(st.lists(st.tuples(st.sampled_from(["self", "intra-node"]), lanes), max_size=4))
def test_any_lanes_are_read_in_full(workers: list[tuple[str, list[tuple[str, list[str]]]]]) -> None:
    lines = [
        f"{LINE}{scope} cfg#{number} " + "  ".join(f"{n}({' '.join(d)})" for n, d in one)
        for number, (scope, one) in enumerate(workers)
    ]
    for wanted in ("self", "intra-node"):
        expected = {
            device.split("/")[0]
            for scope, one in workers
            if scope == wanted
            for _, devices_ in one
            for device in devices_
        }
        assert transports_in("\n".join(lines), wanted) == sorted(expected)


# ------------------------------------------------------------------------------------ the log


def descriptors() -> list[str]:
    """This process's open descriptors; the one that lists them is always among them."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def say(path: str, text: str) -> None:
    with Path(path).open("w") as out:
        out.write(text)


def test_a_log_is_a_terminal_so_that_nothing_waits_in_a_buffer(log: UcxLog) -> None:
    code = "import sys; f = open(sys.argv[1], 'w'); print('here', file=f); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, log.path], stdin=subprocess.PIPE) as child:
        wait_for(log, "here")  # the writer has neither flushed nor ended
        child.communicate()


def wait_for(log: UcxLog, text: str) -> None:
    """Until the log's thread has read it. The test's own time limit is the limit."""
    while text not in log.text:
        os.sched_yield()


def test_closing_ends_the_thread_and_gives_both_descriptors_back() -> None:
    before = descriptors()
    log = UcxLog()
    say(log.path, "said\n")
    wait_for(log, "said")
    assert len(descriptors()) == len(before) + 2
    assert log._reader.is_alive()
    log.close()
    assert not log._reader.is_alive()
    assert descriptors() == before
    assert log.text == "said", "what was said can still be read"


def test_a_chatty_writer_never_blocks_and_only_the_last_lines_are_kept(log: UcxLog) -> None:
    code = (
        "import sys\n"
        "with open(sys.argv[1], 'w') as f:\n"
        "    for i in range(50_000): f.write(f'line {i} ' + 'x' * 80 + '\\n')\n"
    )
    subprocess.run([sys.executable, "-c", code, log.path], check=True, timeout=120)
    wait_for(log, "line 49999")
    lines = log.text.splitlines()
    assert len(lines) == 1000
    assert lines[0].startswith("line 49000 ")


def test_bytes_that_are_no_text_are_survived(log: UcxLog) -> None:
    with Path(log.path).open("wb") as out:
        out.write(b"\xff\xfe broken\nwhole\n")
    wait_for(log, "whole")


# ------------------------------------------------------------------------------------ real agents


@pytest.fixture(scope="module")
def agents_log() -> Iterator[UcxLog]:
    """What one real agent said on tcp over loopback, memory and itself."""
    log = UcxLog()
    config = NixlConfig(env={"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"})
    env = {**os.environ, **engine_env(config, host="127.0.0.1", port=20500, log=log)}
    subprocess.run([sys.executable, "-c", AGENT], env=env, check=True, capture_output=True)
    yield log
    log.close()


def test_a_real_agents_transports_are_found(agents_log: UcxLog) -> None:
    config = NixlConfig(require_transports=["tcp", "cma"])
    assert assert_transports(config, agents_log) == ["cma", "tcp"]


def test_a_transport_that_did_not_come_up_is_refused_by_name(agents_log: UcxLog) -> None:
    config = NixlConfig(require_transports=["tcp", "srd"])
    with pytest.raises(ConfigError) as caught:
        assert_transports(config, agents_log)
    message = str(caught.value)
    assert message.startswith("nixl.require_transports: NIXL came up on cma, tcp, without srd;")
    assert "cfg#0" in message, "what UCX said is told"


def test_agents_that_say_nothing_have_no_transport(log: UcxLog) -> None:
    config = NixlConfig(require_transports=["tcp"])
    with pytest.raises(ConfigError, match="came up on no transport, without tcp"):
        assert_transports(config, log, patience_s=0.0)
    assert assert_transports(NixlConfig(), log, patience_s=0.0) == []


def test_another_backend_answers_with_its_name(log: UcxLog) -> None:
    config = NixlConfig(backend="LIBFABRIC", require_transports=["srd"])
    assert assert_transports(config, log) == ["libfabric"]


# ------------------------------------------------------------------------------------ environment


def test_an_engines_environment_says_where_it_is_and_where_to_log(log: UcxLog) -> None:
    config = NixlConfig(env={"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "debug"})
    assert engine_env(config, host="10.0.0.1", port=20501, log=log) == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "20501",
        "UCX_LOG_LEVEL": "debug",
        "UCX_LOG_FILE": log.path,
        "UCX_TLS": "tcp",
    }


def test_the_side_channels_host_is_as_configured_or_this_machines() -> None:
    assert side_channel_host(NixlConfig(host="10.0.0.1")) == "10.0.0.1"
    assert not ipaddress.ip_address(side_channel_host(NixlConfig())).is_unspecified


# ------------------------------------------------------------------------------------ idle cost

IDLE = """
import json, time
from nixl._api import nixl_agent, nixl_agent_config
from td_serve.engine.connector import _progress_delay

def idle():
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(1.0)
    return (time.process_time() - cpu) / (time.monotonic() - wall)

def make(name):
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))

with _progress_delay(1000):
    first = make("delayed")
delayed = idle()
second = make("polling")
print(json.dumps({"delayed": delayed, "polling": idle()}))
"""


def test_an_idle_agent_made_with_a_progress_delay_leaves_the_core_to_others() -> None:
    """Shares of a core over a second without traffic, measured side by side.

    The second figure has the first agent's cost in it, too.
    """
    env = {**os.environ, "UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", IDLE], env=env, cwd=ROOT, check=True, capture_output=True, text=True
    )
    shares = json.loads(child.stdout.splitlines()[-1])
    assert shares["delayed"] < 0.2, shares
    assert shares["polling"] > 3 * shares["delayed"], shares
