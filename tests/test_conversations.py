"""Keys of conversations: nobody's names another's."""

from hypothesis import given
from hypothesis import strategies as st

from td_serve.conversations import key, tenant_of


@given(st.text(), st.text(), st.text(), st.text())
def test_keys_differ_where_tenant_or_conversation_does(
    tenant: str, conversation: str, other: str, another: str
) -> None:
    same = (tenant, conversation) == (other, another)
    assert (key(tenant, conversation) == key(other, another)) == same
    assert (tenant_of(key(tenant, "x")) == tenant_of(key(other, "y"))) == (tenant == other)


def test_a_boundary_cannot_be_moved() -> None:
    assert key("ab", "c") != key("a", "bc")
