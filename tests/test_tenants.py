"""Tenants: keys are asked for, and nothing that one names is another's."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.cli import main
from td_serve.conversations import key
from td_serve.errors import Unauthorized
from td_serve.tenants import Tenants, digest, salt, session, sim_of
from td_serve.types import OPEN, SessionId, TenantId

KEYS = {"acme": [digest("td-one"), digest("td-two")], "bolt": [digest("td-three")]}
TENANTS = Tenants(KEYS)

# Names that come near each other: of the characters of which scoped ids are made.
names = st.text("~:/0123456789a", max_size=6) | st.text()
tenants = names.map(TenantId)


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ("Bearer td-one", "acme"),
        ("bearer td-two", "acme"),
        ("BEARER   td-three", "bolt"),
    ],
)
def test_a_key_says_whose_a_request_is(header: str, tenant: str) -> None:
    assert TENANTS.of(header) == tenant


@pytest.mark.parametrize("header", [None, "", "Bearer td-one", "Basic x"])
def test_without_tenants_all_are_let_in(header: str | None) -> None:
    assert Tenants({}).of(header) == OPEN


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (None, "missing"),
        ("", "malformed"),
        ("Bearer", "malformed"),
        ("Bearer ", "malformed"),
        ("td-one", "malformed"),
        ("Basic td-one", "malformed"),
        ("Bearer td-one td-two", "malformed"),
        ("Bearer td-one\n", "malformed"),
        (" Bearer td-one", "malformed"),
        ("Bearer t\u00e9", "malformed"),
        # Letters that are equal to others when case is ignored: in ASCII alone it is.
        ("Bearer \u017f\u212a", "malformed"),
        ("Bearer td-four", "a key that is nobody's"),
        ("Bearer TD-ONE", "a key that is nobody's"),
        (f"Bearer {digest('td-one')}", "a key that is nobody's"),
    ],
)
def test_other_headers_are_refused(header: str | None, what: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        TENANTS.of(header)
    wanted = f"authorization: {what}, expected 'Bearer' and a tenant's API key"
    assert (caught.value.message, caught.value.field) == (wanted, "authorization")


@given(st.text() | st.text().map("Bearer {}".format))
def test_what_is_refused_is_refused_in_the_same_words(header: str) -> None:
    """So that none of them has anything of the header in it."""
    with pytest.raises(Unauthorized) as caught:
        TENANTS.of(header)
    assert re.fullmatch(
        "authorization: (malformed|a key that is nobody's), "
        "expected 'Bearer' and a tenant's API key",
        caught.value.message,
    )


def test_td_serve_key_makes_a_key_and_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        assert main(["key"]) == 0
        _, shown, _, line = capsys.readouterr().out.splitlines()
        made.append(shown.strip())
        assert re.fullmatch(r"td-[A-Za-z0-9_-]{43}", made[-1])
        (found,) = re.findall(r'^  - "([0-9a-f]{64})"$', line)
        assert Tenants({"acme": [found]}).of(f"Bearer {made[-1]}") == "acme"
    assert made[0] != made[1]


# ---------------------------------------------------------------- names


@given(tenants, names, tenants, names)
def test_nothing_of_one_tenants_is_anothers(
    tenant: TenantId, name: str, other: TenantId, another: str
) -> None:
    same = (tenant, name) == (other, another)
    assert (session(tenant, name) == session(other, another)) == same
    assert (key(tenant, name) == key(other, another)) == same
    if OPEN not in (tenant, other):
        assert (salt(tenant, name) == salt(other, another)) == same
        assert salt(tenant, None) != salt(other, another)
        assert (salt(tenant, None) == salt(other, None)) == (tenant == other)


@given(tenants, names)
def test_clients_call_a_session_what_they_called_it(tenant: TenantId, sim: str) -> None:
    assert sim_of(session(tenant, sim)) == sim


@given(st.text().filter(lambda sim: not sim.startswith("~")), st.none() | st.text())
def test_an_open_server_changes_no_names(sim: str, own: str | None) -> None:
    assert session(OPEN, sim) == sim
    assert sim_of(SessionId(sim)) == sim
    assert salt(OPEN, own) == own


def test_nobody_spells_his_way_into_anothers_session() -> None:
    theirs = session(TenantId("acme"), "village")
    assert session(OPEN, theirs) != theirs
    assert session(TenantId("bolt"), theirs) != theirs
    assert session(TenantId("acme"), "a/b") != session(TenantId("acme/a"), "b")
