"""Keys of conversations: nobody's names another's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td_serve.conversations import conversation_of, key, tenant_of
from td_serve.errors import BadRequest


@given(st.text(), st.text(), st.text(), st.text())
def test_keys_differ_where_tenant_or_conversation_does(
    tenant: str, conversation: str, other: str, another: str
) -> None:
    same = (tenant, conversation) == (other, another)
    assert (key(tenant, conversation) == key(other, another)) == same
    assert (tenant_of(key(tenant, "x")) == tenant_of(key(other, "y"))) == (tenant == other)


def test_a_boundary_cannot_be_moved() -> None:
    assert key("ab", "c") != key("a", "bc")


@pytest.mark.parametrize("name", ["é", "разговор", "chat-1", "e\u0301", "🙂"])
def test_a_header_and_a_field_name_the_same_conversation(name: str) -> None:
    """Servers decode header bytes as Latin-1, clients send UTF-8."""
    header = name.encode("utf-8").decode("latin-1")
    assert conversation_of({"x-session-id": header}, {}) == name
    assert conversation_of({}, {"session_id": name}) == name


def test_a_header_that_is_latin_is_taken_as_it_is() -> None:
    assert conversation_of({"x-session-id": "caf\xe9"}, {}) == "café"


@pytest.mark.parametrize("name", [".", "..", "a\nb", "chat\n", "\x00", "a\x7f"])
def test_what_no_url_could_delete_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="expected no control characters") as caught:
        conversation_of({}, {"session_id": name})
    assert caught.value.field == "session_id"
